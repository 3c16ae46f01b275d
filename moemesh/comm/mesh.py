"""The mesh of ranks: named axes with their groups, created once, by all ranks, in one order.

A `Mesh` is passed in, never a global; one process can hold several. Groups are cached by their
ranks: an axis that spans the same ranks as another (ep and tp, say) shares its group, an axis over
all ranks is the world group, and an axis of size 1 has no group at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moemesh.config.layout import AXES, Layout
from moemesh.trace.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One named group of ranks, seen from one of them.

    `ranks` are global ranks in ascending order, ``ranks[index]`` is this rank; `group` is None when
    `size` is 1; `device` is where the tensors of its collectives live; `ledger` is where these are
    entered.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: ProcessGroup | None = field(repr=False)
    device: torch.device
    ledger: Ledger = field(repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """All axes of a `Layout` (the names of `moemesh.config.layout.AXES`) for one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        groups: dict[tuple[int, ...], ProcessGroup | None],
        control_group: ProcessGroup | None,
    ) -> None:
        """Use :meth:`create` or :meth:`single`; `groups` are this rank's, by their ranks."""
        self.layout = layout
        self.rank = rank
        self.device = device
        self.ledger = Ledger()
        self.coordinates: dict[str, int] = layout.coordinates(rank)
        self._groups = groups
        self._axes = {name: self._axis(name, layout.group_of(name, rank)) for name in AXES}
        #: The axis of all ranks for control messages on the CPU: its own gloo group where tensors
        #: travel by another backend, the world axis itself otherwise.
        self.control = self["world"]
        if control_group is not None:
            self.control = Axis(
                name="control",
                ranks=self["world"].ranks,
                index=rank,
                group=control_group,
                device=torch.device("cpu"),
                ledger=self.ledger,
            )

    @classmethod
    def create(cls, layout: Layout, device: torch.device | str) -> Mesh:
        """The mesh of a running process group; every rank calls this at the same point.

        Raises ValueError when the layout's world size is not the number of running ranks.
        """
        assert dist.is_initialized(), "Mesh.create needs a process group (or use Mesh.single)"
        if layout.world_size != dist.get_world_size():
            raise ValueError(
                f"the layout needs {layout.world_size} ranks, {dist.get_world_size()} are running"
            )
        device, rank = torch.device(device), dist.get_rank()
        timeout = _world_timeout(device)
        groups: dict[tuple[int, ...], ProcessGroup | None] = {
            tuple(range(layout.world_size)): dist.group.WORLD
        }
        for name in AXES:
            for ranks in layout.groups(name):
                if len(ranks) > 1 and ranks not in groups:
                    group = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
                    groups[ranks] = group if rank in ranks else None
        control_group = None
        if dist.get_backend() != "gloo" and layout.world_size > 1:
            control_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
        return cls(layout, rank, device, groups, control_group)

    @classmethod
    def single(cls, device: torch.device | str) -> Mesh:
        """A mesh of one rank, without any process group."""
        return cls(Layout(), 0, torch.device(device), {}, None)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def __getitem__(self, name: str) -> Axis:
        """The axis `name`, one of `moemesh.config.layout.AXES`."""
        return self._axes[name]

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.layout}, {self.device})"

    @cached_property
    def dense(self) -> DeviceMesh:
        """The (pp, dp, cp, tp) view as a torch DeviceMesh. Needs a process group."""
        return self._view("dense")

    @cached_property
    def expert(self) -> DeviceMesh:
        """The (pp, edp, ep, etp) view as a torch DeviceMesh. Needs a process group."""
        return self._view("expert")

    def _axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        return Axis(
            name=name,
            ranks=ranks,
            index=ranks.index(self.rank),
            group=self._groups[ranks] if len(ranks) > 1 else None,
            device=self.device,
            ledger=self.ledger,
        )

    def _view(self, view: str) -> DeviceMesh:
        degrees = self.layout.dimensions(view)
        groups = [self[name].group or self._alone for name in degrees]
        ranks = torch.arange(self.world_size).reshape(tuple(degrees.values()))
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(degrees)
        )

    @cached_property
    def _alone(self) -> ProcessGroup:
        """A group of this rank only: DeviceMesh wants one for every dimension of size 1."""
        if self.world_size == 1:
            assert dist.group.WORLD is not None, "a DeviceMesh needs a process group"
            return dist.group.WORLD
        # Synchronised locally, that is not at all: ranks may ask for their views at any time.
        return dist.new_group([self.rank], use_local_synchronization=True, group_desc="alone")


def _world_timeout(device: torch.device) -> timedelta:
    """The timeout that the world group was made with; new groups would fall back to torch's own."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(device).options._timeout
