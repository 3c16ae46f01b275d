"""Axes, shared groups, DeviceMesh views, and what a mesh refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from moemesh.comm.mesh import Mesh
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis_has_its_group_and_equal_groups_are_one(layout):
    mesh_on_ranks(layout, look)


def views(mesh: Mesh) -> None:
    for view, name in ((mesh.dense, "dense"), (mesh.expert, "expert")):
        degrees = mesh.layout.dimensions(name)
        assert view.mesh_dim_names == tuple(degrees)
        assert tuple(view.shape) == tuple(degrees.values())
        assert list(view.get_coordinate()) == [mesh.coordinates[axis] for axis in degrees]
        for axis in degrees:
            if mesh[axis].size > 1:
                assert view.get_group(axis) is mesh[axis].group
    flat = torch.arange(8.0)
    shards = [Replicate(), Replicate(), Replicate(), Shard(0)]
    tp = mesh["tp"]
    sharded = DTensor.from_local(flat.chunk(tp.size)[tp.index], mesh.dense, shards)
    assert torch.equal(sharded.full_tensor(), flat)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout()])
def test_device_mesh_views_use_the_same_groups(layout):
    mesh_on_ranks(layout, views)


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
