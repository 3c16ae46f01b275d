"""Every synchronous schedule gives the gradients of one process, bitwise where the order is kept.

Float64, one thread, a mixture-of-experts model with an auxiliary loss. Where a schedule adds the
microbatches of a weight in the order of one process, not one bit may differ.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.ops.weight_gradient import WeightGradientQueue
from moemesh.schedule.text import save
from tests.parity.models import MODEL, MODELS, TRAIN
from tests.parity.training import (
    Shape,
    Trained,
    assert_same,
    build,
    gradients,
    model_of,
    on_ranks_of,
    rows,
    train,
)
from tests.schedule.orders import random_schedule

DEEP: dict[str, dict[str, Any]] = {
    "moe": MODEL | {"num_layers": 8},
    # First and last stage share a weight; norms of queries and keys; fewer key/value heads.
    "tied": MODELS["grouped"] | {"num_layers": 8},
    # The routers' biases move by the loads of all microbatches, and must be known to all holders.
    "sigmoid": MODELS["sigmoid"] | {"num_layers": 8},
}
#: Microbatches of unequal size: 11 sequences in 4 or 8 or 10 parts.
SHAPE = Shape(global_batch=11)
ONE_STEP = TRAIN | {"steps": 1}

BITWISE = rows(
    """
    moe | pp=2 schedule=1f1b microbatches=4 | 11x7
    moe | pp=4 schedule=1f1b microbatches=8 | 11x7
    *moe | pp=2 schedule=interleaved_1f1b stages_per_rank=2 microbatches=4 | 11x7
    moe | pp=4 schedule=interleaved_1f1b stages_per_rank=2 microbatches=8 | 11x7
    moe | pp=2 schedule=zb_h1/zb_h2/dualpipe_v microbatches=4 | 11x7
    moe | pp=4 schedule=zb_h1/zb_h2/dualpipe_v microbatches=8 | 11x7
    *moe | pp=2 schedule=zb_v microbatches=4 | 11x7
    moe | pp=4 schedule=zb_v microbatches=8 | 11x7
    *moe | pp=2 schedule=1f1b microbatches=4 layers_per_stage=(7,1) | 11x7
    """
)
#: Another order of the same additions.
REORDERED = rows(
    """
    *moe | pp=2 schedule=chimera/dualpipe microbatches=4 | 11x7
    moe | pp=2 schedule=gpipe microbatches=4 | 11x7
    moe | pp=4 schedule=gpipe/chimera microbatches=8 | 11x7
    moe | pp=4 schedule=dualpipe microbatches=10 | 11x7
    """
)
#: With the other axes, over several steps, clipping and all.
MIXED = rows(
    """
    moe | pp=2 tp=2 ep=2 schedule=zb_v microbatches=4 | 11x7
    moe sigmoid | pp=2 dp=2 ep=2 schedule=dualpipe microbatches=4 | 11x7
    tied | pp=2 tp=2 ep=2 schedule=zb_h1 microbatches=3 | 11x7
    tied | pp=4 schedule=chimera microbatches=4 | 11x7
    tied | pp=2 dp=2 schedule=zb_v microbatches=3 | 11x7
    sigmoid | pp=4 tp=2 ep=2 schedule=dualpipe_v microbatches=8 | 11x7
    """
)


@cache
def one_process(model: str, microbatches: int, steps: int = 1) -> Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a product over two threads adds in another order
    try:
        keys = TRAIN | {"steps": steps}
        return train(DEEP[model], {"microbatches": microbatches}, keys, SHAPE)
    finally:
        torch.set_num_threads(threads)


def worst_difference(got: Trained, expected: Trained) -> float:
    """Largest difference of a gradient, relative to the largest element of its tensor."""
    assert got.gradients.keys() == expected.gradients.keys()
    return max(
        float((got.gradients[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in expected.gradients.items()
    )


@pytest.mark.parametrize(("model", "plan", "shape"), BITWISE)
def test_gradients_are_bitwise_those_of_one_process(
    model: str, plan: dict[str, Any], shape: Shape
) -> None:
    got = train(DEEP[model], plan, ONE_STEP, shape)
    expected = one_process("moe", plan["microbatches"])
    for name, tensor in expected.gradients.items():
        assert torch.equal(got.gradients[name], tensor), name
    assert (got.losses, got.norms, got.loads) == (expected.losses, expected.norms, expected.loads)


def deferred_on_rank(mesh: Mesh, keys: dict[str, Any]) -> set[bool]:
    """For each QKV weight of the rank whether a queue computed its gradient."""
    config, plan, deferred = model_of(DEEP["moe"]), Plan(**keys), list[Tensor]()
    parallel = build(mesh, config, plan, SHAPE, "float64")

    def append(queue: WeightGradientQueue, weight: Tensor, *rest: Any) -> None:
        deferred.append(weight)
        plain_append(queue, weight, *rest)

    plain_append = WeightGradientQueue.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradientQueue, "append", append)
        gradients(parallel, plan, SHAPE)
    weights = [layer.attention.qkv for layer in parallel.model.layers.values()]
    return {any(weight is one for one in deferred) for weight in weights}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_weight_gradients_are_deferred_where_a_schedule_has_an_operation_for_them(
    schedule: str,
) -> None:
    keys = {"pp": 2, "microbatches": 4, "schedule": schedule}
    for deferred in on_ranks_of(model_of(DEEP["moe"]), Plan(**keys), deferred_on_rank, keys):
        assert deferred == {schedule == "zb_h1"}


@pytest.mark.parametrize(("model", "plan", "shape"), REORDERED)
def test_reordered_sums_differ_by_rounding_only(
    model: str, plan: dict[str, Any], shape: Shape
) -> None:
    got = train(DEEP[model], plan, ONE_STEP, shape)
    assert worst_difference(got, one_process("moe", plan["microbatches"])) <= 1e-15
    assert got.loads == one_process("moe", plan["microbatches"]).loads


@pytest.mark.parametrize(("model", "plan", "shape"), MIXED)
def test_pipelines_join_the_other_axes(model: str, plan: dict[str, Any], shape: Shape) -> None:
    got = train(DEEP[model], plan, TRAIN, shape)
    assert_same(got, one_process(model, plan["microbatches"], 2))


#: Files: name -> (placement of each pipe, microbatches of each, slices), of orders that no
#: generator makes; and the schedules that are hand-written or searched.
RANDOM: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]] = {
    "linear": (((0, 1),), (4,), 1),
    "looped": (((0, 1, 0, 1),), (4,), 1),
    "v of three": (((0, 1, 1, 0, 0, 1),), (3,), 1),
    "anywhere": (((1, 0, 0, 0),), (3,), 1),
    "two pipes": (((0, 1, 1, 0), (1, 0, 0, 1)), (2, 2), 1),
    "slices": (((0, 1),), (3,), 2),
}
HAND_WRITTEN = """pipeline-schedule v1  name=mine ranks=2 stages=2 slices=1 microbatches=3
place 0: 1 0                            # the first stage on rank 1
rank 0: 1F0 1B0 1F2 1I2 1F1 1W2 1B1
rank 1: 0F0 0F2 0F1 0B0 0I2 0B1 0W2
"""


@pytest.mark.representative("two pipes")
@pytest.mark.parametrize("name", RANDOM)
def test_a_file_of_any_order_equals_one_process(tmp_path: Path, name: str) -> None:
    placement, counts, slices = RANDOM[name]
    schedule = random_schedule(placement, counts, seed=len(name), num_slices=slices)
    plan: dict[str, Any] = {
        "pp": 2,
        "microbatches": schedule.total_microbatches,
        "stages_per_rank": schedule.stages_per_rank,
        "schedule": str(tmp_path / "random.csv"),
        "slices": slices if slices > 1 else None,
    }
    save(schedule, Path(plan["schedule"]))
    got = train(DEEP["moe"], plan, ONE_STEP, SHAPE)
    expected = one_process("moe", plan["microbatches"])
    assert worst_difference(got, expected) <= 1e-14
    assert got.losses == pytest.approx(expected.losses, rel=1e-14)
    assert got.loads == expected.loads


@pytest.mark.slow
def test_a_hand_written_file_equals_one_process(tmp_path: Path) -> None:
    """The file runs on two pipelines, whose experts share ranks; microbatches are out of order."""
    path = tmp_path / "mine.txt"
    path.write_text(HAND_WRITTEN)
    plan = {"pp": 2, "dp": 2, "ep": 2, "microbatches": 3, "schedule": str(path)}
    assert_same(train(DEEP["moe"], plan, TRAIN | {"steps": 2}, SHAPE), one_process("moe", 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_searched_schedule_equals_one_process(stages: int) -> None:
    """The automatic scheduler keeps microbatches in order: not one bit differs."""
    plan = {"pp": 4, "microbatches": 8, "schedule": "search", "stages_per_rank": stages}
    got = train(DEEP["moe"], plan | {"schedule_memory_cap": 5.0}, ONE_STEP, SHAPE)
    assert worst_difference(got, one_process("moe", 8)) == 0


def test_the_reference_depends_on_every_microbatch() -> None:
    """Nothing above is vacuous: one microbatch less changes the gradients visibly."""
    expected = one_process("moe", 4)
    smaller = train(DEEP["moe"], {"microbatches": 4}, ONE_STEP, Shape(global_batch=8))
    assert worst_difference(smaller, expected) > 1e-3
    assert expected.aux[0] > 0
