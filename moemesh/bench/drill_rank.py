"""A process of the drill: ``moemesh`` with a fault that comes once, on one rank, at one place.

``python -m moemesh.bench.drill_rank SPEC train ...`` is the launcher and, started by it, each rank.
SPEC is the JSON of a :class:`Spec`. The library has no code for faults: the updates of the progress
word, which every rank passes, are where they come, and the judge's verdict is where time is taken.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemesh.trace import progress_words

#: Files in the drill's folder: times (monotonic seconds) of the fault, of the verdict, and of the
#: first step behind it.
FIRED, JUDGED, WENT_ON = "fired", "judged", "went-on"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What happens to `rank` in `step`. `place`: "forward", "collective", or a phase of a run.

    `action`: one of :data:`ACTIONS`; `folder`: for the times; `once`: not again after a restart.
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


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop() -> None:
    while True:
        pass


def _sleep() -> None:
    time.sleep(1e6)


def _raise() -> None:
    raise RuntimeError("an exception of the drill")


def _exit(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "stop": _stop,
    "loop": _loop,
    "sleep": _sleep,
    "raise": _raise,
    "exit 0": _exit(0),
    "exit 3": _exit(3),
}


def arm(spec: Spec) -> None:
    """Let the fault of `spec` come to this process if it is that rank, and take its times."""
    folder, rank = Path(spec.folder), int(os.environ.get("RANK", -1))
    write: Callable[[Any], None] = progress_words._Writer.write  # pyright: ignore[reportPrivateUsage]

    def watched(word: Any) -> None:
        write(word)
        if word.step < 1:
            return
        if spec.once and (folder / FIRED).exists():
            if word.phase == b"step" and not (folder / WENT_ON).exists() and _was_judged(folder):
                _stamp(folder / WENT_ON)
        elif rank == spec.rank and word.step == spec.step and _is_at(word, spec.place):
            _stamp(folder / FIRED)
            ACTIONS[spec.action]()

    progress_words._Writer.write = watched  # pyright: ignore


def take_time_of_verdicts(folder: Path) -> None:
    """In the launcher: note when the judge has come to a verdict."""
    from moemesh.comm.verdict import Judge

    look = Judge.look

    def timed(judge: Judge, now: float, seen: Sequence[Any]) -> Any:
        verdict = look(judge, now, seen)
        if verdict is not None and not (folder / JUDGED).exists():
            _stamp(folder / JUDGED)
        return verdict

    Judge.look = timed


def read_time(file: Path) -> float | None:
    """A time that was noted."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def _is_at(word: Any, place: str) -> bool:
    if place == "collective":
        return bool(word.inside) and word.phase == b"step"
    if place == "forward":
        return word.layer >= 0 and not word.inside and word.phase == b"step"
    return word.phase == place.encode() and not word.inside


def _was_judged(folder: Path) -> bool:
    return (folder / JUDGED).exists()


def _stamp(file: Path) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(repr(time.monotonic()))
    os.replace(temporary, file)


def main() -> None:
    """See the module."""
    spec = Spec(**json.loads(sys.argv[1]))
    is_rank = "RANK" in os.environ
    sys.argv = ["moemesh", *sys.argv[2:]]
    arm(spec)
    from moemesh.comm import launch

    if not is_rank:
        take_time_of_verdicts(Path(spec.folder))
        launch.ENTRY = ("-m", "moemesh.bench.drill_rank", spec.text())
    runpy.run_module("moemesh", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
