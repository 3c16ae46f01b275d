"""Files that a user names are not replaced where they are the user's own."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moemesh import cli
from moemesh.cli.application import app
from moemesh.config.errors import UserError
from moemesh.report.files import replace_file, write_texts
from tests.huggingface.conversations import add_tokenizer
from tests.huggingface.tiny import save

SCHEDULE = "schedule zb_h1 --ranks 2 --microbatches 4"
PLAN = "plan --model tiny --cluster laptop_cpu --seq-len 128 --global-batch 8"
LAUNCH = "launch --set plan.dp=2 --set data.path=text.txt --slurm"


def call(words: str) -> str:
    cli.import_verbs()
    done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize(
    "command",
    [
        "balance loads.json --gpus 4 --out own",
        "balance loads.json --gpus 4 --svg own",
        f"{SCHEDULE} --svg own",
        f"{SCHEDULE} --save own",
        f"{SCHEDULE} --trace own",
        f"{PLAN} --html own",
        f"{PLAN} --write own",
        "layout --plan dp=2 --svg own",
        "dispatch even-all-to-all --svg own",
        f"{LAUNCH} --file own",
    ],
)
def test_a_file_of_the_user_stays_and_an_earlier_answer_is_replaced(command: str) -> None:
    Path("loads.json").write_text(json.dumps([[3, 1, 2, 5]]))
    Path("text.txt").write_text("a text")
    own = Path("own")
    own.write_text('{"messages": []}\n')
    with pytest.raises(UserError, match=r"own (is not replaced|exists)"):
        call(command)
    assert own.read_text() == '{"messages": []}\n'
    own.unlink()
    call(command)
    first = own.read_text()
    call(command)
    assert own.read_text() == first


def test_an_input_is_not_replaced_by_its_answer() -> None:
    Path("loads.csv").write_text("3,1,2,5\n")
    with pytest.raises(UserError, match=r"loads\.csv is not replaced"):
        call("balance loads.csv --gpus 4 --out loads.csv")
    assert Path("loads.csv").read_text() == "3,1,2,5\n"


def test_a_job_that_was_edited_stays() -> None:
    Path("text.txt").write_text("a text")
    assert "note: data.path" not in call(LAUNCH)
    job = Path("job.sbatch")
    job.write_text(job.read_text() + "# module load of mine\n")
    with pytest.raises(UserError, match="perhaps with changes of yours"):
        call(LAUNCH)
    assert "of mine" in job.read_text()


def test_a_job_without_data_says_so() -> None:
    assert "with data.tokenizer = bytes" in call("launch --set plan.dp=2 --slurm")
    folder = add_tokenizer(save("qwen3_moe", Path("model")))
    output = call(f"launch --set model.path={folder} --set plan.dp=2 --slurm --file own.sbatch")
    assert f"library sources, with data.tokenizer = {folder}" in output


def test_a_job_names_what_its_plan_left_to_choose() -> None:
    text = call("launch --set plan.dp=2 --set train.lr=0.01 --set train.steps=30 --slurm")
    assert "still to choose: data.path, data.tokenizer" in text
    Path("job.sbatch").unlink()
    Path("text.txt").write_text("a text")
    assert "still to choose: train.steps (now 200), train.lr (now 0.003)" in call(LAUNCH)
    Path("job.sbatch").unlink()
    chosen = f"{LAUNCH} --set train.lr=0.01 --set train.steps=30 --set data.tokenizer=bytes"
    assert "still to choose" not in call(chosen)


def test_nothing_is_written_where_one_of_several_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(UserError):
        write_texts([(tmp_path / "a", "<svg>"), (tmp_path / "b", "<svg>")])
    assert not (tmp_path / "a").exists()


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.html'"):
        replace_file(tmp_path / "a.html", "<html>")
    assert not list(tmp_path.iterdir())
