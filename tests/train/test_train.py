"""`moemesh train` as a user meets it: the run folder, any plan, resume, Ctrl-C, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moemesh.checkpoint.stored import read_manifest
from moemesh.monitor import lease
from moemesh.trace.run import Run
from tests import commands
from tests.drill.rank import Spec
from tests.train.runs import (
    arguments,
    interrupted,
    killed,
    losses,
    metrics,
    moemesh,
    rows_of,
    said,
    start,
    torchrun,
    train,
)
from tests.train.test_step_clock import assert_seconds_of_two_ranks
from tests.waiting import PATIENCE, ended, until
from tests.without_linux import MODULE

TWO_RANKS = {"plan__tp": 2, "plan__ep": 2, "train__log_every": 1}
FILES = ["config.toml", "plan.json", "metrics.jsonl", "ledger.json", "timeline.json"]
FILES += ["memory.json", "loads.jsonl", "report.html"]


def assert_close(ours: list[float], theirs: list[float], tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    assert max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) <= tolerance


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    train(out, train__checkpoint_every=2)
    return out


@pytest.fixture
def one_rank_copy(one_rank: Path, tmp_path: Path) -> Path:
    """The run with checkpoints at steps 2 and 4, in a folder of its own."""
    return shutil.copytree(one_rank, tmp_path / "run")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "run"
    (out.parent / "stdout").write_text(said(*arguments(out, **TWO_RANKS)))
    return out


def test_the_run_folder_is_complete(two_ranks: Path) -> None:
    assert all((two_ranks / name).is_file() for name in FILES)
    assert (two_ranks / "checkpoints" / "step-4" / "manifest.json").is_file()
    assert not (two_ranks / "failure.json").exists()
    keys = ["step", "loss", "grad_norm", "aux_loss", "tokens", "tokens_per_second", "lr", "seconds"]
    rows = metrics(two_ranks)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(key in row for row in rows for key in keys)
    assert rows[0]["tokens"] == 6 * 16 and "validation_loss" in rows[-1]
    run = Run.load(two_ranks)
    state = read_manifest(two_ranks / "checkpoints/step-4").state
    assert state["config"] == (two_ranks / "config.toml").read_text()
    assert state["data"] == json.loads((two_ranks / "data.json").read_text())
    assert [(one.step, one.text) for one in run.events if one.kind == "saved"] == [
        (4, "first checkpoint of this start: step 4")
    ]
    assert json.loads((two_ranks / "plan.json").read_text())["world_size"] == 2
    memory = json.loads((two_ranks / "memory.json").read_text())
    assert {profile["rank"] for profile in memory["ranks"]} == {0, 1}
    assert all(sum(loads.tokens_per_expert) == 6 * 16 * 2 for loads in run.loads)


def test_the_wait_for_other_ranks_is_measured(two_ranks: Path) -> None:
    waits = [(row["communication_seconds"], row["seconds"]) for row in metrics(two_ranks)]
    assert all(0 <= wait <= seconds for wait, seconds in waits), waits
    assert any(wait > 0 for wait, _ in waits)
    lines = (two_ranks.parent / "stdout").read_text().splitlines()
    assert all(", ranks " in line for line in lines if line.startswith("step "))


def test_predicted_and_measured_seconds_add_up_to_the_steps(two_ranks: Path) -> None:
    assert_seconds_of_two_ranks(two_ranks)


def test_two_plans_give_the_same_losses(one_rank: Path, two_ranks: Path) -> None:
    assert_close(losses(metrics(one_rank)), losses(metrics(two_ranks)))


def test_memory_and_traffic_stand_beside_their_predictions(two_ranks: Path) -> None:
    """The run's own routing is not uniform, so activations and exchanged rows are near."""
    memory, run = json.loads((two_ranks / "memory.json").read_text()), Run.load(two_ranks)
    for predicted, measured in zip(memory["predicted"], memory["ranks"], strict=True):
        for part in ("dense_weights", "expert_weights", "gradients", "optimizer"):
            assert predicted[part] == measured[part] > 0
        assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.1)
        assert sum(measured["activation_kinds"].values()) == measured["activations"]
    phase = {"axis": "dp_cp", "phase": "backward"}
    for rank, ledger in run.predicted_ledgers.items():
        assert ledger.total(**phase).wire_bytes * 4 == run.ledgers[rank].total(**phase).wire_bytes


def test_resume_in_another_plan_goes_on_with_the_same_losses(
    one_rank_copy: Path, one_rank: Path
) -> None:
    out = one_rank_copy
    shutil.rmtree(out / "checkpoints" / "step-4")
    (out / "timeline_simulated.json").write_text("{}")  # of an end under the first plan
    keys = {"data__path": str(one_rank.parent / "corpus.txt"), "train__checkpoint_every": 2}
    rows = train(out, **keys, plan__dp=2, plan__ep=2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    plans = Run.load(out).plans
    assert [one.record["dp"] for one in plans] == [1, 2] and plans[1].last == 4
    assert not (out / "timeline_simulated.json").exists()
    assert_close(losses(rows), losses(metrics(one_rank)))


@pytest.mark.slow
def test_checkpoints_behind_an_address_outlive_their_machine(tmp_path: Path) -> None:
    """The run folder is gone with its machine; another machine resumes under another plan."""
    keys = {"train__checkpoint_every": 2, "train__steps": 6}
    whole = losses(train(tmp_path / "whole", **keys))
    keys["train__checkpoint_folder"] = f"file://{tmp_path}/bucket/run"
    out = tmp_path / "run"
    killed(out, (tmp_path / "bucket/run/step-2/manifest.json").exists, **keys)
    assert not (out / "checkpoints").exists()
    again = tmp_path / "again"
    rows = train(again, **keys, plan__dp=2, plan__ep=2)
    first = rows[0]["step"]
    assert first > 2
    assert_close(losses(rows), whole[first - 1 :])
    said("convert", again, tmp_path / "exported")
    assert (tmp_path / "exported/config.json").exists()
    refused = said(*arguments(tmp_path / "third", **keys, train__resume="never"), code=2)
    assert 'train.resume is "never"' in refused


@pytest.mark.representative("replicate")
@pytest.mark.parametrize("data", ["replicate", "zero1", "zero2", "zero3"])
def test_a_killed_run_ends_with_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, data: str, two_ranks: Path
) -> None:
    keys = TWO_RANKS | {"train__checkpoint_every": 2, "plan__data": data, "train__restarts": 0}
    rows = metrics(two_ranks) if data == "replicate" else train(tmp_path / "whole", **keys)
    whole, out = losses(rows), tmp_path / "run"
    spec = Spec(action="kill", rank=1, step=4, place="forward", folder=str(tmp_path))
    said(spec.text(), *arguments(out, **keys), code=137, module="tests.drill.rank")
    shutil.copytree(out, tmp_path / "other")
    rows = train(out, **keys)
    assert "resumed" in {event["kind"] for event in rows_of(out / "events.jsonl")}
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert losses(rows) == whole  # bit by bit
    if data != "replicate":
        assert_close(losses(train(tmp_path / "other", **keys | {"plan__data": "replicate"})), whole)


def test_ctrl_c_saves_and_exits_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = TWO_RANKS | {"train__checkpoint_every": 1000, "train__steps": 2000}
    stdout, stderr = interrupted(out, signal.SIGINT, 130, **keys)
    assert "stopped at step" in stdout and "Traceback" not in stdout + stderr
    (saved,) = [int(p.name[5:]) for p in (out / "checkpoints").glob("step-*")]
    assert len(metrics(out)) == saved
    again = moemesh(
        *arguments(out, **keys | {"train__steps": saved + 2}), "--allow-change", "train.steps"
    )
    assert f"resumed from step {saved}" in again.stdout
    assert len(metrics(out)) == saved + 2


def test_the_same_command_after_the_end_does_nothing(two_ranks: Path) -> None:
    before = (two_ranks / "metrics.jsonl").read_bytes()
    assert "already trained" in said(*arguments(two_ranks, **TWO_RANKS))
    assert (two_ranks / "metrics.jsonl").read_bytes() == before


#: The command, which waits for the page of a failed run however busy the machine is.
PATIENT = f"""
from moemesh.cli import main
from moemesh.train.records import failure
failure._PAGE_SECONDS = {PATIENCE}
main()
"""


def test_a_run_without_a_finite_gradient_ends(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"train__lr": 1e30, "train__clip": 0, "train__steps": 50}
    done = ended([commands.python(), "-c", PATIENT, *arguments(tmp_path / "run", **keys)])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no step of the last 5 was finite" in done.stderr
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert "lower train.lr (1e+30)" in failure["advice"] and failure["advice"] in done.stderr
    assert "goes on" not in done.stderr
    assert len(metrics(tmp_path / "run")) < 20
    page = (tmp_path / "run" / "report.html").read_text()
    assert "This run failed" in page and "ower train.lr (1e+30)" in page


# Mistakes: one clear message, exit code 2 (1 at run time), nothing lost.


def test_another_run_does_not_go_on_from_a_checkpoint_in_a_new_folder(
    tmp_path: Path, one_rank: Path
) -> None:
    shutil.copytree(one_rank / "checkpoints", tmp_path / "kept")
    keys = {"train__checkpoint_folder": f"file://{tmp_path}/kept", "train__steps": 6}
    keys["data__path"] = str(one_rank.parent / "corpus.txt")
    new = tmp_path / "new"
    refused = said(*arguments(new, **keys, train__seed=7, model__num_heads=4), code=2)
    assert "--allow-change train.seed" in refused and not new.exists()
    assert "model.num_heads: 8 -> 4 (model)" in refused
    assert "resumed from step 4" in said(*arguments(new, **keys))


def test_a_run_that_was_killed_before_it_saved_begins_again_and_keeps_its_rows(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"

    def has_rows() -> bool:
        files = [out / "metrics.jsonl", out / "loads.jsonl"]
        return all(file.exists() and file.stat().st_size for file in files)

    killed(out, has_rows, train__steps=5000)
    rows = (out / "metrics.jsonl").read_bytes()
    short = [*arguments(out, train__steps=2), "--allow-change", "train.steps"]
    assert "kept in metrics-1.jsonl and loads-1.jsonl" in said(*short)
    assert (out / "metrics-1.jsonl").read_bytes() == rows and len(metrics(out)) == 2
    # Of a run that has saved nothing is replaced.
    shutil.rmtree(out / "checkpoints")
    rows = (out / "metrics.jsonl").read_bytes()
    assert "run records 2 steps, and" in said(*short, code=2)
    assert (out / "metrics.jsonl").read_bytes() == rows and not (out / "checkpoints").exists()


def test_runs_take_the_lease_of_their_folder(one_rank: Path, two_ranks: Path) -> None:
    """Its file stays; tests/train/test_folder.py has what a held lease refuses."""
    assert all((run / lease.FILE).exists() for run in (one_rank, two_ranks))


def test_a_truncated_checkpoint_is_named_and_the_older_one_used(
    one_rank_copy: Path, one_rank: Path
) -> None:
    out = one_rank_copy
    keys = {"data__path": str(one_rank.parent / "corpus.txt"), "train__checkpoint_every": 2}
    whole = losses(metrics(out))
    broken = out / "checkpoints" / "step-4" / "rank-00000.safetensors"
    os.truncate(broken, broken.stat().st_size // 2)
    done = moemesh(*arguments(out, **keys))
    assert done.returncode == 0 and "checkpoint 4 skipped" in done.stderr
    assert str(broken) in done.stderr and "resumed from step 2" in done.stdout
    assert losses(metrics(out)) == whole
    for checkpoint in (out / "checkpoints").glob("step-*"):
        (checkpoint / "manifest.json").write_text("{}")
    done = moemesh(*arguments(out, **keys))
    assert done.returncode == 1 and "no checkpoint" in done.stderr
    assert json.loads((out / "failure.json").read_text())["kind"] == "CheckpointError"


@pytest.mark.slow
def test_torchrun_joins_and_a_wrong_world_size_is_told(tmp_path: Path, two_ranks: Path) -> None:
    done = torchrun("moemesh", *arguments(tmp_path / "good", **TWO_RANKS))
    assert done.returncode == 0, done.stderr
    assert losses(metrics(tmp_path / "good")) == losses(metrics(two_ranks))
    given = arguments(tmp_path / "bad", **TWO_RANKS)
    done = torchrun("moemesh", *given, options=["--nproc-per-node=3"])
    assert done.returncode != 0
    assert "3 ranks were started, the plan needs pp*dp*cp*tp = 1*1*1*2 = 2" in done.stderr
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow
def test_a_signal_that_comes_twice_does_not_cut_the_save_short(tmp_path: Path) -> None:
    """Whoever stops a whole job reaches its ranks directly and through the launcher."""
    out = tmp_path / "run"
    process = start(*arguments(out, **TWO_RANKS, train__steps=100000))
    until((out / "metrics.jsonl").exists, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [process.pid, *map(int, children)]:
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, stdout + stderr
    assert "stopped at step" in stdout and not (out / "failure.json").exists()
    assert list((out / "checkpoints").glob("step-*/manifest.json"))


def test_a_refusal_under_torchrun_leaves_a_good_run_alone(two_ranks: Path) -> None:
    done = torchrun("moemesh", *arguments(two_ranks, **TWO_RANKS, train__lr=0.5))
    assert done.returncode != 0 and "--allow-change train.lr" in done.stderr
    assert "Connection closed" not in done.stderr
    assert not (two_ranks / "failure.json").exists()


def test_another_optimizer_starts_its_moments_afresh(one_rank_copy: Path, one_rank: Path) -> None:
    out, corpus = one_rank_copy, str(one_rank.parent / "corpus.txt")
    again = arguments(out, train__optimizer="muon", train__steps=5, data__path=corpus)
    output = said(*again, "--allow-change", "train.optimizer")
    assert "resumed from step 4" in output and len(metrics(out)) == 5


TWO = {"plan__dp": 2, "train__restarts": 0}


def elsewhere(*words: str) -> subprocess.CompletedProcess[str]:
    command = [commands.python(), "-m", MODULE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def test_a_run_goes_on_with_two_ranks_and_names_the_one_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    spec = Spec(action="kill", rank=1, step=4, place="forward", folder=str(tmp_path))
    words = arguments(out, train__checkpoint_every=2, **TWO)
    killed = elsewhere("tests.drill.rank", spec.text(), *words)
    assert killed.returncode == 137, killed.stderr
    assert "moemesh: rank 1 was killed by SIGKILL\n" in killed.stderr
    assert json.loads((out / "failure.json").read_text())["rank"] == 1
    again = elsewhere("moemesh", *words)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
