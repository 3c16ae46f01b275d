"""The cost of changing the layout of a tensor over the axes of a mesh.

A layout has one placement a mesh axis, outermost axis first:

=====  =================================  =========================
       forward                            the gradient is
=====  =================================  =========================
S0 S1  dim 0, 1 ... cut along the axis    cut likewise
R      the same on every rank             the same on every rank
P      partial: the SUM is the tensor     the same on every rank
B      the same on every rank             partial
=====  =================================  =========================

P and B are conjugate, as g and f of Megatron-LM (M. Shoeybi et al., arXiv:1909.08053): an operator
that uses its whole input for a part of its output reads B, one that contracts a cut dim returns P.
So every change has a forward and a backward:

=====  ==============  ==============
       forward         backward
=====  ==============  ==============
S → R  all-gather      slice
S → B  all-gather      reduce-scatter
R → S  slice           all-gather
R → B  none            all-reduce
P → R  all-reduce      none
P → S  reduce-scatter  all-gather
P → B  all-reduce      all-reduce
S → S  all-to-all      all-to-all (another dim)
=====  ==============  ==============

Over several axes the order matters (slice first, then gather less), so the cost is the shortest
path over single steps. If two axes cut the same dim, the later axis cuts the pieces of the earlier
one; a step on the earlier one is then not a collective of contiguous rows and is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

#: One placement an axis: "R", "P", "B" or "S" and the number of a dim.
MeshLayout = tuple[str, ...]

#: Placement in a layout -> placement of the tensor, and of its gradient, where they differ.
_FORWARD = {"B": "R"}
_GRADIENT = {"P": "R", "B": "P"}


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """Ranks along one axis and the link between them: seconds a message and seconds a byte."""

    name: str
    size: int
    latency: float = 0.0
    seconds_per_byte: float

    def gather(self, num_bytes: float) -> float:
        """Seconds of an all-gather to, a reduce-scatter from, or an all-to-all of `num_bytes` a
        rank; an all-reduce takes twice that time."""
        # Ring: n - 1 messages of S / n each; the additions of a reduce-scatter are not counted.
        share = (self.size - 1) / self.size
        return (self.size - 1) * self.latency + share * num_bytes * self.seconds_per_byte


def reshard_seconds(
    num_bytes: float,
    source: MeshLayout,
    target: MeshLayout,
    axes: Sequence[MeshAxis],
    *,
    backward: bool = True,
) -> float:
    """Seconds to take a tensor of `num_bytes` (all ranks together) from `source` to `target`.

    `backward` adds the change of its gradient from `target` to `source`.
    """
    seconds = 0.0
    passes = [(source, target, _FORWARD), (target, source, _GRADIENT)]
    for start, end, names in passes if backward else passes[:1]:
        before = tuple(names.get(placement, placement) for placement in start)
        after = tuple(names.get(placement, placement) for placement in end)
        if before != after:
            cuts = {placement for placement in (*before, *after) if placement[0] == "S"}
            placements = tuple(sorted(cuts | {"R", "P"}))
            seconds += _all_paths(num_bytes, before, placements, tuple(axes))[after]
    return seconds


@lru_cache(maxsize=2**14)
def _all_paths(
    num_bytes: float, source: MeshLayout, placements: tuple[str, ...], axes: tuple[MeshAxis, ...]
) -> dict[MeshLayout, float]:
    """Dijkstra: seconds from `source` to every layout made of `placements`, in one direction."""
    done: dict[MeshLayout, float] = {}
    heap: list[tuple[float, MeshLayout]] = [(0.0, source)]
    while heap:
        seconds, layout = heapq.heappop(heap)
        if layout in done:
            continue
        done[layout] = seconds
        #: Bytes that one rank holds.
        held = num_bytes
        for placement, axis in zip(layout, axes, strict=True):
            if placement[0] == "S":
                held /= axis.size
        for index, axis in enumerate(axes):
            # Pieces of pieces: only the innermost axis that cuts a dim may change.
            inner = set(layout[index + 1 :])
            old = layout[index]
            if old[0] == "S" and old in inner:
                continue
            for new in placements:
                after = (*layout[:index], new, *layout[index + 1 :])
                if new == old or (new[0] == "S" and new in inner) or after in done:
                    continue
                # Slices, padding with zeros and a copy next to zeros take no communication.
                step = 0.0
                if axis.size == 1:
                    pass
                elif old == "P":
                    step = axis.gather(held) * (2 if new == "R" else 1)
                elif old[0] == "S" and new == "R":
                    step = axis.gather(held * axis.size)
                elif old[0] == "S" and new != "P":
                    step = axis.gather(held)
                heapq.heappush(heap, (seconds + step, after))
    return done
