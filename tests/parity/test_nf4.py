"""A base in NF4 in any plan equals one device, and one device equals a run on the dequantized
numbers; see :mod:`tests.parity.test_parity`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from moemesh.config.lora import LoraConfig, is_adapter
from moemesh.model import initialization
from moemesh.ops import expert_weights
from moemesh.ops.nf4 import dequantize, quantize
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import (
    WHOLE,
    Shape,
    assert_equals_one_device,
    assert_same,
    rows,
    train,
)

NF4: dict[str, Any] = {"rank": 3, "alpha": 6.0, "base": "nf4"}
WIDE = MODEL | {
    "hidden_size": 64,
    "num_kv_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "expert_intermediate_size": 128,
    "lora": NF4,
}
PACKED: dict[str, dict[str, Any]] = {
    "moe": WIDE,
    # Rows that end in a block of 32 or 16 numbers.
    "latent": WIDE
    | {"attention": "mla", "num_kv_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 8, "qk_rotary_head_dim": 4, "v_head_dim": 16},
    "some": WIDE | {"lora": NF4 | {"targets": ("k_proj", "o_proj")}},
    "biased": WIDE | {"expert_bias": True, "qkv_bias": True, "swiglu_limit": 7.0},
}
ALONE = TRAIN | {"train_only": LoraConfig(**NF4).trains}
CASES = rows(
    """
    moe | dp=2 ep=2
    moe | tp=2 ep=2 attention_exit=reduce_scatter/all_reduce/all_to_all
    moe | tp=2 dp=2 ep=2 etp=2
    *moe | dp=2 ep=2 data=zero3 microbatches=2
    moe | dp=4 ep=2 data=zero3 microbatches=2
    moe | dp=4 etp=2 data=zero3 | 1x5
    moe | dp=4 ep=4 data=zero1/zero2 dispatch_chunks=2
    moe | tp=2 dp=2 ep=2 combine=exact
    *moe | pp=2 schedule=zb_h1 microbatches=3
    moe | pp=2 schedule=zb_h1 tp=2 ep=2 microbatches=3
    moe | pp=2 tp=2 cp=2 ep=2 recompute=full microbatches=2
    moe | dp=4 ep=4 dispatcher=low_latency/hierarchical ranks_per_node=2 recompute=selective
    latent | tp=2 dp=2 ep=2
    some | tp=2 dp=2 etp=2 data=zero1
    some | dp=2 ep=2 combine=exact recompute=full
    biased | tp=2 dp=2 ep=2 | padded
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_a_base_in_nf4_in_any_plan(model: str, plan: dict[str, Any], shape: Shape) -> None:
    expected = assert_equals_one_device(PACKED[model], plan, ALONE, shape)
    assert expected.gradients and all(map(is_adapter, expected.gradients))
    before, after = expected.frozen
    assert any(one.dtype == torch.uint8 for one in before.values())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.representative("moe-exact", "latent-fast")
@pytest.mark.parametrize("combine", ["fast", "exact"])
@pytest.mark.parametrize("model", PACKED)
def test_the_numbers_are_those_of_the_dequantized_weights(
    model: str, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in blocks of one, forward and backward, and experts that have no rows."""
    monkeypatch.setattr(expert_weights, "NF4_NUMBERS_AT_ONCE", 1)
    plan, drawn = {"combine": combine}, initialization.normal_slice
    shape = Shape(global_batch=1, seq_len=3)
    got = train(PACKED[model], plan, ALONE, shape)
    packed = {name for name, one in got.frozen[0].items() if one.dtype == torch.uint8}
    deviation = WIDE["init_std"]

    def rounded(seed: int, name: str, *rest: Any) -> torch.Tensor:
        value = drawn(seed, name, *rest)
        if name not in packed:
            return value
        down = name.endswith((".output", ".down"))
        scale = deviation / (2 * WIDE["num_layers"]) ** 0.5 if down else deviation
        return dequantize(quantize(value * scale), torch.float64) / scale

    dense = PACKED[model] | {"lora": PACKED[model]["lora"] | {"base": "same"}}
    with mock.patch.object(initialization, "normal_slice", rounded):
        assert_same(got, train(dense, plan, ALONE, shape)._replace(weights=got.weights), 1e-9)


def test_the_backward_keeps_no_dequantized_weight() -> None:
    """Packed weights are all that autograd saves of them."""
    saved: list[torch.Tensor] = []
    hooks: Callable[..., Any] = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda one: saved.append(one) or one, lambda one: one):
        train(WIDE, {}, ALONE, WHOLE, predicts=False)
    stack = WIDE["num_experts"] * 2 * WIDE["expert_intermediate_size"] * WIDE["hidden_size"]
    assert any(one.dtype == torch.uint8 for one in saved)
    assert all(one.numel() < stack for one in saved if one.is_floating_point())
