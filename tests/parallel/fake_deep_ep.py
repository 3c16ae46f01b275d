"""A fake of `deep_ep` on gloo: the documented contract of V1's `Buffer`, and its refusals.

Written from DeepEP's docstrings: one copy of a token per rank, in the order (source rank, token);
local expert ids with -1 for experts elsewhere; an unweighted combine; a cached handle with which
dispatch takes no `topk_*` and returns data only.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.trace.ledger import Ledger


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle:
    """State of a dispatch for its combine; `alive` is the number of handles in memory."""

    alive: ClassVar[WeakSet[Handle]] = WeakSet()

    def __init__(self, tokens: Tensor, num_tokens: int, sent: list[int], got: list[int]) -> None:
        self.tokens, self.num_tokens, self.sent, self.got = tokens, num_tokens, sent, got
        Handle.alive.add(self)


class Buffer:
    #: The kernels know bfloat16 rows and fp32 weights only; a test of sums in float64 lifts this.
    any_dtype = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        explicitly_destroy: bool = False,
    ) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self.axis = Axis(
            name="deep_ep",
            ranks=ranks,
            index=group.rank(),
            group=group,
            device=torch.device("cpu"),
            ledger=Ledger(),
        )
        self.num_nvl_bytes, self.explicitly_destroy = num_nvl_bytes, explicitly_destroy
        self.num_experts, self.destroyed = 0, False

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        assert self.explicitly_destroy and not self.destroyed
        self.destroyed = True

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and len(topk_idx) > 0
        self.num_experts = num_experts
        rank_TK = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.axis.size))
        in_rank = (rank_TK[:, :, None] == torch.arange(self.axis.size)).any(1)
        per_expert = torch.bincount(topk_idx.flatten() + 1, minlength=num_experts + 1)[1:]
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        self._check(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None, "a handle takes no top-k"
            return self._send(x, handle), None, None, None, None, None
        assert is_token_in_rank is not None and num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None
        assert topk_weights.dtype == torch.float32 or self.any_dtype
        ranks, tokens = is_token_in_rank.t().nonzero(as_tuple=True)
        sent = num_tokens_per_rank.tolist()
        counts = torch.tensor(sent)
        got = collectives.exchange_counts(counts, self.axis, caller="counts").tolist()
        handle = Handle(tokens, len(x), sent, got)
        num_local = self.num_experts // self.axis.size
        local_SK = topk_idx[tokens] - ranks[:, None] * num_local
        elsewhere_SK = (topk_idx[tokens] < 0) | (local_SK < 0) | (local_SK >= num_local)
        ids = self._exchange(local_SK.masked_fill(elsewhere_SK, -1), sent, got)
        # The contract leaves open the weights of slots whose expert is on another rank.
        weights_SK = topk_weights.detach()[tokens].masked_fill(elsewhere_SK, float("nan"))
        weights = self._exchange(weights_SK, sent, got)
        per_expert = torch.bincount(ids.flatten() + 1, minlength=num_local + 1)[1:].tolist()
        return self._send(x, handle), ids, weights, per_expert, handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Any, ...]:
        self._check(x)
        total = self._sum_back(x, handle)
        weights = None if topk_weights is None else self._sum_back(topk_weights, handle)
        return total, weights, None

    def _check(self, x: Tensor) -> None:
        assert not self.destroyed and x.is_contiguous()
        assert x.dtype == torch.bfloat16 or self.any_dtype
        assert x.shape[1] % 16 == 0 or self.any_dtype

    def _send(self, x: Tensor, handle: Handle) -> Tensor:
        assert len(x) == handle.num_tokens
        return self._exchange(x.detach()[handle.tokens], handle.sent, handle.got)

    def _sum_back(self, x: Tensor, handle: Handle) -> Tensor:
        assert len(x) == sum(handle.got)
        back = self._exchange(x.detach(), handle.got, handle.sent)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(handle.num_tokens, x.shape[1], dtype=wide)
        return total.index_add_(0, handle.tokens, back.to(wide)).to(x.dtype)

    def _exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        return collectives.all_to_all(rows, self.axis, sent, got, caller="rows")
