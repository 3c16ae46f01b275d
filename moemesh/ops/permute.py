"""Copy tokens to rows and sum rows back to tokens: the permutation around the experts.

Legend: N source rows (tokens, or received rows), R rows in expert order, K slots per token, E
experts, H features. A :class:`RowMap` maps each row to the source row that it copies; several rows
may copy the same source row (a token goes to K experts), and some source rows may have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """``source_R``: the source row of each row. The inverse as bags: the copies of source row n are
    the rows ``copies_R[starts_N[n] : starts_N[n + 1]]``.

    `has_rest`: the last of the R rows may be padding, neither computed nor read; padding is in N
    further bags. R does not depend on the routing then: the host need not wait for it.
    """

    source_R: Tensor
    copies_R: Tensor
    starts_N: Tensor
    is_permutation: bool = False
    has_rest: bool = False

    @property
    def num_sources(self) -> int:
        return self.starts_N.shape[0] // (1 + self.has_rest)

    @property
    def num_rows(self) -> int:
        return self.source_R.shape[0]


def permutation(order_R: Tensor) -> RowMap:
    """The map ``rows[r] = source[order[r]]``; every source row is copied exactly once."""
    places_R = _multiples(1, order_R.shape[0], order_R.device)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, places_R)
    return RowMap(source_R=order_R, copies_R=inverse_R, starts_N=places_R, is_permutation=True)


def identity(num_rows: int, device: torch.device) -> RowMap:
    """Rows are their own source."""
    return permutation(torch.arange(num_rows, device=device))


def slice_map(rows: RowMap, start: int, stop: int) -> RowMap:
    """The map of the rows ``range(start, stop)`` alone."""
    return map_from_sources(rows.source_R[start:stop], rows.num_sources)


def map_from_sources(source_R: Tensor, num_sources: int) -> RowMap:
    """The map of rows that copy ``source_R``; the inverse lists each bag in ascending row order."""
    return RowMap(
        source_R=source_R,
        copies_R=torch.argsort(source_R, stable=True),
        starts_N=_starts(count_ids(source_R, num_sources)),
    )


def count_ids(ids: Tensor, num_ids: int) -> Tensor:
    """Count each of 0 .. num_ids - 1 in `ids` (int64, 1 dim; -1 is not counted): int64 [num_ids].
    The host does not wait for a device: ``bincount`` would; ``histc`` of integers, which a CPU
    lacks, does not."""
    if ids.device.type == "cpu":
        return torch.bincount(ids + 1, minlength=num_ids + 1)[1:]
    if not num_ids:
        return ids.new_zeros(0)
    return torch.histc(ids, bins=num_ids, min=0, max=max(num_ids - 1, 1))


def count_by_owner(rows: RowMap, counts_L: Tensor, owner_N: Tensor, num_owners: int) -> Tensor:
    """Number of rows of each of the L experts that come from each owner: int64 [L, num_owners].
    `counts_L`: rows of each expert, in the order of rows; `owner_N`: owner of each source row. The
    host does not wait."""
    num_local = len(counts_L)
    expert_R = torch.repeat_interleave(
        _multiples(1, num_local, counts_L.device), counts_L, output_size=rows.num_rows
    )
    key_R = expert_R * num_owners + owner_N[rows.source_R]
    return count_ids(key_R, num_local * num_owners).view(num_local, num_owners)


def places_of_true(mask_N: Tensor, count: int, *, and_others: bool = False) -> Tensor:
    """Indices of the `count` true values of a mask of one dim, ascending, without a wait;
    `and_others`: followed by those of the false ones, `count` in all."""
    if mask_N.device.type == "cpu" and not and_others:
        return mask_N.nonzero().squeeze(1)
    return torch.sort(mask_N.to(torch.uint8), descending=True, stable=True).indices[:count]


class SortedByExpert:
    """The (token, slot) pairs of a routing, sorted by expert without a wait for a device.
    `counts_E`: number of pairs of each expert (int64 [num_experts]); the caller reads from it the
    number of rows that :meth:`rows` needs."""

    def __init__(
        self,
        experts_TK: Tensor,
        num_experts: int,
        owner_T: Tensor | None = None,
        num_owners: int = 1,
        *,
        is_complete: bool = False,
    ) -> None:
        """Pairs of an expert ascend by owner (0 to `num_owners` - 1), then by token. `is_complete`:
        every pair has an expert."""
        self._experts_TK = experts_TK
        flat_TK = experts_TK.reshape(-1)
        self.counts_E = count_ids(flat_TK, num_experts)
        key_TK = flat_TK
        if owner_T is not None:
            owner_TK = owner_T[:, None].expand_as(experts_TK).reshape(-1)
            key_TK = flat_TK * num_owners + owner_TK
        if not is_complete:  # -1 sorts last: its pairs have no row
            key_TK = torch.where(flat_TK < 0, num_experts * num_owners, key_TK)
        #: The pairs ``token * K + slot`` in the order of experts; those without an expert last.
        self.order = torch.argsort(key_TK, stable=True)

    def rows(self, num_rows: int) -> tuple[RowMap, Tensor]:
        """The map rows -> tokens, and the position ``flat_R = token * K + slot`` of each row.

        `num_rows`: number of pairs that have an expert."""
        experts_TK, flat_R = self._experts_TK, self.order[:num_rows]
        num_tokens, num_slots = experts_TK.shape
        source_R = flat_R.div(num_slots, rounding_mode="floor")
        if num_rows == experts_TK.numel():  # every token has K rows
            starts_T = _multiples(max(num_slots, 1), num_tokens, flat_R.device)
            places_R = _multiples(1, num_rows, flat_R.device)
            copies_R = torch.empty_like(flat_R).scatter_(0, flat_R, places_R)
            return RowMap(source_R=source_R, copies_R=copies_R, starts_N=starts_T), flat_R
        has_row_TK = experts_TK >= 0
        row_of_flat = torch.empty_like(experts_TK.reshape(-1))
        row_of_flat.scatter_(0, flat_R, torch.arange(num_rows, device=flat_R.device))
        copies_R = row_of_flat.index_select(0, places_of_true(has_row_TK.reshape(-1), num_rows))
        return RowMap(
            source_R=source_R, copies_R=copies_R, starts_N=_starts(has_row_TK.sum(1))
        ), flat_R

    def rows_and_rest(self) -> tuple[RowMap, Tensor]:
        """:meth:`rows` of all pairs; those without an expert are the padding rows of `has_rest`."""
        experts_TK, flat_R = self._experts_TK, self.order
        has_row_TK = experts_TK >= 0
        # Pairs with an expert in the order of tokens, then the others.
        order = places_of_true(has_row_TK.reshape(-1), len(flat_R), and_others=True)
        bags_T = has_row_TK.sum(1)
        num_slots = experts_TK.shape[1]
        rows = RowMap(
            source_R=flat_R // num_slots,
            copies_R=permutation(flat_R).copies_R.index_select(0, order),
            # Padding rows in small bags: a device sums the rows of a bag one after the other.
            starts_N=_starts(torch.cat([bags_T, num_slots - bags_T])),
            has_rest=True,
        )
        return rows, flat_R


def _multiples(step: int, count: int, device: torch.device) -> Tensor:
    """0, step, 2 step, ...: `count` numbers, read-only."""
    make = torch.arange if device.type == "cpu" else multiples_on_device
    return make(0, step * count, step, device=device)


@functools.lru_cache(maxsize=16)
def multiples_on_device(start: int, stop: int, step: int, *, device: torch.device) -> Tensor:
    """``torch.arange``, cached: layers and steps share it."""
    return torch.arange(start, stop, step, device=device)


def _starts(sizes_N: Tensor) -> Tensor:
    """Starts of consecutive bags of these sizes."""
    return sizes_N.cumsum(0) - sizes_N


def group_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[RowMap, Tensor, Tensor]:
    """Sort the (token, slot) pairs by expert, stable; expert -1 gets no row.

    Returns the map rows -> tokens, the position ``flat_R = token * K + slot`` of each row, and the
    rows per expert (int64 [num_experts]). The host waits for the number of rows.
    """
    sorted_ = SortedByExpert(experts_TK, num_experts)
    rows, flat_R = sorted_.rows(int(sorted_.counts_E.sum()))
    return rows, flat_R, sorted_.counts_E


class OwnSlots(NamedTuple):
    """The map from rows to (token, slot) pairs, each of which has at most one row: ``slot_R`` is
    ``token * K + slot``. ``counts_E``: rows of each expert. ``none_TK``: whether a pair has no
    expert, hence a padding row; None: no row is padding. ``experts_TK``: the routing, if the host
    knows without a wait that every pair has an expert."""

    tokens: RowMap
    slot_R: Tensor
    counts_E: Tensor
    none_TK: Tensor | None = None
    experts_TK: Tensor | None = None

    def pick(self, weights_TK: Tensor) -> Tensor:
        """The weight of each row [R]; without autograd."""
        return weights_TK.reshape(-1).gather(0, self.slot_R)

    def unpick(self, grad_R: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of weights [T, K] from `grad_R`, that of the rows' weights."""
        if self.slot_R.shape[0] == shape.numel() and not self.tokens.has_rest:
            # All pairs have rows: `copies_R` is the row of each pair.
            return grad_R.index_select(0, self.tokens.copies_R).view(shape)
        grad_TK = grad_R.new_zeros(shape.numel()).scatter_(0, self.slot_R, grad_R).view(shape)
        return grad_TK if self.none_TK is None else grad_TK.masked_fill_(self.none_TK, 0.0)


def at_least_one_row(rows: Tensor, value: int = 0) -> Tensor:
    """`rows`, or one row of `value` if there are none: for kernels that need a row."""
    return rows if len(rows) else F.pad(rows, (0, 0, 0, 1), value=value)


def gather_rows(source_NH: Tensor, rows: RowMap) -> Tensor:
    """Copy source rows into row order, [R, H]; without autograd."""
    return source_NH.index_select(0, rows.source_R)


def sum_rows_loop(rows_RH: Tensor, rows: RowMap) -> Tensor:
    """Reference for :func:`sum_rows`."""
    total_NH = rows_RH.new_zeros(rows.num_sources, rows_RH.shape[1])
    for row, source in enumerate(rows.source_R.tolist()):
        total_NH[source] += rows_RH[row]
    return total_NH


def sum_rows(rows_RH: Tensor, rows: RowMap) -> Tensor:
    """Sum the copies of each source row, [N, H], zeros without copies. ``embedding_bag`` adds in
    the order of the bag, without atomics, with fp32 partial sums for bfloat16; on a CPU it is 3 to
    5 times faster than ``index_add_``."""
    if rows.is_permutation:
        return rows_RH.index_select(0, rows.copies_R)
    if not rows_RH.shape[0]:
        return rows_RH.new_zeros(rows.num_sources, rows_RH.shape[1])
    sums_NH = torch.embedding_bag(rows_RH, rows.copies_R, rows.starts_N)[0]
    return sums_NH[: rows.num_sources] if rows.has_rest else sums_NH


def sum_rows_between(rows_RH: Tensor, rows: RowMap, sources: range, copies: range) -> Tensor:
    """:func:`sum_rows` for the `sources` alone, whose copies are ``copies_R[copies]``."""
    copies_R = rows.copies_R[copies.start : copies.stop]
    if not sources or not copies:
        return rows_RH.new_zeros(len(sources), rows_RH.shape[1])
    if rows.is_permutation:
        return rows_RH.index_select(0, copies_R)
    starts_N = rows.starts_N[sources.start : sources.stop] - copies.start
    return torch.embedding_bag(rows_RH, copies_R, starts_N)[0]


class NoSecondDerivative(RuntimeError):
    """Raised by a backward that runs with ``create_graph``.

    torch's `once_differentiable` raises later, in the second backward; and if this is a
    ``torch.autograd.grad`` with respect to named inputs, it does not raise, but lacks terms.
    """

    def __init__(self) -> None:
        super().__init__("moemesh has no second derivatives: create_graph must be False")


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        return ctx.back(gradient), None, None


def linear_map(
    x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """``run(x)``, a linear function; `back`, its transpose, carries the gradient."""
    return _LinearMap.apply(x, run, back)


def unpermute(rows_RH: Tensor, rows: RowMap) -> Tensor:
    """Unweighted sum of each source row's copies, [N, H]; backward: :func:`permute`."""
    return linear_map(rows_RH, lambda x: sum_rows(x, rows), lambda grad: gather_rows(grad, rows))


def permute(source_NH: Tensor, rows: RowMap) -> Tensor:
    """Copy source rows into row order, [R, H]; backward: :func:`unpermute`."""
    return linear_map(
        source_NH, lambda x: gather_rows(x, rows), lambda g: sum_rows(g.contiguous(), rows)
    )
