"""The watcher of a node: names the rank at fault where another launcher has started the ranks.

It is a process beside the ranks of its node, whose first rank starts it
(`moemesh.monitor.rendezvous`).
After a verdict it writes the report, prints the cause and ends the ranks, so that torchrun or Slurm
restarts them or ends the job. It ends with the ranks.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from moemesh.config.limits import parse_json
from moemesh.config.python import python_command
from moemesh.monitor.detector import Limits, RankStatus, Verdict
from moemesh.monitor.lease import read_start
from moemesh.monitor.peers import Peers, inherited
from moemesh.monitor.progress import ProgressFile
from moemesh.monitor.rendezvous import WORDS, Node, ProcessHandles, lock, torchrun_file
from moemesh.monitor.supervisor import RankWatcher, describe
from moemesh.train.records.failure import (
    advice_on,
    details,
    log,
    report_id,
    report_straggler,
    write_page,
    write_verdict,
)
from moemesh.train.records.run_folder import LOGS, Events, RunFolder

#: Signals that end a job; ranks handle them.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Seconds from its start after which a watcher without any rank ends.
_EMPTY_SECONDS = 60.0
#: Seconds from the kill of the rank at fault to the others': a launcher names the first to end.
_CULPRIT_FIRST_SECONDS = 0.4
#: Longest time of a report in seconds, stacks included.
_REPORT_SECONDS = 8.0
_COMMANDS = {"torchrun": "torchrun ... --no-python moemesh", "srun": "srun ... moemesh"}
_RESTARTS = {
    "torchrun": "torchrun restarts them up to --max-restarts times",
    "srun": "Slurm restarts the job if allowed (--requeue)",
}


@dataclass(frozen=True, kw_only=True)
class WatcherSpec:
    """The task of a watcher. `folder`: that of the rendezvous; `path`: the run folder; `command`:
    that of the run, for its messages."""

    node: Node
    folder: str
    path: str
    limits: Limits
    command: list[str]

    @staticmethod
    def of(text: str) -> WatcherSpec:
        """The specification from the JSON of its fields, an argument of the command line."""
        values: dict[str, Any] = parse_json(text)
        values |= {"node": Node(**values["node"]), "limits": Limits(**values["limits"])}
        return WatcherSpec(**values)


def watcher_command(folder: Path, node: Node, *, path: Path, limits: Limits) -> list[str]:
    """The command of the watcher of `node` with rendezvous `folder`; `path`: the run folder."""
    command = [*_COMMANDS.get(node.launcher, "moemesh").split(), *sys.argv[1:]]
    spec = WatcherSpec(
        node=node, folder=str(folder), path=str(path.absolute()), limits=limits, command=command
    )
    return python_command("moemesh.train.watcher", json.dumps(asdict(spec)))


class Watcher:
    """Watches the ranks of one node until they are gone; see :meth:`run`."""

    def __init__(self, spec: WatcherSpec, listener: socket.socket | None = None) -> None:
        """`listener`: accepts the watchers of other nodes."""
        self._spec, self._path, self._folder = spec, Path(spec.path), Path(spec.folder)
        self._processes = ProcessHandles()
        #: Id of the report that an earlier failure has left in the run folder.
        self._earlier = report_id(self._path)
        self._peers = Peers(spec.node.first, listener, self._folder)
        #: Folder of the run if this node wrote the report of its failure.
        self._page_of: Path | None = None

    def run(self) -> None:
        """Watch until all ranks have left, or were ended after a failure."""
        node, limits = self._spec.node, self._spec.limits
        records = ProgressFile(self._folder / WORDS, node.world_size, exists=True)
        watcher = RankWatcher(
            self._folder,
            records,
            node.ranks,
            self._processes,
            limits,
            lambda slow: report_straggler(slow, Events(RunFolder(self._path, has_run=True))),
        )
        handle = lock(self._folder)
        try:
            if (failure := self._watch(watcher)) is not None:
                verdict, statuses = failure
                # If the network is cut, the disk of the run may never answer.
                report = Thread(target=self._report, args=(watcher, verdict, statuses), daemon=True)
                report.start()
                report.join(_REPORT_SECONDS)
                if report.is_alive():
                    why = f"{self._path} does not answer: no report is in it"
                    log(f"moemesh: {verdict.message}; {why}")
                # The folder has no more users: ranks that wait for the verdict have it.
                shutil.rmtree(self._folder, ignore_errors=True)
                self._processes.send(verdict.rank, signal.SIGKILL)
                time.sleep(_CULPRIT_FIRST_SECONDS)
                for status in statuses:
                    self._processes.send(status.rank, signal.SIGKILL)
                if self._page_of is not None:
                    write_page(self._page_of)
            # Skipped after an error of this watcher: a free lock shows the ranks that it is gone.
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            records.unmap()
            self._peers.close()
            os.close(handle)

    def _watch(self, watcher: RankWatcher) -> tuple[Verdict, list[RankStatus]] | None:
        detector, empty_until = watcher.detector, time.monotonic() + _EMPTY_SECONDS
        while True:
            # A rank that never starts or writes no record is left to its launcher.
            statuses = [status for status in watcher.poll() if status.record is not None]
            if not statuses and time.monotonic() > empty_until:
                return None
            for status in statuses:
                if status.exit_code is not None and -status.exit_code in _STOP_SIGNALS:
                    detector.stopping = -status.exit_code
            detector.lost = self._peers.poll(time.monotonic())
            if (verdict := watcher.verdict(time.monotonic(), statuses)) is not None:
                return verdict, statuses
            are_gone = bool(statuses) and all(status.exit_code is not None for status in statuses)
            if are_gone and not detector.is_deciding:
                return None
            self._processes.wait(watcher.pause)

    def _report(
        self, watcher: RankWatcher, verdict: Verdict, statuses: Sequence[RankStatus]
    ) -> None:
        node, error = self._spec.node, verdict.status.error
        # "run_folder": the present path of a renamed run folder; None: unknown, no file is written.
        facts = {} if error is None else error.facts
        path = Path(facts.get("run_folder", self._path) or os.devnull)
        logs = path / LOGS
        ended = watcher.failed(verdict, statuses, logs)
        with suppress(OSError):
            logs.mkdir(exist_ok=True)
            for rank, trace in ended.traces.items():
                (logs / f"rank-{rank}.err").write_text(trace)
        advice = advice_on(verdict, path, self._spec.command)
        restart = _RESTARTS.get(node.launcher)
        action = "ended the ranks of this node" + (f"; {restart}" if restart else "")
        lines = [describe(ended, logs, kept=logs if path.is_dir() else None)]
        if path.is_dir():
            is_first = write_verdict(
                path,
                ended,
                epoch=read_start(path)[1],
                action=action,
                advice=advice,
                first_rank=node.first,
                earlier=self._earlier,
            )
            if is_first:
                self._page_of = path
                step = verdict.status.record.step if verdict.status.record else None
                Events(RunFolder(path, has_run=True)).add("failed", verdict.message, step)
            lines.append(f"moemesh: {action}; {details(path)}")
        # torchrun's report gets the message of the rank at fault.
        with suppress(OSError):
            if name := torchrun_file(self._folder, verdict.rank).read_text():
                extra = {"py_callstack": verdict.message, "timestamp": str(int(time.time()))}
                text = json.dumps({"message": {"message": verdict.message, "extraInfo": extra}})
                temporary = Path(f"{name}.{os.getpid()}")
                temporary.write_text(text)
                os.replace(temporary, name)
        log("\n".join([*lines, advice]))


def main() -> None:
    """Run the watcher that the command line describes."""
    # Each other node needs an open file; many systems allow only 1,024 by default.
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (*_STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    spec = WatcherSpec.of(sys.argv[1])
    Watcher(spec, inherited(sys.stdin.fileno()) if spec.node.has_others else None).run()


if __name__ == "__main__":
    main()
