"""Restarts, and the watcher of a node: ranks that are killed, stopped, stuck or leave."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from moemesh.comm import launch
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.monitor import rendezvous, supervisor
from moemesh.monitor.detector import GONE, Kind, Limits, RankStatus, ReportedError, Verdict
from moemesh.monitor.failures import cause_of
from moemesh.monitor.lease import read_start
from moemesh.monitor.progress import ProgressFile
from moemesh.monitor.rendezvous import (
    WORDS,
    Node,
    ProcessHandles,
    has_supervisor,
    join_node,
    lock,
    shared_memory,
    torchrun_file,
)
from moemesh.monitor.supervisor import RankWatcher, SupervisorResult
from moemesh.report import page as report_page
from moemesh.train import watcher
from moemesh.train.command import CAME_TWICE, Budget, limits_of, train_supervised
from moemesh.train.numerics.replica_checksums import CopiesDiffer
from moemesh.train.records import failure
from moemesh.train.records.failure import report_id, write_verdict
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.watcher import Watcher, WatcherSpec
from tests.drill.rank import Spec as FaultSpec
from tests.monitor.statuses import record
from tests.train.runs import arguments, losses, metrics, rows_of, start, torchrun, train
from tests.waiting import PATIENCE, until


def failed(
    kind: Kind = "killed",
    rank: int = 1,
    *,
    step: int = 5,
    error: ReportedError | None = None,
    code: int | None = -9,
) -> Verdict:
    status = RankStatus(rank=rank, exit_code=code, record=record(rank, step=step), error=error)
    return Verdict(kind=kind, rank=rank, message="", status=status)


FINAL = ReportedError(kind="ConfigError", message="", at=0.0, is_final=True)
RAISED = ReportedError(kind="KeyError", message="'x'", at=0.0)
LIKE = "a restart would fail in the same way"
STUCK = "no progress between restarts"
SIXTH = failed("exception", error=RAISED, step=6)


@pytest.mark.parametrize(
    ("restarts", "failures"),
    [
        (2, [(failed(), 4, None), (failed(), 4, None), (failed(), 4, STUCK)]),
        (0, [(failed(), 4, "train.restarts is 0")]),
        # The first checkpoint and a newer one renew the budget; an older one, because the newest
        # was damaged, does not.
        (1, [(failed(), None, None), (failed(), 0, None), (failed(), 2, None), (failed(), 2, STUCK),
             (failed(), 1, STUCK)]),
        (2, [(failed("exception", error=FINAL), 4, LIKE)]),
        (5, [(failed("exception", error=RAISED), 4, None),
             (failed("exception", error=RAISED, code=None), 4, CAME_TWICE)]),
        # In another place, and after a newer checkpoint, it is another failure.
        (5, [(failed("exception", error=RAISED), 4, None), (SIXTH, 4, None), (SIXTH, 5, None)]),
        # A signal does not count as a mistake of the program.
        (5, [(failed(), 4, None)] * 3),
    ],
)  # fmt: skip
def test_restarts(restarts: int, failures: list[tuple[Verdict, int | None, str | None]]) -> None:
    """Rows are failures: step of the newest checkpoint, and why the ranks do not restart."""
    budget = Budget(restarts)
    assert [budget.refuses(verdict, step) for verdict, step, _ in failures] == [
        reason for *_, reason in failures
    ]


def test_each_verdict_has_one_cause_and_its_advice() -> None:
    """The console and `moemesh explain` print the same."""
    causes = {
        "killed": "killed",
        "exited": "exit",
        "stopped": "stopped from outside",
        "mismatch": "mismatched operations",
        "hung": "hang",
        "busy": "hang",
        "lost-contact": "lost contact",
        "network-cut": "network cut",
        "exception": "exception",
    }
    assert set(causes) == set(get_args(Kind))
    for kind, name in causes.items():
        error = ReportedError(kind="KeyError", message="", at=0.0) if kind == "exception" else None
        verdict = failed(kind, error=error)
        cause = cause_of({"kind": failure.kind_of(verdict)})
        assert cause.name == name
        hint = failure.hint_on(verdict)
        assert hint == ("" if error else cause.advice[0].lower() + cause.advice[1:-1])
    assert cause_of({"kind": CopiesDiffer.__name__}).name == "replicas differ"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_folder_is_taken_over_writes_nothing_more(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__steps": 100_000, "train__checkpoint_every": 5}
    first = start(*arguments(out, **keys))
    until(lambda: (out / "checkpoints/step-10").exists())
    second = start(*arguments(out, **keys), "--takeover")
    _, err = first.communicate(timeout=PATIENCE)
    assert first.returncode not in (0, None) and "another run has taken over" in err, err
    events = out / "events.jsonl"
    until(lambda: "resumed from" in events.read_text())
    rows = len(metrics(out))
    until(lambda: len(metrics(out)) > rows + 5)
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE) == 143, second.communicate()
    steps = [row["step"] for row in metrics(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert sum(one["kind"] == "resumed" for one in rows_of(events)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_is_saved_stops_nothing(
    tmp_path: Path, ranks: int, number: int
) -> None:
    given = {"plan__dp": ranks, "data__global_batch": 4}
    for delay in (0.0, 1.0):
        out = tmp_path / f"run{delay}"
        process = start(*arguments(out, **given))
        until(lambda out=out: (out / "checkpoints/step-4").exists(), process)
        time.sleep(delay)
        process.send_signal(number)
        said, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "stopped by" not in err, said + err
        assert "validation loss" in said and (out / "report.html").exists()


@pytest.mark.slow
def test_ctrl_c_before_training_leaves_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*arguments(out, plan__dp=2, train__steps=100_000))
    until(lambda: (out / "logs/rank-1.out").exists())
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert time.monotonic() - begun < 60, "ranks that save are waited for 120 s"
    assert err.endswith("moemesh: stopped by SIGINT before training began\n"), err
    assert not (out / "metrics.jsonl").exists() and not (out / "failure.json").exists()


@pytest.mark.parametrize(
    ("device", "has_devices", "floor"),
    [("cpu", True, 2.9), ("cpu", False, 2.9), ("auto", False, 2.9), ("auto", True, 180.0)],
)
def test_a_hang_is_told_soon_where_no_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "auto"], has_devices: bool, floor: float
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_devices)
    limits = limits_of(RunConfig(train=TrainConfig(device=device, timeout_seconds=77.0)))
    assert (limits.floor, limits.patience) == (floor, 77.0)
    assert limits.aborts_follow == (floor == 180.0)


def test_what_a_failed_rank_wrote_is_found_where_the_console_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_PAGE_SECONDS", PATIENCE)
    path = tmp_path / "run"
    folder = RunFolder.open(path)
    folder.lock()
    config = RunConfig(train=TrainConfig(restarts=1))

    def run(*_: object, logs: Path, **__: object) -> SupervisorResult:
        # The launcher of ranks writes to the same files.
        logs.mkdir(exist_ok=True)
        (logs / "rank-1.err").write_text(f"Traceback of epoch {folder.epoch}\n")
        (logs / "rank-1.stacks").write_text("")
        (logs / "rank-2.err").write_text("")
        verdict = failed("exception", error=ReportedError(kind="KeyError", message="'x'", at=0.0))
        return SupervisorResult(code=1, verdict=verdict, stacks={}, traces={})

    monkeypatch.setattr(launch, "run_ranks", run)
    for first in (1, 3):  # the same command twice
        assert train_supervised(config, folder, ["train"]) == 1
        said = capfd.readouterr().err
        named = [Path(line) for line in re.findall(r"\(all of it in (.*)\)", said)]
        assert named == [path / f"failures/{first}/rank-1.err", path / "logs/rank-1.err"]
        texts = [file.read_text() for file in named]
        assert texts == [f"Traceback of epoch {epoch}\n" for epoch in (first, first + 1)]
        page = (path / "report.html").read_text()
        assert "This run failed" in page and "KeyError: &#39;x&#39;" in page
        folder.raise_epoch()
    folder.release()
    kept = sorted(str(file.relative_to(path)) for file in path.glob("failures/*/*"))
    names = ("failure.json", "rank-1.err", "rank-1.stacks")
    assert kept == [f"failures/{epoch}/{name}" for epoch in (1, 2, 3) for name in names]


def test_a_folder_in_which_nothing_can_be_written_ends_a_failed_run_with_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two starts of the ranks: no traceback, and the exit code of the rank."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = RunFolder.open(tmp_path / "run")
    folder.lock()

    def run(*_: object, **__: object) -> SupervisorResult:
        for name in ("os.pwrite", "os.replace", "pathlib.Path.write_text"):
            monkeypatch.setattr(name, refuse)
        return SupervisorResult(code=137, verdict=failed(), stacks={}, traces={})

    monkeypatch.setattr(launch, "run_ranks", run)
    config = RunConfig(train=TrainConfig(restarts=1))
    assert train_supervised(config, folder, ["train"]) == 137
    said = capfd.readouterr().err
    assert "not restarted" in said and "Read-only file system" in said
    assert "no report could be written" in said and "None" not in said
    folder.release()


def test_a_place_of_checkpoints_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def candidates(folder: Path) -> list[int]:
        answers.wait(30)
        return [7]

    monkeypatch.setattr(failure, "candidates", candidates)
    monkeypatch.setattr(failure, "_READ_SECONDS", 0.05)
    assert failure.newest_step(tmp_path, seconds=0.05) is None
    text = failure.go_on(tmp_path, ["moemesh", "train"])
    assert text.endswith("from the newest checkpoint, if there is one: moemesh train")
    answers.set()
    assert failure.newest_step(tmp_path) == 7


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_page_that_cannot_be_written_neither_hides_a_failure_nor_holds_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    answers = threading.Event()

    def write(_: Path) -> None:
        if fault == "hangs":
            answers.wait(30)
        raise ValueError("no page")

    monkeypatch.setattr(report_page, "write", write)
    monkeypatch.setattr(failure, "_PAGE_SECONDS", 0.05)
    failure.write_failure(tmp_path, RuntimeError("lost"), 0)
    failure.write_page(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    answers.set()


RANK = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8"}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node of ranks 4 and 5, which no other test has; its folder is removed after the test."""
    monkeypatch.setattr(supervisor, "_FOLLOW_SECONDS", 0.1)
    monkeypatch.setattr(watcher, "_CULPRIT_FIRST_SECONDS", 0.05)
    node = Node.of(RANK | {"MASTER_ADDR": str(tmp_path)})
    yield node
    shutil.rmtree(shared_memory() / node.name, ignore_errors=True)


def test_a_node_has_a_name_of_its_own_at_each_start() -> None:
    start = RANK | {"MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x"}
    node = Node.of(start | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert (list(node.ranks), node.world_size, node.launcher) == ([4, 5], 8, "torchrun")
    sibling = {"RANK": "4", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert Node.of(start | sibling).name == node.name
    others = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"RANK": "6", "LOCAL_RANK": "0"}]
    assert len({node.name, *(Node.of(start | other).name for other in others)}) == 3


def test_the_first_rank_starts_the_watcher_and_what_a_killed_one_left_is_removed(
    node: Node, tmp_path: Path
) -> None:
    def start(folder: Path) -> list[str]:
        return [sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'a').write('x')"]

    folder = join_node(node, start)
    assert folder is not None and (folder / WORDS).stat().st_size > 0
    (folder / "of the first").touch()
    assert join_node(node, start) == folder
    handle = lock(folder)
    assert join_node(node, start) == folder and (folder / "of the first").exists()
    os.close(handle)  # as when the watcher is killed
    assert not has_supervisor(folder)
    assert join_node(node, start) == folder and not (folder / "of the first").exists()
    started = tmp_path / "started"
    until(lambda: started.exists() and started.read_text() == "xx")


def test_nobody_watches_where_the_kernel_gives_no_handles(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert join_node(node, lambda folder: ["true"]) is None


def test_ranks_that_do_not_see_each_other_do_not_meet(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_EARLIER_SECONDS", 0.1)
    folder = join_node(node, lambda folder: ["true"])
    assert folder is not None
    handle = lock(folder)
    monkeypatch.setattr(rendezvous, "process_namespace", lambda: "another container")
    assert join_node(node, lambda folder: ["true"]) is None
    os.close(handle)


def word_of(pid: int) -> Any:
    return type("Found", (), {"pid": pid})()


def test_how_a_process_of_another_parent_ended() -> None:
    guests = ProcessHandles()
    codes = ["exit 3", "kill -9 $$", "exit 0"]
    children = [subprocess.Popen(["sh", "-c", f"read x; {code}"], stdin=-1) for code in codes]
    for rank, child in enumerate(children):
        assert guests.exit_code(rank, word_of(child.pid)) is None
    assert guests.exit_code(9, None) is None
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        # WNOWAIT leaves the exit code, which only the parent can read later.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    guests.wait(5)
    assert [guests.exit_code(rank, None) for rank in range(3)] == [3, -9, 0]
    for child in children:
        child.wait()
    late = ProcessHandles()
    assert late.exit_code(0, word_of(children[0].pid)) == GONE


#: Script of a rank: attaches, enters a step, then runs the given action.
PROCESS = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from moemesh.monitor import progress as words
from moemesh.monitor.rendezvous import STACK_SIGNAL, WORDS, stack_file
folder, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.register(STACK_SIGNAL, stack_file(folder, rank).open("w"))
words.attach(folder / WORDS, rank)
words.at_step(7)
group = (4, 5)
words.waiting(words.entered("all_reduce", "dp", "gradients", group, 8))
words.left()
while not (folder / "go").exists():
    time.sleep(0.01)
if what == "wait":
    words.waiting(words.entered("all_reduce", "dp", "gradients", group, 8))
    time.sleep(100)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "sleep":
    time.sleep(100)
words.finished(0)
"""


def watch(node: Node, run: Path, *what: str, patience: float = 100.0) -> list[int]:
    """The exit codes of two ranks that do `what`, with a watcher beside them."""
    folder = join_node(node, lambda folder: ["true"])
    assert folder is not None
    torchrun_file(folder, 5).write_text(str(run.parent / "error.json"))
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(folder), str(rank), one])
        for rank, one in zip(node.ranks, what, strict=True)
    ]
    records = ProgressFile(folder / WORDS, node.world_size, exists=True)
    until(lambda: None not in [records.read(rank) for rank in node.ranks])
    (folder / "go").touch()
    for rank, one in zip(node.ranks, what, strict=True):
        if one == "wait":  # else the patience with it could be over before it has entered
            until(lambda rank=rank: (record := records.read(rank)) is not None and record.inside)
    limits = Limits(patience=patience, floor=patience)
    command = ["moemesh", "train", "x.toml"]
    spec = WatcherSpec(node=node, folder=str(folder), path=str(run), limits=limits, command=command)
    assert WatcherSpec.of(json.dumps(asdict(spec))) == spec
    try:
        Watcher(spec).run()
        assert not folder.exists()
        return [one.wait(PATIENCE) for one in ranks]
    finally:
        for one in ranks:
            one.kill()


def test_failures_before_the_first_lease_of_their_start_are_kept_apart(tmp_path: Path) -> None:
    """Ranks that fail before they have a lease have the epoch of the start before."""
    (tmp_path / "failures/3").mkdir(parents=True)
    for rank in range(4):
        earlier = report_id(tmp_path)
        status = RankStatus(rank=rank, exit_code=3)
        verdict = Verdict(kind="exited", rank=rank, message="", status=status)
        ended = SupervisorResult(code=3, verdict=verdict, stacks={}, traces={})
        for node in (4, 0):  # of two nodes the first one reports for the run
            is_first = write_verdict(
                tmp_path, ended, epoch=3, action="", advice="", first_rank=node, earlier=earlier
            )
            assert is_first == (node == 4)
    files = ["failures/3/failure-1.json", "failures/3/failure-2.json", "failures/3/failure.json"]
    ranks = [json.loads((tmp_path / file).read_text())["rank"] for file in [*files, "failure.json"]]
    assert ranks == [0, 1, 2, 3]


def test_a_disk_that_does_not_answer_holds_nobody_up(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk may be on the other side of the network cut."""
    monkeypatch.setattr(watcher, "_REPORT_SECONDS", 0.2)
    monkeypatch.setattr(watcher, "read_start", lambda path: threading.Event().wait())
    run = tmp_path / "run"
    run.mkdir()
    assert watch(node, run, "wait", "kill") == [-9, -9]
    assert "rank 5 was killed by SIGKILL" in (said := capfd.readouterr().err)
    assert f"{run} does not answer" in said


def test_a_killed_rank_is_named_and_the_others_are_ended(
    node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "lease").write_text(json.dumps({"epoch": 3}))
    # Of an earlier start; another node was not faster.
    (run / "failure.json").write_text(json.dumps({"epoch": 2, "rank": 0}))
    assert watch(node, run, "wait", "kill") == [-9, -9]
    report = json.loads((run / "failure.json").read_text())
    assert (report["kind"], report["rank"], report["epoch"], report["step"]) == ("Killed", 5, 3, 7)
    assert report["signal"] == "SIGKILL" and report["exit_code"] == 137
    assert json.loads((run / "failures/3/node-4.json").read_text()) == report
    assert json.loads((run / "failures/2/failure.json").read_text())["rank"] == 0
    shown = json.loads((tmp_path / "error.json").read_text())
    assert shown["message"]["message"] == "rank 5 was killed by SIGKILL"
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "moemesh: rank 5 was killed by SIGKILL"
    assert err[-1].endswith("the same command starts from the beginning: moemesh train x.toml")
    event = json.loads((run / "events.jsonl").read_text())
    assert (event["kind"], event["step"]) == ("failed", 7)


def test_a_hanging_rank_is_named_and_the_report_of_the_faster_node_stays(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(watcher, "report_id", lambda folder: None)  # it comes later
    (run / "lease").write_text(json.dumps({"epoch": 3}))
    (run / "failure.json").write_text(json.dumps({"epoch": 3, "rank": 0}))
    assert watch(node, run, "sleep", "wait", patience=0.4) == [-9, -9]
    assert json.loads((run / "failure.json").read_text())["rank"] == 0
    report = json.loads((run / "failures/3/node-4.json").read_text())
    assert (report["kind"], report["rank"]) == ("Hung", 4)
    assert report["collective"]["entered"] == [5] and report["collective"]["missing"] == [4]
    assert not (run / "events.jsonl").exists()


def test_ranks_that_end_well_leave_nothing(
    node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watch(node, tmp_path / "run", "end", "end") == [0, 0]
    assert capfd.readouterr().err == "" and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("kill", "Killed"),
        ("stop", "Stopped"),
        ("loop", "Busy"),
        ("raise", "RuntimeError"),
        ("exit 3", "Exited"),
    ],
)
def test_torchrun_starts_ranks_again_after_each_fault(
    tmp_path: Path, action: str, kind: str
) -> None:
    keys = {"plan__dp": 2, "train__steps": 8, "train__checkpoint_every": 2}
    whole = train(tmp_path / "whole", **keys)
    fault = FaultSpec(action=action, rank=1, step=5, place="forward", folder=str(tmp_path))
    out = tmp_path / "run"
    options = ["--nproc-per-node=2", "--max-restarts=1"]
    command = ["tests.drill.rank", fault.text(), *arguments(out, **keys)]
    done = torchrun(*command, options=options, python=sys.executable)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "failures/1/failure.json").read_text())
    assert (report["kind"], report["rank"], report["step"]) == (kind, 1, 5), report
    assert f"moemesh: {report['action']}" in done.stderr and read_start(out)[1] == 2
    # Errors of rank 0 that follow from it are not printed, and torchrun names the same first rank.
    # Ranks that start late, on a busy machine, are named by the one that waits for them.
    assert len(re.findall(r"moemesh: rank \d (?!waits at )", done.stderr)) == 1, done.stderr
    assert "reset by peer" not in done.stderr
    assert "local_rank: 1" in done.stderr and "local_rank: 0" not in done.stderr
    assert losses(metrics(out)) == losses(whole)
    assert not [one for one in watchers() if str(out) in one]


@pytest.mark.slow
def test_ranks_restart_with_the_configuration_of_their_launcher(tmp_path: Path) -> None:
    """The file of the configuration has changed since the run started."""
    fault = FaultSpec(
        action="kill", rank=1, step=5, place="forward", folder=str(tmp_path), once=True
    )
    out, file = tmp_path / "run", tmp_path / "run.toml"
    words = arguments(out, plan__dp=2, train__steps=8, train__checkpoint_every=2)
    file.write_text("train.lr = 0.002")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.drill.rank", fault.text(), *words, str(file)]
    )
    until((out / "metrics.jsonl").exists, process)
    file.write_text("train.lr = 0.5")
    assert process.wait(PATIENCE) == 0
    assert (out / "failures/1/failure.json").exists()
    assert "\nlr = 0.002\n" in (out / "config.toml").read_text()
    assert max(row["lr"] for row in metrics(out)) == pytest.approx(0.002)


@pytest.mark.slow
def test_torchrun_ends_with_the_cause(tmp_path: Path) -> None:
    fault = FaultSpec(action="loop", rank=1, step=5, place="forward", folder=str(tmp_path))
    out = tmp_path / "run"
    command = ["tests.drill.rank", fault.text(), *arguments(out, plan__dp=2, train__steps=8)]
    done = torchrun(*command, python=sys.executable)
    assert done.returncode == 1
    *_, last = done.stderr.split("Root Cause")
    assert "rank 1 is busy" in last and "never entered" in last
    assert json.loads((out / "failure.json").read_text())["rank"] == 1


@pytest.mark.slow
def test_a_folder_that_is_refused_is_told_and_left_alone(tmp_path: Path) -> None:
    """It may be another run's: no report is written into it."""
    out = tmp_path / "run"
    train(out, train__steps=2)
    before = sorted(file.name for file in out.iterdir())
    given = arguments(out, plan__dp=2, train__seed=7)
    done = torchrun("moemesh", *given, python=sys.executable)
    assert done.returncode == 1 and "train.seed" in done.stderr, done.stderr
    assert sorted(file.name for file in out.iterdir()) == before


def sleeper(node: Node) -> tuple[Path, subprocess.Popen[bytes], ProgressFile]:
    """The folder of a node, rank 4 there, which sleeps, and the words of all."""
    folder = join_node(node, lambda folder: ["true"])
    assert folder is not None
    child = subprocess.Popen([sys.executable, "-c", PROCESS, str(folder), "4", "sleep"])
    records = ProgressFile(folder / WORDS, node.world_size, exists=True)
    until(lambda: records.read(4) is not None)
    return folder, child, records


def watchers() -> Iterator[str]:
    """The command lines of all watchers."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "moemesh.train.watcher" in line:
            yield line


def test_signals_with_which_a_job_is_asked_to_end_are_no_failure(
    node: Node, tmp_path: Path
) -> None:
    folder, rank, _ = sleeper(node)
    rank.send_signal(signal.SIGTERM)
    limits = Limits(patience=60.0)
    spec = WatcherSpec(node=node, folder=str(folder), path=str(tmp_path), limits=limits, command=[])
    Watcher(spec).run()
    assert rank.wait(PATIENCE) == -15 and not (tmp_path / "failure.json").exists()


def test_states_are_asked_of_ranks_that_do_not_move(node: Node) -> None:
    folder, child, records = sleeper(node)
    guests = ProcessHandles()
    looks = RankWatcher(folder, records, [4], guests, Limits(patience=1.0))
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert [one.state for one in looks.poll()] == [""] and looks.pause > supervisor.POLL_SECONDS
    assert [one.state for one in looks.poll()] == ["T"] and looks.pause == supervisor.POLL_SECONDS
    child.kill()
    guests.wait(PATIENCE)
    assert [(one.exit_code, one.state) for one in looks.poll()] == [(-9, "")]
    assert looks.pause == supervisor.POLL_SECONDS
    child.wait()
