"""The command: fast help without torch, one message and exit code 2 for every mistake."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import typer

from moemesh import __main__, __version__, cli
from moemesh.cli.application import app
from moemesh.cli.verbs import VERBS
from moemesh.trace import machine
from moemesh.train.preparation import Preparation, RunRequest
from tests.mistakes.runner import get_command
from tests.waiting import ended

#: Any import of torch, numpy or pydantic beyond what is allowed ends the process.
GUARD = """
import sys
from importlib.abc import MetaPathFinder

class Guard(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise SystemExit(f"forbidden import: {{name}}")

sys.meta_path.insert(0, Guard())
sys.executable = {python!r}
from moemesh.cli import main
commands = {commands!r}
for words in commands:
    sys.argv = ["moemesh", *words]
    try:
        main()
    except SystemExit as error:
        if words is commands[-1] or isinstance(error.code, str):
            raise
"""


def run_guarded(
    forbidden: set[str], *arguments: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter of its own, whose processes run in `python`."""
    return run_all_guarded(forbidden, arguments, python=python)


def run_all_guarded(
    forbidden: set[str], *commands: Sequence[str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Several commands in one such interpreter; the exit code is that of the last."""
    given = [list(arguments) for arguments in commands]
    script = GUARD.format(forbidden=forbidden, commands=given, python=python)
    return ended([sys.executable, "-c", script])


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["moemesh", *arguments])
    cli.import_verbs()
    monkeypatch.setattr(typer.main, "get_command", get_command)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


#: The fixture `invoke`: :func:`run` for the arguments of a command.
Invoke = Callable[..., tuple[int, str, str]]


def test_help_imports_nothing_heavy() -> None:
    forbidden = {"torch", "numpy", "rich", "jinja2"}
    verbs = ["train", "--help"], ["bench", "links", "--help"], ["config", "--help"]
    # Newer versions of typer use pydantic themselves to read the arguments of a verb.
    for names, commands in (({"pydantic"}, (["--help"], ["--version"])), (set(), verbs)):
        done = run_all_guarded(forbidden | names, *commands)
        assert done.returncode == 0, done.stderr
        assert "forbidden import" not in done.stderr
        assert done.stdout.count("moemesh") >= len(commands)


def test_configuration_and_report_never_import_torch() -> None:
    done = run_all_guarded(
        {"torch"},
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "check", "--set", "plan.dp=4"],
        ["config", "check", "--set", "plan.ep=4"],
        ["train", "--set", "plan.ep=3"],
        ["train", "--no-such-option"],
        ["report", "/no/such/folder"],
    )
    assert "forbidden import" not in done.stderr and "/no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_guard_can_fail() -> None:
    done = run_guarded({"pydantic"}, "config", "show")
    assert "forbidden import: pydantic" in done.stderr


def test_help_lists_the_options(invoke: Invoke) -> None:
    code, out, _ = invoke("train", "--help")
    assert code == 0
    for word in ("--set", "--out", "CONFIG.toml"):
        assert word in out
    assert invoke("--version")[:2] == (0, f"moemesh {__version__}\n")


def test_show_prints_every_key_with_its_origin(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEMESH__train__seed", "9")
    code, out, err = invoke("config", "show", "--set", "plan.dp=2")
    assert (code, err) == (0, "")
    assert re.search(r"^plan.dp +\= 2 +# --set plan.dp=2$", out, re.MULTILINE)
    assert re.search(r"^train.seed += 9 +# environment MOEMESH__train__seed$", out, re.MULTILINE)
    assert re.search(r"^model.num_experts += 8 +# preset tiny$", out, re.MULTILINE)
    code, out, _ = invoke("config", "show", "--no-origin")
    assert "#" not in out


def test_show_as_json(invoke: Invoke) -> None:
    _, out, _ = invoke("config", "show", "--json", "--set", "plan.dp=2")
    shown = json.loads(out)
    assert shown["config"]["plan"]["dp"] == 2
    assert shown["origins"]["plan.dp"] == "--set plan.dp=2"
    _, out, _ = invoke("config", "show", "--json", "--no-origin")
    assert set(json.loads(out)) == {"config"}


def test_check_says_how_many_ranks(invoke: Invoke) -> None:
    arguments = ["config", "check", "--set", "plan.dp=4", "--set", "plan.ep=2"]
    assert invoke(*arguments) == (
        0,
        "ok: 4 ranks (pp=1 dp=4 cp=1 tp=1, ep=2 etp=1 edp=2)\n",
        "",
    )


def fake(monkeypatch: pytest.MonkeyPatch, package: str, name: str, **functions: object) -> None:
    """Put a module in place of one that needs torch."""
    module = ModuleType(f"{package}.{name}")
    for function, body in functions.items():
        setattr(module, function, body)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    parent = __import__(package, fromlist=["x"])
    monkeypatch.setattr(parent, name, module, raising=False)


def test_train_passes_on_what_it_was_told(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def command(request: RunRequest, prepared: Preparation) -> int:
        given = (request.config_file, request.overrides, request.out, request.allowed_changes)
        calls.append((*given, request.stop_after, request.takeover, request.profile_steps))
        assert prepared.folder.path == (request.out or Path("runs/tiny"))
        return 3

    fake(monkeypatch, "moemesh.train", "command", train=command)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.toml"
    path.write_text("[plan]\ndp = 2\n")
    out = tmp_path / "run"
    given = [str(path), "--set", "train.steps=3", "--out", str(out), "--allow-change", "train.lr"]
    given += ["--stop-after", "2", "--profile", "4"]
    assert invoke("train", *given)[0] == 3
    assert invoke("train")[0] == 3
    assert invoke("train", "--takeover")[0] == 3
    assert calls == [
        (path, ["train.steps=3"], out, ["train.lr"], 2, False, 4),
        (None, [], None, [], None, False, None),
        (None, [], None, [], None, True, None),
    ]


class SomethingWrongError(ValueError):
    """Stands for a package's own kind of ValueError."""


def test_the_table_of_verbs_is_that_of_the_modules() -> None:
    cli.import_verbs()
    options: dict[str, set[str]] = {}
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        options.setdefault(command.callback.__module__, set()).add(name)
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:  # type: ignore[union-attr]
            options.setdefault(command.callback.__module__, set()).add(str(group.name))
    named: dict[str, set[str]] = {}
    for verb, row in VERBS.items():
        named.setdefault(f"moemesh.cli{row.module}", set()).add(verb.split()[0])
    assert options == named


def test_a_verb_does_not_wait_for_the_modules_of_others() -> None:
    script = (
        "import sys; sys.argv = ['moemesh', 'cluster', 'list']; import atexit; atexit.register("
    )
    script += "lambda: print(*sys.modules)); from moemesh.cli import main; main()"
    done = ended([sys.executable, "-c", script])
    assert "moemesh.cli.machine" in done.stdout and "benchmarks.application" not in done.stdout


def test_ctrl_c_in_the_end_of_the_interpreter_prints_nothing() -> None:
    script = (
        "import atexit, os, signal, sys; from moemesh.__main__ import main\n"
        "atexit.register(lambda: (sys.stdout.flush(), os.kill(os.getpid(), signal.SIGINT)))\n"
        "sys.argv = ['moemesh', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-2, f"moemesh {__version__}\n", "")


def test_ctrl_c_in_an_import_prints_nothing() -> None:
    script = (
        "import os, signal, sys; from moemesh.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder()); main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_second_ctrl_c_prints_nothing() -> None:
    script = (
        "import os, sys; from moemesh.__main__ import main\n"
        "assert not {'typing', 'contextlib', 'signal'} & {*sys.modules} - before\n"
        "import signal; from moemesh import cli\n"
        "def twice():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.main = twice; main()"
    )
    script = f"import sys; before = {{*sys.modules}}; {script}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot set a handler of signals."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    monkeypatch.setattr(cli, "main", lambda: 7 / 0)
    with ThreadPoolExecutor() as pool, pytest.raises(ZeroDivisionError):
        pool.submit(__main__.main).result()


def test_only_our_own_value_errors_are_the_users(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    fake(monkeypatch, "moemesh.train", "command", train=fail)
    error: Exception = ValueError("a fault of ours")
    monkeypatch.setattr(sys, "argv", ["moemesh", "train"])
    with pytest.raises(ValueError, match="a fault of ours"):
        cli.main()
    error = OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")
    code, _, err = invoke("train")
    assert (code, err) == (2, "moemesh: out/model.safetensors: No space left on device\n")
    SomethingWrongError.__module__ = "moemesh.data.samples"
    error = SomethingWrongError("data.path names no file")
    code, _, err = invoke("train")
    assert (code, err) == (2, "moemesh: data.path names no file\n")
    error = KeyboardInterrupt()  # type: ignore[assignment]
    assert invoke("train")[0] == 130


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[plan]\r\ndp = 2\r\n")
    code, out, _ = invoke("config", "check", str(path))
    assert (code, out[:11]) == (0, "ok: 2 ranks")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{Path(sys.executable).parent}/moemesh config show | head -n 1"
    done = ended([command], shell=True)
    assert done.stdout.startswith("model.preset")
    assert "Traceback" not in done.stderr


FIRST = """
[plan]
dp = 2
ep = 2
[train]
dtype = "float32"
[data]
seq_len = 64
global_batch = 8
"""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_estimate_of_a_configuration_has_its_dtype_and_optimizer(
    tmp_path: Path, invoke: Invoke, optimizer: str
) -> None:
    """fp32: gradients as large as the weights; AdamW has two moments, SGD here none."""
    path = tmp_path / "config.toml"
    path.write_text(FIRST.replace("[data]", f'optimizer = "{optimizer}"\n[data]'))
    arguments = ["estimate", "--cluster", "laptop_cpu", "--json", "--config"]
    code, out, _ = invoke(*arguments, str(path))
    memory = json.loads(out)["memory"]["first"]
    weights = memory["dense_weights"] + memory["expert_weights"]
    assert code == 0 and memory["gradients"] == weights
    assert memory["optimizer"] == (2 * weights if optimizer == "adamw" else 0)
    # A run's folder gives the same output as the file in it.
    assert invoke(*arguments, str(tmp_path))[1] == out


def test_check_says_how_many_ranks_share_a_core(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    many = ["--set", "plan.dp=64", "--set", "data.global_batch=64", "--set", "train.device=cpu"]
    code, out, _ = invoke("config", "check", *many)
    assert code == 0 and "64 ranks share 2 core(s)" in out


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_idle_threads_spin_for_a_short_time_in_every_verb(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of the user's environment is left as it is."""
    for name in machine.OPENMP_WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["moemesh", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    names = machine.OPENMP_WAITING.keys() & os.environ.keys()
    assert {name: os.environ[name] for name in names} == (given or machine.OPENMP_WAITING)
