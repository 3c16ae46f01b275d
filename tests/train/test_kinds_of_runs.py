"""`moemesh train` with every schedule, with balanced experts, and with data of every kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.schedule.text import digest, load
from moemesh.sharding.load_run import load_run
from moemesh.trace.timeline import Timeline
from moemesh.train.preparation import untrainable
from tests.test_cli import Invoke
from tests.train import runs
from tests.train.runs import losses, train

DEEP: dict[str, Any] = {"model__num_layers": 4, "plan__microbatches": 4, "data__global_batch": 4}


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
        {"plan__pp": 2, "plan__schedule": "zb_v"},
        {"plan__pp": 2, "plan__schedule": "dualpipe"},
        {},
    ]
    out = tmp_path / "run"
    for done, plan in enumerate(plans):
        if done:
            for later in range(done + 1, 5):
                shutil.rmtree(out / "checkpoints" / f"step-{later}")
        runs.train(out, **(keys | plan))
    assert_same_losses(runs.metrics(out), one_device)


@pytest.fixture
def searched(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, Any]]:
    """A run of `train` with the file of `schedule search --save`, by a relative path."""
    monkeypatch.chdir(tmp_path)
    words = ["schedule", "search", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "2"]
    _, saved, _ = invoke(*words, "--save", "s.txt")
    assert "moemesh train --set plan.pp=2 --set plan.stages_per_rank=2" in saved
    keys = DEEP | {"plan__pp": 2, "plan__stages_per_rank": 2, "train__checkpoint_every": 3}
    keys |= {"train__checkpoints_kept": 4, "plan__schedule": "s.txt"}
    runs.train(out := tmp_path / "run", **keys)
    return out, keys


def test_a_searched_schedule_trains_from_the_command_line(
    one_device: list[dict[str, Any]],
    searched: tuple[Path, dict[str, Any]],
) -> None:
    """With the timeline of the simulation beside the measured one."""
    out, _ = searched
    assert_same_losses(runs.metrics(out), one_device)
    assert (out / "schedule.txt").read_text() == Path("s.txt").read_text()
    measured, simulated = (
        Timeline.from_json(json.loads((out / name).read_text()))
        for name in ("timeline.json", "timeline_simulated.json")
    )
    assert (measured.source, simulated.source) == ("measured", "simulated")
    assert measured.digest == simulated.digest == digest(load(out / "schedule.txt"))
    names = [
        sorted(r.name for r in timeline.records if r.rank == 1 and r.kind in "FBIW" and r.kind)
        for timeline in (measured.last_step(), simulated)
    ]
    assert names[0] == names[1] and len(names[0]) >= 2 * 2 * 4
    assert "simulated above measured" in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_run_resumes_without_the_file_of_its_schedule(
    one_device: list[dict[str, Any]],
    searched: tuple[Path, dict[str, Any]],
    invoke: Invoke,
    change: str,
) -> None:
    out, keys = searched
    shutil.rmtree(out / "checkpoints" / "step-4")
    name, words = load("s.txt").name, "s.txt is gone: the run continues with its copy"
    Path("s.txt").unlink()
    if change == "changed":
        name, words = "dualpipe_v", "changed since the last call: the schedule s.txt: digest"
        invoke("schedule", name, "--ranks", "2", "--microbatches", "4", "--save", "s.txt")
    assert words in runs.said(*runs.arguments(out, **keys))
    assert load(out / "schedule.txt").name == name
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
    problem = runs.said(*runs.arguments(tmp_path / "other", **keys), code=2)
    assert "does not hold the timeline of a run" in problem
    # Going on needs no costs: the run has its schedule.
    shutil.rmtree(out / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "measured")
    assert_same_losses(runs.train(out, **keys), one_device)
    assert (out / "schedule.txt").read_text() == text


KEYS: dict[str, Any] = {
    "plan__dp": 2,
    "plan__ep": 2,
    "train__steps": 6,
    "train__dtype": "float64",
}
MOVING = KEYS | {"train__rebalance_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [{}, {"plan__ep": 1}, {"plan__dp": 4, "plan__ep": 4}])
def test_a_run_goes_on_with_experts_where_they_were(
    tmp_path: Path, resumed: dict[str, Any]
) -> None:
    keys = MOVING | {"train__checkpoint_every": 4}
    whole = losses(train(tmp_path / "run", **keys))
    # The state of a run that was killed after step 4, when experts have moved.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    again = losses(train(tmp_path / "run", **keys | resumed))
    if resumed:
        assert again == pytest.approx(whole, rel=1e-12)
    else:
        assert again == whole  # bit by bit


def test_what_can_be_combined_is_not_refused() -> None:
    settings = ["plan.spare_slots=2", "plan.dispatcher=auto", "train.rebalance_every=3"]
    assert untrainable(load_run([], settings)) == []


CONFIG = """
[model]
num_layers = 2
hidden_size = 32
[data]
seq_len = 32
global_batch = 4
validation = "v.jsonl"
tokenizer = "tok"
[[data.sources]]
path = "a.jsonl"
weight = 3
[[data.sources]]
path = "b"
[train]
epochs = 0.02
warmup_steps = 2
checkpoint_every = 3
validation_batches = 1
dtype = "float64"
optimizer = "sgd"
"""


def write_lines(path: Path, seed: int, count: int) -> None:
    words = np.random.default_rng(seed).integers(0, 40, (count, 12))
    text = [" ".join(f"w{word}" for word in row) for row in words]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "b").mkdir()
    write_lines(tmp_path / "a.jsonl", 1, 500)
    write_lines(tmp_path / "b" / "one.jsonl", 2, 50)
    write_lines(tmp_path / "b" / "two.jsonl", 3, 50)
    write_lines(tmp_path / "v.jsonl", 4, 50)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def test_ranks_share_the_cache_and_no_layout_changes_the_losses(folder: Path) -> None:
    # Above the size that every rank would tokenize for itself.
    write_lines(folder / "a.jsonl", 1, 20_000)
    few = ["--set", "train.epochs=0.001"]
    printed = runs.said("train", "run.toml", *few, "--out", "one", cwd=folder)
    steps = len(losses(runs.metrics(folder / "one")))
    assert f"steps    {steps}: 0.001 epoch(s)" in printed and "2 sources" in printed
    assert "75.00%  a.jsonl" in printed and "validation v.jsonl" in printed
    assert "file(s)," in printed and len(list((folder / "token_cache").glob("*.bin"))) == 1
    plan = ["--set", "plan.dp=2", "--set", "plan.ep=2"]
    again = runs.said("train", "run.toml", *few, *plan, "--out", "two", cwd=folder)
    assert "file(s)," not in again  # nothing is tokenized a second time
    np.testing.assert_allclose(
        losses(runs.metrics(folder / "one")), losses(runs.metrics(folder / "two")), rtol=1e-9
    )
    assert f"steps = {steps}\n" in (folder / "one" / "config.toml").read_text()
    one, two = ((folder / run / "data.json").read_text() for run in ("one", "two"))
    assert one == two


def test_data_that_changed_in_place_are_refused(folder: Path) -> None:
    few = ["--set", "train.epochs=0.04", "--out", "run"]
    runs.said("train", "run.toml", *few, cwd=folder)
    steps = len(losses(runs.metrics(folder / "run")))
    more = ["--set", "train.epochs=0.052", "--out", "run"]
    original = (folder / "b" / "two.jsonl").read_text()
    (folder / "b" / "two.jsonl").write_text(original.replace("w1 ", "w2 "))
    error = runs.said("train", "run.toml", *more, code=2, cwd=folder)
    assert (
        "  b: " in error
        and "the same number, but other tokens" in error
        and "--allow-change data" in error
    )
    assert "  a.jsonl: " not in error
    # The run continues with the change allowed.
    (folder / "b" / "two.jsonl").write_text(original)
    write_lines(folder / "b" / "three.jsonl", 5, 9)
    last = ["--set", "train.epochs=0.064", "--out", "run"]
    assert "tokens then" in runs.said("train", "run.toml", *last, code=2, cwd=folder)
    output = runs.said("train", "run.toml", *last, "--allow-change", "data", cwd=folder)
    assert f"resumed from step {steps}" in output
    # Another tokenizer in the same folder is other data, too.
    file = folder / "tok" / "tokenizer.json"
    made = json.loads(file.read_text())
    vocabulary = made["model"]["vocab"]
    vocabulary["w"], vocabulary["x"] = vocabulary["x"], vocabulary["w"]
    file.write_text(json.dumps(made))
    error = runs.said("train", "run.toml", *last, code=2, cwd=folder)
    assert error.count("the same number, but other tokens") == 2
