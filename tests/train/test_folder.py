"""The run folder: resume rules, the lease, whole writes, rows cut back, changed configurations."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moemesh.checkpoint import ownership
from moemesh.checkpoint.retention import VerifiedState, remember
from moemesh.cli.application import load
from moemesh.config.changes import Change, compare
from moemesh.config.errors import UserError
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.data.samples import Samples
from moemesh.monitor.devices import FOLDER_VARIABLE, RESOLVED
from moemesh.monitor.lease import Lease
from moemesh.sharding.load_run import load_run
from moemesh.trace.run import is_locked
from moemesh.train.records import run_folder as folder_module
from moemesh.train.records.run_folder import (
    Events,
    RunFolder,
    RunFolderError,
    record_of_data,
    refuse_changes,
    refuse_other_data,
)
from tests.checkpoint.simulate import save_one, whole
from tests.data.texts import stream

METRICS = {"loss": 1.0, "grad_norm": 1.0, "aux_loss": 0.0, "tokens": 1, "tokens_per_second": 1.0,
           "lr": 0.1, "seconds": 1.0}  # fmt: skip


def test_module_does_not_import_torch() -> None:
    code = "import sys, moemesh.train.records.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- resume rules ------------------------------------------------------------------------------


def test_a_new_folder(tmp_path: Path) -> None:
    for resume in ("auto", "never"):
        run = RunFolder.open(tmp_path / resume / "deep", resume)  # pyright: ignore
        assert not run.has_run and run.checkpoints.is_dir()
    with pytest.raises(RunFolderError, match="holds no checkpoint"):
        RunFolder.open(tmp_path / "new", "must")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_a_run(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path)
    run.lock()
    run.release()
    assert RunFolder.open(tmp_path, "never").path == tmp_path  # locked once, but nothing written
    run.write_text("config.toml", "x = 1\n")
    run.row_log("metrics.jsonl").append([{"step": 1}])
    assert RunFolder.open(tmp_path, "auto").has_run
    with pytest.raises(RunFolderError, match=r"config\.toml.*metrics\.jsonl.*never"):
        RunFolder.open(tmp_path, "never")
    with pytest.raises(RunFolderError, match="holds no checkpoint"):
        RunFolder.open(tmp_path, "must")
    (run.checkpoints / ("step-3.tmp-" + "0" * 32)).mkdir()
    with pytest.raises(RunFolderError, match="holds no checkpoint"):
        RunFolder.open(tmp_path, "must")
    (run.checkpoints / "step-3").mkdir()
    for path in (tmp_path, tmp_path / "alone"):  # a checkpoint is a run, whatever is beside it
        (path / "checkpoints/step-3").mkdir(parents=True, exist_ok=True)
        assert RunFolder.open(path, "must").has_run and RunFolder.open(path, "auto").has_run
        with pytest.raises(RunFolderError, match="never"):
            RunFolder.open(path, "never")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: shutil.rmtree(run / "checkpoints"),
        lambda run: shutil.rmtree(run / "checkpoints/step-3"),
        lambda run: [(run / "checkpoints/verified.json").unlink(),
                     shutil.rmtree(run / "checkpoints/step-3"),
                     Events(RunFolder(run, has_run=True)).add("saved", "step 3", 3)],
    ],
    ids=["the folder", "the steps", "all but the folder"],
)  # fmt: skip
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    run = RunFolder.open(tmp_path / "run")
    run.row_log("metrics.jsonl").append([METRICS | {"step": step} for step in (1, 2, 3, 4)])
    run.row_log("loads.jsonl").append([{"step": 4}])
    assert RunFolder.inspect(run.path).has_run  # it was killed before it saved
    save_one(run.checkpoints, 3, [whole("w", torch.zeros(2))])
    remember(run.checkpoints, [VerifiedState(3, "digest", True, True)])
    elsewhere = str(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"elsewhere holds none.* it kept them in .*/run/che"):
        RunFolder.open(run.path, checkpoint_folder=elsewhere)
    spoil(run.path)
    before = sorted(run.path.rglob("*"))
    with pytest.raises(RunFolderError, match=r"run records 4 steps, and .* holds none of its"):
        RunFolder.open(run.path)
    assert sorted(run.path.rglob("*")) == before and not Path(elsewhere).exists()
    assert RunFolder.open(run.path, None).has_run  # a rank, after a look of its launcher


def test_rows_are_set_aside_under_a_free_name(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path)
    assert run.set_rows_aside() == []
    for number in (1, 2):
        run.row_log("metrics.jsonl").append([{"step": number}])
        (tmp_path / "loads.jsonl").write_text("")
        assert run.set_rows_aside() == [f"metrics-{number}.jsonl"]
    assert (tmp_path / "metrics-1.jsonl").read_text() == '{"step": 1}\n'


def test_checkpoints_in_the_memory_of_a_process_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(RunFolderError, match=r"checkpoint_folder memory:///x is in the memory of"):
        RunFolder.open(tmp_path / "run", checkpoint_folder="memory://x")
    with pytest.raises(UserError, match="name one store"):
        RunFolder.open(tmp_path / "run", checkpoint_folder="simplecache::s3://bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(RunFolderError, match=r"holds config\.toml but no run"):
        RunFolder.open(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "config.toml").rename(tmp_path / "notes.txt")
    with pytest.raises(RunFolderError, match=r"holds notes\.txt but no run.*such as .*run"):
        RunFolder.open(tmp_path)
    (tmp_path / "notes.txt").rename(tmp_path / ".notes")
    (tmp_path / "logs").mkdir()
    assert not RunFolder.open(tmp_path).has_run


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Not a directory"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(RunFolderError, match="Not a directory"):
        RunFolder.open(tmp_path / "file" / "below")


# --- lease -------------------------------------------------------------------------------------

HOLD = """
import sys, time
from moemesh.train.records.run_folder import RunFolder
run = RunFolder.open(sys.argv[1])
run.lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        run = RunFolder.open(tmp_path)
        with pytest.raises(RunFolderError, match=rf"in use .*pid {process.pid} on .*, since 20"):
            run.lock()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run.lock()
    body = json.loads((tmp_path / "lease").read_text())
    assert body["pid"] == os.getpid() and body["held"] and body["epoch"] == 2
    with pytest.raises(RunFolderError, match=f"pid {os.getpid()}"):
        RunFolder.open(tmp_path).lock()
    run.release()
    run.release()
    RunFolder.open(tmp_path).lock()


def test_two_runs_with_one_folder_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(ownership, "_LOOK_SECONDS", 0.05)
    shared = str(tmp_path / "shared")
    one, two = (RunFolder.open(tmp_path / name, checkpoint_folder=shared) for name in "ab")
    one.lock()
    rank = RunFolder.open(tmp_path / "a", checkpoint_folder=shared)
    rank.join()
    with pytest.raises(RunFolderError, match=rf"in use by .*pid {os.getpid()} on .*, since 20"):
        two.lock()
    assert one.lost() is None and rank.lost() is None
    two.lock(takeover=True)  # the lease of its own run folder was given back
    for lost in (one, rank):
        assert lost.why_lost() is None and "was taken over by another run" in str(lost.lost())
    assert two.lost() is None
    one.release()
    two.release()
    one.lock(), one.release()
    again = RunFolder.open(tmp_path / "a", checkpoint_folder=shared)
    again.lock()
    assert again.lost() is None and one.lost() is not None
    again.release()


def test_a_lease_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, mode: int) -> None:
        raise OSError(95, "Operation not supported")

    first, run = RunFolder.open(tmp_path), RunFolder.open(tmp_path)
    first.lock()
    (tmp_path / "lease").write_text("")
    with pytest.raises(RunFolderError, match="unknown process"):
        run.lock()
    monkeypatch.setattr("moemesh.monitor.lease.fcntl.flock", refuse)
    with pytest.raises(RunFolderError, match="cannot be locked"):
        run.lock()
    # Nothing that a live process may hold is swept away, and no run is refused for it.
    assert is_locked(tmp_path / "lease")
    Lease.refuse_held(tmp_path)
    (tmp_path / "lease").unlink()
    (tmp_path / "lease").mkdir()
    with pytest.raises(RunFolderError, match="cannot be opened"):
        run.lock()


def test_a_lease_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: one message, and the folder is free for the next try."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunFolder.open(tmp_path)
    with monkeypatch.context() as full:
        full.setattr("moemesh.monitor.lease.os.pwrite", refuse)
        with pytest.raises(RunFolderError, match="lease: cannot be written"):
            run.lock()
    run.lock()
    with monkeypatch.context() as full:
        full.setattr("moemesh.monitor.lease.os.pwrite", refuse)
        with pytest.raises(RunFolderError, match="lease: cannot be written"):
            run.raise_epoch()
        run.release()
    again = RunFolder.open(tmp_path)
    again.lock()
    again.release()


# --- writes ------------------------------------------------------------------------------------


def test_whole_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.open(tmp_path)
    run.write_json("plan.json", {"ep": 2})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"ep": 2}

    def die(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            run.write_json("plan.json", {"ep": 4})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"ep": 2}
    run.write_json("plan.json", {"ep": 4})
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "plan.json"]

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "fsync", refuse)
        with pytest.raises(OSError, match=r"No space left on device.*plan\.json"):
            run.write_json("plan.json", {"ep": 8})
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "plan.json"]
    with pytest.raises(AssertionError):
        run.write_text("../escape", "x")


# --- changed configurations --------------------------------------------------------------------

OLD = """
[model]
preset = "tiny"
hidden_size = 128
aux_loss_coefficient = 0.01
[plan]
ep = 2
schedule = "1f1b"
[data]
tokenizer = "bytes"
seq_len = 128
[train]
steps = 100
lr = 0.003
checkpoint_every = 10
"""


@pytest.mark.parametrize(
    ("old", "new", "key", "kind"),
    [
        ("checkpoint_every = 10", "checkpoint_every = 5", "train.checkpoint_every", "free"),
        ('preset = "tiny"', 'preset = "other"', "model.preset", "free"),
        ("steps = 100", "steps = 200", "train.steps", "free"),
        ("steps = 100", "steps = 50", "train.steps", "training"),
        ("ep = 2", "ep = 4", "plan.ep", "layout"),
        ("ep = 2", "ep = 2\ntp = 2", "plan.tp", "layout"),
        ('"1f1b"', '"zb_h1"', "plan.schedule", "layout"),
        ('"1f1b"', '"pipedream"', "plan.schedule", "training"),
        ("lr = 0.003", "lr = 0.001", "train.lr", "training"),
        ("seq_len = 128", "seq_len = 256", "data.seq_len", "training"),
        ("coefficient = 0.01", "coefficient = 0.5", "model.aux_loss_coefficient", "training"),
        ("hidden_size = 128", "hidden_size = 256", "model.hidden_size", "model"),
        ('tokenizer = "bytes"', 'tokenizer = "t"', "data.tokenizer", "model"),
    ],
)
def test_classes_of_change(old: str, new: str, key: str, kind: str) -> None:
    changes = compare(OLD, OLD.replace(old, new))
    assert [(change.key, change.kind) for change in changes] == [(key, kind)]
    if kind in ("free", "layout"):
        refuse_changes(changes)
        return
    with pytest.raises(RunFolderError, match=key):
        refuse_changes(changes)
    if kind == "training":
        refuse_changes(changes, frozenset({key}))
    else:
        with pytest.raises(RunFolderError, match="the model cannot change"):
            refuse_changes(changes, frozenset({key}))


def test_the_refusal_shows_the_difference() -> None:
    new = OLD.replace("hidden_size = 128", "hidden_size = 256").replace("lr = 0.003", "lr = 0.004")
    with pytest.raises(RunFolderError) as caught:
        refuse_changes(compare(OLD, new))
    text = str(caught.value)
    assert "model.hidden_size: 128 -> 256 (model)" in text
    assert "train.lr: 0.003 -> 0.004 (training)" in text
    assert "--allow-change train.lr" in text
    assert compare(OLD, OLD) == []
    assert str(Change(key="a", old="x", new=True, kind="free")) == 'a: "x" -> true (free)'
    for broken in ("= 1", "a." * 100 + "b = 1"):
        with pytest.raises(UserError, match=r"the config\.toml of the run is not TOML"):
            compare(broken, OLD)


def test_converted_weights_have_no_course_of_training(tmp_path: Path) -> None:
    """Every setting but those of the model is free until a step is saved."""
    place, new = tmp_path / "kept", OLD.replace("lr = 0.003", "lr = 0.1")
    save_one(place, 0, [whole("w", torch.zeros(2))], {"config": OLD})

    def changes(text: str) -> list[Change]:
        return RunFolder.open(tmp_path / "new", checkpoint_folder=str(place)).changes(text)

    assert [change.key for change in changes(new)] == ["train.lr"]
    with pytest.raises(RunFolderError, match="the model cannot change"):
        changes(new.replace("hidden_size = 128", "hidden_size = 256"))
    save_one(place, 1, [whole("w", torch.zeros(2))], {"config": OLD})
    with pytest.raises(RunFolderError, match=r"--allow-change train\.lr"):
        changes(new)


def test_a_checkpoint_says_what_it_was_trained_with(tmp_path: Path) -> None:
    """The checkpoint counts, whatever the run folder holds, and also without a run folder."""
    place = tmp_path / "kept"
    samples, others = (
        Samples(stream(np.arange(seed, 900) % 256, source="t"), seq_len=16, seed=0)
        for seed in (0, 1)
    )
    state = {"config": OLD, "data": record_of_data(samples)}
    save_one(place, 3, [whole("w", torch.zeros(2))], state)

    def folder(name: str) -> RunFolder:
        return RunFolder.open(tmp_path / name, checkpoint_folder=str(place))

    changed = folder("new").changes(OLD.replace("ep = 2", "ep = 4"))
    assert [one.key for one in changed] == ["plan.ep"]
    with pytest.raises(RunFolderError, match=r"of the checkpoint .*/kept/step-3:\n  train.lr: 0."):
        folder("new").changes(OLD.replace("lr = 0.003", "lr = 0.1"))
    refuse_other_data(folder("new"), samples, allowed=False)
    refuse_other_data(folder("new"), others, allowed=True)
    with pytest.raises(RunFolderError, match=r"not those of the ch.*\n  t: 900 .* 899 now"):
        refuse_other_data(folder("new"), others, allowed=False)
    # Allowed once, and ended before it saved: the checkpoint counts.
    run = folder("run")
    run.write_text("config.toml", OLD.replace("lr = 0.003", "lr = 0.1"))
    run.write_json("data.json", record_of_data(others))
    assert run.changes(OLD) == []
    refuse_other_data(run, samples, allowed=False)
    with pytest.raises(RunFolderError, match=r"config.toml has another train.lr, with .* saved\):"):
        run.changes(OLD.replace("lr = 0.003", "lr = 0.1"))
    # One that cannot be read is passed over; one of an older version leaves it to the run folder.
    (place / "step-4").mkdir()
    assert folder("new").recorded.config == OLD
    save_one(place, 5, [whole("w", torch.zeros(2))], {"step": 5})
    assert folder("new").recorded.config is None and "0.1" in str(folder("run").recorded.config)
    with pytest.raises(RunFolderError, match=r"not those of the run in .*\n  t: 899 .* 900 now"):
        refuse_other_data(folder("run"), samples, allowed=False)


def test_a_key_that_an_older_version_did_not_know_stands_for_its_default() -> None:
    new = resolved_toml(RunConfig())
    old = "".join(line for line in new.splitlines(keepends=True) if "log_every" not in line
                  and "bad_records" not in line and "qk_norm" not in line)  # fmt: skip
    assert old != new
    assert compare(old, new) == []
    (change,) = compare(old, new.replace('bad_records = "fail"', 'bad_records = "skip"'))
    assert (change.key, change.old, change.new) == ("data.bad_records", "fail", "skip")


@pytest.mark.parametrize(
    "keys",
    [
        ("plan.dp=2", "train.steps=70", "train.freeze=['embedding.*']"),
        ("train.lr=0.1", "plan.schedule=interleaved_1f1b", "plan.pp=2", "plan.stages_per_rank=2"),
        ("lora.rank=2", "train.train_only=['norm.*']", "data.sources=[{path='a', weight=2.0}]"),
    ],
)
def test_a_rank_of_the_launcher_reads_the_configuration_that_it_has_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """Neither the command line nor the environment of the rank counts."""
    config = load_run([], keys).config.with_following(steps=60, epochs=None)
    (tmp_path / RESOLVED).write_text(resolved_toml(config))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("MOEMESH__PLAN__TP", "2")
    read = load(tmp_path / "gone.toml", ["plan.dp=4"]).config
    assert (read, resolved_toml(read)) == (config, resolved_toml(config))


def test_a_rank_opens_the_folder_in_which_another_has_begun(tmp_path: Path) -> None:
    """Rank 0 notes events before there is a configuration: no other rank refuses the folder."""
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match=r"holds events\.jsonl but no run"):
        RunFolder.open(tmp_path)
    assert not RunFolder.open(tmp_path, None).has_run
