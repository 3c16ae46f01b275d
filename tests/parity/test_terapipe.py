"""Slices of sequences through a pipeline give the gradients of whole sequences in one process.

Float64, a mixture-of-experts model with both auxiliary losses, in all scopes: the slices of a
sequence share its keys and values, its counts and its scope. Only the order of additions differs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_parity import MODEL, MODELS, TRAIN
from tests.parity.test_pipelines import worst_difference
from tests.parity.training import Shape, alone, assert_equals_one_device, rows, train

LOSSES = {"z_loss_coefficient": 1e-2, "router_jitter": 0.2, "num_layers": 4}
DEEP: dict[str, dict[str, Any]] = {
    scope: MODEL | LOSSES | {"aux_loss_scope": scope}
    for scope in ("sequence", "microbatch", "global")
} | {
    # Fewer key/value heads than heads, norms of queries and keys, first and last stage share a
    # weight; biases that move by the loads; no auxiliary loss, no experts.
    "tied": MODELS["grouped"] | LOSSES,
    "sigmoid": MODELS["sigmoid"] | LOSSES,
    "dense": MODELS["dense"] | {"num_layers": 4},
}
ONE_STEP = TRAIN | {"steps": 1}
#: 11 tokens cannot be cut evenly, 5 sequences neither.
CASES = rows(
    """
    sequence | pp=2 | 5x11
    sequence | pp=4 slices=3 | 5x11 padded
    sequence | pp=2 slices=11 recompute=full | 5x11
    *microbatch | pp=2 slices=3 microbatches=2 recompute=selective | 5x11 padded
    *global | pp=4 microbatches=3 | 5x11
    tied | pp=2 slices=4 microbatches=3 | 5x11 padded
    tied | pp=2 slices=3 | 5x11 packed
    dense | pp=2 slices=5 recompute=full | 5x11
    """
)
#: With the other axes, over several steps, clipping and all.
MIXED = rows(
    """
    *sequence | pp=2 tp=2 ep=2 recompute=full dispatch_chunks=2 | 5x11 padded
    global | pp=2 dp=2 ep=2 slices=3 | 5x11
    sigmoid | pp=2 tp=2 dp=2 ep=4 dispatcher=all_gather | 5x11 padded
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_slices_have_the_gradients_of_whole_sequences(
    model: str, plan: dict[str, Any], shape: Shape
) -> None:
    got = train(DEEP[model], plan | {"schedule": "terapipe"}, ONE_STEP, shape)
    expected = alone(DEEP[model], ONE_STEP, shape, plan.get("microbatches", 1))
    assert worst_difference(got, expected) <= 1e-12
    assert got.loads == expected.loads
    assert got.losses + got.aux == pytest.approx(expected.losses + expected.aux, rel=1e-14)


@pytest.mark.parametrize(("model", "plan", "shape"), MIXED)
def test_slices_join_the_other_axes(model: str, plan: dict[str, Any], shape: Shape) -> None:
    plan, count = plan | {"schedule": "terapipe"}, plan.get("microbatches", 1)
    assert_equals_one_device(DEEP[model], plan, TRAIN, shape, count)
