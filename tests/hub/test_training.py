"""Layouts give the numbers of a plain loop over transformers, to 1e-9 in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.train.numerics.hub_proof import ProofError, prove
from tests.hub.families import family_names
from tests.hub.training import architecture_of, difference, model_of, plain, split

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
#: Plain experts; a gate of its own, biases and windows; linear attention, and idle parameters.
FEW = ("qwen3_moe", "gpt_oss", "qwen3_next", "afmoe")


@pytest.mark.parametrize("layout", ["ep2", "zero3"])
@pytest.mark.parametrize("name", FEW)
def test_a_layout_trains_as_transformers(name: str, layout: str) -> None:
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9


# Gates before ups; interleaved columns, transposed, with biases.
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_ranks_that_share_the_width_of_experts_train_as_transformers(name: str) -> None:
    assert difference(split(name, **LAYOUTS["ep2_etp2"]), plain(name)) < 1e-9


# Linear attention; a head that is tied to the embedding.
@pytest.mark.parametrize("name", ["qwen3_next", "cohere2_moe"])
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", family_names())
def test_every_family_trains_as_transformers(name: str, layout: str) -> None:
    architecture = architecture_of(name)
    if architecture.num_experts % LAYOUTS[layout].get("ep", 1):
        pytest.skip(f"{architecture.num_experts} experts")
    if "pp" in LAYOUTS[layout] and architecture.uncut:
        pytest.skip(architecture.uncut)
    if "etp" in LAYOUTS[layout] and not architecture.cuts_experts:
        pytest.skip("experts that are no sums over parts of their width")
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9


def test_a_family_without_a_small_model_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("the small model has no Indexer")

    monkeypatch.setattr("moemesh.model.hub.shrink.shrunken", fail)
    config = SimpleNamespace(model=model_of(architecture_of("olmoe")), plan=Plan())
    with pytest.raises(ProofError, match=r"olmoe: .*\(ValueError: the small model has no Indexer"):
        prove(cast("Any", config), Mesh.single("cpu"))
