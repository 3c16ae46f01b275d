"""Axes, shared groups, meshes over existing groups, and the layouts that a mesh refuses."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from moemesh.comm import collectives, mesh
from moemesh.comm.consensus import run_with_consensus
from moemesh.comm.mesh import Axis, Mesh, new_group
from moemesh.config.layout import AXES, Layout
from tests.ranks import RankFailed, mesh_on_ranks, run_on_ranks

LAYOUTS = [
    Layout(pp=2, dp=2, tp=2, ep=2),
    Layout(dp=2, cp=2, tp=2, ep=4, etp=2),
    Layout(tp=2, dp=2, ep=2, etp=2),
]


def look(mesh: Mesh) -> None:
    layout, rank = mesh.layout, mesh.rank
    assert mesh.world_size == layout.world_size == dist.get_world_size()
    assert mesh.coordinates == layout.coordinates(rank)
    for name in AXES:
        axis = mesh[name]
        assert axis.name == name and axis.ledger is mesh.ledger
        assert axis.ranks == layout.group_of(name, rank)
        assert axis.size == len(axis.ranks) and axis.ranks[axis.index] == rank
        if axis.size == 1:
            assert axis.group is None
            continue
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        same = [other for other in AXES if mesh[other].ranks == axis.ranks]
        assert all(mesh[other].group is axis.group for other in same)
        members = torch.tensor([rank])
        dist.all_reduce(members, group=axis.group)
        assert members.item() == sum(axis.ranks)
    assert mesh["world"].group is dist.group.WORLD
    assert mesh.control is mesh["world"]


@pytest.mark.representative("layout1")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis_has_its_group_and_equal_groups_are_one(layout):
    mesh_on_ranks(layout, look)


def from_groups(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own, other = halves[rank % 2], halves[1 - rank % 2]
    axis = Axis.from_group(own, "experts")
    assert (axis.name, axis.ranks) == ("experts", (rank % 2, rank % 2 + 2))
    assert (axis.index, axis.size, axis.group) == (rank // 2, 2, own)
    assert (axis.device, axis.backend) == (torch.device("cpu"), "gloo")
    gathered = collectives.all_gather(torch.tensor([rank]), axis, caller="t")
    assert gathered.tolist() == list(axis.ranks) and len(axis.ledger) == 1
    assert Axis.from_group(init_device_mesh("cpu", (4,)), ledger=axis.ledger).ranks == (0, 1, 2, 3)
    alone = Axis.from_group(dist.new_group([rank], use_local_synchronization=True))
    assert alone.size == 1 and alone.group is None
    # The two halves build their meshes independently of one another, in different layouts.
    layout = Layout(dp=2, ep=2) if rank % 2 else Layout(tp=2, ep=2, ranks_per_node=1)
    mesh = Mesh.from_group(own, layout)
    assert mesh["ep"].group is own and mesh["ep"].ranks == axis.ranks
    assert mesh.rank == rank // 2 and mesh.control is mesh["world"]
    assert [mesh[name].size for name in ("dp", "tp", "ep_rail")] == (
        [2, 1, 1] if rank % 2 else [1, 2, 2]
    )
    assert [
        o.problem for o in run_with_consensus(lambda: None, mesh, name="t", timeout_seconds=200)
    ] == [None, None]
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        Axis.from_group(other)
    with pytest.raises(ValueError, match="has 2: choose one of dp, ep"):
        Axis.from_group(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    with pytest.raises(ValueError, match="the layout needs 4 ranks, 2 are running"):
        Mesh.from_group(own, Layout(dp=4))
    with pytest.raises(ValueError, match="pp = 2"):
        Mesh.from_group(own, Layout(pp=2))


def test_axes_and_meshes_over_groups_of_the_users_own():
    run_on_ranks(4, from_groups)


def subgroups(mesh: Mesh) -> None:
    part = Mesh.from_group(mesh["dp"].group, Layout(dp=4, ep=2))
    pair = [0, 1] if part.rank < 2 else [2, 3]
    assert part["ep"].ranks == tuple(mesh["dp"].ranks[index] for index in pair)
    total = torch.tensor([mesh.rank])
    dist.all_reduce(total, group=part["edp"].group)
    assert total.item() == sum(part["edp"].ranks)


@pytest.mark.slow
def test_a_mesh_inside_one_axis_of_another():
    mesh_on_ranks(Layout(pp=2, dp=4), subgroups)


def timeouts(rank: int) -> None:
    mesh = Mesh.create(Layout(dp=2, tp=2), "cpu")
    cpu = torch.device("cpu")
    wanted = dist.group.WORLD._get_backend(cpu).options._timeout
    assert mesh["tp"].group._get_backend(cpu).options._timeout == wanted
    assert wanted.total_seconds() == 77 + 30


def test_every_group_has_the_timeout_of_the_world():
    run_on_ranks(4, timeouts, timeout=77)


def two_meshes(mesh: Mesh) -> None:
    other = Mesh.create(Layout(tp=4), "cpu")
    assert other["tp"].ranks == (0, 1, 2, 3) and mesh["tp"].size == 2
    assert other.ledger is not mesh.ledger
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["tp"].group)
    dist.all_reduce(total, group=other["tp"].group)
    assert total.item() == 8


def test_one_process_can_hold_two_meshes():
    mesh_on_ranks(Layout(dp=2, tp=2), two_meshes)


def too_small(rank: int) -> None:
    Mesh.create(Layout(dp=3), "cpu")


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(RankFailed, match="the layout needs 3 ranks, 2 are running"):
        run_on_ranks(2, too_small)


def test_a_single_rank_needs_no_process_group():
    mesh = Mesh.single("cpu")
    assert not dist.is_initialized()
    assert all(mesh[name].size == 1 and mesh[name].group is None for name in AXES)
    assert mesh.rank == 0 and mesh.world_size == 1 and set(mesh.coordinates.values()) == {0}


def beside_an_eager_world(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    waiting: list[torch.device] = []
    source = SimpleNamespace(supports_splitting=True, perform_nocolor_split=waiting.append)
    with pytest.MonkeyPatch.context() as patch:
        # Members would hand it to a real backend; who is none waits in it.
        patch.setattr(distributed_c10d, "_get_split_source", lambda *_: [None, None, source][rank])
        bound = world.bound_device_id = torch.device("cuda", 0)
        try:
            new_group([0, 1], name="host", backend="gloo")
            if rank < 2:
                new_group([0, 1], name="own", is_local=True)
            assert not waiting and world.bound_device_id == bound
            new_group([0, 1], name="split")
            assert len(waiting) == (rank == 2)
        finally:
            world.bound_device_id = None


def test_groups_of_gloo_and_of_members_alone_are_not_split_from_the_world() -> None:
    run_on_ranks(3, beside_an_eager_world)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_interpreter_ends_after_threads_of_groups_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread with the name of gloo's works for 0.3 s, which needs the GIL at its end."""
    monkeypatch.setattr(mesh, "_EXIT_SECONDS", 60.0)  # on a busy machine they are idle later
    asleep, is_over = threading.Event(), threading.Event()

    def run() -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        (task / "comm").write_text("pt_gloo_runloop")
        asleep.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the GIL
        results.append("freed")
        is_over.wait()

    results = list[str]()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    asleep.wait()
    started = time.monotonic()
    mesh._wait_for_group_threads()
    assert results == ["freed"]
    # A thread that sleeps, for example in an operation that never ends, is not waited for.
    mesh._wait_for_group_threads()
    assert time.monotonic() - started < mesh._EXIT_SECONDS
    is_over.set()
    thread.join()
