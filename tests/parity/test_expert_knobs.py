"""Every knob of experts and MLPs that published models have, under plans that cut what it adds."""

from typing import Any

import pytest

from tests.parity.test_parity import MODEL, TRAIN
from tests.parity.training import Shape, assert_equals_one_device, rows

OSS: dict[str, Any] = {"swiglu_limit": 0.3, "swiglu_alpha": 1.702, "swiglu_offset": 1.0}
MODELS: dict[str, dict[str, Any]] = {
    # Three ranks cut the width of experts evenly, their output channels unevenly.
    "bias": MODEL
    | {"expert_bias": True, "expert_intermediate_size": 12, "router_logit_bias": True},
    "oss": MODEL | OSS | {"expert_bias": True, "router_when": "after", "num_shared_experts": 0},
    "gate": MODEL | OSS | {"shared_gate": True, "shared_intermediate_size": 24},
    "granite": MODEL
    | {
        "router_when": "after",
        "tied_embeddings": True,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "router_scale": 2.0,
        "router_scale_on": "output",
    },
    "pattern": MODEL | {"num_layers": 4, "moe_layers": (0, 2), "shared_gate": True},
}
CASES = rows(
    """
    *bias | tp=2 dp=2 ep=2 etp=2 | padded
    bias | dp=3 etp=3 dispatcher=all_gather | padded
    bias | tp=2 ep=2 dispatch_chunks=2 | padded
    bias | tp=2 dp=2 ep=2 etp=2 combine=exact | padded
    *bias | dp=2 ep=2 spare_slots=2 | padded
    bias | dp=4 ep=2 etp=2 spare_slots=2 recompute=full | padded
    bias | pp=2 etp=2 dp=2 schedule=zb_h1 microbatches=3 | padded
    bias | dp=2 etp=2 data=zero3 | padded
    oss | tp=2 dp=2 ep=4 recompute=selective | padded
    oss | tp=2 ep=2 dispatcher=hierarchical | padded
    gate | tp=2 ep=2 | padded
    *gate | tp=2 dp=2 ep=2 recompute=selective | padded
    gate | tp=2 ep=2 recompute=full attention_exit=all_to_all | padded
    gate | pp=2 cp=2 ep=2 microbatches=2 | padded
    granite | tp=2 pp=2 ep=2 microbatches=2 | padded
    pattern | pp=4 microbatches=4 | padded
    *pattern | pp=2 dp=2 ep=2 schedule=dualpipe_v microbatches=4 | padded
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_a_knob_under_a_plan(model: str, plan: dict[str, Any], shape: Shape) -> None:
    count = plan.get("microbatches", 1)
    expected = assert_equals_one_device(MODELS[model], plan, TRAIN, shape, count)
    for leaf, weight in expected.weights.items():
        if leaf.endswith("_bias"):
            assert bool((weight != 0).any()), f"{leaf} never moved"
