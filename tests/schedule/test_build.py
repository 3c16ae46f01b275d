"""Schedules by name: the names of the configuration, options, and refusals of other names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.suggest import choices_of
from moemesh.schedule import answer
from moemesh.schedule.action import messages
from moemesh.schedule.build import build
from moemesh.schedule.check import check
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import peak_memory
from moemesh.schedule.plan_schedule import build_step
from moemesh.schedule.simulate import simulate
from moemesh.schedule.stage_times import costs_of_run, estimated_costs, measured_costs
from moemesh.schedule.text import save
from moemesh.trace.timeline import WorkRecord


def test_the_names_are_those_of_the_configuration() -> None:
    names = choices_of(Plan.model_fields["schedule"].annotation)
    assert names == (*SCHEDULES, "search")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_build_is_a_value(name: str) -> None:
    assert build(name, 4, 16) == build(name, 4, 16)
    assert build(name, 4, 16) != build(name, 2, 16)


def test_options_reach_their_schedules() -> None:
    assert build("terapipe", 4, 2).num_slices == 4
    assert build("terapipe", 4, 2, num_slices=3).num_slices == 3
    assert build("interleaved_1f1b", 2, 4, stages_per_rank=3).num_stages == 6
    assert build("zb_v", 2, 4, stages_per_rank=2) == build("zb_v", 2, 4)
    schedule = build("ampnet", 2, 4, max_in_flight=3, window=2, cost=lambda op: 1, latency=1)
    assert schedule.update is not None and schedule.update.window == 2
    assert schedule.parameters["max_in_flight"] == 3


def test_numbers_must_be_whole() -> None:
    for ranks, microbatches in ((True, 4), (4.0, 4), (4, "8")):
        with pytest.raises(TypeError, match="must be a whole number"):
            build("gpipe", ranks, microbatches)  # pyright: ignore[reportArgumentType]


def test_interleaving_multiplies_the_messages() -> None:
    once = len(messages(build("1f1b", 4, 8)))
    assert once == 2 * 3 * 8
    assert len(messages(build("interleaved_1f1b", 4, 8, stages_per_rank=2))) == 2 * 7 * 8
    # Neighbouring chunks of the same rank pass tensors without a message.
    assert len(messages(build("zb_v", 4, 8))) == 2 * 6 * 8


# The schedule of a plan: files and searches.


def saved(folder: Path, name: str = "zb_h1", ranks: int = 2, count: int = 4, **keys: Any) -> str:
    path = folder / "s.txt"
    save(build(name, ranks, count, **keys), path)
    return str(path)


@pytest.mark.parametrize("ending", ["txt", "csv"])
def test_a_file_is_the_schedule_that_was_saved(tmp_path: Path, ending: str) -> None:
    schedule = build("dualpipe", 2, 4)
    path = tmp_path / f"a schedule.{ending}"
    save(schedule, path)
    assert build_step(Plan(pp=2, microbatches=4, schedule=str(path))) == schedule
    command = shlex.split(answer.saved(schedule, path).partition("train with it: ")[2])
    assert command[-2:] == ["--set", f"plan.schedule={path}"]


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path)
    plan = Plan(pp=2, microbatches=4, schedule=path)
    assert build_step(plan).name == "zb_h1"
    saved(tmp_path, "1f1b")
    assert build_step(plan).name == "1f1b"


@pytest.mark.parametrize(
    ("made", "plan", "words"),
    [
        ({"ranks": 4}, {}, ["4 ranks, the plan has 2", "plan.pp = 4"]),
        ({"count": 6}, {}, ["6 microbatches, the plan has 4", "plan.microbatches = 6"]),
        ({"name": "zb_v"}, {}, ["2 stages per rank, the plan has 1", "plan.stages_per_rank = 2"]),
        ({}, {"stages_per_rank": 2}, ["1 stages per rank, the plan has 2"]),
        (
            {"name": "terapipe", "num_slices": 3},
            {},
            ["3 slices of a sequence, the plan has 1", "plan.slices = 3"],
        ),
        ({"name": "pipedream"}, {}, ["update=stash", "by its name"]),
        (
            {"name": "chimera"},
            {"optimizer_validation": "after"},
            ["two replicas", "optimizer_validation = after needs one pipe"],
        ),
        ({}, {"data": "zero3"}, ["has freed by then", "plan.data = zero2"]),
        (
            {"ranks": 3, "count": 5},
            {"stages_per_rank": 2},
            ["3 ranks", "5 microbatches", "1 stages per rank"],
        ),
    ],
    ids=str,
)
def test_a_file_for_another_plan_is_refused_with_its_numbers(
    tmp_path: Path, made: dict[str, Any], plan: dict[str, Any], words: list[str]
) -> None:
    path = saved(tmp_path, **made)
    keys: dict[str, Any] = {"pp": 2, "microbatches": 4} | plan
    with pytest.raises(UserError) as error:
        build_step(Plan(schedule=path, **keys))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", ["deadlock"]),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ["0B1", "is missing"]),
        ("0F0,0F1,0B0,0X1\n1F0,1B0,1F1,1B1\n", ["line 1, token 4", "0X1"]),
        ("0F0,0B0,0F1,0B1,2F0,2B0,2F1,2B1\n1F0,1B0,1F1,1B1\n", ["3 stages on 2", "2 or 4"]),
        (
            "0F0,0B0,1F0p1,1B0p1\n1F0,1B0,0F0p1,0B0p1\n".replace("p1", "p2"),
            ["no operation of stage 0 in pipe 1"],
        ),
        (
            "0F0,0B0,0F0p1,0B0p1\n1F0,1B0,1F0p1,1B0p1\n",
            ["2 pipes", "over an even number of ranks"],
        ),
        ("", ["empty"]),
    ],
)
def test_a_file_that_cannot_run_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        build_step(Plan(pp=2, microbatches=2, schedule=str(path)))
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


def test_tied_embeddings_need_opposite_ranks(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("1F0,1B0\n0F0,0B0\n2F0,2B0\n3F0,3B0\n")
    plan = Plan(pp=4, schedule=str(path))
    build_step(plan, ModelConfig())
    with pytest.raises(UserError, match="first stage on rank 1 and the last on rank 3"):
        build_step(plan, ModelConfig(tied_embeddings=True))


def test_a_search_fits_the_plan_its_costs_and_its_cap() -> None:
    model = ModelConfig(num_layers=4)
    keys: dict[str, Any] = {"pp": 2, "microbatches": 6, "schedule": "search"}
    plan = Plan(**keys)
    schedule = build_step(plan, model, 64)
    assert (schedule.num_ranks, schedule.num_stages, schedule.total_microbatches) == (2, 2, 6)
    check(schedule)
    costs = estimated_costs(plan, model, 64)
    best = min(
        simulate(build(name, 2, 6), costs).makespan for name in ("1f1b", "gpipe", "zb_h1", "zb_h2")
    )
    assert simulate(schedule, costs).makespan <= best
    capped = build_step(Plan(**keys, schedule_memory_cap=1.5), model, 64)
    assert max(peak.activation for peak in peak_memory(capped)) <= 1.5
    assert max(peak.activation for peak in peak_memory(schedule)) > 1.5
    assert build_step(Plan(**keys, stages_per_rank=2), model, 64).num_stages == 4
    with pytest.raises(UserError, match="below one microbatch"):
        build_step(Plan(**keys, schedule_memory_cap=0.5), model, 64)


def test_estimated_costs_know_the_head_attention_and_recomputation() -> None:
    model = ModelConfig(num_layers=4)

    def of(recompute: Any, seq_len: int) -> Costs:
        plan = Plan(pp=2, recompute=recompute, layers_per_stage=(2, 2))
        return estimated_costs(plan, model, seq_len)

    short, long = of("none", 1), of("none", 100_000)
    head = model.vocab_size * model.hidden_size
    assert short.weight_gradient == long.weight_gradient
    for costs in (short, long):
        forward, inputs, weights = costs.forward, costs.input_gradient, costs.weight_gradient
        for values in (forward, inputs, weights):
            assert isinstance(values, list)
        assert inputs == [2 * f - w for f, w in zip(forward, weights, strict=True)]
    assert of("full", 1).input_gradient == [
        i + f - extra
        for i, f, extra in zip(short.input_gradient, short.forward, (0, head), strict=True)
    ]
    # Dense first layer or not: whatever layers cost, equal layers differ by the head alone.
    even = ModelConfig(num_layers=4, first_dense_layers=0)
    first, last = estimated_costs(Plan(pp=2, layers_per_stage=(2, 2)), even, 64).forward
    assert last - first == head


def test_measured_costs_fill_in_halves_and_sums() -> None:
    def record(kind: str, stage: int, start: float, end: float) -> WorkRecord:
        return WorkRecord(rank=stage, name=kind, start=start, end=end, kind=kind, stage=stage)

    costs = measured_costs(
        [record("F", 0, 0, 1), record("B", 0, 1, 4), record("I", 1, 0, 2), record("W", 1, 2, 5)]
    )
    whole = build("1f1b", 2, 1)
    split = build("zb_h1", 2, 1)
    for schedule in (whole, split):
        bound = costs.bind(schedule)
        times = {str(op): bound.op(op) for rank in range(2) for op in schedule.ops(rank)}
        assert times["0F0"] == 1
        if schedule is whole:
            assert (times["0B0"], times["1B0"]) == (3, 5)
        else:
            assert [times[name] for name in ("0I0", "0W0", "1I0", "1W0")] == [1.5, 1.5, 2, 3]


def test_a_search_takes_the_times_that_a_run_has_measured(tmp_path: Path) -> None:
    """Costs come from the timeline of a run, unless its number of stages differs."""
    given = Costs(forward=[1, 4], input_gradient=[2, 3], weight_gradient=[0.5, 5])
    timeline = simulate(build("zb_h1", 2, 4), given).timeline
    (tmp_path / "timeline.json").write_text(json.dumps(timeline.to_json()))
    costs, stages = costs_of_run(tmp_path)
    assert stages == 2
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == (
        given.forward,
        given.input_gradient,
        given.weight_gradient,
    )
    keys: dict[str, Any] = {"microbatches": 6, "schedule": "search"}
    keys["schedule_costs"] = str(tmp_path)
    schedule = build_step(Plan(pp=2, **keys))
    best = min(simulate(build(name, 2, 6), given).makespan for name in ("1f1b", "zb_h1", "zb_h2"))
    assert simulate(schedule, given).makespan <= best
    with pytest.raises(UserError, match=r"measured 2 stages, the plan has .* = 2\*2 = 4"):
        build_step(Plan(pp=2, stages_per_rank=2, **keys))
    with pytest.raises(UserError, match="take the costs of a run with 4"):
        build_step(Plan(pp=4, **keys))
    with pytest.raises(UserError, match=r"none/timeline\.json cannot be read"):
        costs_of_run(tmp_path / "none")
    # A new run in the folder has other times; a foreign file has none.
    one = simulate(build("gpipe", 1, 4), Costs(forward=1, input_gradient=2, weight_gradient=1))
    for text, message in (
        (json.dumps(one.timeline.to_json()), "measured 1 stages"),
        ('{"ranks": [1e999], "records": [], "source": "measured", "unit": "s"}', "does not hold"),
        ('{"ranks": [0], "records": [7], "source": "measured", "unit": "s"}', "does not hold"),
    ):
        (tmp_path / "timeline.json").write_text(text)
        with pytest.raises(UserError, match=message):
            build_step(Plan(pp=2, **keys))
