"""`moemesh train` with every schedule: the losses of one device, checkpoints across pipelines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moemesh.schedule.text import digest, load
from moemesh.trace.timeline import Timeline
from tests.parallel.pipelining import SYNCHRONOUS
from tests.test_cli import run
from tests.train import runs

DEEP: dict[str, Any] = {"model__num_layers": 8, "plan__microbatches": 8, "data__global_batch": 8}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return runs.train(tmp_path_factory.mktemp("one") / "run", **DEEP)


def assert_same_losses(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    for name in ("loss", "aux_loss", "grad_norm"):
        assert [row[name] for row in got] == pytest.approx(
            [row[name] for row in expected], rel=1e-5
        )
    assert got[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_pipeline_is_resumed_as_another_one_and_as_none(
    tmp_path: Path, one_device: list[dict[str, Any]]
) -> None:
    """V placement, then mirrored replicas, then one device: checkpoints know no stages."""
    keys = DEEP | {"train__checkpoint_every": 1, "train__checkpoints_kept": 4}
    plans: list[dict[str, Any]] = [
        {"plan__pp": 4, "plan__schedule": "zb_v"},
        {"plan__pp": 4, "plan__schedule": "dualpipe"},
        {},
    ]
    out = tmp_path / "run"
    for done, plan in enumerate(plans):
        if done:
            for later in range(done + 1, 5):
                shutil.rmtree(out / "checkpoints" / f"step-{later}")
        finished = runs.moemesh(*runs.arguments(out, **(keys | plan)))
        assert finished.returncode == 0, finished.stderr
    assert_same_losses(runs.metrics(out), one_device)


def test_the_measured_timeline_has_its_simulation_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    runs.train(out, **DEEP, plan__pp=2, plan__dp=2, plan__schedule="zb_v", train__steps=2)
    measured, simulated = (
        Timeline.from_json(json.loads((out / name).read_text()))
        for name in ("timeline.json", "timeline_simulated.json")
    )
    assert measured.source, simulated.source == ("measured", "simulated")
    assert measured.digest == simulated.digest != ""
    assert simulated.ranks == (0, 2)  # one pipeline of the two
    names = [
        sorted(r.name for r in timeline.records if r.rank == 2 and r.kind in "FBIW" and r.kind)
        for timeline in (measured.last_step(), simulated)
    ]
    assert names[0] == names[1] and len(names[0]) == 2 * 3 * 8
    assert "simulated above measured" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"plan__pp": 3, "plan__schedule": "chimera"}, ["chimera", "3"]),
        (
            {"plan__pp": 4, "plan__schedule": "dualpipe", "plan__microbatches": 6},
            ["dualpipe", "6", "8"],
        ),
        ({"plan__pp": 4, "plan__schedule": "interleaved_1f1b", "plan__microbatches": 6}, ["6"]),
        ({"plan__pp": 8, "plan__schedule": "zb_v"}, ["zb_v", "16", "num_layers is 8", "pp = 4"]),
        ({"plan__pp": 2, "plan__layers_per_stage": [3, 4]}, ["[4, 4]", "num_layers (8)"]),
        ({"plan__pp": 2, "plan__stages_per_rank": 2}, ["stages_per_rank"]),
        ({"plan__pp": 2, "plan__schedule": "zbh1"}, ["zb_h1", "choices"]),
        ({"plan__pp": 2, "plan__schedule": "no.txt"}, ["no.txt", "No such file"]),
        (
            {"plan__pp": 2, "plan__schedule_memory_cap": 2.0},
            ["schedule_memory_cap belongs to schedule = search, not 1f1b"],
        ),
        (
            {"plan__pp": 2, "plan__schedule": "search", "plan__schedule_costs": "no/run"},
            ["no/run/timeline.json", "No such file"],
        ),
    ],
)
def test_conditions_of_a_schedule_are_told_before_anything_starts(
    tmp_path: Path,
    keys: dict[str, Any],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = runs.arguments(tmp_path / "run", **(DEEP | keys))
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_a_searched_schedule_trains_from_the_command_line(
    tmp_path: Path,
    one_device: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`schedule search --save`, then `train` with the file: by a relative path, resumed when the
    file has changed, and when it is gone."""
    monkeypatch.chdir(tmp_path)
    words = ["schedule", "search", "--ranks", "2", "--microbatches", "8", "--stages-per-rank", "2"]
    saved = runs.moemesh(*words, "--save", "s.txt")
    assert "moemesh train --set plan.pp=2 --set plan.stages_per_rank=2" in saved.stdout
    keys = DEEP | {"plan__pp": 2, "plan__stages_per_rank": 2, "train__checkpoint_every": 1}
    keys |= {"train__checkpoints_kept": 4, "plan__schedule": "s.txt"}
    out = tmp_path / "run"
    assert_same_losses(runs.train(out, **keys), one_device)
    assert (out / "schedule.txt").read_text() == Path("s.txt").read_text()
    simulated = Timeline.from_json(json.loads((out / "timeline_simulated.json").read_text()))
    assert simulated.digest == digest(load(out / "schedule.txt"))

    shutil.rmtree(out / "checkpoints" / "step-4")
    runs.moemesh("schedule", "dualpipe_v", "--ranks", "2", "--microbatches", "8", "--save", "s.txt")
    again = runs.moemesh(*runs.arguments(out, **keys))
    assert "changed since the last call: the schedule s.txt: digest" in again.stdout
    assert load(out / "schedule.txt").name == "dualpipe_v"
    assert_same_losses(runs.metrics(out), one_device)

    for step in (3, 4):
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
    Path("s.txt").unlink()
    again = runs.moemesh(*runs.arguments(out, **keys))
    assert "s.txt is gone: the run goes on with its copy" in again.stdout
    assert_same_losses(runs.metrics(out), one_device)


@pytest.mark.slow
def test_costs_of_a_run_make_the_schedule_of_the_next(
    tmp_path: Path, one_device: list[dict[str, Any]]
) -> None:
    keys = DEEP | {"plan__pp": 2, "train__checkpoint_every": 2}
    runs.train(tmp_path / "measured", **keys)
    keys |= {"plan__schedule": "search", "plan__schedule_costs": str(tmp_path / "measured")}
    out = tmp_path / "run"
    assert_same_losses(runs.train(out, **keys), one_device)
    text = (out / "schedule.txt").read_text()
    (tmp_path / "measured" / "timeline.json").write_text("{}")
    problem = runs.moemesh(*runs.arguments(tmp_path / "other", **keys))
    assert problem.returncode == 2 and "is no timeline of a run" in problem.stderr
    # Going on needs no costs: the run has its schedule.
    shutil.rmtree(out / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "measured")
    assert_same_losses(runs.train(out, **keys), one_device)
    assert (out / "schedule.txt").read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_trains_with_the_losses_of_one_device(
    tmp_path: Path, name: str, one_device: list[dict[str, Any]]
) -> None:
    keys = DEEP | {"plan__pp": 4, "plan__schedule": name}
    if name == "interleaved_1f1b":
        keys |= {"plan__stages_per_rank": 2}
    assert_same_losses(runs.train(tmp_path / "run", **keys), one_device)
