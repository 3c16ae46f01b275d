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
that uses its whole input for a part of its output wants B, one that contracts a cut dim leaves P.
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
path over single steps. Of two axes that cut the same dim the later one cuts the pieces of the
earlier one; a step on the earlier one is then not a collective of contiguous rows and is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: One placement an axis: "R", "P", "B" or "S" and the number of a dim.
MeshLayout = tuple[str, ...]

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
        """All-gather to, or reduce-scatter from, `num_bytes` a rank."""
        # Ring: n - 1 messages of S / n each; the additions of a reduce-scatter are not counted.
        share = (self.size - 1) / self.size
        return (self.size - 1) * self.latency + share * num_bytes * self.seconds_per_byte

    def all_reduce(self, num_bytes: float) -> float:
        """All-reduce of `num_bytes` a rank: a reduce-scatter, then an all-gather."""
        return 2 * self.gather(num_bytes)

    def all_to_all(self, num_bytes: float) -> float:
        """All-to-all of `num_bytes` held by each rank: as many messages, of the same size."""
        return self.gather(num_bytes)


def _cuts(placement: str) -> bool:
    return placement[0] == "S"


def local_bytes(num_bytes: float, layout: MeshLayout, axes: Sequence[MeshAxis]) -> float:
    """Bytes that one rank holds of a tensor of `num_bytes`."""
    for placement, axis in zip(layout, axes, strict=True):
        if _cuts(placement):
            num_bytes /= axis.size
    return num_bytes


def reshard_seconds(
    num_bytes: float,
    source: MeshLayout,
    target: MeshLayout,
    axes: Sequence[MeshAxis],
    *,
    backward: bool = True,
) -> float:
    """Seconds to take a tensor of `num_bytes` (of all ranks) from `source` to `target`.

    With `backward`, its gradient on the way back as well.
    """
    mesh = tuple(axes)
    seconds = _path_seconds(num_bytes, _mapped(source, _FORWARD), _mapped(target, _FORWARD), mesh)
    if backward:
        start, end = _mapped(target, _GRADIENT), _mapped(source, _GRADIENT)
        seconds += _path_seconds(num_bytes, start, end, mesh)
    return seconds


def _mapped(layout: MeshLayout, names: Mapping[str, str]) -> MeshLayout:
    return tuple(names.get(placement, placement) for placement in layout)


def _path_seconds(
    num_bytes: float, source: MeshLayout, target: MeshLayout, axes: tuple[MeshAxis, ...]
) -> float:
    """The cheapest sequence of single steps from one layout to another, one direction."""
    if source == target:
        return 0.0
    dims = {place for place in (*source, *target) if _cuts(place)}
    return _all_paths(num_bytes, source, tuple(sorted(dims | {"R", "P"})), axes)[target]


@lru_cache(maxsize=2**14)
def _all_paths(
    num_bytes: float, source: MeshLayout, places: tuple[str, ...], axes: tuple[MeshAxis, ...]
) -> dict[MeshLayout, float]:
    """Dijkstra: seconds from `source` to every layout made of `places`."""
    done: dict[MeshLayout, float] = {}
    heap: list[tuple[float, MeshLayout]] = [(0.0, source)]
    while heap:
        seconds, layout = heapq.heappop(heap)
        if layout in done:
            continue
        done[layout] = seconds
        for index, axis in enumerate(axes):
            # Pieces of pieces: only the innermost axis that cuts a dim may change.
            inner = set(layout[index + 1 :])
            old = layout[index]
            if _cuts(old) and old in inner:
                continue
            for new in places:
                if new == old or (_cuts(new) and new in inner):
                    continue
                after = (*layout[:index], new, *layout[index + 1 :])
                if after not in done:
                    held = local_bytes(num_bytes, layout, axes)
                    step = _step_seconds(held, old, new, axis)
                    heapq.heappush(heap, (seconds + step, after))
    return done


def _step_seconds(held: float, old: str, new: str, axis: MeshAxis) -> float:
    """One change along one axis, of a tensor of which a rank holds `held` bytes before."""
    if axis.size == 1:
        return 0.0
    if _cuts(old):
        if new == "R":
            return axis.gather(held * axis.size)
        # To partial: pad with zeros, nothing moves.
        return 0.0 if new == "P" else axis.all_to_all(held)
    if old == "P":
        return axis.all_reduce(held) if new == "R" else axis.gather(held)
    # Replicated: cut by slicing; partial by keeping one copy and zeros elsewhere.
    return 0.0
