"""`moemesh schedule`: its output, its files and its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moemesh.cli.pipelines import schedule_text
from moemesh.config.schedule_table import SCHEDULES
from moemesh.schedule.answer import answer, compare
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.request import ScheduleRequest
from moemesh.schedule.simulate import simulate
from moemesh.schedule.text import to_text
from tests.test_cli import Invoke, run_guarded


def of(name: object, ranks: int | None = 4, microbatches: int | None = 8, **more: Any) -> Any:
    """The answer about a schedule of four ranks, or of others."""
    request = {"name": str(name), "ranks": ranks, "microbatches": microbatches}
    return answer(ScheduleRequest(**request | more))


def test_costs_per_stage_blocks_and_messages() -> None:
    given = {"forward": "1,2.5", "dgrad": "1,2", "wgrad": "0.5", "block": "3", "comm": "0.25"}
    costs = Costs(
        forward=(1, 2.5), input_gradient=(1, 2), weight_gradient=0.5, overlapped=3, message=0.25
    )
    result = of("dualpipe", 2, **given)
    assert result.simulation.makespan == simulate(build("dualpipe", 2, 8), costs).makespan
    # No formula holds for unequal stages.
    assert result.closed is None and "closed_form" not in result.to_json()


def test_ampnet_runs_under_the_given_costs() -> None:
    slow, plain = of("ampnet", 3, 6, forward="1,9,1", comm="2"), of("ampnet", 3, 6)
    assert slow.schedule.orders != plain.schedule.orders


@pytest.mark.parametrize(
    ("option", "has_effect", "has_none"),
    [
        ("block", ("dualpipe", "dualpipe_v"), ("gpipe", "zb_h1", "chimera")),
        ("weight_memory", ("zb_h1", "search", "dualpipe"), ("gpipe", "ampnet", "terapipe")),
        ("relaxed", ("interleaved_1f1b",), ("1f1b", "zb_h2")),
    ],
)
def test_an_option_has_an_effect_or_is_refused(
    option: str, has_effect: tuple[str, ...], has_none: tuple[str, ...], tmp_path: Path
) -> None:
    given: dict[str, Any] = {option: True if option == "relaxed" else "0.5"}
    if option == "relaxed":
        given |= {"stages_per_rank": None, "comm": "1"}
    for name in has_effect:
        chunks = {"stages_per_rank": 2} if name == "interleaved_1f1b" else {}
        of(name, **given | chunks)
    flag = f"--{option.replace('_', '-')} has no effect"
    for name in has_none:
        with pytest.raises(ValueError, match=flag):
            of(name, **given)
    path = tmp_path / "mine.txt"
    path.write_text(to_text(build("1f1b", 4, 8)))
    with pytest.raises(ValueError, match=flag):
        of(path, **given)


def test_all_schedules_take_the_options_that_are_theirs() -> None:
    """One of others does not refuse a schedule, nor change it."""
    given = {"ranks": 4, "microbatches": 8, "block": "4", "weight_memory": "0.5"}
    rows = {row["name"]: row for row in compare(ScheduleRequest(**given))}
    assert not [name for name, row in rows.items() if "refused" in row]
    assert rows["gpipe"]["makespan"] == 33
    assert rows["dualpipe"]["makespan"] == of("dualpipe", block="4").simulation.makespan


def test_messages_name_the_options() -> None:
    for name, more, words in (
        ("terapipe", {"num_slices": 0}, "needs --slices >= 1"),
        ("ampnet", {"max_in_flight": 0}, "nearest: --in-flight 1"),
        ("ampnet", {"num_slices": 2}, "no --slices: it takes --in-flight, --window$"),
        ("1f1b", {"stages_per_rank": 3}, "nearest: --stages-per-rank 1"),
        ("1f1b", {"dgrad": "1,2"}, "--dgrad has 2 costs for 4 stages"),
        ("search", {"memory_cap": "0.5"}, "--memory-cap 0.5 of rank 0"),
        ("num_slices.txt", {}, "^num_slices.txt cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            of(name, **more)


def test_relaxed_is_labelled_and_shorter() -> None:
    request = {"name": "interleaved_1f1b", "microbatches": 16, "stages_per_rank": 2, "comm": "1"}
    strict, relaxed = (of(**request, relaxed=value) for value in (False, True))
    assert relaxed.simulation.makespan < strict.simulation.makespan
    assert relaxed.to_json()["relaxed"] is True and "relaxed" not in strict.to_json()
    assert "cannot run as drawn" in schedule_text(relaxed)
    with pytest.raises(ValueError, match="--relaxed needs one pipe"):
        of("zb_v", relaxed=True)


@pytest.mark.parametrize("name", [*SCHEDULES, "search"])
def test_lines_behind_the_picture_fit_80_characters(name: str) -> None:
    assert max(map(len, schedule_text(of(name)).splitlines())) <= 80


@pytest.mark.parametrize("block", ["0", "2.5", "9"])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_a_block_that_no_overlap_explains_has_no_formula(name: str, block: str) -> None:
    """Shorter than the longer of its two passes, or longer than both."""
    closed = of(name, forward="1.5", dgrad="1.5", block=block).closed
    assert closed is not None
    assert (closed.bubble is None) == (block != "2.5")


@pytest.mark.parametrize(
    ("ranks", "microbatches", "nearest"),
    [(4, 10**20, "microbatches 166666"), (10**6, 10**6, "microbatches 1, ranks 666666")],
)
def test_too_many_operations(ranks: int, microbatches: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=nearest):
        build("gpipe", ranks, microbatches)


def test_the_table_shows_formula_beside_simulation() -> None:
    shown = schedule_text(of("zb_h1", wgrad="0.5"))
    formula = r"span bubble +4\.5  \(p-1\)\(tF\+tI-tW\) = 4\.5   \(m >= p, tW <= tF\)"
    assert re.search(formula, shown)
    assert "(not here: m >= p, tW <= tF)" in schedule_text(of("zb_h1", 4, 3))


@pytest.mark.parametrize(
    ("given", "nearest"),
    [({"num_slices": 10**9}, "num_slices 166666"), ({"num_slices": 666_667}, "num_slices 166666")],
)
def test_too_many_slices(given: dict[str, int], nearest: str) -> None:
    with pytest.raises(ValueError, match=f"nearest: {nearest}"):
        build("terapipe", 2, 2, **given)
    build("terapipe", 2, 1, num_slices=4)


class TestFiles:
    def test_a_table_by_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.csv"
        path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        assert of(path, None, None).simulation.makespan == 9

    def test_options_must_fit_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.txt"
        path.write_text(to_text(build("gpipe", 4, 8)))
        with pytest.raises(ValueError) as caught:
            of(path, 2, 8, window=3, memory_cap="2")
        lines = str(caught.value).splitlines()
        assert lines[0] == f"--ranks 2, but {path} has 4" and len(lines) == 3


class TestCommandLine:
    def test_json_and_files(self, invoke: Invoke, tmp_path: Path) -> None:
        words = ["schedule", "zb_h2", "--ranks", "4", "--microbatches", "8", "--json"]
        files = {name: tmp_path / f"a.{name}" for name in ("svg", "trace", "save")}
        for name, path in files.items():
            words += [f"--{name}", str(path)]
        code, out, err = invoke(*words)
        assert (code, err) == (0, "")
        document = json.loads(out)
        assert document["makespan"] == 27 and document["bubble_rate"] == 0
        assert document["peak_activation"] == [7, 7, 7, 7] and document["weight_copies"] == 1
        assert document["actions"][1][:6] == ["1F0", "1F1", "1F2", "1F3", "1F4", "1I0"]
        assert files["svg"].read_text().startswith("<svg")
        assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 96
        again = invoke("schedule", str(files["save"]), "--json")
        # A file may hold a schedule of that name and be another one: formulas are for generators.
        del document["closed_form"]
        assert json.loads(again[1]) == document

    def test_nothing_is_written_where_one_output_cannot_be(
        self, invoke: Invoke, tmp_path: Path
    ) -> None:
        svg, same = str(tmp_path / "a.svg"), str(tmp_path / "." / "a.svg")
        words = ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--svg", svg)
        for option, path, reason in (
            ("--save", str(tmp_path / "none" / "a.txt"), "none does not exist"),
            ("--save", str(tmp_path), "it is a folder"),
            ("--trace", same, "it is named for 2 outputs"),
            ("--save", same, "it is named for 2 outputs"),
        ):
            code, out, err = invoke(*words, option, path)
            assert (code, out) == (2, "") and reason in err
            assert not list(tmp_path.iterdir())
        # Of three outputs two have one path.
        other = str(tmp_path / "b.txt")
        assert "for 2 outputs" in invoke(*words, "--trace", same, "--save", other)[2]

    def test_picture(self, invoke: Invoke) -> None:
        words = ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
        _, picture, _ = invoke(*words, "--text")
        assert picture.splitlines()[1] == "rank 1: .  F0 B0--- F1 B1---"
        _, everything, _ = invoke(*words)
        assert picture in everything and "(p-1)(tF+tB) = 3" in everything

    def test_it_starts_light(self) -> None:
        forbidden = {"torch", "numpy", "scipy", "numba", "pandas", "rich", "jinja2"}
        words = ("schedule", "zb_v", "--ranks", "4", "--microbatches", "8")
        done = run_guarded(forbidden, *words)
        assert done.returncode == 0, done.stderr


def test_all_schedules_in_one_table(invoke: Invoke) -> None:
    sizes = ("--ranks", "4", "--microbatches", "8")
    code, out, _ = invoke("schedule", "--all", *sizes)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert code == 0
    assert set(SCHEDULES) <= set(rows)
    assert rows["gpipe"][3] == "8" and rows["1f1b"][3] == "4"  # activation
    assert rows["chimera"][4] == rows["dualpipe"][4] == "2"  # copies of weights
    # A rank between two others sends each microbatch on and its gradient back; twice with two
    # chunks of layers.
    assert rows["1f1b"][5] == rows["terapipe"][5] == "16"
    assert rows["interleaved_1f1b"][5] == "32"


def test_a_schedule_that_cannot_be_made_is_told_beside_the_others(invoke: Invoke) -> None:
    sizes = ("--ranks", "3", "--microbatches", "5")
    _, out, _ = invoke("schedule", "--all", *sizes, "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    single = json.loads(invoke("schedule", "zb_h1", *sizes, "--json")[1])
    assert "an even number of ranks" in rows["dualpipe"]["refused"]
    assert rows["zb_h1"]["bubble_rate"] == single["bubble_rate"]
    assert rows["zb_h1"]["peak_activation"] == max(single["peak_activation"])


def test_a_picture_and_an_object_are_two_answers(invoke):
    code, _, problem = invoke(
        "schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--text", "--json"
    )
    assert code == 2 and "--text and --json" in problem
