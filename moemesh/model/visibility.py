"""Attention masks: a query sees the keys before it, in its document and its window.

Legend: B sequences, L positions of a whole sequence, S queries of this rank, C its keys, E keys of
a tile; N query heads, M key/value heads, D head size.

A query at position p sees the keys at positions ``lowest .. p``, its own included; ``lowest`` is
the start of its document or of its window, whichever is later. The queries and keys of a rank are
runs of contiguous positions, in any order: a whole sequence, a slice of it, or the chunks of a
context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moemesh.ops.packed_attention import Documents, documents, takes_documents

Runs = tuple[range, ...]


@dataclass(frozen=True)
class Visibility:
    """The keys that each query sees. ``queries``, ``keys``: runs of positions on this rank.
    ``window``: a query sees the last `window` positions, its own included (None: all).
    ``starts_BL``: first position of the document of each position of the whole sequence (int64;
    None: a sequence is one document). ``length``: positions of a whole sequence, which several
    ranks may share. ``host_starts_BL``: ``starts_BL`` on the CPU, if the caller has it: tiles are
    chosen there, and a copy would wait for the device."""

    queries: Runs
    keys: Runs
    window: int | None = None
    starts_BL: Tensor | None = None
    length: int = 0
    host_starts_BL: Tensor | None = None

    @cached_property
    def is_whole(self) -> bool:
        """Whether queries and keys are the same single run, and :attr:`is_triangle`."""
        return self.is_triangle and len(self.queries) == 1 and self.queries == self.keys

    @property
    def by_the_last(self) -> slice | None:
        """Slice of the keys that a single query, at the last position of the keys, sees; None for
        several queries, or with documents."""
        if len(self.queries) != 1 or len(self.queries[0]) != 1 or self.starts_BL is not None:
            return None
        stop = self.queries[0].stop
        if self.keys != (range(stop),):
            return None
        return slice(max(stop - (self.window or stop), 0), stop)

    @cached_property
    def is_triangle(self) -> bool:
        """Whether a query sees every key up to its position: no documents, no window that hides
        one."""
        if self.starts_BL is not None or self.window is None:
            return self.starts_BL is None
        return self.window >= max((run.stop for run in self.queries), default=0)

    @cached_property
    def starts_on_host(self) -> Tensor | None:
        if self.starts_BL is None or self.host_starts_BL is not None:
            return self.host_starts_BL
        return self.starts_BL.cpu()

    def between(self, queries: Runs, keys: Runs) -> Visibility:
        """The same rules for other queries and keys."""
        return replace(self, queries=queries, keys=keys)

    def within(self, window: int) -> Visibility:
        """The same rules with the window `window` in place of another."""
        narrowed = replace(self, window=window)
        narrowed.__dict__["_documents"] = self._documents  # all layers share them
        return narrowed

    @cached_property
    def _documents(self) -> dict[tuple[int, torch.device], Documents]:
        return {}

    def documents(self, query_BNSD: Tensor, value_BMCD: Tensor) -> Documents | None:
        """The documents of this rank's positions, for a kernel that takes them. None: such a kernel
        is missing or not needed, or queries and keys are not the same single run."""
        is_one_run = len(self.queries) == 1 and self.queries == self.keys
        if not is_one_run or self.is_triangle or not takes_documents(query_BNSD, value_BMCD):
            return None
        key, run = (len(query_BNSD), query_BNSD.device), self.queries[0]
        if key not in self._documents:
            starts_BS = self.starts_on_host
            if starts_BS is not None:
                # Positions in the run; documents that start before it start at 0.
                starts_BS = (starts_BS[:, run.start : run.stop] - run.start).clamp(min=0)
            self._documents[key] = documents(starts_BS, key[0], len(run), key[1])
        return self._documents[key]

    def lowest(self, queries: range) -> tuple[int, int]:
        """Lowest position that a query sees, least and largest over the `queries` of all sequences.
        It never falls from a query to the next: these are those of the first and the last query."""
        first, last = queries[0], queries[-1]
        window = last + 1 if self.window is None else self.window
        least, largest = max(first + 1 - window, 0), max(last + 1 - window, 0)
        if self.starts_on_host is not None and len(self.starts_on_host):
            least = max(least, int(self.starts_on_host[:, first].min()))
            largest = max(largest, int(self.starts_on_host[:, last].max()))
        return least, largest

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Whether each of `queries` sees each of `keys`: bool [B or 1, S, E]."""
        query_S1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key_E = torch.arange(keys.start, keys.stop, device=device)
        mask_BSE = (key_E <= query_S1)[None]
        if self.window is not None:
            mask_BSE = mask_BSE & (key_E > query_S1 - self.window)
        if self.starts_BL is not None:
            lowest_BS = self.starts_BL[:, queries.start : queries.stop]
            mask_BSE = mask_BSE & (key_E >= lowest_BS[:, :, None])
        return mask_BSE


def document_starts(documents_BL: Tensor) -> Tensor:
    """First position of each position's document, int64 [B, L], from document numbers, which differ
    between neighbouring documents."""
    positions_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return torch.where(begins_BL, positions_L, 0).cummax(dim=1).values
