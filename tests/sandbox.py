"""A place of its own for every test: directory, home and environment. The checkout is read only.

Commands read the directory they are called in, ``~`` and variables such as ``MOEMESH__plan__tp``,
and write to ``runs/``. Those of the user's must not change what a test finds, and a test must not
change them. The session therefore takes variables of the user out of the environment
(:func:`begin`), every test and every module has a directory and a home (:func:`place`), and who
writes into the checkout, or looks into its ``runs/``, fails where it does so (:func:`watch`).

Code that was compiled, and the examples of hypothesis, stay in pytest's cache from one session to
the next.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jinja2 import Environment

from moemesh.balance import compiled
from moemesh.trace.machine import OPENMP_WAITING

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

#: Variables of a user, job, terminal or git hook that change what commands do, find or print.
FOREIGN = re.compile(
    r"MOEMESH_(?!TEST_)|_MOEMESH_|SLURM_|TORCHELASTIC_|GIT_|HF_|HUGGINGFACE_|TRANSFORMERS_"
    r"|XDG_(CACHE|CONFIG|DATA|STATE)_HOME$"
    r"|((LOCAL|GROUP|ROLE|NODE)_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
    r"|(COLUMNS|LINES|TERMINAL_WIDTH|(NO|FORCE|CLI)_?COLOR|PY_COLORS|TTY_\w+|GITHUB_ACTIONS)$"
)

#: Variables of the session for the processes of its tests: the folder of files that are kept from
#: one session to the next, folders of the checkout in which they may write, and a folder of the
#: session for results that several tests use, in all workers.
_KEPT, _MAY_WRITE = "MOEMESH_TEST_KEPT", "MOEMESH_TEST_MAY_WRITE"
_SHARED = "MOEMESH_TEST_SHARED"

#: Variables to restore after the session, and the folder that holds all places.
_sessions: list[tuple[pytest.MonkeyPatch, Path]] = []
_numbers = count()
#: Places that were left empty, for the next tests: a disk takes milliseconds to remove a folder.
_empty: list[Path] = []


def begin(config: pytest.Config) -> None:
    """Take the user's variables and home out of the environment, before tests are imported."""
    patch, base = pytest.MonkeyPatch(), Path(tempfile.mkdtemp(prefix="moemesh-tests-"))
    _sessions.append((patch, base))
    for name in filter(FOREIGN.match, list(os.environ)):
        patch.delenv(name)
    for name, value in OPENMP_WAITING.items():  # torch is not loaded yet
        patch.setenv(name, value)
    # Without kept bytecode every process of a test compiles three hundred files.
    patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    patch.setattr(sys, "dont_write_bytecode", False)
    kept = base / "kept"
    if _KEPT in os.environ:  # pytest in a test
        kept = Path(os.environ[_KEPT])
    else:
        with suppress(AttributeError, OSError):  # `-p no:cacheprovider`; it cannot be written
            kept = config.cache.mkdir("moemesh")  # type: ignore[union-attr]
    patch.setenv(_KEPT, str(kept))
    if _SHARED not in os.environ:  # else a worker's
        patch.setenv(_SHARED, str(base / "shared"))
    for name in ("NUMBA", "TORCHINDUCTOR", "TRITON"):
        patch.setenv(f"{name}_CACHE_DIR", str(kept / name.lower()))
    patch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(kept / "hypothesis"))
    # Programs that tests start import moemesh and tests from this checkout, wherever they run,
    # and what the user installed beside an interpreter (`pip install --user`).
    # An empty one must go first: an empty entry beside another would be the current directory.
    given = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{given}" if given else str(ROOT))
    patch.setenv("PYTHONUSERBASE", site.getuserbase())
    may_write = [kept, config.option.basetemp and Path(config.option.basetemp).absolute()]
    # A checkout may lie in the folder of temporary files, or hold it.
    if (temporary := Path(tempfile.gettempdir())).is_relative_to(ROOT):
        may_write.append(temporary)
    patch.setenv(_MAY_WRITE, os.pathsep.join(str(path) for path in may_write if path))
    (base / "home").mkdir()
    patch.setenv("HOME", str(base / "home"))


def end() -> None:
    patch, base = _sessions.pop()
    patch.undo()
    _empty.clear()
    shutil.rmtree(base, ignore_errors=True)


def shared(name: str) -> Path:
    """A folder for results of this kind, of all workers of the session."""
    folder = Path(os.environ[_SHARED]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def once(name: str, make: Callable[[], T]) -> T:
    """`make()`, from a file if a process of the session has computed it before."""
    if _SHARED not in os.environ:
        return make()
    file = shared("results") / name
    with suppress(FileNotFoundError):
        return pickle.loads(file.read_bytes())
    result = make()
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(result))
    part.replace(file)
    return result


@contextmanager
def place() -> Iterator[None]:
    """An empty directory to be in, and a home."""
    folder = _empty.pop() if _empty else _new_place()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "here")
        patch.setenv("HOME", str(folder / "home"))
        yield
    with suppress(FileNotFoundError):
        if not os.listdir(folder / "here") and not os.listdir(folder / "home"):
            _empty.append(folder)


def _new_place() -> Path:
    folder = _sessions[-1][1] / str(next(_numbers))
    for name in ("here", "home"):
        (folder / name).mkdir(parents=True)
    return folder


def use_plain_loops() -> None:
    """The balancer is not compiled in this process, which would take half a minute;
    `tests.balance.test_compiled` compiles it."""
    compiled._plain = ContextVar("plain loops", default=True)


def compile_pages_once() -> None:
    """Pages share one template in this process, and in those that are forked from it."""
    compile_page = Environment.compile
    pages: dict[tuple[str, str], Any] = {}

    def compiled(
        environment: Environment, source: str, name: str | None = None, filename: str | None = None
    ) -> Any:
        if filename is None:  # of a model's conversations
            return compile_page(environment, source, name, filename)
        if (filename, source) not in pages:
            pages[filename, source] = compile_page(environment, source, name, filename)
        return pages[filename, source]

    Environment.compile = compiled  # type: ignore[assignment,method-assign]


# The checkout, which no test may change.

#: Events of Python (`sys.addaudithook`) and where among their arguments they have paths.
_PATHS = {
    "open": (0,),
    "os.chmod": (0,),
    "os.link": (1,),
    "os.listdir": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.scandir": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
    "subprocess.Popen": (2,),  # the directory of the program, which would write there
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Running tests; writes between tests are not watched.
_tests: list[str] = []
_violations: list[str] = []


def watch(test: str) -> None:
    """Watch what this process does to the checkout, until :func:`release`."""
    if not hasattr(sys, "_checkout_is_watched"):
        sys.addaudithook(_audit)
        sys._checkout_is_watched = True  # type: ignore[attr-defined]
    _tests.append(test)


def release() -> None:
    _tests.pop()


def violations() -> list[str]:
    """Violations since the last call: the test fails even if the code under test continued."""
    texts = _violations.copy()
    _violations.clear()
    return texts


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _PATHS or not _tests:
        return
    looks = event in ("os.listdir", "os.scandir")
    looks |= event == "open" and not arguments[2] & _WRITING
    for position in _PATHS[event]:
        if (path := _in_checkout(arguments[position])) and not (looks and _may_be_read(path)):
            _violations.append(f"{event} {path}")
            raise AssertionError(f"{_tests[-1]} leaves the checkout alone: {event} {path}")


def _in_checkout(place: Any) -> str:
    """The absolute path, if it is in the checkout and not in a folder that may be written."""
    if place is None or isinstance(place, int):
        return ""
    path = os.path.abspath(os.fsdecode(place))
    if not f"{path}/".startswith(f"{ROOT}/") or "__pycache__" in path:
        return ""
    may_write = filter(None, os.environ.get(_MAY_WRITE, "").split(os.pathsep))
    return "" if f"{path}/".startswith(tuple(f"{folder}/" for folder in may_write)) else path


def _may_be_read(path: str) -> bool:
    """Documents, sources and tests may; runs are the user's."""
    return not f"{path}/".startswith(f"{ROOT}/runs/")
