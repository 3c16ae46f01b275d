"""Context parallelism in streams and in evaluation; `test_parity` has the training steps."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.train.step import evaluate
from tests.parity.asynchronous import stream
from tests.parity.models import DEEP, TRAIN
from tests.parity.training import Shape, build, microbatches, model_of, shape_of
from tests.ranks import mesh_on_ranks

CONTEXTS = ("ring", "all_gather", "all_to_all")
BOTH = shape_of("3x13 padded packed")


ASYNCHRONOUS: list[dict[str, Any]] = [
    {"schedule": "pipedream", "context": "ring"},
    {"schedule": "pipedream_2bw", "update_window": 2, "context": "all_gather", "ep": 2},
    # One microbatch at a time: the order does not depend on who is faster.
    {"schedule": "ampnet", "update_window": 2, "max_in_flight": 1, "context": "all_to_all"},
]


@pytest.mark.representative("pipedream_2bw")
@pytest.mark.parametrize("plan", ASYNCHRONOUS, ids=lambda plan: plan["schedule"])
def test_a_stream_is_spread_over_contexts(plan: dict[str, Any]) -> None:
    keys = plan | {"pp": 2, "microbatches": 4}
    one = stream(DEEP["deep"], keys | {"ep": 1}, TRAIN, BOTH)
    two = stream(DEEP["deep"], keys | {"cp": 2}, TRAIN, BOTH)
    assert two.losses == pytest.approx(one.losses, rel=1e-10)
    assert two.aux == pytest.approx(one.aux, rel=1e-10)
    for name, weight in one.weights.items():
        assert (two.weights[name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name


def losses_on_rank(mesh: Mesh, plan_keys: dict[str, Any], shape: Shape) -> float:
    config, plan = model_of(DEEP["deep"]), Plan(**plan_keys)
    parallel = build(mesh, config, plan, shape, "float64", seed=1)
    return evaluate(parallel, microbatches(config, plan, shape, 1, mesh))


@pytest.mark.representative("ring")
@pytest.mark.parametrize("context", CONTEXTS)
def test_evaluation_counts_every_token_once(context: str) -> None:
    one = losses_on_rank(Mesh.single("cpu"), {}, BOTH)
    plan = {"dp": 2, "cp": 2, "context": context}
    for loss in mesh_on_ranks(Plan(**plan).layout, losses_on_rank, plan, BOTH):
        assert loss == pytest.approx(one, rel=1e-12)
