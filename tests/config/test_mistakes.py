"""A corpus of mistakes: each ends in exit code 2 and a message with the key and the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import clean_environment, run

__all__ = ["clean_environment"]  # a fixture, used by being here


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
    (None, ["--set", "model.first_dense_layers=9"], ["(9)", "(8)"]),
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
    (None, ["--set", "plan.pp=16"], ["plan.pp", "(16*1 = 16)", "pp = 8"]),
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
