"""The run folder: resume rules, the lease, whole writes, rows cut back, changed configurations."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from moemesh.checkpoint import ownership
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.retention import VerifiedState, remember
from moemesh.config.changes import Change, compare
from moemesh.config.errors import UserError
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.data.samples import Samples
from moemesh.train import session as session_module
from moemesh.train.records import rows as row_log
from moemesh.train.records import run_folder as folder_module
from moemesh.train.records.rows import Cut, RowLog, cut_after
from moemesh.train.records.run_folder import (
    Events,
    RunFolder,
    RunFolderError,
    record_of_data,
    refuse_changes,
    refuse_other_data,
)
from moemesh.train.session import Session
from moemesh.watch.lease import LeaseLost
from tests.checkpoint.simulate import save_one, whole
from tests.data.texts import stream
from tests.train import runs

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
    with pytest.raises(RunFolderError, match="does not say who"):
        run.lock()
    monkeypatch.setattr("moemesh.watch.lease.fcntl.flock", refuse)
    with pytest.raises(RunFolderError, match="cannot be locked"):
        run.lock()
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
        full.setattr("moemesh.watch.lease.os.pwrite", refuse)
        with pytest.raises(RunFolderError, match="lease: cannot be written"):
            run.lock()
    run.lock()
    with monkeypatch.context() as full:
        full.setattr("moemesh.watch.lease.os.pwrite", refuse)
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
        (
            "aux_loss_coefficient = 0.01",
            "aux_loss_coefficient = 0.5",
            "model.aux_loss_coefficient",
            "training",
        ),
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
    with pytest.raises(UserError, match="not TOML"):
        compare("= 1", OLD)


def test_a_checkpoint_says_what_it_was_trained_with(tmp_path: Path) -> None:
    """Whatever the run folder says, and where there is none."""
    place = tmp_path / "kept"
    samples, others = (
        Samples(stream(np.arange(seed, 900) % 256, source="t"), seq_len=16, seed=0)
        for seed in (0, 1)
    )
    state = {"config": OLD, "data": record_of_data(samples)}
    save_one(place, 3, [whole("w", torch.zeros(2))], state)

    def folder(name: str) -> RunFolder:
        return RunFolder.open(tmp_path / name, checkpoint_folder=str(place))

    assert [one.key for one in folder("new").changes(OLD.replace("ep = 2", "ep = 4"))] == [
        "plan.ep"
    ]
    with pytest.raises(
        RunFolderError, match=r"of the checkpoint .*/kept/step-3:\n  train.lr: 0.003"
    ):
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


def test_a_rank_opens_the_folder_in_which_another_has_begun(tmp_path: Path) -> None:
    """Rank 0 notes events before there is a configuration: no other rank refuses the folder."""
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match=r"holds events\.jsonl but no run"):
        RunFolder.open(tmp_path)
    assert not RunFolder.open(tmp_path, None).has_run


class FullDisk:
    """Takes `room` bytes, then none, as write(2) does it: the last write is cut short."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, handle: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self._write(handle, data[: self.room])
        self.room -= taken
        return taken


def rows_of(path: Path) -> list[int]:
    return [row["step"] for row in runs.rows_of(path)]


def test_a_full_disk_is_told_once_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = RowLog(tmp_path / "metrics.jsonl", lambda text, kind: said.append(f"{kind}: {text}"))
    disk = FullDisk(room=100_000)
    monkeypatch.setattr(row_log.os, "write", disk.write)
    assert log.append([{"step": 1}])
    disk.room = 5  # half a row
    for step in (2, 3, 4):
        assert not log.append([{"step": step}])
        assert rows_of(log.path) == [1]
        disk.room = 0
    assert len(said) == 1
    assert said[0].startswith(f"disk: {log.path}: No space left on device: ")
    assert said[0].endswith(" free; the run goes on, rows wait in memory")
    disk.room = 100_000
    assert log.append([{"step": 5}])
    assert rows_of(log.path) == [1, 2, 3, 4, 5]
    assert said[1:] == [f"disk: {log.path} is written again"]


def test_rows_that_wait_are_bounded_and_the_lost_ones_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_log, "MOST_WAITING", 3)
    said: list[str] = []
    log = RowLog(tmp_path / "metrics.jsonl", lambda text, kind: said.append(text))
    disk = FullDisk(room=0)
    with monkeypatch.context() as patch:
        patch.setattr(row_log.os, "write", disk.write)
        for step in range(1, 6):
            log.append([{"step": step}])
        assert not log.append([{"step": 6}], waits=False)
    assert log.flush()
    assert rows_of(log.path) == [3, 4, 5]
    assert said[-1] == f"{log.path} is written again; 2 rows are lost"


def test_a_device_that_is_always_full() -> None:
    said: list[str] = []
    log = RowLog(Path("/dev/full"), lambda text, kind: said.append(text))
    assert not any(log.append([{"step": step}]) for step in (1, 2))
    assert len(said) == 1 and "No space left on device" in said[0]


def test_rows_behind_a_torn_one_stand_alone(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"step": 1}\n{"ste')
    RowLog(file).append([{"step": 2}])
    assert file.read_text() == '{"step": 1}\n{"ste\n{"step": 2}\n'


def test_rows_keep_full_precision_and_are_cut_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert cut_after(file, 3) == Cut(missing="metrics.jsonl: 3 steps are missing (1 to 3)")
    log = RowLog(file)
    for step in range(1, 6):
        log.append([{"step": step, "loss": 0.1 + step / 3}])
    whole = file.read_bytes()
    with file.open("a") as handle:
        handle.write('{"step": 6, "lo')  # a crash in the middle of a row
    assert cut_after(file, 9)._replace(missing="") == Cut(damaged=1, first_damaged=6)
    assert file.read_bytes() == whole
    assert cut_after(file, 3)._replace(missing="") == Cut(rows=2)
    rows = runs.rows_of(file)
    assert rows == [{"step": step, "loss": 0.1 + step / 3} for step in (1, 2, 3)]
    assert cut_after(file, -1) == Cut(rows=3)
    assert file.read_bytes() == b""


def test_a_whole_last_row_without_its_newline_stays(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    assert cut_after(file, 2)._replace(missing="") == Cut()
    RowLog(file).append([{"step": 3}])
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("line", ["{broken", "3", "{}", '{"step": "1"}', "\xff\xfe", "[" * 9999])
def test_a_damaged_row_blocks_no_resume(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n{"step": 3}\n', encoding="latin-1")
    assert cut_after(file, 2)._replace(missing="") == Cut(rows=1, damaged=1, first_damaged=2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_cut_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    monkeypatch.setattr(row_log.os, "replace", None)  # no second file
    monkeypatch.setattr(row_log.os, "fsync", None)
    assert cut_after(file, 1)._replace(missing="") == Cut(rows=1, damaged=1, first_damaged=3)
    assert file.read_text() == '{"step": 1}\n'


def test_a_sum_across_the_cut_goes(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    rows = [{"step": 4, "steps": 4}, {"step": 8, "steps": 4}, {"step": 12, "steps": 4}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cut_after(file, 6) == Cut(
        rows=2, lost=range(5, 7), missing="loads.jsonl: 2 steps are missing (5 to 6)"
    )
    assert rows_of(file) == [4]


def test_the_rates_of_an_extended_run_are_named(tmp_path: Path) -> None:
    """By the cosine: 0.1 of the rate at its end; 3 of 8 decay steps are done at step 5."""
    out = tmp_path / "run"
    keys = {"train__steps": 4, "train__lr": 1e-3, "train__warmup_steps": 2}
    keys["train__final_lr_ratio"] = 0.1
    assert "learning rate" not in runs.said(*runs.arguments(out, **keys))
    told = runs.said(*runs.arguments(out, **keys | {"train__steps": 10}))
    after = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * 3 / 8))
    note = f"note: the learning rate of step 4 was 1.00e-04, that of step 5 is {after:.2e}: "
    assert note + "its decay ends at step 10 now, not at 4" in told, told
    assert runs.metrics(out)[4]["lr"] == pytest.approx(after)


def test_rows_that_are_missing_at_a_resume_are_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert cut_after(file, 3).missing == "metrics.jsonl: 3 steps are missing (1 to 3)"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 5, 8, 9)))
    assert cut_after(file, 10).missing == "metrics.jsonl: 5 steps are missing (3 to 4, 6 to 7, 10)"
    file.write_text('{"step": 4, "steps": 4}\n{"step": 6, "steps": 2}\n')
    assert cut_after(file, 6).missing == ""


# --- a folder that is lost while a run works in it ----------------------------------------------


def _lose(out: Path, how: str) -> Path | None:
    """The folder of the run afterwards."""
    if how == "deleted":
        while out.exists():  # the run may be writing
            shutil.rmtree(out, ignore_errors=True)
        return None
    moved = out.rename(out.with_name("moved"))
    if how == "replaced":
        out.mkdir()
    elif how == "replaced by a run":
        other = RunFolder.open(out)
        other.lock()
        other.release()
    return moved


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced", "replaced by a run"])
def test_a_lost_folder_takes_nothing_more(tmp_path: Path, how: str) -> None:
    out = tmp_path / "run"
    holder = RunFolder.open(out)
    holder.lock()
    rank = RunFolder.inspect(out, None)
    rank.join()
    save_one(out / "checkpoints", 3, [whole("w", torch.zeros(2))])
    log = rank.row_log("metrics.jsonl")
    assert log.append([{"step": 1}]) and holder.why_lost() is None
    moved = _lose(out, how)
    before = sorted(out.rglob("*"))
    for folder in (holder, rank):
        with pytest.raises(LeaseLost, match=r"renamed, deleted|replaced") as lost:
            folder.check_lease()
        assert folder.present_path() == moved and folder.lost() is not None
        with pytest.raises(LeaseLost):
            folder.write_text("summary.json", "{}")
        if moved is None:
            assert "no checkpoint of this run is left" in lost.value.facts["advice"]
        else:
            assert f"it is {moved} now" in str(lost.value)
            assert f"is {moved}/checkpoints/step-3; --out {moved}" in lost.value.facts["advice"]
    log.append([{"step": 2}])
    Events(rank).add("note", "text")
    with pytest.raises(LeaseLost):
        holder.raise_epoch()
    if moved is not None:  # as long as the run lives, no other one enters there
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.open(moved).lock()
    holder.release()
    assert sorted(out.rglob("*")) == before
    if moved is not None:
        assert not json.loads((moved / "lease").read_text())["held"]


def test_a_lost_folder_of_checkpoints_elsewhere(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run = RunFolder.open(tmp_path / "run", checkpoint_folder=str(shared))
    run.lock()
    save_one(shared, 7, [whole("w", torch.zeros(2))])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(LeaseLost) as lost:
        run.check_lease()
    assert f"the last checkpoint of this run is {shared}/step-7" in lost.value.facts["advice"]
    (tmp_path / "moved").rename(tmp_path / "run")
    assert run.lost() is None
    shared.rename(tmp_path / "away")
    assert run.why_lost() is None and "shared was renamed, deleted or replaced" in str(run.lost())
    run.release()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced by a run"])
def test_a_run_whose_folder_is_lost_stops(tmp_path: Path, ranks: int, how: str) -> None:
    out = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__steps": 100_000, "train__checkpoint_every": 5}
    process = runs.start(*runs.arguments(out, **keys))
    runs.until(lambda: (out / "checkpoints/step-10").exists(), process)
    moved = _lose(out, how)
    before = sorted(out.rglob("*"))
    told, err = process.communicate(timeout=runs.PATIENCE)
    assert process.returncode == 1 and "Traceback" not in err, told + err
    assert "renamed, deleted" in err or "replaced" in err
    assert sorted(out.rglob("*")) == before
    if moved is None:
        assert "no checkpoint of this run is left" in err
        return
    step = max(int(path.name[5:]) for path in moved.glob("checkpoints/step-*[0-9]"))
    assert f"the last checkpoint of this run is {moved}/checkpoints/step-{step}" in err, err
    assert json.loads((moved / "failure.json").read_text())["run_folder"] == str(moved)
    runs.said(*runs.arguments(moved, **keys), "--stop-after", step + 5)


# --- a disk that is full at the last step -------------------------------------------------------


def _last_save(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], stops: list[bool]
) -> list[str]:
    """What the console gets from the save of step 6 of 6, the last one saved being 4; `outcomes`:
    of the attempts; `stops`: whether a stop was requested, after each of them."""
    monkeypatch.setattr(session_module, "_ROOM_SECONDS", 0.01)
    said = list[str]()
    attempts = iter(outcomes)

    def save(step: int, state: object, *, is_last: bool, hurries: Callable[[], bool]) -> None:
        # A stop while the save runs ends it after the attempt; it has none of its own here.
        session.stop.requested = True
        assert hurries() == is_last
        session.stop.requested = False
        if problem := next(attempts):
            raise CheckpointError(problem)

    requests = iter(stops)
    session = SimpleNamespace(
        folder=SimpleNamespace(check_lease=lambda: None, path=Path()),
        artifacts=SimpleNamespace(flush=lambda: None, identity={}),
        num_read=lambda step: step,
        rehoming=SimpleNamespace(state=dict),
        nan_policy=SimpleNamespace(state=dict),
        checkpoints=SimpleNamespace(save=save),
        config=SimpleNamespace(train=SimpleNamespace(steps=6)),
        stop=SimpleNamespace(requested=False),
        largest=lambda number: next(requests),
        mesh=SimpleNamespace(rank=0),
        console=SimpleNamespace(warn=said.append),
        saved=5,  # that save failed later
    )
    monkeypatch.setattr(session_module, "newest_step", lambda path: 4)
    Session.save(cast("Session", session), 6, is_last=True)
    return said


def test_the_last_step_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full = "checkpoint of step 6: /r/step-6: No space left on device: 9 bytes needed, 1 free"
    said = _last_save(monkeypatch, [full, full, full, ""], [False] * 3)
    assert len(said) == 1 and "waits for room" in said[0] and "steps 5 to 6 are lost" in said[0]
    with pytest.raises(CheckpointError, match="steps 5 to 6 are lost"):
        _last_save(monkeypatch, [full, full], [False, True])
    with pytest.raises(CheckpointError, match="Input/output error"):
        _last_save(monkeypatch, ["Input/output error"], [])
