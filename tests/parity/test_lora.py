"""Adapters in any plan equal those of one device; see :mod:`tests.parity.test_parity`."""

from typing import Any

import pytest
import torch

from moemesh.config.lora import LoraConfig, is_adapter
from moemesh.config.plan import Plan
from moemesh.model.transformer import Transformer
from moemesh.sharding.parameters import tensors
from tests.parity.models import KINDS, MODELS, TRAIN
from tests.parity.training import Shape, assert_equals_one_device, model_of, rows, train

LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0}
LATENT = MODELS["moe"] | {
    "attention": "mla",
    "num_kv_heads": 8,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rotary_head_dim": 2,
    "v_head_dim": 6,
}
ADAPTED: dict[str, dict[str, Any]] = {
    "moe": MODELS["moe"] | {"lora": LORA},
    "grouped": MODELS["grouped"] | {"lora": LORA | {"rslora": True}},
    "latent": LATENT | {"lora": LORA},
    "direct_queries": LATENT | {"q_lora_rank": 0, "lora": LORA},
    "biased": MODELS["moe"]
    | {"expert_bias": True, "qkv_bias": True, "output_bias": True, "swiglu_limit": 7.0}
    | {"swiglu_alpha": 1.702, "swiglu_offset": 1.0, "lora": LORA},
    "some": MODELS["moe"] | {"lora": LORA | {"targets": ("k_proj", "up_proj", "o_proj")}},
    "dense": MODELS["dense"] | {"lora": LORA},
    "deep": MODELS["moe"] | {"num_layers": 4, "lora": LORA},
}

CASES = rows(
    """
    moe | tp=2 ep=2 attention_exit=reduce_scatter
    moe | tp=2 ep=2 attention_exit=all_reduce dispatcher=all_gather
    moe | tp=2 etp=2 attention_exit=all_to_all
    *moe | tp=2 etp=2
    moe | tp=2 dp=2 ep=2 etp=2
    moe | dp=4 etp=2 dispatcher=all_gather data=zero1
    moe | dp=4 ep=2 data=zero2 microbatches=2
    moe | dp=4 etp=2 data=zero3 microbatches=2
    moe | tp=2 dp=2 ep=2 combine=exact
    moe | tp=2 dp=2 etp=2 combine=exact
    moe | pp=2 schedule=zb_h1 tp=2 ep=2 microbatches=3
    deep | pp=2 schedule=zb_v/dualpipe_v dp=2 ep=2 microbatches=4
    moe | tp=2 cp=2 ep=4 recompute=full
    moe | tp=2 dp=2 ep=4 recompute=selective dispatch_chunks=3
    moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 | 1x5
    grouped | tp=4 ep=2 | padded
    latent | tp=2 cp=2 ep=2
    latent | tp=4 etp=2 attention_exit=all_to_all | 1x5
    direct_queries | tp=2 dp=2
    biased | tp=2 ep=2
    biased | dp=2 etp=2 combine=exact
    some | tp=2 dp=2 etp=2 data=zero1
    dense | tp=2 pp=2 microbatches=2
    moe | pp=2 tp=2 cp=2 ep=2 etp=2 microbatches=2
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_adapters_in_any_plan(model: str, plan: dict[str, Any], shape: Shape) -> None:
    assert_equals_one_device(ADAPTED[model], plan, TRAIN, shape)


ALONE = TRAIN | {"train_only": LoraConfig(**LORA).trains}
ALONE_CASES = rows(
    """
    moe | tp=2 dp=2 ep=2 etp=2 microbatches=2 | padded
    *deep | pp=2 schedule=zb_h1 dp=2 ep=2 microbatches=4
    deep | pp=2 schedule=dualpipe_v dp=2 microbatches=4
    moe | dp=4 ep=2 data=zero3 microbatches=2
    latent | tp=2 cp=2 ep=2 data=zero2
    moe | dp=4 etp=2 combine=exact recompute=full
    grouped | pp=2 tp=2 microbatches=2 data=zero1
    some | tp=2 dp=2 etp=2 recompute=selective | 1x5
    moe | tp=2 pp=2 cp=2 ep=4 microbatches=3 data=zero1
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "shape"), ALONE_CASES)
def test_adapters_alone_in_any_plan(model: str, plan: dict[str, Any], shape: Shape) -> None:
    expected = assert_equals_one_device(ADAPTED[model], plan, ALONE, shape)
    assert expected.gradients and all(map(is_adapter, expected.gradients))


def test_frozen_weights_give_adapters_the_same_gradients():
    """The first step, before any weight has moved."""
    everything = train(ADAPTED["moe"], {}, TRAIN | {"steps": 1, "clip": 0.0})
    adapters = train(ADAPTED["moe"], {}, ALONE | {"steps": 1, "clip": 0.0})
    for name, gradient in adapters.gradients.items():
        torch.testing.assert_close(gradient, everything.gradients[name], rtol=1e-12, atol=1e-14)


PACKED = {f"packed_{name}": ADAPTED[name] | {"lora": LORA | {"base": "nf4"}} for name in ADAPTED}
LISTED = ADAPTED | PACKED | KINDS


@pytest.mark.parametrize("keys", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize("attention_exit", ["reduce_scatter", "all_to_all"])
def test_the_planner_lists_the_same_parameters(keys: dict[str, Any], attention_exit: Any) -> None:
    config, plan = model_of(keys), Plan(tp=2, attention_exit=attention_exit)
    known = list(tensors(config, plan))
    built = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    assert [(one.name, one.shape) for one in known] == list(built.items())
    assert any("lora" in one.name for one in known) == ("lora" in keys)
