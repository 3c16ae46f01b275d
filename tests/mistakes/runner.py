"""Runs all mistakes in one process without torch; prints one JSON object a case."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from tests.mistakes.cases import Mistake

FORBIDDEN = "torch"
#: CPU seconds after which a command is ended.
ENDED_AFTER = 5.0


#: The tree of all commands, which typer builds for each call in more time than most messages take.
get_command = functools.cache(typer.main.get_command)


class Outcome(NamedTuple):
    """Result of a command: exit code (text: an exception or a forbidden import), output, CPU
    seconds, and names of files that it left."""

    code: int | str
    out: str
    err: str
    seconds: float
    left: list[str]


class _Guard(MetaPathFinder):
    """Ends a command that imports torch."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == FORBIDDEN:
            raise SystemExit(f"imports {fullname}")


class _TooLongError(Exception):
    """A command takes more CPU time than any message needs."""


def _end(number: int, frame: Any) -> None:
    raise _TooLongError(f"{ENDED_AFTER} s of CPU")


def run_here(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int | str, str, str]:
    """(exit code, stdout, stderr) of the command, in this process."""
    from moemesh import cli

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["moemesh", *arguments]
    os.environ.update(environ)
    code: Any = "no exit"
    signal.signal(signal.SIGPROF, _end)
    signal.setitimer(signal.ITIMER_PROF, ENDED_AFTER)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for name in environ:
            del os.environ[name]
    return code, out.getvalue(), err.getvalue()


def outcome(mistake: Mistake) -> Outcome:
    """Run one case in the current folder, and remove the files that it left."""
    bad = Path("bad.toml")
    if mistake.toml is not None:
        bad.write_text(mistake.toml)
    before = set(Path().rglob("*"))
    start = time.process_time()
    code, out, err = run_here(mistake.arguments, mistake.environ)
    seconds = time.process_time() - start
    left = sorted(set(Path().rglob("*")) - before, reverse=True)
    for path in left:
        path.rmdir() if path.is_dir() else path.unlink()
    bad.unlink(missing_ok=True)
    return Outcome(code, out, err, seconds, [str(path) for path in left])


def main() -> None:
    from moemesh import cli
    from moemesh.data import input_files
    from tests.mistakes import cases

    # The default data without packages: each command that checks its data would read all sources.
    library = Path(sysconfig.get_path("stdlib"))
    packages = {path.name for path in library.iterdir() if path.is_dir()}
    input_files.STANDARD_LIBRARY_SKIP = packages | {path.name for path in library.glob("[a-r]*.py")}
    sys.meta_path.insert(0, _Guard())
    sys.executable = sys.argv[1]
    cli.import_verbs()
    typer.main.get_command = get_command
    for mistake in cases.MISTAKES:
        print(json.dumps(outcome(mistake)), flush=True)


if __name__ == "__main__":
    main()
