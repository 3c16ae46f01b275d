"""Checks of `moemesh train` before torch: `--dry-run`, `config check`, paths, permissions."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from moemesh.cli.train import FILES
from moemesh.config.cluster import load_cluster
from moemesh.config.load import resolved_toml
from moemesh.monitor import devices
from moemesh.monitor.lease import Lease
from moemesh.planner import machine_memory
from moemesh.sharding.load_run import load_run
from moemesh.train import preparation
from moemesh.train.inference import evaluation
from moemesh.train.preparation import RunRequest, finished, prepare
from moemesh.train.weights import weight_sources
from tests.documents import text_of
from tests.mistakes.files import MODEL
from tests.test_cli import Invoke, run_guarded
from tests.train.runs import sets


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 800)
    return tmp_path


def put_run(run: Path, *keys: str, steps: tuple[int, ...] = (5,)) -> None:
    """The folder of a run that was started here, with these `keys` and empty checkpoints."""
    for step in steps:
        (run / f"checkpoints/step-{step}").mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(resolved_toml(load_run([], keys).config))
    (run / "plan.json").write_text("{}")
    starts = [{"directory": str(Path.cwd())}]
    (run / "provenance.json").write_text(json.dumps({"starts": starts}))


def test_a_dry_run_says_all_and_writes_nothing(folder: Path) -> None:
    given = ["data.path=a.txt", "plan.dp=2", "plan.ep=2", "data.seq_len=32", "train.steps=3"]
    given.append("train.warmup_steps=4")
    done = run_guarded({"torch"}, "train", "--dry-run", *sets(*given))
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "plan     2 rank(s)  pp=1  dp=2  cp=1  tp=1  ep=2  etp=1  edp=1",
        "steps    3 steps of 32 sequences of 32 tokens",
        "data     a.txt: 1 file(s), 0.0 MB",
        "data     a.txt: 8,000 tokens, 32 x 32 a step, 0.405 epochs",
        "samples  237 for training, 12 for validation",
        "note: train.warmup_steps = 4 must be below train.steps = 3",
        "resume   nothing there: a new run",
    ):
        assert line in done.stdout
    assert re.search(
        r"memory   [\d.]+ MiB held, predicted, of rank \d, the fullest rank: ", done.stdout
    )
    assert "checkpoints/step-3\n" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


def test_a_dry_run_and_a_run_count_the_epochs_of_each_source_alike(
    folder: Path, invoke: Invoke
) -> None:
    (folder / "b.txt").write_text("other words\n" * 9_000)
    given = ["data.sources=[{path='a.txt', weight=0.5}, {path='b.txt', weight=0.5}]"]
    given += ["data.seq_len=32", "train.epochs=1", "data.global_batch=64", "model.num_layers=2"]
    code, out, _ = invoke("train", "--dry-run", *sets(*given))
    assert code == 0
    read = re.findall(r"50\.00%  .*, ([\d.]+) epochs", out)
    # Half of the samples of both, over those of each: 237 and 3,206 of 95 in 100.
    steps = -(-(237 + 3206) // 64)
    assert read == [f"{steps * 32 / size:.3g}" for size in (237, 3206)]
    assert "data     2 sources, 64 x 32 a step" in out


def test_a_dry_run_of_a_run_that_goes_on(folder: Path, invoke: Invoke) -> None:
    put_run(folder / "run", "data.path=a.txt", steps=(5, 10))
    given = ["--out", "run", "--set", "data.path=a.txt", "--set", "plan.dp=2"]
    code, out, _ = invoke("train", "--dry-run", *given)
    assert code == 0
    assert "resume   from run/checkpoints/step-10, the newest of 2\n" in out
    assert "changed since the last call: plan.dp: 1 -> 2 (layout)" in out
    given += ["--set", "train.lr=0.1"]
    code, _, error = invoke("train", "--dry-run", *given)
    assert code == 2 and "--allow-change train.lr" in error
    given += ["--allow-change", "train.lr"]
    assert invoke("train", "--dry-run", *given)[0] == 0


def test_the_folder_of_a_run_in_place_of_a_file_resumes_it(folder: Path, invoke: Invoke) -> None:
    put_run(folder / "kept/a", "data.path=a.txt", "train.steps=10")
    given = ["train", "kept/a", "--dry-run"]
    code, out, _ = invoke(*given, "--set", "plan.dp=2")
    assert code == 0 and "resume   from kept/a/checkpoints/step-5\n" in out
    assert "writes   kept/a: " in out and "plan.dp: 1 -> 2 (layout)" in out
    code, out, error = invoke(*given, "--set", "train.lr=0.1")
    assert code == 2 and "--allow-change train.lr" in error
    # Another folder: a new run of the same configuration.
    code, out, _ = invoke(*given, "--out", "kept/b")
    assert code == 0 and "resume   nothing there: a new run\nwrites   kept/b: " in out
    # Repeated with more steps, a command does not change what follows from their number.
    given = ["train", "--dry-run", "--out", "kept/a", "--set", "data.path=a.txt"]
    code, out, error = invoke(*given, "--set", "train.steps=400")
    assert code == 0, error
    assert "changed since the last call: train.steps: 10 -> 400 (free)" in out
    assert "warmup" not in out


def test_a_run_is_resumed_from_another_folder(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_run(folder / "kept/a", "data.path=a.t*", "train.steps=10")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    code, out, error = invoke("train", "../kept/a", "--dry-run")
    assert code == 0 and "resume   from ../kept/a/checkpoints/step-5\n" in out, error
    # A file of that name here is the one that is meant.
    (folder / "elsewhere/a.txt").write_text("other")
    code, _, error = invoke("train", "../kept/a", "--dry-run")
    assert code == 2 and str(folder) not in error


def test_sources_and_clusters_of_a_run_are_found_from_another_folder(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bytes").mkdir()  # the tokenizer is the word, the cluster that of the package
    sources = 'data.sources=[{path="a.txt"}, {path="**/b.txt"}]'
    (folder / "b.txt").write_text("another text " * 100)
    for cluster in ("mine.toml", "one_h100"):
        (folder / cluster).write_text(load_cluster("one_h100").to_toml("mine"))
        put_run(folder / "kept/a", sources, "train.steps=10", f"train.cluster={cluster}")
        (folder / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / "elsewhere")
        code, out, error = invoke("train", "../kept/a", "--dry-run")
        assert code == 0 and "resume   from ../kept/a/checkpoints/step-5\n" in out, error
        config = load_run([Path("../kept/a/config.toml")], []).config
        assert config.data.sources[0].path == f"{folder}/a.txt"
        wanted = f"{folder}/mine.toml" if cluster == "mine.toml" else cluster
        assert (config.data.tokenizer, config.train.cluster) == ("bytes", wanted)
        monkeypatch.chdir(folder)


def test_a_run_with_absolute_paths_takes_the_relative_ones_of_its_first_command(
    folder: Path, invoke: Invoke
) -> None:
    put_run(folder / "run", f"data.path={folder}/a.txt", "train.steps=10")
    given = ["train", "--dry-run", "--out", "run", "--set", "train.steps=10", "--set"]
    code, out, error = invoke(*given, "data.path=a.txt")
    assert code == 0 and "resume   from run/checkpoints/step-5\n" in out, error
    (folder / "b.txt").write_text("other")
    assert invoke(*given, "data.path=b.txt")[0] == 2


def test_a_folder_in_use_is_refused_before_any_data_is_read(folder: Path, invoke: Invoke) -> None:
    (folder / "run").mkdir()
    given = ["train", "--dry-run", "--out", "run", "--set", "data.path=gone"]
    lease = Lease.take(folder / "run")
    code, _, error = invoke(*given)
    assert code == 2 and f"run is in use by another run (pid {os.getpid()} on" in error
    assert "gone" not in error
    assert "gone: No such file" in invoke(*given, "--takeover")[2]
    lease.release()
    assert "gone: No such file" in invoke(*given)[2]


@pytest.mark.parametrize(
    "given",
    [
        "run other",
        "run other --adapter",
        "run other --delta",
        "folder other",
        "folder other --dtype bfloat16 --to huggingface",
        "folder other --upcycle experts=2,k=1",
        "folder other --upcycle experts=2,k=1 --to moemesh",
        "folder other --apply delta",
        "run stored",
        "run tuned",
        "run tuned --adapter",
        "run tuned --delta",
        "run run/checkpoints",
        "run run/checkpoints/step-1",
        "folder folder --to huggingface --dtype bfloat16",
        "folder notes",
        "folder a.txt",
    ],
)
def test_nothing_is_converted_into_a_folder_that_holds_anything(
    folder: Path, invoke: Invoke, given: str
) -> None:
    for name in ("run", "other"):
        (folder / name / "checkpoints/step-1").mkdir(parents=True)
        for file in ("config.toml", "metrics.jsonl", "checkpoints/step-1/manifest.json"):
            (folder / name / file).write_text(name)
    (folder / "stored/checkpoints/step-0").mkdir(parents=True)
    (folder / "notes").mkdir()
    (folder / "notes/mine.md").write_text("mine")
    for name in ("folder", "tuned", "delta"):
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / name / file).write_text(name)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    source, out, *options = given.split()
    code, printed, error = invoke("convert", source, out, *options)
    assert (code, printed) == (2, "") and f"{out}" in error, error
    assert f"the conversion of {source} would be mixed with it" in error or out == "a.txt"
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_a_conversion_that_was_interrupted_may_go_on(folder: Path) -> None:
    for kind, left in (("folder", "model-00001-of-00002.safetensors"), ("run", "checkpoints/x")):
        (folder / kind / left).mkdir(parents=True)
        (folder / kind / ".model.safetensors.tmp").write_text("")
        weight_sources.refuse_occupied(folder / "in", folder / kind, kind)  # pyright: ignore
    weight_sources.refuse_occupied(folder / "in", folder / "new", "adapter")


def test_a_finished_run_is_told_before_its_data_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(steps: int) -> str | None:
        resolved = load_run([], ["data.path=gone", f"train.steps={steps}"])
        return finished(RunRequest(resolved=resolved, out=folder / "run"))

    assert refusal(2) is None
    put_run(folder / "run", "data.path=gone", "train.steps=2", steps=(2,))
    (folder / "run/provenance.json").unlink()  # older versions did not write it
    # The checkpoint is damaged: only a start shows whether the run resumes from another one.
    (folder / "run/report.html").write_text("")
    assert refusal(2) is None
    monkeypatch.setattr(preparation, "open_stored", lambda folder, step: None)
    (folder / "run/report.html").unlink()
    assert refusal(2) is None  # its end was not written
    (folder / "run/report.html").write_text("")
    text = refusal(2)
    assert text is not None and "already trained to step 2 of 2" in text
    assert refusal(3) is None


def test_all_that_a_run_would_meet_is_told_at_once(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["data.path=a.txt", "data.seq_len=9000", "lora.rank=2", "lora.path=gone"]
    given.append("train.train_only=*")  # weights besides the adapters, of a run from scratch
    given += ["plan.dp=2", "plan.pp=2", "plan.schedule=gone.txt", "train.device=cuda"]
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    code, out, error = invoke("train", *sets(*given))
    assert (code, out) == (2, "")
    assert error.startswith("moemesh: 4 problems\n1. plan.schedule = "), error
    for part in ("want a CUDA device each", "lora.path gone", "a.txt holds 8000 tokens"):
        assert error.count(part) == 1, part


@pytest.mark.parametrize("verb", [("config", "check"), ("train",), ("train", "--dry-run")])
def test_a_missing_file_is_told_beside_a_wrong_key(
    folder: Path, invoke: Invoke, verb: tuple[str, ...]
) -> None:
    given = ["plan.dpp=2", "model.vocab_size=x", "data.path=gone.txt", "data.seq_len=0"]

    def error_of(*more: str) -> str:
        code, out, error = invoke(*verb, *sets(*given, *more))
        assert (code, out) == (2, "")
        return error

    error = error_of()
    assert (
        error.startswith("moemesh: 4 problems\n1. ") and "4. data.path gone.txt: No such" in error
    )
    # What the file would be read as is not known.
    assert "gone.txt: No such" not in error_of("data.format=csv")


def test_the_first_line_says_what_is_read_and_started() -> None:
    texts: list[str] = []
    resolved = load_run([], ["data.path=a.txt", "plan.dp=2", "data.validation=a.txt"])
    prepare(RunRequest(resolved=resolved), texts.append)
    assert texts == ["starting reads a.txt, a.txt; then starts 2 processes"]


def test_the_files_are_those_of_the_documentation() -> None:
    table = text_of("docs/run-folder.md").split("## metrics.jsonl")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    assert set(FILES) <= documented


def test_a_check_for_another_machine_looks_at_settings_only(invoke: Invoke) -> None:
    far = ["--set", "model.preset=deepseek-v3", "--set", "data.path=/far/away"]
    for verb in (["config", "check"], ["train", "--dry-run"]):
        assert invoke(*verb, *far)[0] == 2
    code, out, _ = invoke("config", "check", "--elsewhere", *far)
    assert (code, out[:10]) == (0, "ok: 1 rank")
    wrong = ["config", "check", "--elsewhere", "--set", "plan.ep=3"]
    assert invoke(*wrong)[0] == 2


def test_what_only_this_machine_lacks_is_a_note(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(machine_memory, "physical_bytes", lambda: 1 << 20)
    given = ["data.path=a.txt", "model.path=model", "train.device=cpu", "data.global_batch=4"]
    words = sets(*given)
    code, out, _ = invoke("config", "check", *words)
    assert code == 0
    lacking = [line for line in out.splitlines() if "it cannot run on this machine now" in line]
    assert len(lacking) == 2
    assert "1.0 MiB: take a smaller model" in lacking[0] and "holds no weights" in lacking[1]
    assert invoke("train", "--dry-run", *words)[0] == 2


def test_an_evaluation_takes_the_length_of_the_run(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("moemesh.cli.weights._check", lambda *_: None)
    monkeypatch.setattr(
        "moemesh.train.inference.evaluation.evaluate",
        lambda *given, **_: seen.append(given[2]) or 0,
    )
    config = load_run([], ["data.path=a.txt", "data.seq_len=48"]).config
    (folder / "run").mkdir()
    (folder / "run/config.toml").write_text(resolved_toml(config))
    words = ("evaluate", "run", "--data", "a.txt")
    assert invoke(*words)[0] == 0 and seen == [48]
    (folder / "run/config.json").write_text(json.dumps(MODEL))
    code, _, error = invoke(*words)
    assert code == 2 and "such as --seq-len 128" in error


def test_a_path_that_counts_from_the_configuration_is_recognised(
    folder: Path, invoke: Invoke
) -> None:
    (folder / "configs").mkdir()
    (folder / "configs/letters.txt").write_text("text")
    (folder / "configs/c.toml").write_text('[data]\npath = "letters.txt"\n')
    code, _, error = invoke("config", "check", "configs/c.toml")
    assert code == 2
    assert f"relative paths count from the folder of the call, {folder}" in error
    assert "configs/letters.txt exists, but paths do not start from the folder of" in error


def test_permissions_that_are_known() -> None:
    names = ["data", "train.lr", "plan.ep", "train.log_every"]
    prepare(RunRequest(resolved=load_run([], ["data.path=a.txt"]), allowed_changes=names))


def test_a_key_that_is_set_twice_is_noted_once_for_all_ranks(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = ["config", "check", "--set", "plan.dp=2", "--set", "plan.dp=4"]
    code, out, error = invoke(*twice)
    assert code == 0 and out.startswith("ok: 4 ranks")
    assert error == (
        "moemesh: note: plan.dp is set twice: --set plan.dp=4 counts, not --set plan.dp=2\n"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert invoke(*twice)[2] == ""


def test_a_long_evaluation_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starts(number: int, size: int, *, is_silent: bool) -> list[int]:
        batches = [ids.tolist() for ids in evaluation.in_batches(number, size, is_silent=is_silent)]
        assert [id_ for ids in batches for id_ in ids] == list(range(number))
        return [ids[0] for ids in batches]

    assert starts(10, 4, is_silent=False) == [0, 4, 8]
    assert capsys.readouterr().err == "", "a short one prints nothing"
    monkeypatch.setattr(evaluation, "_LINE_SECONDS", 0.0)
    assert starts(10, 4, is_silent=True) == [0, 4, 8]
    assert capsys.readouterr().err == ""
    assert starts(1000, 400, is_silent=False) == [0, 400, 800]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == [
        "note: 400 of 1,000 windows",
        "note: 800 of 1,000 windows",
    ]
