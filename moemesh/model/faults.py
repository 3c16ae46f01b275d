"""Routing faults, named by layer, token and expert: logits that are not finite, false choices.

Legend: L layers, T tokens of this rank, E experts, K slots per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Code of a layer without faults, larger than every other code.
NO_FAULT = 2**63 - 1


class RoutingError(ValueError):
    """A routing that cannot be used: logits that are not finite, or experts that do not exist."""


def first_fault(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Code of the first logit that is not finite, ``row * E + expert``; NO_FAULT without one. Rows
    of padding are left out. An int64 scalar on the device: the host does not wait."""
    logits_TE = logits_TE.detach()
    if not logits_TE.numel():
        return torch.full((), NO_FAULT, dtype=torch.int64, device=logits_TE.device)
    nan_TE = logits_TE - logits_TE  # NaN where a logit is not finite, else 0
    if valid_T is not None:
        nan_TE = nan_TE.masked_fill(~valid_T[:, None], 0.0)
    # NaN is larger than any number; of several, max returns the first.
    worst, place = nan_TE.view(-1).max(0)
    return place.masked_fill(worst == 0, NO_FAULT)


def of_tokens(fault_L: Tensor, token_ids_T: Tensor, num_experts: int) -> Tensor:
    """Codes of several layers, from :func:`first_fault`, with the id of the token in place of its
    row: ``id * E + expert``."""
    num_tokens = token_ids_T.shape[0]
    if not num_tokens:
        return fault_L
    row_L = (fault_L // num_experts).clamp(max=num_tokens - 1)
    code_L = token_ids_T[row_L] * num_experts + fault_L % num_experts
    return torch.where(fault_L == NO_FAULT, fault_L, code_L)


def describe_logit(layer: int, code: int, num_experts: int, seq_len: int) -> str:
    """A code of :func:`of_tokens` as text."""
    token, expert = divmod(code, num_experts)
    sequence, position = divmod(token, max(seq_len, 1))
    where = f"token {token} (sequence {sequence}, position {position})"
    return f"layer {layer}, {where}, expert {expert}: the router's logit is not finite"


def check_experts(
    experts_TK: Tensor, num_experts: int, *, layer: int, token_ids_T: Tensor | None = None
) -> None:
    """Raise RoutingError unless `experts_TK` is a routing: int64 [T, K], ids below `num_experts` or
    -1, each id at most once per token. The message names the first wrong choice, by its token's
    id in `token_ids_T`, or by its row without these.
    """
    where = f"layer {layer}"
    if experts_TK.ndim != 2 or experts_TK.dtype != torch.int64:
        raise RoutingError(
            f"{where}: a routing is int64 [tokens, experts per token], not "
            f"{str(experts_TK.dtype).removeprefix('torch.')} {list(experts_TK.shape)}"
        )
    if experts_TK.shape[1] > num_experts:
        raise RoutingError(
            f"{where}: {experts_TK.shape[1]} experts per token, but there are {num_experts}"
        )
    bad_TK = (experts_TK < -1) | (experts_TK >= num_experts)
    # After a sort equal ids are neighbours; the mark returns to the slot of the later one.
    ordered_TK = experts_TK.sort(dim=1, stable=True)
    twice_TK = torch.zeros_like(bad_TK)
    same = (ordered_TK.values[:, 1:] == ordered_TK.values[:, :-1]) & (ordered_TK.values[:, 1:] >= 0)
    twice_TK.scatter_(1, ordered_TK.indices[:, 1:], same)
    for wrong_TK, why in (
        (bad_TK, f"is not one of the experts 0 to {num_experts - 1}, nor -1 (none)"),
        (twice_TK, "is chosen twice"),
    ):
        wrong_pairs = wrong_TK.nonzero()
        if len(wrong_pairs):
            row, slot = wrong_pairs[0].tolist()
            token = row if token_ids_T is None else int(token_ids_T[row])
            expert = int(experts_TK[row, slot])
            raise RoutingError(f"{where}, token {token}: expert {expert} {why}")
