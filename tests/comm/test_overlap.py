"""An all-to-all in two halves equals the blocking one: forward, backward and ledger."""

from typing import Any

import torch
from torch.testing import assert_close

from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.comm.overlap import overlapped_all_to_all
from moemesh.config.layout import Layout
from moemesh.parallel.expert.site import FP8_CODEC
from tests.ranks import mesh_on_ranks

SPLITS = [[1, 0, 3], [2, 2, 0], [0, 4, 1]]


def exchanges_on_rank(mesh: Mesh, how: str) -> dict[str, Any]:
    """Three exchanges started together, each weighed differently, waited for in order."""
    axis = mesh["dp"]
    inputs, outputs = SPLITS[axis.index], [row[axis.index] for row in SPLITS]
    generator = torch.Generator().manual_seed(axis.index)
    xs = [
        torch.randn(sum(inputs), 3, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(3)
    ]
    if how == "blocking":
        ys = [collectives.all_to_all(x, axis, inputs, outputs, caller="test") for x in xs]
    else:
        codec = FP8_CODEC if how == "coded" else None
        pending = [
            overlapped_all_to_all(x, axis, inputs, outputs, caller="test", codec=codec) for x in xs
        ]
        ys = [one.wait() for one in pending]
    sum((y * (i + 1 + axis.index)).square().sum() for i, y in enumerate(ys)).backward()
    return {"ys": ys, "grads": [x.grad for x in xs], "ledger": mesh.ledger.rows(), "xs": xs}


def test_two_halves_are_the_blocking_exchange() -> None:
    halves = mesh_on_ranks(Layout(dp=3), exchanges_on_rank, "halves")
    blocking = mesh_on_ranks(Layout(dp=3), exchanges_on_rank, "blocking")
    for ours, theirs in zip(halves, blocking, strict=True):
        for key in ("ys", "grads"):
            assert all(map(torch.equal, ours[key], theirs[key]))
        assert ours["ledger"] == theirs["ledger"]


def test_a_codec_shrinks_the_forward_and_leaves_gradients_alone() -> None:
    coded = mesh_on_ranks(Layout(dp=3), exchanges_on_rank, "coded")
    plain = mesh_on_ranks(Layout(dp=3), exchanges_on_rank, "halves")
    for rank, (ours, theirs) in enumerate(zip(coded, plain, strict=True)):
        for got, exact in zip(ours["ys"], theirs["ys"], strict=True):
            assert_close(got, exact, rtol=1 / 16, atol=1e-2)
        # Straight through: the gradient of the coded run is the plain exchange of 2 y s^2.
        sent = {r["phase"]: r["wire_bytes"] for r in ours["ledger"]}
        rows = sum(SPLITS[rank]) - SPLITS[rank][rank]
        assert sent["forward"] == 3 * rows * (3 + 4)
        received = sum(row[rank] for row in SPLITS) - SPLITS[rank][rank]
        assert sent["backward"] == 3 * received * 3 * 8


def test_a_world_of_one_is_the_identity() -> None:
    x = torch.randn(4, 2)
    assert overlapped_all_to_all(x, Mesh.single("cpu")["ep"], caller="test").wait() is x
