"""Tuned models of transformers: frozen weights, chosen experts and adapters, to 1e-9 in float64.

References are a plain loop over transformers, and PEFT's adapters on its model.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moemesh.checkpoint.huggingface.adapters import adaptations
from moemesh.checkpoint.huggingface.convert import write_adapters
from moemesh.checkpoint.huggingface.pieces import slices
from moemesh.comm.mesh import Mesh
from moemesh.config.lora import ADAPTER_WEIGHTS, NO_ADAPTERS, LoraConfig, is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig, adapter_rules, projections
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import Tuning
from moemesh.model.hub.experts import HeldExperts
from moemesh.ops.nf4 import dequantize, quantize
from moemesh.train.numerics.hub_proof import ProofError, prove
from tests.hub.families import family_names
from tests.hub.training import (
    Trained,
    architecture_of,
    difference,
    model_of,
    plain,
    plain_model,
    split,
    steps,
)

#: Plain experts; a gate of its own, biases and transposed stacks; linear attention and a shared
#: expert; experts without a gate.
FEW = ("qwen3_moe", "gpt_oss", "qwen3_next", "nemotron_h")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "zero3": {"dp": 2, "ep": 2, "data": "zero3", "recompute": "full", "microbatches": 2},
    "pp2": {"pp": 2, "dp": 2, "data": "zero1", "microbatches": 2},
}
LORA = LoraConfig(rank=3, alpha=5.0)


def factors_of(model: ModelConfig) -> dict[str, Tensor]:
    """Adapters that are far from zero, by name."""
    assert model.architecture is not None
    generator = torch.Generator().manual_seed(7)
    return {
        record.name: torch.randn(record.shape, generator=generator, dtype=torch.float64) * 0.1
        for record in model.architecture.parameters
        if is_adapter(record.name)
    }


def written(factors: dict[str, Tensor], model: ModelConfig, name: str, folder: Path) -> Path:
    def read(key: str, box: Any) -> Tensor:
        return factors[key][slices(box)]

    write_adapters(read, model, name, folder, dtype=torch.float64, base=None)
    return folder


def with_peft(name: str, folder: Path) -> Any:
    """PEFT's model over that of transformers, with the adapters of a folder."""
    net = plain_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        net = peft.PeftModel.from_pretrained(net, folder, is_trainable=True)
    assert sum(one.requires_grad for one in net.parameters())
    return net


def by_peft(name: str, lora: LoraConfig, folder: Path) -> tuple[Trained, dict[str, Tensor]]:
    """The steps by PEFT, and the adapters at first. Its adapter of gate and up together keeps a
    block of each."""
    model = model_of(architecture_of(name)).with_lora(lora)
    factors = factors_of(model)
    net = with_peft(name, written(factors, model, name, folder / "first"))
    ones = {key: torch.ones_like(factor) for key, factor in factors.items()}
    blocks = load_file(written(ones, model, name, folder / "ones") / ADAPTER_WEIGHTS)
    named = dict(net.named_parameters())

    def parameter(key: str) -> Any:
        return named[f"{key.removesuffix('.weight')}.default.weight"]

    stored = load_file(folder / "first" / ADAPTER_WEIGHTS)
    lost = [key for key, factor in stored.items() if not torch.equal(parameter(key), factor)]
    # PEFT renames what it loads: it loses modules with "weight" in their names (inkling2), and
    # shared experts of laguna.
    assert not lost or name.startswith(("inkling2", "laguna"))
    for key in lost:
        parameter(key).data.copy_(stored[key])
    masks = {parameter(key): block for key, block in blocks.items()}
    trained = steps(net, masks, masks)
    weights: dict[str, Tensor] = {}
    for one in adaptations(model, name):
        for letter in "AB":
            stored = parameter(one.name(letter)).detach()
            for part, factor in zip(one.parts, one.load(letter, stored), strict=True):
                weights[one.factor(part, letter)] = factor
    return trained._replace(weights=weights), factors


def adapted(name: str, lora: LoraConfig, folder: Path, **keys: Any) -> float:
    """The largest difference between the steps by PEFT and those in the layout `keys`."""
    expected, factors = by_peft(name, lora, folder)
    for key, factor in list(factors.items()):
        module, _, leaf = key.rpartition(".")
        if module.endswith(".experts"):
            factors |= {f"{module}.{place}.{leaf}": row for place, row in enumerate(factor)}
    tuning = Tuning(train_only=lora.trains)
    return difference(expected, split(name, lora=lora, tuning=tuning, factors=factors, **keys))


@pytest.mark.representative("nemotron_h-ep2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FEW)
def test_adapters_train_as_in_peft(name: str, layout: str, tmp_path: Path) -> None:
    assert adapted(name, LORA, tmp_path, **LAYOUTS[layout]) < 1e-9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", family_names())
def test_adapters_of_every_family_train_as_in_peft(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS["ep2"] if architecture_of(name).num_experts % 2 == 0 else {"dp": 2}
    assert adapted(name, LORA, tmp_path, **layout) < 1e-9


def packed(name: str, **keys: Any) -> float:
    """The largest difference between the steps of adapters on a base in NF4 in the layout `keys`,
    and those on one device on the dequantized numbers."""
    lora = LORA.model_copy(update={"base": "nf4"})
    architecture = architecture_of(name)
    stored = {one.name for one in architecture.parameters if one.parts}
    factors = factors_of(model_of(architecture).with_lora(LORA))
    for key, factor in list(factors.items()):
        module, _, leaf = key.rpartition(".")
        if module.endswith(".experts"):
            factors |= {f"{module}.{place}.{leaf}": row for place, row in enumerate(factor)}

    def rounded(key: str, weight: Tensor) -> Tensor:
        return dequantize(quantize(weight), torch.float64) if key in stored else weight

    given: dict[str, Any] = {"tuning": Tuning(train_only=LORA.trains), "factors": factors}
    expected = split(name, lora=LORA, changed=rounded, **given)
    got = split(name, lora=lora, **given, **keys)
    adapters = {key: one for key, one in expected.weights.items() if is_adapter(key)}
    assert adapters
    return difference(expected._replace(weights=adapters), got)


@pytest.mark.representative("gpt_oss-zero3")
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("name", FEW)
def test_a_base_in_nf4_trains_as_its_dequantized_copy(name: str, layout: str) -> None:
    assert packed(name, **LAYOUTS.get(layout, {})) < 1e-9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", family_names())
def test_a_base_in_nf4_of_every_family(name: str) -> None:
    layout = LAYOUTS["ep2"] if architecture_of(name).num_experts % 2 == 0 else {"dp": 2}
    assert packed(name, **layout) < 1e-9


def some_experts(name: str) -> Tuning:
    """Other experts of each layer, and the parameters whose names have "norm"."""
    architecture = architecture_of(name)
    table = tuple(
        (layer, tuple(range(place % 2, architecture.num_experts - 1, 2 + place)))
        for place, layer in enumerate(architecture.routed_layers)
    )
    return Tuning(train_only=("*norm*",), experts=table)


@pytest.mark.representative("gpt_oss-ep2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FEW)
def test_chosen_experts_train_as_in_a_plain_loop(name: str, layout: str) -> None:
    tuning = some_experts(name)
    assert (
        difference(split(name, tuning=tuning, **LAYOUTS[layout]), plain(name, tuning=tuning)) < 1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", family_names())
def test_chosen_experts_of_every_family_train_as_in_a_plain_loop(name: str) -> None:
    tuning = some_experts(name)
    layout = LAYOUTS["ep2"] if architecture_of(name).num_experts % 2 == 0 else {"dp": 2}
    assert difference(split(name, tuning=tuning, **layout), plain(name, tuning=tuning)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("patterns", [("*self_attn*", "*linear_attn*"), ("model.layers.1.*",)])
def test_frozen_weights_stay(patterns: tuple[str, ...]) -> None:
    tuning = Tuning(freeze=patterns)
    trained = split("qwen3_next", tuning=tuning, **LAYOUTS["zero3"])
    assert difference(trained, plain("qwen3_next", tuning=tuning)) < 1e-9


@pytest.mark.parametrize("train", [TrainConfig(), TrainConfig(train_only=("*.experts.1.*",))])
def test_the_proof_before_a_run_is_tuned_as_the_run(
    train: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = NO_ADAPTERS if train.train_only else LORA
    model = model_of(architecture_of("gpt_oss"))
    config = RunConfig(model=model, train=train, lora=lora)
    mesh = Mesh.single("cpu")
    prove(config, mesh)
    held: Any = HeldExperts
    product = held._product

    def wrong(self: Any, leaf: str, *inputs: Any) -> Tensor:
        return product(self, leaf, *inputs) * (leaf != "down_proj")

    monkeypatch.setattr(held, "_product", wrong)
    with pytest.raises(ProofError, match="gpt_oss: "):
        prove(config, mesh)


@pytest.mark.representative("nemotron_h-has0-lacks0", "qwen3_next-has2-lacks2")
@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("nemotron_h", {"in_proj", "up_proj"}, {"out_proj", "gate_proj"}),  # kernel; no gate
        ("jamba", {"out_proj", "x_proj", "gate_proj"}, {"dt_proj", "router"}),
        ("qwen3_next", {"in_proj_qkvz", "in_proj_ba"}, {"shared_expert_gate", "gate"}),
        ("deepseek_v32", {"q_a_proj", "kv_b_proj"}, {"wk", "wq_b"}),  # no gradient reaches these
        ("deepseek_v4", {"o_b_proj"}, {"o_a_proj"}),  # a forward of its own
    ],
)
def test_targets_are_the_linear_layers_that_a_family_calls(
    name: str, has: set[str], lacks: set[str]
) -> None:
    model = model_of(architecture_of(name)).with_lora(LoraConfig(rank=2, targets=("none",)))
    (problem,) = adapter_rules(model)
    assert problem.code == "not-a-choice"
    targets = {one.target for one in projections(model)}
    assert has <= targets and not lacks & targets


@pytest.mark.parametrize("targets", [("all-linear",), ("c_attn",)])
def test_a_model_without_linear_layers_has_no_adapters(targets: tuple[str, ...]) -> None:
    """The projections of GPT-2 are of another class."""
    lora = LORA.model_copy(update={"targets": targets})
    (problem,) = adapter_rules(model_of(architecture_of("gpt2")).with_lora(lora))
    assert (problem.key, problem.code) == ("lora.rank", "not-available")
    assert "none is an nn.Linear" in problem.message and problem.fix.startswith("rank = 0")


def test_all_linear_leaves_out_what_is_smaller_than_the_rank() -> None:
    architecture = architecture_of("qwen3_next")
    for rank, has_small in ((8, True), (9, False)):
        names = [one.name for one in architecture.with_adapters(LoraConfig(rank=rank)).parameters]
        assert any("in_proj_ba_lora_A" in name for name in names) == has_small
        assert any("in_proj_qkvz_lora_A" in name for name in names)


def test_a_rank_above_every_projection_is_refused() -> None:
    model = model_of(architecture_of("qwen3_next")).with_lora(LoraConfig(rank=4096))
    (problem,) = adapter_rules(model)
    assert problem.key == "lora.rank" and problem.fix.endswith("= 64")
    assert "(4096) exceeds the smaller dimension of in_proj_qkvz" in problem.message
