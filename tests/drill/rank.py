"""A process of the drill: ``moemesh`` with a fault that comes once, on one rank, at one place.

``python -m tests.drill.rank SPEC train ...`` is the launcher and, started by it, each rank.
SPEC is the JSON of a :class:`Spec`. The library has no code for faults: the updates of the progress
word, which every rank passes, are where they come, and the judge's verdict is where time is taken.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemesh.config.python import python_command
from moemesh.monitor import progress

#: Name of the file with the findings of an action that only inspects (empty: no problem), and of
#: the file with command and process of the launcher, as JSON.
FOUND, LAUNCHER = "found", "launcher"
#: Name of the file with a line for each fault, each verdict, and each first step after one; names
#: of the files of a soak with its next fault, and of the action of its :class:`Spec`.
NOTES, ORDER, SOAK = "notes.jsonl", "order", "soak"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A fault of `rank` in `step`. `place`: "forward", "collective", or a phase of a run.

    `action`: one of :data:`ACTIONS` or of :func:`_act`; `folder`: for times and findings; `once`:
    only before the first restart.
    """

    action: str
    rank: int
    step: int
    place: str
    folder: str
    once: bool = True

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def environment() -> dict[str, str]:
    """The environment of a process of the drill, which imports this package wherever it starts."""
    paths = (os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent.parent.parent))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _loop() -> None:
    while True:
        pass


def _raise() -> None:
    raise RuntimeError("an exception of the drill")


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "sleep": lambda: time.sleep(1e6),
    "raise": _raise,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
}


def _act(spec: Spec) -> None:
    """Carry the action of `spec` out in this process."""
    folder = Path(spec.folder)
    if spec.action in ACTIONS:
        ACTIONS[spec.action]()
    elif spec.action.startswith("SIG"):
        name, _, _, target = spec.action.split()
        pid = os.getpid() if target == "rank" else _launcher(folder)["pid"]
        os.kill(pid, signal.Signals[name])
    elif spec.action.startswith("clock"):
        shift = 3600.0 if spec.action.endswith("forward") else -3600.0
        now = time.time
        time.time = lambda: now() + shift
        (folder / FOUND).write_text("")
    elif spec.action == "full disk":
        _limit_files(_FULL_BYTES)
    elif spec.action == "NaN":
        _weights(folder)[-1].fill_(float("nan"))
    elif spec.action == "flip":
        # Norms are the same on every rank of a stage.
        _weights(folder, dimensions=1)[0].mul_(1 + 2**-20)
    elif spec.action == "call":
        _call_alone()
    elif spec.action == "sockets":
        pids = (os.getpid(), _launcher(folder)["pid"])
        sockets = open_sockets(pids)
        (folder / FOUND).write_text("not shown" if sockets is None else "\n".join(sockets))
    else:
        second = python_command("moemesh", *_launcher(folder)["arguments"])
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        done = subprocess.run(second, capture_output=True, text=True, env=environment)
        is_refused = done.returncode == 2 and "in use by another run" in done.stderr
        (folder / FOUND).write_text("" if is_refused else f"{done.returncode}: {done.stderr}")


def open_sockets(pids: Iterable[int]) -> list[str] | None:
    """TCP sockets of `pids` that listen on more than loopback; None where they are not shown."""
    sockets: set[str] = set()
    addresses: list[str] = []
    try:
        for file in (file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(FileNotFoundError):  # the listing itself has one
                sockets.add(os.readlink(file))
    except OSError:
        return None
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[i] for i in (1, 3, 9))
            is_loopback = address.startswith(("0100007F", "0" * 24 + "01000000"))
            is_loopback |= address.startswith("0" * 16 + "FFFF00000100007F")
            if state == "0A" and f"socket:[{inode}]" in sockets and not is_loopback:
                addresses.append(f"{table} {address}")
    return addresses


def _weights(folder: Path, dimensions: int = 2) -> list[Any]:
    """Trained weights of this process with that number of dimensions, as tensors to write to."""
    import torch

    weights = [
        one.data
        for one in gc.get_objects()
        if isinstance(one, torch.nn.Parameter) and one.requires_grad and one.dim() == dimensions
    ]
    (folder / FOUND).write_text(f"{len(weights)} weights")
    return weights


def _call_alone() -> None:
    """An all_reduce over all ranks that the others do not call."""
    import torch

    from moemesh.comm.mesh import Mesh
    from moemesh.comm.transfers import all_reduce_

    mesh = next(one for one in gc.get_objects() if isinstance(one, Mesh) and one.world_size > 1)
    numbers = torch.zeros(1021, device=mesh.device)
    all_reduce_(numbers, mesh["world"], caller="drill", phase="forward")


#: A file can grow up to here on a "full disk": rows of metrics fit, a checkpoint does not.
_FULL_BYTES = 16 * 1024


def _limit_files(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def _launcher(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LAUNCHER).read_text())


def arm(spec: Spec) -> None:
    """Let the fault of `spec` come to this process if it is that rank, and take its times."""
    folder, rank = Path(spec.folder), int(os.environ.get("RANK", -1))
    write: Callable[[Any], None] = progress._Writer.write  # pyright: ignore[reportPrivateUsage]

    def watched(word: Any) -> None:
        write(word)
        if word.step < 1:
            return
        if spec.action == "full disk" and word.step >= spec.step + 2:
            _limit_files(resource.RLIM_INFINITY)
        noted = {note["event"] for note in read_notes(folder)} if spec.once else set[str]()
        if "fault" in noted:
            if word.phase == b"step" and "verdict" in noted and "went on" not in noted:
                _note(folder, "went on", step=word.step)
        elif rank == spec.rank and word.step == spec.step and _is_at(word, spec.place):
            _note(folder, "fault", action=spec.action, rank=rank, step=word.step)
            _act(spec)

    progress._Writer.write = watched  # pyright: ignore


def arm_for_orders(folder: Path) -> None:
    """Let this process, a rank of a soak, carry out the orders for it: an :data:`ORDER` file has
    the number of the fault, its action and its rank. A fault comes at a layer of a step, once."""
    rank = int(os.environ.get("RANK", -1))
    write: Callable[[Any], None] = progress._Writer.write  # pyright: ignore[reportPrivateUsage]
    first = last = 0

    def watched(word: Any) -> None:
        nonlocal first, last
        write(word)
        if word.step < 1 or word.step == last or not _is_at(word, "forward"):
            return
        first, last = first or word.step, word.step
        if rank == 0 and word.step == first + 1:
            _note(folder, "went on", step=first)
        try:
            order = json.loads((folder / ORDER).read_text())
        except FileNotFoundError:
            return
        if order["rank"] == rank:
            (folder / ORDER).unlink()
            _note(folder, "fault", action=order["action"], rank=rank, step=word.step)
            ACTIONS[order["action"]]()

    progress._Writer.write = watched  # pyright: ignore


def note_verdicts(folder: Path) -> None:
    """Note every verdict of the launcher, which calls this."""
    from moemesh.monitor.detector import FailureDetector

    look = FailureDetector.poll

    def noted(detector: FailureDetector, now: float, statuses: Sequence[Any]) -> Any:
        verdict = look(detector, now, statuses)
        if verdict is not None:
            _note(folder, "verdict", kind=verdict.kind, rank=verdict.rank)
        return verdict

    FailureDetector.poll = noted


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """Notes of the processes of the drill, in the order of time."""
    file = folder / NOTES
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(map(json.loads, lines), key=lambda note: note["time"])


def _note(folder: Path, event: str, **facts: Any) -> None:
    with (folder / NOTES).open("a") as file:
        file.write(json.dumps({"event": event, "time": time.monotonic(), **facts}) + "\n")


def _is_at(word: Any, place: str) -> bool:
    if place == "collective":
        return bool(word.inside) and word.phase == b"step"
    if place == "forward":
        return word.layer >= 0 and not word.inside and word.phase == b"step"
    return word.phase == place.encode() and not word.inside


def main() -> None:
    """See the module."""
    spec = Spec(**json.loads(sys.argv[1]))
    is_rank = "RANK" in os.environ
    sys.argv = ["moemesh", *sys.argv[2:]]
    folder = Path(spec.folder)
    if spec.action == SOAK:
        arm_for_orders(folder)
    else:
        arm(spec)
    from moemesh.comm import launch

    if not is_rank:
        launcher = {"pid": os.getpid(), "arguments": sys.argv[1:]}
        (folder / LAUNCHER).write_text(json.dumps(launcher))
        note_verdicts(folder)
        launch.MODULE = ("tests.drill.rank", spec.text())
    runpy.run_module("moemesh", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
