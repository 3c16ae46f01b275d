"""Layouts give the numbers of a plain loop over transformers, to 1e-9 in float64."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from moemesh.comm.mesh import Mesh
from moemesh.config.architecture import Architecture
from moemesh.config.errors import ConfigError
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.model.hub.architecture import read
from moemesh.model.hub.experts import is_experts
from moemesh.model.hub.shrink import shrunken
from moemesh.train.numerics.hub_proof import ProofError, prove
from tests.hub.families import family_names, random_model, text_of_images
from tests.hub.training import architecture_of, difference, model_of, plain, split
from tests.ranks import mesh_on_ranks
from tests.sandbox import ROOT

#: dp, ep, ep beside replicas of experts, weights that are gathered, each layer computed twice,
#: parts of the width of experts, and stages of a pipeline.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "zero3": {"dp": 2, "ep": 2, "data": "zero3", "recompute": "full", "microbatches": 2},
    "etp2": {"dp": 2, "etp": 2},
    "ep2_etp2": {"dp": 4, "ep": 2, "etp": 2, "data": "zero3", "microbatches": 2},
    "pp2": {"pp": 2, "microbatches": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2, "data": "zero2", "microbatches": 2},
}
#: More ways through a pipeline: other schedules, gathered weights, two stages a rank.
PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "schedule": "gpipe", "recompute": "full", "microbatches": 2},
    "zb_h1": {"pp": 2, "schedule": "zb_h1", "microbatches": 4},
    "zero1": {"pp": 2, "dp": 2, "data": "zero1", "microbatches": 2},
    "zero3": {"pp": 2, "dp": 2, "ep": 2, "data": "zero3", "microbatches": 2},
    "two_stages_a_rank": {
        "pp": 2, "stages_per_rank": 2, "schedule": "interleaved_1f1b", "microbatches": 2,
    },
}  # fmt: skip
#: The same without experts.
DENSE: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "data": "zero3", "recompute": "full", "microbatches": 2},
    "pp2": {"pp": 2, "dp": 2, "data": "zero1", "microbatches": 2},
}
#: Plain experts; a gate of its own, biases and windows; linear attention, and idle parameters.
FEW = ("qwen3_moe", "gpt_oss", "qwen3_next", "afmoe")


@pytest.mark.representative("qwen3_next-ep2")
@pytest.mark.parametrize("layout", ["ep2", "zero3"])
@pytest.mark.parametrize("name", FEW)
def test_a_layout_trains_as_transformers(name: str, layout: str) -> None:
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9


# Gates before ups; interleaved columns, transposed, with biases.
@pytest.mark.representative("gpt_oss")  # its experts have biases
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_ranks_that_share_the_width_of_experts_train_as_transformers(name: str) -> None:
    assert difference(split(name, **LAYOUTS["ep2_etp2"]), plain(name)) < 1e-9


# Linear attention; a head that is tied to the embedding; a router that reads that of the layer
# before.
@pytest.mark.representative("zaya")
@pytest.mark.parametrize("name", ["qwen3_next", "cohere2_moe", "zaya"])
def test_a_pipeline_trains_as_transformers(name: str) -> None:
    assert difference(split(name, **LAYOUTS["pp2_ep2"]), plain(name)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", PIPELINES)
# Two with four layers and more; ids that routers read, and a wider stream; a tied head.
@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "deepseek_v4", "cohere2_moe"])
def test_every_way_through_a_pipeline_trains_as_transformers(name: str, layout: str) -> None:
    if PIPELINES[layout].get("stages_per_rank", 1) * 2 > architecture_of(name).num_layers:
        pytest.skip("too few layers")
    assert difference(split(name, **PIPELINES[layout]), plain(name)) < 1e-9


# Windows and a capped head; parallel blocks; linear attention; a table of positions; a head that
# calls a model inside of the base model, and an embedding narrower than the layers; layers that
# return a tuple of one tensor, and lists that are longer than there are layers.
@pytest.mark.representative("gemma2-pp2", "opt-pp2")
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("name", ["gemma2", "cohere2", "qwen3_5_text", "gpt2", "opt", "falcon_h1"])
def test_a_dense_model_trains_as_transformers(name: str, layout: str) -> None:
    assert difference(split(name, **DENSE[layout]), plain(name)) < 1e-9


@pytest.mark.parametrize("layout", DENSE)
def test_a_tied_head_without_a_norm_trains_as_transformers(layout: str) -> None:
    """Its unit reads nothing but the table of the embedding; its layers return a list of one
    tensor."""
    assert difference(split("openai-gpt", **DENSE[layout]), plain("openai-gpt")) < 1e-9


def documented() -> list[str]:
    """The dense families that docs/huggingface.md lists as trained."""
    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    return re.findall(
        r"`([\w-]+)`", text.split("<!-- generated: hub_dense -->")[1].split("<!--")[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", documented())
def test_every_documented_dense_family_trains_as_transformers(name: str) -> None:
    architecture = architecture_of(name)
    layout = DENSE["zero3" if architecture.uncut else "pp2"]
    layout = layout | ({"data": "zero2"} if architecture.reads_between else {})
    assert difference(split(name, **layout), plain(name)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", family_names())
def test_every_family_trains_as_transformers(name: str, layout: str) -> None:
    architecture = architecture_of(name)
    if architecture.num_experts % LAYOUTS[layout].get("ep", 1):
        pytest.skip(f"{architecture.num_experts} experts")
    if "pp" in LAYOUTS[layout] and architecture.uncut:
        pytest.skip(architecture.uncut)
    if LAYOUTS[layout].get("data") == "zero3" and architecture.reads_between:
        pytest.skip("weights that are read between the layers")
    if "etp" in LAYOUTS[layout] and not architecture.cuts_experts:
        pytest.skip("experts that cannot be cut along their width")
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", text_of_images())
def test_models_of_images_and_text_alone_train_on_text(name: str) -> None:
    """The weights of the encoders stay as they are."""
    try:
        weights = random_model(name).state_dict()
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"transformers itself: {error}")
    if len(experts_of(name)) > 1:
        pytest.skip("several lists of layers have experts")
    trained = split(name, **LAYOUTS["ep2"])
    assert difference(trained, plain(name)) < 1e-9
    encoder = [key for key in trained.weights if "vis" in key]
    assert all(torch.equal(trained.weights[key], weights[key].double()) for key in encoder)
    mesh_on_ranks(Plan(dp=2, ep=2).layout, proof, architecture_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", text_of_images())
def test_pipelines_of_models_of_images_and_text_train_as_transformers(name: str) -> None:
    try:
        architecture = architecture_of(name)
    except (AssertionError, RuntimeError, ConfigError) as error:
        pytest.skip(f"no tiny model: {error}")
    if architecture.uncut:
        pytest.skip(architecture.uncut)
    assert difference(split(name, **LAYOUTS["pp2_ep2"]), plain(name)) < 1e-9


def experts_of(name: str) -> set[str]:
    """The names of experts modules without the numbers of their layers."""
    modules = random_model(name).named_modules()
    return {re.sub(r"\d+", "", path) for path, module in modules if is_experts(module)}


def test_a_family_without_a_small_model_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("the small model has no Indexer")

    monkeypatch.setattr("moemesh.model.hub.shrink.shrunken", fail)
    config = RunConfig(model=model_of(architecture_of("olmoe")), plan=Plan())
    with pytest.raises(
        ProofError, match=r"olmoe: .*\(rank 0: ValueError: the small model has no Indexer"
    ):
        prove(config, Mesh.single("cpu"))


def proofs_with_a_fault(
    mesh: Mesh, architecture: Architecture, targets: Sequence[str]
) -> list[str]:
    """The message of a proof in which rank 1 computes something else, for each target."""
    return [proof_with_a_fault(mesh, architecture, target) for target in targets]


def proof_with_a_fault(mesh: Mesh, architecture: Architecture, target: str) -> str:
    torch.set_num_threads(1)

    def broken(function: Any) -> Any:
        def fails(*args: Any, **kwargs: Any) -> Any:
            if target.endswith("shrunken"):
                raise ValueError("no memory for it")
            return function(*args, **kwargs) * 1.001

        return fails

    config = RunConfig(model=model_of(architecture), plan=Plan(dp=2, ep=2))
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(target, broken(resolve_name(target)))
        with pytest.raises(ProofError) as raised:
            prove(config, mesh)
    return str(raised.value)


def test_a_proof_that_fails_on_one_rank_fails_on_all() -> None:
    words = {
        "moemesh.model.hub.shrink.shrunken": r"rank 1: ValueError: no memory for it",
        "moemesh.model.hub.experts.HeldExperts.__call__": (
            r"the gradient of model\.\S+ of a small model differs by \d\.\de-0\d"
        ),
    }
    args = architecture_of("qwen3_moe"), list(words)
    first, second = mesh_on_ranks(Plan(dp=2, ep=2).layout, proofs_with_a_fault, *args)
    assert first == second
    for pattern, message in zip(words.values(), first, strict=True):
        assert re.search(pattern, message), message


def proof(mesh: Mesh, architecture: Architecture) -> str:
    torch.set_num_threads(1)
    config = RunConfig(model=model_of(architecture), plan=Plan(dp=2, ep=2))
    return prove(config, mesh)


@pytest.mark.slow
def test_experts_that_are_called_as_those_of_the_interface_are_spread() -> None:
    """Without the decorator of transformers, and with a gate of their own."""
    values = CONFIG_MAPPING["step3p7"]().to_dict()
    values["text_config"]["sliding_window"] = 8
    small = shrunken(values)
    architecture = read(small.config.to_dict(), documents="rows")
    assert architecture.routed_layers
    mesh_on_ranks(Plan(dp=2, ep=2).layout, proof, architecture)
