"""The input of a forward: the tokens of a microbatch with their global ids and masks.

Legend: B sequences, S positions of each in the batch, L positions of a whole sequence, T = B S
tokens (in :class:`Context` those of this rank), K experts of a token, R rotated channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.config.attention_keys import AttentionConfig
from moemesh.model.rope import Tables, rotary_tables
from moemesh.model.seams import NO_SLICES, PLAIN_FLOW, Flow, SliceState
from moemesh.model.visibility import Runs, Visibility, document_starts
from moemesh.ops.host_copy import upload


class Ahead(NamedTuple):
    """A microbatch for an extra prediction layer, shifted by `depth` tokens; all [B, S]. At
    position s, ``tokens_BS`` has token s + depth, and ``targets_BS`` the token after it.
    ``valid_BS``: whether position s and position s + depth - 1, whose target is the input token,
    are valid and in one document (None: everywhere); ``loss_BS``: whether the target has loss."""

    tokens_BS: Tensor
    targets_BS: Tensor
    valid_BS: Tensor | None
    loss_BS: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A microbatch of B sequences of S tokens; every tensor-parallel rank holds all of it.

    ``sequences_B`` numbers the sequences over the whole step, so that a token's global id is
    ``sequence * S + position`` in every layout. Two different masks: ``valid_BS`` (False = padding,
    never routed) and ``loss_mask_BS`` (False = carries no loss). None means all True.

    ``seed`` and ``step`` determine the random numbers of a training forward; an evaluation
    (``training = False``) draws none. ``experts``: a routing to replay, global layer index ->
    experts [B*S, K] (int64, -1 = none), in place of the router's choice; the weights still come
    from the router.

    ``documents_BS`` numbers the documents that are packed in a sequence: the numbers of neighbours
    differ at the start of a document. Attention does not cross documents, and rotary positions
    restart in each. None: a sequence is one document.

    A part of longer sequences (:meth:`take`) has the positions ``runs`` of the batch ``whole``,
    whose sequences have ``length`` positions; ``documents_BS`` are those of whole sequences.
    ``slices``: state of earlier slices. ``on_host``: the same batch on the CPU, for counts that the
    host needs.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    sequences_B: Tensor
    valid_BS: Tensor | None = None
    loss_mask_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    seed: int = 0
    step: int = 0
    training: bool = True
    experts: Mapping[int, Tensor] | None = None
    runs: Runs | None = None
    length: int | None = None
    slices: SliceState = NO_SLICES
    whole: Batch | None = None
    on_host: Batch | None = None

    def to(self, device: torch.device) -> Batch:
        """A copy of this CPU batch on `device`, not waited for; its ``on_host`` is this batch. On a
        CPU this batch itself; ``experts`` and ``whole`` are not copied."""
        if device.type == "cpu":
            return self
        tensors = {
            name: upload(tensor, device)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return replace(self, **tensors, on_host=self)

    def take(self, runs: Runs | None) -> Batch:
        """The positions `runs`, in that order, of all sequences; None: this batch."""
        if runs is None:
            return self
        assert self.runs is None, "a part of a part"
        num_sequences, length = self.tokens_BS.shape
        index_S = position_ids(runs, self.tokens_BS.device)

        def cut(x_BS: Tensor | None) -> Tensor | None:
            return None if x_BS is None else x_BS[:, index_S]

        experts = None
        if self.experts is not None:
            experts = {
                layer: experts_TK.view(num_sequences, length, -1)[:, index_S].flatten(0, 1)
                for layer, experts_TK in self.experts.items()
            }
        return replace(
            self,
            tokens_BS=self.tokens_BS[:, index_S],
            targets_BS=self.targets_BS[:, index_S],
            valid_BS=cut(self.valid_BS),
            loss_mask_BS=cut(self.loss_mask_BS),
            experts=experts,
            runs=runs,
            length=length,
            whole=self,
            on_host=None if self.on_host is None else self.on_host.take(runs),
        )

    def ahead(self, depth: int) -> Ahead:
        """The input of an extra prediction layer, `depth` >= 1 tokens ahead of these positions."""
        whole = self.whole or self
        size, device = whole.tokens_BS.shape, self.tokens_BS.device
        ones_BS = torch.ones(size, dtype=torch.bool, device=device)
        mask_T, valid_BS = whole.loss_mask_T(), whole.valid_BS
        loss_BS = _shifted(ones_BS if mask_T is None else mask_T.view(size), depth)
        # The input token is the target `depth - 1` positions later.
        exists_BS = _shifted(ones_BS if valid_BS is None else valid_BS, depth - 1)
        if valid_BS is not None:
            loss_BS, exists_BS = loss_BS & valid_BS, exists_BS & valid_BS
        if (documents_BS := whole.documents_BS) is not None:
            starts_BS = document_starts(documents_BS)
            loss_BS = loss_BS & (_shifted(starts_BS, depth) == starts_BS)
            exists_BS = exists_BS & (_shifted(starts_BS, depth - 1) == starts_BS)

        def local(x_BS: Tensor) -> Tensor:
            return x_BS if self.runs is None else x_BS[:, position_ids(self.runs, device)]

        return Ahead(
            local(_shifted(whole.targets_BS, depth - 1)),
            local(_shifted(whole.targets_BS, depth)),
            None if valid_BS is None and depth == 1 else local(exists_BS),
            local(loss_BS),
        )

    def slice(self, start: int, stop: int, slices: SliceState) -> Batch:
        """Positions ``range(start, stop)`` of all sequences; `slices`: state of earlier ones."""
        return replace(self.take((range(start, stop),)), slices=slices)

    @property
    def num_tokens(self) -> int:
        return self.tokens_BS.numel()

    def loss_mask_T(self) -> Tensor | None:
        """Flattened loss mask; padding carries no loss."""
        masks = [mask for mask in (self.valid_BS, self.loss_mask_BS) if mask is not None]
        if not masks:
            return None
        return torch.stack(masks).all(0).flatten()

    def num_routed_sequences(self) -> int:
        """Sequences with at least one token that is not padding."""
        valid_BS = (self.on_host or self).valid_BS
        return len(self.tokens_BS) if valid_BS is None else int(valid_BS.any(1).sum())

    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        mask_T = (self.on_host or self).loss_mask_T()
        return self.num_tokens if mask_T is None else int(mask_T.sum())

    def num_tokens_ahead(self, depth: int) -> int:
        """Tokens that carry loss `depth` tokens ahead of these positions."""
        return int((self.on_host or self).ahead(depth).loss_BS.sum())


def _shifted(x_BS: Tensor, steps: int) -> Tensor:
    """`x_BS` moved left by `steps` positions; zeros (False) at the end."""
    length = x_BS.shape[1]
    return F.pad(x_BS[:, steps:], (0, min(steps, length)))


@dataclass(frozen=True, kw_only=True)
class Context:
    """Shared by the layers of one forward: shapes, positions, and the ids of the local tokens.

    The residual stream holds rows of the flattened B*S tokens, ``local`` of :func:`make_context`
    (all of them on one device, a tensor-parallel shard otherwise); ``sequence_T``, ``position_T``,
    ``valid_T`` and ``token_ids_T`` describe those rows, as does ``experts``; ``slices``: see
    :class:`Batch`. ``visible``: the keys that each query sees, those of earlier slices included.
    ``tables`` of rotary positions [S, 1, R], or [B, S, 1, R] if positions restart in documents;
    None without attention. ``length``: positions of a whole sequence. ``flow``: recomputation and
    cuts of the graph.
    """

    num_sequences: int
    seq_len: int
    num_tokens: int
    length: int
    visible: Visibility
    sequence_T: Tensor
    position_T: Tensor
    valid_T: Tensor | None
    token_ids_T: Tensor
    seed: int = 0
    step: int = 0
    training: bool = True
    experts: Mapping[int, Tensor] | None = None
    slices: SliceState = NO_SLICES
    flow: Flow = PLAIN_FLOW
    tables: Tables | None = None
    _rotary: dict[torch.dtype, Tables] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rotary(self, dtype: torch.dtype) -> Tables:
        """``tables`` in the dtype of the heads: converted once for all layers."""
        if dtype not in self._rotary:
            assert self.tables is not None
            self._rotary[dtype] = self.tables.to(dtype)
        return self._rotary[dtype]


def make_context(
    batch: Batch, local: range, config: AttentionConfig, flow: Flow = PLAIN_FLOW
) -> Context:
    """The context of `batch` for a rank whose residual stream holds the token rows `local`."""
    num_sequences, seq_len = batch.tokens_BS.shape
    device = batch.tokens_BS.device
    length = seq_len if batch.length is None else batch.length
    runs = (range(length),) if batch.runs is None else batch.runs
    positions_S = position_ids(runs, device)
    # Documents: their starts in whole sequences, and positions that restart in each.
    starts_BL = host_starts_BL = None
    rotary_positions = positions_S
    if batch.documents_BS is not None:
        starts_BL = document_starts(batch.documents_BS)
        if batch.on_host is not None and batch.on_host.documents_BS is not None:
            host_starts_BL = document_starts(batch.on_host.documents_BS)
        rotary_positions = positions_S - starts_BL[:, positions_S]
    # With slices, the keys of all earlier positions are cached.
    keys = runs if batch.slices is NO_SLICES else (range(runs[-1].stop),)
    # The rows of this rank.
    rows_T = torch.arange(local.start, local.stop, device=device)
    sequence_T = rows_T // max(seq_len, 1)
    valid_T = None
    if batch.valid_BS is not None:
        valid_T = batch.valid_BS.flatten()[local.start : local.stop]
    position_T = positions_S[rows_T % max(seq_len, 1)]
    experts = None
    if batch.experts is not None:
        experts = {
            layer: experts_TK[local.start : local.stop]
            for layer, experts_TK in batch.experts.items()
        }
    return Context(
        num_sequences=num_sequences,
        seq_len=seq_len,
        num_tokens=num_sequences * seq_len,
        length=length,
        visible=Visibility(runs, keys, None, starts_BL, length, host_starts_BL),
        sequence_T=sequence_T,
        position_T=position_T,
        valid_T=valid_T,
        token_ids_T=batch.sequences_B[sequence_T] * length + position_T,
        seed=batch.seed,
        step=batch.step,
        training=batch.training,
        experts=experts,
        slices=batch.slices,
        flow=flow,
        tables=rotary_tables(config, rotary_positions),
    )


def token_context(
    x: Tensor,
    num_sequences: int,
    length: int,
    *,
    first_id: int = 0,
    valid_T: Tensor | None = None,
    **options: int | bool,
) -> Context:
    """Context of `num_sequences` * `length` tokens on the device of `x`, for MoE layers alone:
    without rotary tables and visible keys. `options`: other fields of :class:`Context`."""
    rows_T = torch.arange(num_sequences * length, device=x.device)
    return Context(
        num_sequences=num_sequences,
        seq_len=length,
        num_tokens=len(rows_T),
        length=length,
        visible=Visibility((), ()),
        sequence_T=rows_T // max(length, 1),
        position_T=rows_T % max(length, 1),
        valid_T=valid_T,
        token_ids_T=rows_T + first_id,
        **options,
    )


def position_ids(runs: Runs, device: torch.device) -> Tensor:
    """The positions of `runs` in their order, int64 [S]."""
    parts = [torch.arange(run.start, run.stop, device=device) for run in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
