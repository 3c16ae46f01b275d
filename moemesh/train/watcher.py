"""The watcher of a node: names the rank at fault where another launcher has started the ranks.

It is a process beside the ranks of its node, which the first of them starts
(`moemesh.watch.meeting`). After a verdict it writes the report, tells the cause and ends the ranks,
so that torchrun or Slurm starts them again or ends the job. It leaves with the ranks.
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
from moemesh.train.records.failure import (
    advice_on,
    details,
    report_id,
    say,
    tell_slow,
    write_verdict,
)
from moemesh.train.records.run_folder import LOGS, Events, RunFolder
from moemesh.watch.lease import read_start
from moemesh.watch.meeting import WORDS, Guests, Node, lock, torchrun_file
from moemesh.watch.peers import Peers, inherited
from moemesh.watch.progress_words import WordFile
from moemesh.watch.supervisor import RankWatcher, describe
from moemesh.watch.verdict import Limits, Seen, Verdict

#: Signals with which a job is asked to end; ranks see to them.
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Without any rank for so long there will be none.
_EMPTY_SECONDS = 60.0
#: The launcher takes the rank that leaves first for the cause.
_CULPRIT_FIRST_SECONDS = 0.4
#: A report takes less than this, stacks included, or does not come.
_REPORT_SECONDS = 8.0
_COMMANDS = {
    "torchrun": ["torchrun", "...", "--no-python", "moemesh"],
    "srun": ["srun", "...", "moemesh"],
}
_STARTS_AGAIN = {
    "torchrun": "torchrun starts them again as often as --max-restarts says",
    "srun": "Slurm starts the job again where it may (--requeue)",
}


@dataclass(frozen=True, kw_only=True)
class WatcherSpec:
    """The task of a watcher: where ranks meet, where the run is, and the words of the command."""

    node: Node
    folder: str
    path: str
    limits: Limits
    command: list[str]

    @staticmethod
    def of(text: str) -> WatcherSpec:
        """From the JSON of its fields, as the command line has it."""
        found: dict[str, Any] = parse_json(text)
        found |= {"node": Node(**found["node"]), "limits": Limits(**found["limits"])}
        return WatcherSpec(**found)


def watcher_command(folder: Path, node: Node, *, path: Path, limits: Limits) -> list[str]:
    """The command of the watcher of `node`, whose ranks meet in `folder`; `path`: of the run."""
    command = [*_COMMANDS.get(node.launcher, ["moemesh"]), *sys.argv[1:]]
    spec = WatcherSpec(
        node=node, folder=str(folder), path=str(path.absolute()), limits=limits, command=command
    )
    return python_command("moemesh.train.watcher", json.dumps(asdict(spec)))


class Watcher:
    """Watches the ranks of one node until they are gone; see :meth:`run`."""

    def __init__(self, spec: WatcherSpec, listener: socket.socket | None = None) -> None:
        """`listener`: for the watchers of other nodes."""
        self._spec, self._path, self._folder = spec, Path(spec.path), Path(spec.folder)
        self._guests, self._earlier = Guests(), report_id(self._path)
        self._peers = Peers(spec.node.first, listener, self._folder)

    def run(self) -> None:
        """Until all ranks have left, or were ended after a failure."""
        node, limits = self._spec.node, self._spec.limits
        words = WordFile(self._folder / WORDS, node.world_size, is_there=True)
        watcher = RankWatcher(
            self._folder,
            words,
            node.ranks,
            self._guests,
            limits,
            lambda slow: tell_slow(slow, Events(RunFolder(self._path, has_run=True))),
        )
        handle = lock(self._folder)
        try:
            if (found := self._watch(watcher)) is not None:
                verdict, seen = found
                # The disk of the run may be behind the network that is cut, and never answer.
                report = Thread(target=self._report, args=(watcher, verdict, seen), daemon=True)
                report.start()
                report.join(_REPORT_SECONDS)
                if report.is_alive():
                    why = f"{self._path} does not answer: no report is in it"
                    say(f"moemesh: {verdict.message}; {why}")
                # Nobody meets here any more, and ranks that wait for the verdict have it.
                shutil.rmtree(self._folder, ignore_errors=True)
                self._guests.send(verdict.rank, signal.SIGKILL)
                time.sleep(_CULPRIT_FIRST_SECONDS)
                for one in seen:
                    self._guests.send(one.rank, signal.SIGKILL)
            # Not after an error of its own: ranks see by a free lock that nobody speaks for them.
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            words.unmap()
            self._peers.close()
            os.close(handle)

    def _watch(self, watcher: RankWatcher) -> tuple[Verdict, list[Seen]] | None:
        judge, empty_until = watcher.judge, time.monotonic() + _EMPTY_SECONDS
        while True:
            # A rank that does not come, or does not take part, is its launcher's.
            seen = [one for one in watcher.look() if one.word is not None]
            if not seen and time.monotonic() > empty_until:
                return None
            for one in seen:
                if one.exit_code is not None and -one.exit_code in _ASKED:
                    judge.stopping = -one.exit_code
            judge.lost = self._peers.look(time.monotonic())
            if (verdict := watcher.verdict(time.monotonic(), seen)) is not None:
                return verdict, seen
            are_gone = bool(seen) and all(one.exit_code is not None for one in seen)
            if are_gone and not judge.is_deciding:
                return None
            self._guests.wait(watcher.pause)

    def _report(self, watcher: RankWatcher, verdict: Verdict, seen: Sequence[Seen]) -> None:
        node, told = self._spec.node, verdict.seen.told
        # A run that has lost its folder names its present one, or None.
        facts = {} if told is None else told.facts
        path = Path(facts.get("run_folder", self._path) or os.devnull)
        logs = path / LOGS
        ended = watcher.failed(verdict, seen, logs)
        with suppress(OSError):
            logs.mkdir(exist_ok=True)
            for rank, trace in ended.traces.items():
                (logs / f"rank-{rank}.err").write_text(trace)
        advice = advice_on(verdict, path, self._spec.command)
        again = _STARTS_AGAIN.get(node.launcher)
        action = "ended the ranks of this node" + (f"; {again}" if again else "")
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
                word = verdict.seen.word
                Events(RunFolder(path, has_run=True)).add(
                    "failed", verdict.message, word.step if word else None
                )
            lines.append(f"moemesh: {action}; {details(path)}")
        # The message that torchrun's own report shows of the rank at fault.
        with suppress(OSError):
            if name := torchrun_file(self._folder, verdict.rank).read_text():
                extra = {"py_callstack": verdict.message, "timestamp": str(int(time.time()))}
                text = json.dumps({"message": {"message": verdict.message, "extraInfo": extra}})
                temporary = Path(f"{name}.{os.getpid()}")
                temporary.write_text(text)
                os.replace(temporary, name)
        say("\n".join([*lines, advice]))


def main() -> None:
    """Be the watcher that the command line describes."""
    # One to each other node; many systems allow 1,024 files until a process asks.
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (*_ASKED, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    spec = WatcherSpec.of(sys.argv[1])
    Watcher(spec, inherited(sys.stdin.fileno()) if spec.node.has_others else None).run()


if __name__ == "__main__":
    main()
