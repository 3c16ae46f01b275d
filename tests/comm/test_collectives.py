"""Every autograd pair against the same mathematics in one process, in float64, and its ledger."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moemesh.comm import collectives, transfers
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.trace import wire
from moemesh.trace.ledger import Ledger
from tests.ranks import mesh_on_ranks

WORLD = 3
UNEVEN = [(2, 2, 2), (4, 0, 1), (0, 5, 0), (0, 0, 0)]
SPLITS = [[[1, 1, 1]] * 3, [[0, 2, 1], [3, 0, 0], [1, 1, 4]], [[0, 0, 0], [0, 0, 2], [0, 0, 0]]]


def cut(sizes: tuple[int, ...] | list[int], x: Tensor) -> list[Tensor]:
    return list(x.split(list(sizes)))


def random(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def one_rank(mesh: Mesh, name: str, inputs: list[Tensor], weights: list[Tensor], options: dict):
    """Forward, then backward of ``(weight * output).sum()``; what came out and what was entered."""
    axis = mesh["dp"]
    x = inputs[mesh.rank].clone().requires_grad_()
    chosen = {key: value[mesh.rank] for key, value in options.get("per_rank", {}).items()}
    output = getattr(collectives, name)(x, axis, **chosen, **options.get("same", {}), caller="t")
    assert output.requires_grad
    (weights[mesh.rank] * output).sum().backward()
    return output.detach(), x.grad, axis.ledger


def check(name: str, inputs: list[Tensor], expected, options: dict) -> list[Ledger]:
    """Run `name` on ranks, and `expected(inputs) -> outputs` under one process's autograd."""
    own = [x.clone().requires_grad_() for x in inputs]
    outputs = expected(own)
    weights = [random(50 + rank, *output.shape) for rank, output in enumerate(outputs)]
    if options.get("same_weights"):  # consumers that are the same on every rank
        weights = [weights[0]] * len(weights)
        (weights[0] * outputs[0]).sum().backward()
    else:
        torch.stack([(w * y).sum() for w, y in zip(weights, outputs, strict=True)]).sum().backward()
    outcomes = mesh_on_ranks(Layout(dp=len(inputs)), one_rank, name, inputs, weights, options)
    for rank, (output, gradient, _) in enumerate(outcomes):
        torch.testing.assert_close(output, outputs[rank].detach(), rtol=1e-13, atol=1e-13)
        expected_gradient = own[rank].grad
        if expected_gradient is None:
            expected_gradient = torch.zeros_like(own[rank])
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-13, atol=1e-13)
    return [ledger for _, _, ledger in outcomes]


def entered(ledger: Ledger, op: str, phase: str) -> wire.WireBytes:
    total = ledger.total(op=op, phase=phase, axis="dp", caller="t")
    assert total.count == 1
    return wire.WireBytes(total.payload_bytes, total.wire_bytes, total.received_bytes)


@pytest.mark.representative("all_gather-sizes1", "reduce_scatter-sizes2")
@pytest.mark.parametrize("sizes", UNEVEN)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_a_gather_and_a_scatter_are_each_others_backward(name, sizes):
    rows = sizes if name == "all_gather" else [sum(sizes)] * WORLD
    inputs = [random(rank, own, 2, 3) for rank, own in enumerate(rows)]

    def expected(xs):
        return [torch.cat(xs)] * WORLD if name == "all_gather" else cut(sizes, sum(xs))

    ledgers = check(name, inputs, expected, {"same": {"sizes": sizes}})
    blocks = [own * 6 * 8 for own in sizes]
    back = "reduce_scatter" if name == "all_gather" else "all_gather"
    for rank, ledger in enumerate(ledgers):
        assert entered(ledger, name, "forward") == getattr(wire, name)(blocks, rank)
        assert entered(ledger, back, "backward") == getattr(wire, back)(blocks, rank)
        assert len(ledger) == 2


def test_without_sizes_ranks_are_equal():
    inputs = [random(rank, 2, 3) for rank in range(WORLD)]
    check("all_gather", inputs, lambda xs: [torch.cat(xs)] * WORLD, {})
    inputs = [random(rank, 6) for rank in range(WORLD)]
    check("reduce_scatter", inputs, lambda xs: cut([2, 2, 2], sum(xs)), {})


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_all_reduce_whose_consumers_are_the_same(num_rows):
    inputs = [random(rank, num_rows, 2) for rank in range(WORLD)]
    ledgers = check("all_reduce", inputs, lambda xs: [sum(xs)] * WORLD, {"same_weights": True})
    for rank, ledger in enumerate(ledgers):
        formula = wire.all_reduce(num_rows * 2, 8, WORLD, rank)
        assert entered(ledger, "all_reduce", "forward") == formula
        assert len(ledger) == 1


@pytest.mark.parametrize("sizes", UNEVEN)
def test_take_shard_gathers_the_gradient(sizes):
    x = random(0, sum(sizes), 2)
    one = x.clone().requires_grad_()
    weights = [random(50 + rank, rows, 2) for rank, rows in enumerate(sizes)]
    (torch.cat(weights) * one).sum().backward()
    options = {"same": {"sizes": sizes}}
    outcomes = mesh_on_ranks(
        Layout(dp=WORLD), one_rank, "take_shard", [x] * WORLD, weights, options
    )
    blocks = [rows * 2 * 8 for rows in sizes]
    for rank, (output, gradient, ledger) in enumerate(outcomes):
        assert torch.equal(output, cut(sizes, x)[rank])
        assert torch.equal(gradient, one.grad)
        assert entered(ledger, "all_gather", "backward") == wire.all_gather(blocks, rank)
        assert len(ledger) == 1


def transposed(splits):
    return [list(column) for column in zip(*splits, strict=True)]


def all_to_all_in_one_process(splits):
    def run(xs):
        parts = [cut(split, x) for split, x in zip(splits, xs, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]

    return run


@pytest.mark.parametrize("splits", SPLITS)
def test_all_to_all(splits):
    inputs = [random(rank, sum(split), 3) for rank, split in enumerate(splits)]
    outputs = transposed(splits)
    ledgers = check(
        "all_to_all",
        inputs,
        all_to_all_in_one_process(splits),
        {"per_rank": {"input_splits": splits, "output_splits": outputs}},
    )
    for rank, ledger in enumerate(ledgers):
        there = [rows * 24 for rows in splits[rank]]
        back = [rows * 24 for rows in outputs[rank]]
        assert entered(ledger, "all_to_all", "forward") == wire.all_to_all(there, back, rank)
        assert entered(ledger, "all_to_all", "backward") == wire.all_to_all(back, there, rank)


def test_all_to_all_without_splits():
    inputs = [random(rank, 6) for rank in range(WORLD)]
    check("all_to_all", inputs, all_to_all_in_one_process([[2, 2, 2]] * WORLD), {})


def two_phase(mesh: Mesh, splits: list[list[int]]):
    axis = mesh["dp"]
    x = torch.full((sum(splits[mesh.rank]), 2), float(mesh.rank), requires_grad=True)
    own = splits[mesh.rank]
    output_splits = collectives.exchange_counts(torch.tensor(own), axis, caller="t.counts").tolist()
    rows = collectives.all_to_all(x, axis, own, output_splits, caller="t")
    (rows * (mesh.rank + 1)).sum().backward()
    return rows.detach(), output_splits, x.grad, axis.ledger.entries()


@pytest.mark.parametrize("splits", SPLITS)
def test_two_phases_tell_the_receiver_what_comes(splits):
    outcomes = mesh_on_ranks(Layout(dp=WORLD), two_phase, splits)
    for rank, (rows, output_splits, gradient, entries) in enumerate(outcomes):
        assert output_splits == transposed(splits)[rank]
        assert rows[:, 0].tolist() == [
            float(source) for source in range(WORLD) for _ in range(splits[source][rank])
        ]
        assert gradient[:, 0].tolist() == [
            float(to + 1) for to in range(WORLD) for _ in range(splits[rank][to])
        ]
        counts = next(entry for entry in entries if entry.caller == "t.counts")
        assert (counts.payload_bytes, counts.wire_bytes, counts.received_bytes) == (24, 16, 16)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def every_dtype(mesh: Mesh) -> None:
    axis, rank = mesh["dp"], mesh.rank
    sizes = [3, 0, 2]
    for dtype in DTYPES:
        base = torch.arange(10).reshape(2, 5)
        partial = (base + rank).to(dtype).t()  # [5, 2], not contiguous
        assert not partial.is_contiguous()
        total = (3 * base + 3).to(dtype).t()
        mine = list(total.split(sizes))[rank]
        scattered = collectives.reduce_scatter(partial, axis, sizes, caller="t")
        assert scattered.dtype == dtype and torch.equal(scattered, mine)
        assert torch.equal(collectives.all_gather(mine, axis, sizes, caller="t"), total)
        assert torch.equal(collectives.all_reduce(partial, axis, caller="t"), total)
        assert torch.equal(partial, (base + rank).to(dtype).t()), "the input must stay"
        dense = partial.contiguous()
        collectives.all_reduce(dense, axis, caller="t")
        transfers.broadcast(dense, axis, 1, phase="x", caller="t")
        assert torch.equal(dense, partial), "the input must stay"
        first = base.to(dtype).t()
        assert torch.equal(transfers.broadcast(partial, axis, 0, phase="x", caller="t"), first)
        turned = collectives.all_to_all(partial[:3], axis, caller="t")
        assert torch.equal(turned[:, 0], torch.tensor([rank, rank + 1, rank + 2]).to(dtype))
        collectives.all_reduce_(partial, axis, op="max", caller="t", phase="metrics")
        assert torch.equal(partial, (base + 2).to(dtype).t())
    eighth = torch.full((3, 2), rank + 1.0).to(torch.float8_e4m3fn)
    gathered = collectives.all_gather(eighth, axis, caller="t").float()
    assert gathered[:, 0].tolist() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    assert collectives.all_to_all(eighth, axis, caller="t").float()[:, 1].tolist() == [1, 2, 3]


def test_every_dtype_and_inputs_that_are_not_contiguous():
    mesh_on_ranks(Layout(dp=WORLD), every_dtype)


def bf16_sum(mesh: Mesh) -> list[float]:
    # 256 + 1 + 1 in bf16 is 256 if every step is rounded, 258 if the sum is rounded once.
    x = torch.full((3,), 256.0 if mesh.rank == 0 else 1.0, dtype=torch.bfloat16)
    return collectives.reduce_scatter(x, mesh["dp"], caller="t").tolist()


def test_low_precision_is_summed_in_float32():
    assert mesh_on_ranks(Layout(dp=3), bf16_sum) == [[258.0]] * 3


def control(mesh: Mesh):
    axis = mesh["dp"]
    collectives.barrier(axis)
    values = collectives.gather_json({"rank": mesh.rank, "text": "ä" * mesh.rank, "x": 0.1}, axis)
    work = collectives.all_reduce_(
        flag := torch.tensor([mesh.rank]), axis, op="max", caller="t", phase="x", async_op=True
    )
    assert work is not None
    work.wait()
    return values, flag.item(), len(axis.ledger)


def test_control_messages_are_json_and_not_entered():
    everyone = [{"rank": rank, "text": "ä" * rank, "x": 0.1} for rank in range(3)]
    assert mesh_on_ranks(Layout(dp=3), control) == [(everyone, 2, 1)] * 3


def test_a_world_of_one_is_the_identity_and_enters_nothing():
    mesh = Mesh.single("cpu")
    x = torch.randn(4, 2, requires_grad=True)
    for axis in (mesh["dp"], mesh["world"]):
        for name in ("all_gather", "reduce_scatter", "all_reduce", "take_shard"):
            assert getattr(collectives, name)(x, axis, caller="t") is x
        assert collectives.all_to_all(x, axis, caller="t") is x
        assert transfers.broadcast(x, axis, 0, phase="x", caller="t") is x
        assert collectives.all_reduce_(x, axis, caller="t", phase="x") is None
        assert collectives.gather_json({"a": 1}, axis) == [{"a": 1}]
        collectives.barrier(axis)
    assert len(mesh.ledger) == 0


#: Collective, sizes for 5 rows on each of two ranks, and the message.
BAD_SIZES: list[tuple[str, dict[str, list[int]], str]] = [
    ("reduce_scatter", {}, "5 rows do not divide evenly over dp"),
    ("reduce_scatter", {"sizes": [1, 1]}, "add up to 2"),
    ("all_gather", {"sizes": [1, 1]}, "rows, but sizes has"),
    ("take_shard", {"sizes": [1, 1]}, "do not cut 5 rows"),
    ("all_to_all", {"input_splits": [1, 4]}, "give both"),
    ("all_to_all", {"input_splits": [1], "output_splits": [1]}, "1 sizes"),
]


def refuse_sizes(mesh: Mesh) -> None:
    for name, arguments, message in BAD_SIZES:
        with pytest.raises(ValueError, match=message):
            getattr(collectives, name)(torch.zeros(5, 2), mesh["dp"], **arguments, caller="here")


def test_sizes_that_cannot_be_are_named() -> None:
    mesh_on_ranks(Layout(dp=2), refuse_sizes)
