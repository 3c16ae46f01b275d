"""Shapes that are counted in modelling code equal those of formulas, where there are formulas."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from moemesh.config.architecture import Architecture
from moemesh.model.hub import architecture, costs
from moemesh.model.hub.build import blueprint
from moemesh.model.hub.costs import count_costs
from moemesh.planner.memory import estimate_memory
from moemesh.planner.parameters import count_flops, count_parameters
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.counted import counted_shape
from moemesh.planner.shapes.shape import from_huggingface

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of documents and stages take seconds, and no shape reads them."""
    monkeypatch.setattr(architecture, "_documents", lambda _: "rows")
    monkeypatch.setattr(architecture, "_against_stages", lambda _: "")


def counted(values: dict[str, Any]) -> tuple[Architecture, int]:
    """The record, and the number of parameters of the model itself."""
    record = architecture.read(values)
    model = blueprint(values).build(torch.bfloat16)
    return record, sum(parameter.numel() for parameter in model.parameters())


def config(kind: str, **sizes: Any) -> dict[str, Any]:
    return CONFIG_MAPPING[kind](**sizes).to_dict()


#: The record of a family with formulas, which takes most of a second.
plain = functools.cache(lambda: counted(config("qwen3_moe", **SIZES)))


@pytest.mark.representative("changed1")
@pytest.mark.parametrize("changed", [{}, {"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}])
def test_a_family_with_formulas_is_counted_as_they_say(changed: dict[str, Any]) -> None:
    values = config("qwen3_moe", **SIZES, **changed)
    record, number = counted(values)
    shape, formula = counted_shape(record, "m"), from_huggingface(values)
    mine, theirs = count_parameters(shape), count_parameters(formula)
    assert mine.total == theirs.total == number and mine.active == theirs.active
    for length in (64, 4096):
        mine_flops, their_flops = (count_flops(one, length, "full") for one in (shape, formula))
        assert mine_flops.forward == pytest.approx(their_flops.forward, rel=1e-6)


@pytest.mark.representative("nemotron_h")
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "granitemoehybrid"])
def test_layers_without_formulas_are_counted(kind: str) -> None:
    """Parameters are exact, and FLOPs of short and long sequences those of the code."""
    values = config(kind)
    record, number = counted(values)
    shape, known = counted_shape(record, "m"), record.costs
    assert count_parameters(shape).total == number
    for length in (128, 8192):
        want = sum(known["flops"]) + known["ends"][0] + length * sum(known["flops_per_key"])
        assert count_flops(shape, length, "full").forward == pytest.approx(want, rel=0.02)


@pytest.mark.representative("qwen3_next")
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_layers_alike_are_counted_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"}
    sizes |= {"num_experts": 4, "num_hidden_layers": 8}
    values = config(kind, **sizes)
    model, name = blueprint(values).build(torch.bfloat16), "model.layers"
    forwards: list[int] = []
    for layer in model.get_submodule(name).children():
        mixer = next(iter(layer.children()))
        mixer.register_forward_hook(lambda *_: forwards.append(1))
    quick, few = count_costs(model, model, name), len(forwards)
    monkeypatch.setattr(costs, "_kind", lambda layer, index, config: index)
    assert quick == count_costs(model, model, name)
    assert few < len(forwards) - few == 8 * 6


def test_layers_whose_mean_is_no_integer_are_counted_exactly() -> None:
    record, number = plain()
    norm = next(
        part for part in record.parameters if part.unit == "layers.0" and len(part.shape) < 2
    )
    longer = replace(norm, shape=(norm.shape[0] + 1,))
    parameters = tuple(longer if part is norm else part for part in record.parameters)
    shape = counted_shape(replace(record, parameters=parameters), "m")
    assert count_parameters(shape).total == number + 1


def test_kept_bytes_are_those_that_were_counted() -> None:
    record, _ = plain()
    more = replace(record, costs=record.costs | {"kept_bytes": [1e6] * 4})
    layout = PlannedLayout(seq_len=64, global_batch=1)
    before, after = (
        estimate_memory(counted_shape(one, "m"), layout).worst.activations for one in (record, more)
    )
    kept = sum(record.costs["kept_bytes"])
    assert after - before == pytest.approx(64 * (4e6 - kept), rel=1e-6)


def test_degrees_that_cut_a_layer_are_not_legal() -> None:
    record, _ = plain()
    sizes = counted_shape(record, "m").sizes
    assert sizes.num_heads == 1 and sizes.num_experts == 8
