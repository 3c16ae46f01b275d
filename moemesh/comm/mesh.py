"""The mesh of ranks: named axes with their groups, created once, by all ranks, in one order.

A `Mesh` is passed in, never a global; one process can hold several. Groups are cached by their
ranks: an axis that spans the same ranks as another (for example ep and tp) shares its group, an
axis over all ranks has the group that the mesh was made of, and an axis of size 1 has none.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moemesh.config.errors import UserError, check_kind
from moemesh.config.layout import AXES, Layout
from moemesh.config.shown import Shown
from moemesh.trace.ledger import Ledger
from moemesh.trace.machine import thread_states

#: Axes besides "world" that get a second group, of gloo, for numbers on the CPU if their tensors
#: are on a device: sizes of exchanges (ep_etp), token counts of a step (dp_cp).
HOST_AXES = ("ep_etp", "dp_cp")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One named group of ranks, seen from one of them.

    `ranks` are global ranks in ascending order, ``ranks[index]`` is this rank; `group` is None when
    `size` is 1; `device` holds the tensors of the axis's collectives; `ledger` records these.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: ProcessGroup | None = field(repr=False)
    device: torch.device
    ledger: Ledger = field(repr=False)

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def backend(self) -> str:
        """The name of the backend that moves the tensors of `device`: "gloo", "nccl"."""
        assert self.group is not None, "an axis of one rank has no backend"
        return self.group._get_backend(self.device).name()

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | DeviceMesh,
        name: str = "group",
        *,
        device: torch.device | str | None = None,
        ledger: Ledger | None = None,
    ) -> Axis:
        """The ranks of an existing process group, or of a DeviceMesh of one dimension. `device`
        defaults to the current CUDA device for NCCL, to the CPU for other backends. Raises
        ValueError on a rank that is not in the group."""
        group = _process_group(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        if device is None:
            device, cuda = torch.device("cpu"), torch.device("cuda")
            if cuda in group._device_types and group._get_backend(cuda).name() == "nccl":
                device = torch.device("cuda", torch.cuda.current_device())
        return cls(
            name=name,
            ranks=ranks,
            index=dist.get_rank(group),
            group=group if len(ranks) > 1 else None,
            device=device_of(device),
            ledger=Ledger() if ledger is None else ledger,
        )


class Mesh(Shown):
    """All axes of a `Layout` (the names of `moemesh.config.layout.AXES`) for one rank.

    `rank` counts from 0 among the ranks of the mesh; the `ranks` of its axes are global ones.
    """

    shown = ("rank", "layout", "device")

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        groups: dict[tuple[int, ...], ProcessGroup | None],
        host_groups: dict[tuple[int, ...], ProcessGroup | None] | None = None,
        global_ranks: tuple[int, ...] | None = None,
    ) -> None:
        """Use :meth:`create`, :meth:`from_group` or :meth:`single`. `groups`: the groups of this
        rank by their members, which are numbered in the mesh. `host_groups`: the same for gloo on
        the CPU; None if `groups` already use it. ``global_ranks[rank]`` defaults to ``rank``."""
        self.layout = layout
        self.rank = rank
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ledger = Ledger()
        self.coordinates: dict[str, int] = layout.coordinates(rank)
        global_ranks = global_ranks or tuple(range(layout.world_size))
        self._axes: dict[str, Axis] = {}
        for name in AXES:
            ranks = layout.group_of(name, rank)
            self._axes[name] = Axis(
                name=name,
                ranks=tuple(global_ranks[member] for member in ranks),
                index=ranks.index(rank),
                group=groups[ranks] if len(ranks) > 1 else None,
                device=device,
                ledger=self.ledger,
            )
        self._host_groups = host_groups
        #: The axis of all ranks for control messages on the CPU, by gloo.
        self.control = self["world"]
        if host_groups is not None:
            self.control = replace(self.host("world"), name="control")

    @classmethod
    def create(cls, layout: Layout, device: torch.device | str) -> Mesh:
        """The mesh of a running process group; every rank calls this at the same point.

        Raises ValueError when the layout's world size is not the number of running ranks.
        """
        check_kind("layout", layout, Layout, "plan.layout")
        if dist.group.WORLD is None:
            raise UserError(
                "Mesh.create needs a process group: torch.distributed.init_process_group() first, "
                "or Mesh.single(device) for one rank"
            )
        return cls.from_group(dist.group.WORLD, layout, device)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | DeviceMesh,
        layout: Layout | None = None,
        device: torch.device | str | None = None,
    ) -> Mesh:
        """A mesh over the ranks of an existing group, or of a DeviceMesh of one dimension; all
        ranks of the group call this at the same point, and no others need to.

        `layout` defaults to experts over all ranks (ep = dp = size); `device` is as in
        :meth:`Axis.from_group`. Raises ValueError when the layout has another number of ranks, or a
        pipeline over a part of the ranks.
        """
        axis = Axis.from_group(group, device=device)
        layout = layout or Layout(dp=axis.size, ep=axis.size)
        if layout.world_size != axis.size:
            raise ValueError(f"the layout needs {layout.world_size} ranks, {axis.size} are running")
        group = _process_group(group)
        # Ranks outside the group do not call this: its members create the smaller groups alone.
        is_local = group is not dist.group.WORLD
        if is_local and layout.pp > 1:
            raise ValueError(f"a pipeline (pp = {layout.pp}) needs a mesh over all ranks")
        timeout = _timeout(group, axis.device)
        groups: dict[tuple[int, ...], ProcessGroup | None] = {tuple(range(axis.size)): axis.group}

        def make_groups(
            groups: dict[tuple[int, ...], ProcessGroup | None],
            names: Iterable[str],
            backend: str | None = None,
        ) -> None:
            """Add the groups of the axes `names`; None for those without this rank."""
            for name in names:
                for ranks in layout.groups(name):
                    if len(ranks) == 1 or ranks in groups:
                        continue
                    groups[ranks] = None
                    is_member = axis.index in ranks
                    if is_member or not is_local:
                        members = [axis.ranks[rank] for rank in ranks]
                        created = new_group(
                            members, name=name, timeout=timeout, backend=backend, is_local=is_local
                        )
                        groups[ranks] = created if is_member else None

        make_groups(groups, AXES)
        host_groups = None
        if axis.size > 1 and (axis.backend != "gloo" or axis.device.type != "cpu"):
            host_groups = {}
            make_groups(host_groups, ("world", *HOST_AXES), "gloo")
        return cls(layout, axis.index, axis.device, groups, host_groups, axis.ranks)

    @classmethod
    def single(cls, device: torch.device | str) -> Mesh:
        """A mesh of one rank, without any process group."""
        return cls(Layout(), 0, device_of(device), {}, None)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def timeout(self) -> timedelta | None:
        """Longest time of an operation of this mesh; None without a process group."""
        world = self["world"]
        return None if world.group is None else _timeout(world.group, world.device)

    def __getitem__(self, name: str) -> Axis:
        """The axis `name`, one of `moemesh.config.layout.AXES`."""
        return self._axes[name]

    def host(self, name: str) -> Axis:
        """The ranks of "world" or of an axis of :data:`HOST_AXES` for exchanges of numbers on the
        CPU: a gloo group besides the group of the axis, so that no host waits for a device. The
        axis itself if its tensors are on the CPU, or if it has one rank."""
        axis = self[name]
        if self._host_groups is None or axis.size == 1:
            return axis
        ranks = self.layout.group_of(name, self.rank)
        return replace(axis, group=self._host_groups[ranks], device=torch.device("cpu"))


def new_group(
    ranks: Sequence[int],
    *,
    name: str,
    timeout: timedelta | None = None,
    backend: str | None = None,
    is_local: bool = False,
) -> ProcessGroup:
    """The group of the global `ranks`; `backend` None is that of the world.

    All ranks of the world call this in one order; with `is_local` the members alone do.

    torch makes a group by splitting the communicator of a world that is bound to a device
    (``init_process_group(device_id=...)``), and ``ncclCommSplit`` is collective over the axis
    world. With two kinds of groups its callers would wait for ever: with groups of gloo, whose
    members do not call it, and with groups that the members create alone. For these the binding is
    hidden during the call; a group of NCCL then connects through the store, at its first use.
    """
    world = dist.group.WORLD
    assert world is not None, "groups need a process group of all ranks"
    device = world.bound_device_id
    if is_local or backend == "gloo":
        world.bound_device_id = None
    try:
        return dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=is_local,
            group_desc=name,
        )
    finally:
        world.bound_device_id = device


# Threads of process groups at the end of the interpreter.
#
# Such a thread drops its reference to an operation after it has woken the waiting rank. If that is
# the last reference, the thread frees the operation's tensors and the context of its backward,
# which needs the GIL. Before Python 3.14 an interpreter that ends unwinds each thread that waits
# for the GIL, and the C++ runtime then aborts the process.

#: Prefixes of the names of these threads in torch.
_GROUP_THREADS = ("pt_gloo", "pt_nccl")
#: Seconds between two readings of their states, and the longest wait.
_POLL_SECONDS, _EXIT_SECONDS = 0.002, 5.0


@atexit.register
def _wait_for_group_threads() -> None:
    """Release the GIL until no thread of a process group waits for it: until two readings show all
    of them asleep, with equal counts of context switches. A thread that waits for the GIL wakes
    up, which changes its counts."""
    before, threads = None, thread_states(_GROUP_THREADS)
    if threads is None:  # not Linux
        time.sleep(0.1)
        return
    deadline = time.monotonic() + _EXIT_SECONDS
    while threads and time.monotonic() < deadline:
        if threads == before and all(state[:1] == "S" for state, *_ in threads.values()):
            return
        time.sleep(_POLL_SECONDS)
        before, threads = threads, thread_states(_GROUP_THREADS)


def device_of(name: torch.device | str | int) -> torch.device:
    """``torch.device(name)``. Raises UserError for a name that torch does not know."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device cannot be {name!r}: cpu, or cuda:0 and its siblings") from error


def _process_group(group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"a DeviceMesh of one dimension is needed, this one has {group.ndim}: "
                f"choose one of {', '.join(map(str, names))}"
            )
        return group.get_group()
    # `new_group` returns this number instead of a group on ranks outside of it.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the group")
    check_kind("group", group, ProcessGroup, "torch.distributed.new_group(ranks), or a DeviceMesh")
    return group


def _timeout(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of `group`. New groups receive it explicitly: torch would use its default."""
    return group._get_backend(device).options._timeout


def local_part(tensor: Any) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a DTensor, and the index of its first element in the whole tensor."""
    # Imported late: a program that holds a DTensor has loaded this module, others need not.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert tuple(size) == tuple(local.shape), f"{size} is not {local.shape}"
    return local, tuple(offset)
