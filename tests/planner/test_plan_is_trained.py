"""Whatever `moemesh plan --trainable` answers, `moemesh train` accepts and `estimate` prices alike.

Over presets, clusters, lengths and batches: the printed command passes ``config check`` through the
command line itself, the stages of its plan are those that were priced, and ``estimate`` of the same
plan gives the same seconds and bytes. The grid by default is small; the marked one has hundreds.
"""

from __future__ import annotations

import itertools
import random
import shlex

import pytest
from typer.testing import CliRunner

from moemesh import cli
from moemesh.cli.application import app
from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.planner.estimate import estimate
from moemesh.planner.layout_sources import plan_of, read_plan
from moemesh.planner.search.command import not_trained, train_command
from moemesh.planner.search.search import Candidate, SearchSpace
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load_shape import Model, load_model
from moemesh.planner.stage_cut import Stages
from moemesh.sharding.load_run import load_run
from moemesh.sharding.stages import cut_layers

pytestmark = pytest.mark.usefixtures("large_machine")

MODELS = ("tiny", "llama3-8b", "qwen3-30b-a3b", "mixtral-8x7b")
CLUSTERS = ("dgx_h100", "dgx_a100", "gb200_nvl72", "laptop_cpu", "hgx_b300", "dgx_h200")
#: (model, cluster, nodes, sequence length, batch, answers that are looked at).
FEW = (
    ("llama3-8b", "dgx_h100", 2, 4096, 64, 2),
    ("qwen3-30b-a3b", "dgx_h100", 3, 4096, 64, 2),
    ("qwen3-30b-a3b", "dgx_h200", 1, 32768, 1, 2),
    ("mixtral-8x7b", "dgx_h200", 4, 8192, 48, 2),
    ("tiny", "laptop_cpu", 2, 128, 32, 3),
    ("qwen3-30b-a3b", "gb200_nvl72", 1, 32768, 1, 2),  # more ranks in a node than key/value heads
)
_CHANCE = random.Random(20261122)
MANY = tuple(
    (*case, _CHANCE.choice((1, 6, 24, 64, 100, 512)), 12)
    for case in _CHANCE.sample(
        list(itertools.product(MODELS, CLUSTERS, (1, 2, 3, 8), (512, 4096, 32768))), 72
    )
)


def machine(name: str, nodes: int) -> Cluster:
    return load_cluster(name).model_copy(update={"nodes": nodes})


def answers(
    model: Model, cluster: Cluster, seq_len: int, batch: int, top: int
) -> tuple[Candidate, ...]:
    """The first `top` answers and a few from anywhere in the list of what fits."""
    space = Space(
        num_devices=cluster.num_devices,
        node_size=cluster.gpus_per_node,
        seq_len=seq_len,
        global_batch=batch,
        trainable=True,
    )
    search = SearchSpace(model.shape, cluster, space)
    best = search.fitting(search.capacity, top)
    rest = [index for index in range(search.examined) if search.needed[index] <= search.capacity]
    others = random.Random(batch + seq_len).sample(rest, min(top // 2, len(rest)))
    return tuple(search.candidate(index) for index in dict.fromkeys([*best, *others]))


def assert_is_what_runs(model: Model, cluster: Cluster, candidate: Candidate) -> None:
    layout = candidate.layout
    assert not not_trained(layout, model)
    words = shlex.split(train_command(layout, model))
    assert words[:2] == ["moemesh", "train"]
    cli.import_verbs(["config"])
    result = CliRunner().invoke(app, ["config", "check", *words[2:]])
    assert result.exit_code == 0, (words, result.output, result.exception)
    settings = [word for word in words[2:] if word != "--set"]
    config = load_run([], settings).config
    assert (config.data.seq_len, config.data.global_batch) == (layout.seq_len, layout.global_batch)
    assert plan_of(layout) == config.plan
    cut = cut_layers(config.model, config.plan.num_stages, config.plan.layers_per_stage)
    assert Stages.of(model.shape, layout).sizes == tuple(len(layers) for layers in cut)
    sizes = {"seq_len": layout.seq_len, "global_batch": layout.global_batch}
    for text in (layout.text, _as_keys(layout)):
        planned = read_plan(text, model=model, **sizes)
        estimated = estimate(model, planned.layout, cluster, planned.plan)
        assert estimated.seconds["total"] == pytest.approx(candidate.seconds, rel=1e-9), text
        assert estimated.peak.needed == pytest.approx(candidate.memory.needed, rel=1e-9), text
        assert estimated.peak.needed >= estimated.memory.worst.total


def _as_keys(layout: object) -> str:
    """The keys of the train command, as --plan takes them."""
    chosen = plan_of(layout).model_dump(exclude_defaults=True)  # type: ignore[arg-type]
    return ",".join(
        f"{key}={'-'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in chosen.items()
    ) or "pp=1"  # fmt: skip


@pytest.mark.representative("qwen3-30b-a3b-gb200_nvl72")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case[:2])))
def test_what_is_planned_can_be_trained_and_costs_what_was_said(case) -> None:
    name, cluster, nodes, seq_len, batch, top = case
    model, there = load_model(name), machine(cluster, nodes)
    candidates = answers(model, there, seq_len, batch, top)
    assert len(candidates) >= top
    for candidate in candidates:
        assert_is_what_runs(model, there, candidate)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_answers() -> None:
    count = 0
    for name, cluster, nodes, seq_len, batch, top in MANY:
        model, there = load_model(name), machine(cluster, nodes)
        positions = 0 if model.config is None else model.config.max_position_embeddings
        if 0 < positions < seq_len:
            continue  # `plan --trainable` refuses it
        try:
            candidates = answers(model, there, seq_len, batch, top)
        except ConfigError:
            continue  # no layout of this number of devices takes this batch
        for candidate in candidates:
            assert_is_what_runs(model, there, candidate)
        count += len(candidates)
    assert count >= 500
