"""What `moemesh train` looks at before torch: `--dry-run`, `config check`, paths, permissions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moemesh.cli.preparation_text import FILES
from moemesh.config.load import load_run, resolved_toml
from moemesh.train.preparation import prepare
from tests.documents import text_of
from tests.test_cli import clean_environment, run, run_guarded

__all__ = ["clean_environment"]  # a fixture, used by being here


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 400)
    return tmp_path


def test_a_dry_run_says_all_and_writes_nothing(here: Path) -> None:
    given = ["data.path=a.txt", "plan.dp=2", "plan.ep=2", "data.seq_len=32", "train.steps=3"]
    words = [word for one in given for word in ("--set", one)]
    done = run_guarded({"torch"}, "train", "--dry-run", *words)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "plan     2 rank(s)  pp=1  dp=2  cp=1  tp=1  ep=2  etp=1  edp=1",
        "steps    3 steps of 32 sequences of 32 tokens",
        "data     a.txt: 1 file(s), 0.0 MB",
        "resume   nothing there: a new run",
    ):
        assert line in done.stdout
    assert re.search(
        r"memory   [\d.]+ MiB held, predicted, of rank \d, the most of a rank: ", done.stdout
    )
    assert "checkpoints/step-3\n" in done.stdout
    assert [path.name for path in here.iterdir()] == ["a.txt"]


def test_a_dry_run_of_a_run_that_goes_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        (here / f"run/checkpoints/step-{step}").mkdir(parents=True)
    (here / "run/config.toml").write_text(resolved_toml(load_run([], ["data.path=a.txt"]).config))
    (here / "run/plan.json").write_text("{}")
    given = ["--out", "run", "--set", "data.path=a.txt", "--set", "plan.dp=2"]
    code, out, _ = run(capsys, monkeypatch, "train", "--dry-run", *given)
    assert code == 0
    assert "resume   from run/checkpoints/step-10, the newest of 2\n" in out
    assert "changed since the last call: plan.dp: 1 -> 2 (layout)" in out
    given += ["--set", "train.lr=0.1"]
    code, _, error = run(capsys, monkeypatch, "train", "--dry-run", *given)
    assert code == 2 and "--allow-change train.lr" in error
    given += ["--allow-change", "train.lr"]
    assert run(capsys, monkeypatch, "train", "--dry-run", *given)[0] == 0


def test_the_files_are_those_of_the_documentation() -> None:
    table = text_of("docs/run-folder.md").split("## metrics.jsonl")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    assert set(FILES) <= documented


def test_a_check_for_another_machine_looks_at_settings_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = ["--set", "model.preset=deepseek-v3", "--set", "data.path=/far/away"]
    for verb in (["config", "check"], ["train", "--dry-run"]):
        assert run(capsys, monkeypatch, *verb, *far)[0] == 2
    code, out, _ = run(capsys, monkeypatch, "config", "check", "--elsewhere", *far)
    assert (code, out[:10]) == (0, "ok: 1 rank")
    wrong = ["config", "check", "--elsewhere", "--set", "plan.ep=3"]
    assert run(capsys, monkeypatch, *wrong)[0] == 2


def test_a_path_that_counts_from_the_configuration_is_recognised(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "configs").mkdir()
    (here / "configs/letters.txt").write_text("text")
    (here / "configs/c.toml").write_text('[data]\npath = "letters.txt"\n')
    code, _, error = run(capsys, monkeypatch, "config", "check", "configs/c.toml")
    assert code == 2
    assert f"relative paths count from the folder of the call, {here}" in error
    assert "configs/letters.txt is there, but paths do not count from the folder of" in error


@pytest.mark.parametrize("name", ["data", "train.lr", "plan.ep", "train.log_every"])
def test_permissions_that_are_known(name: str) -> None:
    prepare(load_run([], ["data.path=a.txt"]), None, None, [name])


def test_a_key_that_is_set_twice_is_noted_once_for_all_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = ["config", "check", "--set", "plan.dp=2", "--set", "plan.dp=4"]
    code, out, error = run(capsys, monkeypatch, *twice)
    assert code == 0 and out.startswith("ok: 4 ranks")
    assert error == (
        "moemesh: note: plan.dp is set twice: --set plan.dp=4 counts, not --set plan.dp=2\n"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert run(capsys, monkeypatch, *twice)[2] == ""
