"""A model without references is freed, with its weights and process groups."""

import gc
from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.data.reducer import GradientReducer
from tests.parity import training
from tests.parity.asynchronous import stream_on_rank
from tests.parity.models import MODEL, TRAIN

SHAPE = training.Shape(seq_len=6, global_batch=8)
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "recompute": {"recompute": "full"},
    "sharded experts": {"dp": 2, "ep": 2, "data": "zero3"},
    "tensors": {"tp": 2, "ep": 2, "data": "zero1"},
    "split backward": {"pp": 2, "schedule": "zb_h1", "microbatches": 2},
    "streams": {"pp": 2, "schedule": "pipedream", "microbatches": 2},
}


def reducers() -> int:
    """Number of reducers in this process."""
    gc.collect()
    return sum(type(one) is GradientReducer for one in gc.get_objects())


def left_behind(mesh: Mesh, keys: dict[str, Any]) -> int:
    """Number of reducers more than before, after a step of a model that is gone."""
    before = reducers()
    if keys.get("schedule") == "pipedream":
        stream_on_rank(mesh, MODEL, keys, TRAIN | {"clip": 0.0}, SHAPE)
    else:
        plan = Plan(**keys)
        parallel = training.build(mesh, ModelConfig(**MODEL), plan, SHAPE, "float64", seed=1)
        training.gradients(parallel, plan, SHAPE)
        del parallel
    return reducers() - before


@pytest.mark.representative("sharded experts", "streams")
@pytest.mark.parametrize("keys", PLANS.values(), ids=PLANS)
def test_a_model_is_freed(keys: dict[str, Any]) -> None:
    config, plan = ModelConfig(**MODEL), Plan(**keys)
    counts = training.on_ranks_of(config, plan, left_behind, keys)
    assert counts == [0] * plan.world_size
