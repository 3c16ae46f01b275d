"""`moemesh partition`: exact methods agree, printed commands run, bad input names the numbers."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from typing import Any

import pytest

from moemesh.config.cluster import load_cluster
from moemesh.planner.requests import PartitionRequest
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.stages.answer import METHODS, Partition
from moemesh.planner.stages.division import StageError, best_division
from moemesh.planner.stages.partition import compare, partition
from moemesh.planner.stages.two_level import TwoLevelSearch
from tests.test_cli import Invoke

pytestmark = pytest.mark.usefixtures("large_machine")


def check_command(invoke: Invoke, command: str) -> None:
    """`moemesh config check` accepts the configuration of a printed `moemesh train`."""
    words = shlex.split(command)
    assert words[:2] == ["moemesh", "train"]
    code, _, errors = invoke("config", "check", *words[2:])
    assert code == 0, f"{command}\n{errors}"


def check_sums(partitioned: Partition) -> None:
    """Stages cover layers and ranks once, and the time of a step follows from its stages."""
    seconds = [stage.seconds for stage in partitioned.stages]
    expected = sum(seconds) + (partitioned.microbatches - 1) * max(seconds)
    assert partitioned.seconds == pytest.approx(expected)
    layers = [layer for stage in partitioned.stages for layer in stage.layers]
    assert layers == list(range(len(layers)))
    ranks = [rank for stage in partitioned.stages for rank in stage.ranks]
    assert ranks == list(range(partitioned.num_devices))
    for number, stage in enumerate(partitioned.stages):
        assert stage.in_flight == min(partitioned.microbatches, len(partitioned.stages) - number)
        assignment = partitioned.assignments[stage.assignment]
        assert all(one.seconds >= 0 for one in assignment.operators)
    assert partitioned.implied is not None
    plan = partitioned.implied.plan
    assert plan.world_size == partitioned.num_devices
    assert plan.pp == len(partitioned.stages)
    assert plan.microbatches == partitioned.microbatches
    if plan.pp > 1:
        assert plan.layers_per_stage == tuple(len(stage.layers) for stage in partitioned.stages)


def test_stages_and_strategies_of_a_model_become_a_command_that_runs(invoke: Invoke) -> None:
    result = partition(
        model="llama3-8b", cluster="dgx_h100", nodes=2, global_batch=64, seq_len=4096, stages=4
    )
    check_sums(result)
    assert result.implied is not None
    assert result.implied.fits
    assert "plan.layers_per_stage=[" in result.implied.command
    check_command(invoke, result.implied.command)


def test_methods_agree_and_baselines_say_their_gap() -> None:
    request: dict[str, Any] = {
        "model": "llama3-8b", "cluster": "dgx_h100", "global_batch": 32, "stages": 4,
        "microbatches": 8, "evaluations": 300,
    }  # fmt: skip
    dp, ilp, random, learned = compare(PartitionRequest(**request, method="all"))
    assert ilp.seconds == pytest.approx(dp.seconds, rel=1e-9)
    assert dp.gap == 0
    for baseline in (random, learned):
        assert baseline.optimum_seconds == dp.seconds
        assert baseline.gap == pytest.approx(max(baseline.seconds / dp.seconds - 1, 0))
        assert baseline.evaluations == 300
    assert random.gap > 0
    for answer in (dp, ilp, random, learned):
        check_sums(answer)


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_skipped_meshes_hold_nothing_better(model: str, gigabytes: float) -> None:
    """The search's answer is the best of all meshes, and each is above its bound."""
    size = {"gpus_per_node": 4, "nodes": 1, "memory_bytes": int(gigabytes * 2**30)}
    cluster, shape = load_cluster("dgx_h100"), load_model(model).shape.truncated(3)
    request = PartitionRequest(model=model, cluster="", global_batch=8, seq_len=512)
    search = TwoLevelSearch(shape, cluster.model_copy(update=size), request)
    divisions = [
        (mesh, best_division(mesh.refined.table(), mesh.microbatches)) for mesh in search.meshes
    ]
    for mesh, division in divisions:
        assert division is None or mesh.lower_bound <= division.seconds * (1 + 1e-9)
    seconds = [division.seconds for _, division in divisions if division is not None]
    if not seconds:
        with pytest.raises(StageError):
            search.best(best_division)
    else:
        assert search.best(best_division)[1].seconds == pytest.approx(min(seconds), rel=1e-9)


CASES: list[tuple[str, int, int, int, int | None]] = [
    ("tiny", 1, 64, 8, 2),
    ("qwen3-30b-a3b", 2, 4096, 64, 4),
    *(
        (model, nodes, seq_len, batch, None)
        for model in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b")
        for nodes in (2, 4)
        for seq_len, batch in ((1024, 48), (4096, 64), (8192, 256))
    ),
]


@pytest.mark.representative("tiny-1-64-8-2")
@pytest.mark.parametrize(("model", "nodes", "seq_len", "batch", "stages"), CASES)
def test_every_printed_command_passes_config_check(
    invoke: Invoke, model: str, nodes: int, seq_len: int, batch: int, stages: int | None
) -> None:
    sizes: dict[str, Any] = {"seq_len": seq_len, "global_batch": batch, "stages": stages}
    try:
        result = partition(model=model, cluster="dgx_h100", nodes=nodes, **sizes)
    except StageError as error:
        assert "fits in" in str(error)
        return
    check_sums(result)
    assert result.implied is not None
    if result.implied.fits and not result.implied.not_trained:
        check_command(invoke, result.implied.command)


def test_the_branch_network_is_placed_by_every_method() -> None:
    request = PartitionRequest(
        model="branching-alexnet", cluster="dgx_h100", global_batch=128, evaluations=2000,
        method="all",
    )  # fmt: skip
    results = compare(request)
    assert results[1].seconds == pytest.approx(results[0].seconds, rel=1e-9)
    for one in results:
        assert one.gap >= 0
        names = sorted(name for stage in one.stages for name in stage.operators)
        assert names == sorted(operator.operator for operator in one.assignments[0].operators)
        assert one.implied is None
    # Both convolutions of a layer at once: the step is shorter than all operators in a row.
    assert results[0].seconds < sum(stage.seconds for stage in results[0].stages)


def test_the_seed_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"seed must be at least 0, not -1(.|\n)*fix: seed = 0"):
        partition(model="tiny", cluster="dgx_h100", global_batch=8, method="random", seed=-1)


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        ("llama3-8b", {"evaluations": 50}, "method = dp draws no divisions"),
        ("llama3-8b", {"seed": 1, "method": "ilp"}, "method = ilp draws no divisions"),
        ("branching-alexnet", {"seq_len": 128}, "has neither sequences nor a pipeline"),
        ("branching-alexnet", {"schedule": "gpipe"}, "has neither sequences nor a pipeline"),
    ],
)
def test_a_value_has_an_effect_or_is_refused(
    model: str, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} has no effect: .*{reason}"):
        compare(PartitionRequest(model=model, cluster="dgx_h100", global_batch=64, **given))


def test_a_loop_over_methods_passes_one_set_of_values() -> None:
    request: dict[str, Any] = {"model": "tiny", "cluster": "laptop_cpu", "global_batch": 8}
    one, other = (partition(**request, method="dp", **more) for more in ({}, {"evaluations": 9}))
    assert one.seconds == other.seconds


def test_the_same_call_gives_the_same_answer() -> None:
    request: dict[str, Any] = {
        "model": "branching-alexnet", "cluster": "dgx_h100", "global_batch": 16, "stages": 3,
        "evaluations": 50, "seed": 3,
    }  # fmt: skip
    for method in ("random", "learned"):
        first, second = (partition(method=method, **request) for _ in range(2))
        for field in fields(Partition):
            if field.name != "wall_seconds":
                assert getattr(first, field.name) == getattr(second, field.name)


def test_a_model_that_does_not_fit_names_the_memory_that_would_do() -> None:
    with pytest.raises(
        StageError, match=r"(?s)no division of 61 layers .*fix: devices with"
    ) as caught:
        partition(model="deepseek-v3", cluster="dgx_h100", global_batch=64, stages=8)
    assert "8 devices" in str(caught.value)


def test_the_verb_prints_text_and_json(invoke: Invoke) -> None:
    words = ("partition", "--model", "tiny", "--cluster", "dgx_h100", "--global-batch", "8")
    options = ("--seq-len", "64", "--stages", "2")
    code, text, _ = invoke(*words, *options)
    assert code == 0
    assert "moemesh train --set model.preset=tiny" in text
    _, output, _ = invoke(*words, *options, "--method", "all", "--evaluations", "50", "--json")
    document = json.loads(output)
    assert [row["method"] for row in document["methods"]] == list(METHODS)
    assert {"stages", "assignments", "plan", "seconds", "gap", "evaluations"} <= document.keys()
    assert document["stages"][0]["ranks"] == [0, 3]
    assert document["plan"]["command"] in text
    code, _, errors = invoke(*words, "--stages", "99")
    assert code == 2
    assert "fix: stages = " in errors
