"""The command: fast help without torch, one message and exit code 2 for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from moemesh import __version__, cli

#: Any import of torch, numpy or pydantic beyond what is allowed ends the process.
GUARD = """
import sys
from importlib.abc import MetaPathFinder

class Guard(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise SystemExit(f"forbidden import: {{name}}")

sys.meta_path.insert(0, Guard())
sys.argv = ["moemesh", *{arguments!r}]
from moemesh.cli import main
main()
"""


def run_guarded(forbidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = GUARD.format(forbidden=forbidden, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["moemesh", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOEMESH__")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["bench", "layer", "--help"],
        ["config", "--help"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    # Newer versions of typer use pydantic themselves to read the arguments of a verb.
    forbidden = {"torch", "numpy", "rich", "jinja2"}
    done = run_guarded(forbidden | ({"pydantic"} if len(arguments) == 1 else set()), *arguments)
    assert done.returncode in (0, 2), done.stderr
    assert "forbidden import" not in done.stderr
    assert "moemesh" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "check", "--set", "plan.dp=4"],
        ["config", "check", "--set", "plan.ep=4"],
        ["train", "--set", "plan.ep=3"],
        ["train", "--no-such-option"],
        ["report", "/no/such/folder"],
    ],
)
def test_configuration_and_report_never_import_torch(arguments: list[str]) -> None:
    done = run_guarded({"torch"}, *arguments)
    assert "forbidden import" not in done.stderr
    assert "Traceback" not in done.stderr


def test_guard_can_fail() -> None:
    done = run_guarded({"pydantic"}, "config", "show")
    assert "forbidden import: pydantic" in done.stderr


def test_help_starts_in_three_tenths_of_a_second() -> None:
    command = [sys.executable, "-m", "moemesh", "--help"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) <= 0.3


def test_help_lists_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "train", "--help")
    assert code == 0
    for word in ("--set", "--out", "CONFIG.toml"):
        assert word in out
    assert run(capsys, monkeypatch, "--version")[:2] == (0, f"moemesh {__version__}\n")


def test_show_prints_every_key_with_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEMESH__train__seed", "9")
    code, out, err = run(capsys, monkeypatch, "config", "show", "--set", "plan.dp=2")
    assert (code, err) == (0, "")
    assert re.search(r"^plan.dp +\= 2 +# --set plan.dp=2$", out, re.MULTILINE)
    assert re.search(r"^train.seed += 9 +# environment MOEMESH__train__seed$", out, re.MULTILINE)
    assert re.search(r"^model.num_experts += 8 +# preset tiny$", out, re.MULTILINE)
    code, out, _ = run(capsys, monkeypatch, "config", "show", "--no-origin")
    assert "#" not in out


def test_show_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = run(capsys, monkeypatch, "config", "show", "--json", "--set", "plan.dp=2")
    shown = json.loads(out)
    assert shown["config"]["plan"]["dp"] == 2
    assert shown["origins"]["plan.dp"] == "--set plan.dp=2"
    _, out, _ = run(capsys, monkeypatch, "config", "show", "--json", "--no-origin")
    assert set(json.loads(out)) == {"config"}


def test_show_as_a_table_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(capsys, monkeypatch, "config", "show", "--set", "data.path='[red]x'")
    assert code == 0
    for word in ("origin", "value", '"[red]x"', "--set data.path="):
        assert word in out, word


def test_check_says_how_many_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["config", "check", "--set", "plan.dp=4", "--set", "plan.ep=2"]
    assert run(capsys, monkeypatch, *arguments) == (
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def command(*given: object) -> int:
        calls.append(given)
        return 3

    fake(monkeypatch, "moemesh.train", "command", train=command)
    path = tmp_path / "a.toml"
    path.write_text("[plan]\ndp = 2\n")
    out = tmp_path / "run"
    given = [str(path), "--set", "train.steps=3", "--out", str(out), "--allow-change", "train.lr"]
    assert run(capsys, monkeypatch, "train", *given)[0] == 3
    assert run(capsys, monkeypatch, "train")[0] == 3
    assert calls == [(path, ["train.steps=3"], out, ["train.lr"]), (None, [], None, [])]


def test_bench_passes_on_what_it_was_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []
    fake(monkeypatch, "moemesh.bench", "layer", command=lambda **given: calls.append(given))
    arguments = ["--shape", "A", "--ranks", "4", "--dtype", "bfloat16", "--rounds", "7", "--json"]
    assert run(capsys, monkeypatch, "bench", "layer", *arguments)[0] == 0
    assert calls == [{"shape": "A", "ranks": 4, "dtype": "bfloat16", "rounds": 7, "json": True}]


class SomethingWrongError(ValueError):
    """Stands for a package's own kind of ValueError."""


def test_only_our_own_value_errors_are_the_users(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    fake(monkeypatch, "moemesh.train", "command", train=fail)
    error: Exception = ValueError("a fault of ours")
    monkeypatch.setattr(sys, "argv", ["moemesh", "train"])
    with pytest.raises(ValueError, match="a fault of ours"):
        cli.main()
    SomethingWrongError.__module__ = "moemesh.train.data"
    error = SomethingWrongError("data.path names no file")
    code, _, err = run(capsys, monkeypatch, "train")
    assert (code, err) == (2, "moemesh: data.path names no file\n")
    error = KeyboardInterrupt()  # type: ignore[assignment]
    assert run(capsys, monkeypatch, "train")[0] == 130


# A file (or None), arguments after the verb, words that the message must hold.
BAD: list[tuple[str | None, list[str], list[str]]] = [
    # unknown keys and sections
    ("[plan]\ntpp = 2", [], ["plan.tpp", "bad.toml:2", "plan.tp"]),
    ("[paln]\ntp = 2", [], ["paln", "bad.toml:1", "[plan]"]),
    ("tp = 2", [], ["tp", "belongs to [plan]", "plan.tp"]),
    ("[plan]\nclip = 1.0", [], ["plan.clip", "belongs to [train]"]),
    ("[train]\nlearning_rate = 1e-3", [], ["train.learning_rate", "train.lr"]),
    ("[plan]\ntensor_parallel_size = 2", [], ["plan.tp"]),
    ("[model]\nnum_local_experts = 8", [], ["model.num_experts"]),
    ("[model]\nqk_rope_head_dim = 8", [], ["model.qk_rotary_head_dim"]),
    ("[train]\nbatch_size = 8", [], ["data.global_batch"]),
    ("[train]\nmicro_batch_size = 8", [], ["plan.microbatches"]),
    ("[train]\nbeta2 = 0.9", [], ["train.adam_betas"]),
    ("[plan.deep]\nx = 1", [], ["plan.deep"]),
    ("[[plan]]\ntp = 1", [], ["plan", "section"]),
    ('"" = 1', [], ["sections"]),
    (None, ["--set", "plan.Tp=2"], ["plan.Tp", "plan.tp"]),
    (None, ["--set", "ep=2"], ["plan.ep"]),
    (None, ["--set", "plan.tp.x=2"], ["plan.tp.x"]),
    # syntax
    ("[plan", [], ["bad.toml:1", "not valid TOML"]),
    ("[plan]\ntp = \n", [], ["bad.toml:2", "not valid TOML"]),
    ("[plan]\ntp = 1\ntp = 2\n", [], ["bad.toml:3", "tp = 2"]),
    ("[plan]\n[plan]\n", [], ["bad.toml:2"]),
    ("[train]\nlr = .5\n", [], ["bad.toml:2"]),
    ("[train]\nsteps = 08\n", [], ["bad.toml:2"]),
    ('[data]\npath = "a\n', [], ["bad.toml:2"]),
    ("x = " + "[" * 5000, [], ["nested too deeply"]),
    ("x = " + "9" * 5000, [], ["not valid TOML"]),
    ("plan = 3", [], ["plan = 3", "section"]),
    # overrides
    (None, ["--set", "plan.tp"], ["plan.tp", "section.key=value"]),
    (None, ["--set", "=3"], ["--set"]),
    (None, ["--set", "plan=3"], ["plan", "section"]),
    (None, ["--set", "plan.tp=2", "--set", "plan.tp=4"], ["plan.tp", "twice", "plan.tp=2"]),
    (None, ["--set", "train.adam_betas=[0.9"], ["train.adam_betas", "not a TOML value"]),
    (None, ["--set", 'data.path="x'], ["data.path", "not a TOML value"]),
    # types
    (None, ["--set", 'plan.tp="2"'], ["plan.tp", '"2"', "integer", "tp = 2"]),
    (None, ["--set", "plan.tp=2.0"], ["plan.tp", "2.0", "integer"]),
    (None, ["--set", "plan.tp=true"], ["plan.tp", "true", "integer"]),
    (None, ["--set", "plan.tp=two"], ["plan.tp", '"two"', "integer"]),
    (None, ["--set", "plan.tp=[2]"], ["plan.tp", "[2]", "integer"]),
    (None, ["--set", "plan.tp="], ["plan.tp", '""', "integer"]),
    (None, ["--set", "train.lr=fast"], ["train.lr", '"fast"', "number"]),
    (None, ["--set", "train.lr=false"], ["train.lr", "false", "number"]),
    (None, ["--set", "train.lr=inf"], ["train.lr", "inf", "finite"]),
    (None, ["--set", "train.lr=nan"], ["train.lr", "nan", "finite"]),
    (None, ["--set", "data.path=3"], ["data.path", 'path = "3"']),
    (None, ["--set", "data.path=2024-01-01"], ["data.path", 'path = "2024-01-01"']),
    (None, ["--set", "model.qk_norm=1"], ["model.qk_norm", "true or false"]),
    (None, ["--set", "model.qk_norm=yes"], ["model.qk_norm", "qk_norm = true"]),
    (None, ["--set", "train.adam_betas=0.9"], ["train.adam_betas", "list"]),
    (None, ["--set", "train.adam_betas=[0.9]"], ["train.adam_betas", "2 numbers"]),
    (None, ["--set", "train.adam_betas=[0.9,0.9,0.9]"], ["train.adam_betas", "2 numbers"]),
    (None, ["--set", "model.preset=3"], ["model.preset", "text"]),
    # choices
    (None, ["--set", "train.optimizer=adam"], ["train.optimizer", "did you mean adamw"]),
    (None, ["--set", "train.dtype=bf16"], ["train.dtype", "bfloat16"]),
    (None, ["--set", "plan.schedule=1F1B "], ["plan.schedule", "did you mean 1f1b"]),
    (None, ["--set", "plan.schedule=zbh1"], ["plan.schedule", "did you mean zb_h1"]),
    (None, ["--set", "plan.dispatcher=alltoall"], ["did you mean all_to_all"]),
    (None, ["--set", "plan.data=zero4"], ["did you mean zero", "parameter_server"]),
    (None, ["--set", "plan.recompute=true"], ["plan.recompute", "none, selective, full"]),
    (None, ["--set", "model.preset=mixtral-8x7"], ["did you mean mixtral-8x7b"]),
    (None, ["--set", "train.resume=yes"], ["auto, never, must"]),
    # ranges
    (None, ["--set", "plan.tp=0"], ["plan.tp", "at least 1", "not 0"]),
    (None, ["--set", "plan.dp=-4"], ["plan.dp", "not -4"]),
    (None, ["--set", "plan.dp=99999999999999999999"], ["plan.dp", "at most 1048576"]),
    (None, ["--set", "train.steps=0"], ["train.steps", "at least 1"]),
    (None, ["--set", "train.lr=0"], ["train.lr", "above 0"]),
    (None, ["--set", "train.lr=-1e-3"], ["train.lr", "-0.001"]),
    (None, ["--set", "train.clip=-1"], ["train.clip", "at least 0"]),
    (None, ["--set", "train.momentum=1.0"], ["train.momentum", "below 1"]),
    (None, ["--set", "train.adam_betas=[0.9, 1.5]"], ["train.adam_betas", "below 1", "1.5"]),
    (None, ["--set", "train.final_lr_ratio=2"], ["train.final_lr_ratio", "at most 1"]),
    (None, ["--set", "train.timeout_seconds=0"], ["train.timeout_seconds", "above 0"]),
    (None, ["--set", "train.checkpoints_kept=0"], ["train.checkpoints_kept", "at least 1"]),
    (None, ["--set", "data.held_out=1"], ["data.held_out", "below 1"]),
    (None, ["--set", "data.seq_len=0"], ["data.seq_len", "at least 1"]),
    (None, ["--set", "data.global_batch=-1"], ["data.global_batch", "at least 1"]),
    (None, ["--set", "data.path="], ["data.path", "empty"]),
    (None, ["--set", "model.path="], ["model.path", "empty"]),
    (None, ["--set", "model.hidden_size=0"], ["model.hidden_size", "at least 1"]),
    # rules between keys
    (None, ["--set", "model.num_heads=6"], ["(4)", "(6)", "num_kv_heads = 3 or 6"]),
    (None, ["--set", "model.head_dim=15"], ["model.head_dim", "15", "14 or 16"]),
    (None, ["--set", "model.experts_per_token=9"], ["(9)", "(8)", "experts_per_token = 8"]),
    (None, ["--set", "model.router_groups=3"], ["(3)", "(8)", "router_groups = 2 or 4"]),
    (None, ["--set", "model.first_dense_layers=9"], ["(9)", "(4)"]),
    (None, ["--set", "model.vocab_size=100"], ["(100)", "256"]),
    (None, ["--set", "model.attention=mla"], ["kv_lora_rank", "v_head_dim"]),
    (None, ["--set", "model.preset=tiny", "--set", "model.path=x"], ["model.path", "both"]),
    (
        None,
        ["--set", "plan.dp=8", "--set", "plan.ep=6"],
        ["plan.ep = 6", "ep*etp (6) must divide dp*cp*tp (8)", "ep = 4 or 8"],
    ),
    (None, ["--set", "plan.ep=2"], ["ep*etp (2)", "dp*cp*tp (1)", "dp = 2"]),
    (None, ["--set", "plan.tp=3"], ["num_heads (8)", "num_kv_heads (4)", "tp = 2 or 4"]),
    (None, ["--set", "plan.pp=8"], ["plan.pp", "(8*1 = 8)", "pp = 4"]),
    (None, ["--set", "plan.ranks_per_node=3"], ["ranks_per_node (3)", "(1)"]),
    (None, ["--set", "plan.microbatches=64"], ["microbatches (64)", "(32 sequences)"]),
    (
        None,
        ["--set", "model.num_experts=0", "--set", "plan.dp=2", "--set", "plan.ep=2"],
        ["plan.ep", "num_experts is 0", "ep = 1"],
    ),
]


@pytest.mark.parametrize(("text", "arguments", "words"), BAD)
def test_bad_configurations(
    text: str | None,
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    if text is not None:
        Path("bad.toml").write_text(text)
        files = ["bad.toml"]
    for verb in (["config", "check"], ["train"]):
        code, out, err = run(capsys, monkeypatch, *verb, *files, *arguments)
        assert code == 2
        assert out == ""
        assert "Traceback" not in err
        for word in words:
            assert word in err, err
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.toml"}


def test_there_are_enough_bad_configurations() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--lr", "3"], ["--lr", "--set train.lr=VALUE"]),
        (["train", "--tensor-parallel-size", "3"], ["--set plan.tp=VALUE"]),
        (["train", "--plan.tp", "3"], ["--set plan.tp=VALUE"]),
        (["train", "--stes"], ["--stes"]),
        (["train", "a.toml", "b.toml"], ["b.toml"]),
        (["trian"], ["trian"]),
        (["config", "show", "--set"], ["--set"]),
        (["bench", "layer", "--shape", "C"], ["C"]),
        (["bench", "layer", "--ranks", "0"], ["--ranks", "1"]),
        (["bench", "layer", "--rounds", "many"], ["--rounds", "integer"]),
        (["report"], ["RUN"]),
        (["report", "no-such-run"], ["no-such-run"]),
        (["config", "check", "none.toml"], ["none.toml", "cannot read"]),
        (["config", "check", "."], [".", "cannot read"]),
    ],
)
def test_bad_commands(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def test_bytes_that_are_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, monkeypatch, "config", "check", str(path))
    assert code == 2
    assert "UTF-8" in err
    code, _, err = run(capsys, monkeypatch, "config", "check", "--set", "data.path=\udcff")
    assert code == 2
    assert "UTF-8" in err


def test_a_file_with_a_byte_order_mark_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[plan]\r\ndp = 2\r\n")
    code, out, _ = run(capsys, monkeypatch, "config", "check", str(path))
    assert (code, out[:11]) == (0, "ok: 2 ranks")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m moemesh config show | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("model.preset")
    assert "Traceback" not in done.stderr
