"""Coordinates of ranks: the two meshes over the same ranks, and how sizes are cut into shards.

The dense mesh is ``pp x dp x cp x tp``, the expert mesh ``pp x edp x ep x etp``; pp is
outermost and shared, tp and etp are innermost:

    rank = ((pp * DP  + dp ) * CP + cp) * TP  + tp
         = ((pp * EDP + edp) * EP + ep) * ETP + etp

If expert-parallel groups span nodes, ``ep = ep_rail * EP_NODE + ep_node``, which are two axes:
``ep_rail`` across nodes, ``ep_node`` inside of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from moemesh.config.shown import Shown

#: Dimensions of each view of a world, outermost first; "node" cuts ep at node borders.
VIEWS: dict[str, tuple[str, ...]] = {
    "dense": ("pp", "dp", "cp", "tp"),
    "expert": ("pp", "edp", "ep", "etp"),
    "node": ("pp", "edp", "ep_rail", "ep_node", "etp"),
}

#: Axis name -> (view, the dimensions of that view that the axis spans).
#: Three combined axes sum gradients: ``dp_cp`` those of parameters that tp shards, ``stage`` those
#: of other dense parameters, and ``edp_etp`` those of the factors of adapters that are not sharded
#: with their expert's width. The ranks of ``cp_tp`` share sequences.
AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pp": ("dense", ("pp",)),
    "dp": ("dense", ("dp",)),
    "cp": ("dense", ("cp",)),
    "tp": ("dense", ("tp",)),
    "cp_tp": ("dense", ("cp", "tp")),
    "dp_cp": ("dense", ("dp", "cp")),
    "stage": ("dense", ("dp", "cp", "tp")),
    "edp": ("expert", ("edp",)),
    "ep": ("expert", ("ep",)),
    "ep_rail": ("node", ("ep_rail",)),
    "ep_node": ("node", ("ep_node",)),
    "etp": ("expert", ("etp",)),
    "edp_etp": ("expert", ("edp", "etp")),
    "ep_etp": ("expert", ("ep", "etp")),
    # Pairs of ranks from both ends of pp: they share stages of mirrored pipes, or a tied embedding.
    "mirror": ("dense", ("pp",)),
    "world": ("dense", ("pp", "dp", "cp", "tp")),
}
#: Axes over which gradients are summed and states may be sharded. Each is divided into two axes:
#: ranks that shard one copy of the states (``_shard``), and ranks with the same shard
#: (``_copies``).
SHARDED_AXES = ("dp_cp", "stage", "edp", "edp_etp")
#: The sharded axes of the parameters of routed experts.
EXPERT_AXES = ("edp", "edp_etp")
AXES.update({f"{axis}_{part}": AXES[axis] for axis in SHARDED_AXES for part in ("shard", "copies")})


def shard_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Balanced contiguous split of `size` items; the first ``size % parts`` are one larger."""
    base, extra = divmod(size, parts)
    return tuple(base + (index < extra) for index in range(parts))


def shard_range(size: int, parts: int, index: int) -> range:
    """The items of shard `index` under :func:`shard_sizes`."""
    base, extra = divmod(size, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


class MeshDegrees:
    """Mixin of records with the degrees of the two meshes: derived numbers of ranks."""

    if TYPE_CHECKING:
        pp: int
        dp: int
        cp: int
        tp: int
        ep: int
        etp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Number of replicas of the experts: the degree that follows from the others."""
        return self.stage_ranks // (self.ep * self.etp)


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(MeshDegrees, Shown):
    """The degrees of the two meshes. Raises ValueError for a degree below 1, and when the meshes do
    not cover the same ranks. ``ranks_per_node = 0`` means that all ranks share one node."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    ranks_per_node: int = 0
    #: Consecutive ranks of an axis that share one copy of sharded states; 0: all of the axis.
    shard_group: int = 0

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number < (least := int(name not in ("ranks_per_node", "shard_group"))):
                raise ValueError(f"{name} must be at least {least}, not {number}")
        if self.stage_ranks % (self.ep * self.etp):
            raise ValueError(
                f"ep*etp ({self.ep}*{self.etp}) must divide "
                f"dp*cp*tp ({self.dp}*{self.cp}*{self.tp})"
            )

    @property
    def ep_node(self) -> int:
        """Consecutive ranks in ep that share a node: the largest divisor of ep that allows it."""
        node = self.ranks_per_node or self.world_size
        return gcd(self.ep, node // self.etp) if node % self.etp == 0 else 1

    @property
    def ep_rail(self) -> int:
        """Number of blocks of :attr:`ep_node` ranks (nodes, or parts of them) in an expert-parallel
        group."""
        return self.ep // self.ep_node

    def dimensions(self, view: str) -> dict[str, int]:
        """Degrees of one view (a key of :data:`VIEWS`), outermost first."""
        return {name: int(getattr(self, name)) for name in VIEWS[view]}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Every coordinate of `rank` in all views."""
        coordinates: dict[str, int] = {}
        for view in VIEWS:
            rest = rank
            for name, degree in reversed(self.dimensions(view).items()):
                rest, coordinates[name] = divmod(rest, degree)
        return coordinates

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, each a tuple of ascending ranks; groups ordered by first rank."""
        whole, _, part = axis.rpartition("_")
        if part in ("shard", "copies") and whole in SHARDED_AXES:
            groups: list[tuple[int, ...]] = []
            for group in self.groups(whole):
                size = gcd(self.shard_group, len(group)) if self.shard_group else len(group)
                if part == "shard":
                    groups += [group[start : start + size] for start in range(0, len(group), size)]
                else:
                    groups += [group[start::size] for start in range(size)]
            return tuple(sorted(groups))
        view, spanned = AXES[axis]
        # The first rank of each group, members relative to it, ranks between neighbours in a dim.
        first, members, distance = [0], [0], self.world_size
        for name, degree in self.dimensions(view).items():
            distance //= degree
            steps = range(0, degree * distance, distance)
            if name in spanned:
                members = [rank + step for rank in members for step in steps]
            else:
                first = [rank + step for rank in first for step in steps]
        groups = [tuple([start + rank for rank in members]) for start in first]
        if axis == "mirror":
            groups = [
                tuple(sorted({group[end], group[-1 - end]}))
                for group in groups
                for end in range((len(group) + 1) // 2)
            ]
        return tuple(sorted(groups))

    def sharding_axes(self, axis: str) -> tuple[str, str]:
        """Names of two axes: ranks that shard one copy of the states of `axis`, and ranks with the
        same shard. Without a `shard_group` the first is `axis` itself."""
        return f"{axis}_shard" if self.shard_group else axis, f"{axis}_copies"

    def same_ranks(self, axis: str) -> str:
        """The first of :data:`SHARDED_AXES` that has the same groups as `axis`, which is one of
        them."""
        shape = self._shape_of_groups(axis)
        return next(other for other in SHARDED_AXES if self._shape_of_groups(other) == shape)

    def _shape_of_groups(self, axis: str) -> list[tuple[int, int]]:
        """(degree, ranks between neighbours) of the dimensions that a group spans, innermost first.
        Adjacent dimensions are merged into one, so that equal groups have equal shapes."""
        view, spanned = AXES[axis]
        dimensions: list[tuple[int, int]] = []
        distance = 1
        for name, degree in reversed(self.dimensions(view).items()):
            if name in spanned and degree > 1:
                if dimensions and dimensions[-1][0] * dimensions[-1][1] == distance:
                    degree_within, distance_within = dimensions.pop()
                    dimensions.append((degree * degree_within, distance_within))
                else:
                    dimensions.append((degree, distance))
            distance *= degree
        return dimensions

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds `rank`."""
        if axis == "mirror" or axis.endswith(("_shard", "_copies")):
            return next(group for group in self.groups(axis) if rank in group)
        # Computed for this rank only, without a list of all groups.
        (view, spanned), coordinates, ranks = AXES[axis], self.coordinates(rank), [0]
        for name, degree in self.dimensions(view).items():
            indices = range(degree) if name in spanned else (coordinates[name],)
            ranks = [base * degree + index for base in ranks for index in indices]
        return tuple(ranks)
