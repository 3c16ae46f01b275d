"""Sources, precedence, origins, and all problems of a bad configuration at once."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.config.errors import ConfigError, Problem, is_user_error
from moemesh.config.load import Resolved, resolved_toml, with_recorded
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig
from moemesh.config.schema import SCHEMA_KEY, all_keys
from moemesh.config.sources import preset_names
from moemesh.config.toml import format_value, key_lines
from moemesh.config.train import TrainConfig
from moemesh.sharding.load_run import load_run
from tests.mistakes.files import MODEL


def write(folder: Path, text: str, name: str = "my.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems_of(files: list[Path], overrides: list[str], environ: dict | None = None) -> list:
    with pytest.raises(ConfigError) as caught:
        load_run(files, overrides, environ or {})
    return list(caught.value.problems)


def test_no_input_is_the_default() -> None:
    resolved = load_run([], [], {})
    assert resolved.config == RunConfig()
    assert set(resolved.origins) == set(all_keys())
    assert resolved.origins["plan.ep"] == "default"
    assert resolved.origins["model.num_experts"] == "preset tiny"


def test_precedence_and_origins(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "[train]\nsteps = 1\nlr = 1\nclip = 2.0\n\n[model]\npreset = 'tiny'\nnum_layers = 6\n",
    )
    second = write(tmp_path, "# comment\n[train]\nlr = 0.5\nseed = 3\n", "more.toml")
    environ = {"MOEMESH__train__seed": "4", "MOEMESH__plan__dp": "2", "OTHER": "x"}
    resolved = load_run([first, second], ["plan.dp=4", "train.resume=never"], environ)
    train, origins = resolved.config.train, resolved.origins
    assert (train.steps, train.lr, train.seed, train.clip) == (1, 0.5, 4, 2.0)
    assert isinstance(train.lr, float)
    assert train.resume == "never"
    assert resolved.config.plan.dp == 4
    assert resolved.config.model == ModelConfig(num_layers=6)
    assert origins["train.steps"] == f"{first}:2"
    assert origins["train.lr"] == f"{second}:3"
    assert origins["train.seed"] == "environment MOEMESH__train__seed"
    assert origins["plan.dp"] == "--set plan.dp=4"
    assert origins["model.num_layers"] == f"{first}:8"
    assert origins["model.hidden_size"] == "preset tiny"
    assert origins["train.momentum"] == "default"


def test_fields_beside_a_preset_win_whatever_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nnum_layers = 2\npreset = 'mixtral-8x7b'\n")
    resolved = load_run([path], [], {})
    assert resolved.config.model_preset == "mixtral-8x7b"
    assert (resolved.config.model.num_layers, resolved.config.model.num_experts) == (2, 8)
    assert resolved.origins["model.num_experts"] == "preset mixtral-8x7b"
    assert resolved.origins["model.preset"] == f"{path}:3"


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOEMESH__")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOEMESH__train__steps", "7")
    assert load_run().config.train.steps == 7


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.path=/some/where/*.txt", "/some/where/*.txt"),
        ("data.path=name with blanks # no comment", "name with blanks # no comment"),
        ('data.path="8"', "8"),
        ("data.path='a b'", "a b"),
        ("data.path=a=b", "a=b"),
        ("data.path=a\nb", "a\nb"),
        (" data.path = x", "x"),
    ],
)
def test_texts_on_the_command_line(override: str, expected: str) -> None:
    assert load_run([], [override], {}).config.data.path == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.adam_betas=[0.8, 0]", (0.8, 0.0)),
        ("train.adam_betas=0.8, 0", (0.8, 0.0)),
        ("train.freeze=*router*", ("*router*",)),
        ("train.sinks=csv,tensorboard", ("csv", "tensorboard")),
        ("lora.targets=q_proj, v_proj", ("q_proj", "v_proj")),
    ],
)
def test_lists_become_tuples(override: str, expected: tuple[object, ...]) -> None:
    section, _, name = override.partition("=")[0].partition(".")
    values = getattr(load_run([], [override], {}).config, section)
    assert getattr(values, name) == expected


def test_a_list_of_names_is_named_so() -> None:
    with pytest.raises(ConfigError, match="targets must be a list of names, not 3"):
        load_run([], ["lora.targets=3"], {})


SIZES = {"num_hidden_layers": 5, "hidden_size": 96, "vocab_size": 300, "intermediate_size": 64}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 4}
MIXTRAL = {"model_type": "mixtral", **SIZES, **HEADS, "num_experts_per_tok": 2}


def test_a_model_folder_gives_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    resolved = load_run([], [f"model.path={tmp_path}", "model.z_loss_coefficient=0.5"], {})
    model = resolved.config.model
    assert resolved.config.model_path == str(tmp_path)
    assert (model.num_layers, model.hidden_size, model.head_dim) == (5, 96, 16)
    assert (model.num_experts, model.num_shared_experts, model.z_loss_coefficient) == (4, 0, 0.5)
    assert resolved.origins["model.num_layers"] == str(tmp_path / "config.json")
    assert load_run_text(resolved_toml(resolved.config)).config == resolved.config
    (note,) = resolved.notes
    assert note.startswith(f"{tmp_path} holds no tokenizer.json: text is read by bytes")
    chosen = [f"model.path={tmp_path}", "data.tokenizer=bytes"]
    assert load_run([], chosen, {}).notes == ()


def test_keys_beside_a_model_folder_that_its_weights_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    given = ["num_layers=4", "router_logit_bias=true", "num_experts=4", "norm_eps=1e-6"]
    given += ["experts_per_token=1", "aux_loss_coefficient=0.1"]
    settings = [f"model.path={tmp_path}", *(f"model.{one}" for one in given)]
    first, second = problems_of([], settings)
    assert (first.code, first.key, first.value) == ("conflict", "model.num_layers", 4)
    assert "num_layers = 5" in first.message and str(tmp_path / "config.json") in first.message
    assert second.key == "model.router_logit_bias" and "the default" in second.message


def test_a_model_folder_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    (problem,) = problems_of([], [f"model.path={tmp_path / 'none'}", "plan.tp=64"])
    assert problem.code == "no-file"
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    settings = [f"model.path={tmp_path}", "model.implementation=moemesh"]
    assert [problem.key for problem in problems_of([], settings)] == ["model_type"]


def load_run_text(text: str) -> Resolved:
    """Load `text` without writing a file: section by section as overrides."""
    overrides = [
        f"{section}.{key}={format_value(value)}"
        for section, table in tomllib.loads(text).items()
        if section != SCHEMA_KEY
        for key, value in table.items()
    ]
    return load_run([], overrides, {})


@pytest.mark.parametrize("preset", preset_names())
def test_round_trip_of_presets(tmp_path: Path, preset: str) -> None:
    config = load_run([], [f"model.preset={preset}", "plan.ranks_per_node=1"], {}).config
    again = load_run([write(tmp_path, resolved_toml(config))], [], {})
    assert again.config == config
    assert "default" not in {
        origin for key, origin in again.origins.items() if getattr_key(config, key) is not None
    }


def getattr_key(config: RunConfig, key: str) -> object:
    section, leaf = key.split(".")
    if key in ("model.preset", "model.path"):
        return getattr(config, f"model_{leaf}")
    return getattr(getattr(config, section), leaf)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.floats(min_value=1e-300, max_value=1e300),
    st.integers(0, 2**63 - 1),
)
def test_round_trip_of_any_text_and_number(path: str, rate: float, seed: int) -> None:
    config = RunConfig(train=TrainConfig(lr=rate, seed=seed))
    config = replace(config, data=config.data.model_copy(update={"path": path}))
    tables = tomllib.loads(resolved_toml(config))
    assert tables["data"]["path"] == path
    assert tables["train"]["lr"] == rate
    assert load_run_text(resolved_toml(config)).config == config


def test_all_problems_at_once(tmp_path: Path) -> None:
    good = write(tmp_path, '[train]\nsteps = "8"\nlr = true\n[plan]\ndp = 8\nep = 6\n')
    broken = write(tmp_path, "[train\n", "broken.toml")
    environ = {"MOEMESH__data__seqlen": "4"}
    missing = [tmp_path / "none.toml", tmp_path / "none.yaml"]
    problems = problems_of([good, broken, *missing], ["train.clip=-1", "a.b=1"], environ)
    assert {(item.code, item.key) for item in problems} == {
        ("wrong-type", "train.steps"),
        ("wrong-type", "train.lr"),
        ("not-divisible", "plan.ep"),
        ("syntax", ""),
        *(("no-file", str(file)) for file in missing),
        ("unknown-key", "data.seqlen"),
        ("out-of-range", "train.clip"),
        ("unknown-key", "a.b"),
    }
    assert sum(item.key == "plan.ep" for item in problems) == 2


def test_problems_are_sorted_by_file_and_line(tmp_path: Path) -> None:
    lines = "\n".join(f"wrong{number} = 1" for number in range(12))
    problems = problems_of([write(tmp_path, f"[train]\n{lines}\n")], [])
    assert [int(item.origin.rpartition(":")[2]) for item in problems] == list(range(2, 14))


def test_origins_of_both_sides_of_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nnum_heads = 12\n")
    (problem,) = problems_of([path], ["plan.tp=8", "model.num_kv_heads=12"])[:1]
    assert problem.origin.startswith("--set plan.tp=8")
    text = str(ConfigError(problems_of([path], ["plan.tp=8", "model.num_kv_heads=12"])))
    assert f"model.num_heads: {path}:2" in text
    assert "tp (8) must divide num_heads (12)" in text
    assert "fix: tp = 4" in text


def test_duplicates(tmp_path: Path) -> None:
    resolved = load_run([], ["plan.dp=2", "plan.tp=2", "plan.dp=4", "plan.tp=2"], {})
    assert (resolved.config.plan.dp, resolved.origins["plan.dp"]) == (4, "--set plan.dp=4")
    assert resolved.notes == ("plan.dp is set twice: --set plan.dp=4 counts, not --set plan.dp=2",)
    (problem,) = problems_of([write(tmp_path, "[plan]\ntp = 1\ntp = 2\n")], [])
    assert problem.origin.endswith("my.toml:3")
    assert problem.value == "tp = 2"


def test_key_lines() -> None:
    text = '''# [not.a.table]
title = """
[also] = not
"""
[plan]  # comment = 1
dp = 2
"quoted" = '# [x]'
list = [ # comment ]
  1, 2,
  "]",
]
inline = { a = 1, b = { c = "}" } }
dotted . key = 3

[train.deep]
x = 1
[[rows]]
y = \'\'\'
z = 1\'\'\'
'''
    tomllib.loads(text)
    assert key_lines(text) == {
        ("title",): 2,
        ("plan",): 5,
        ("plan", "dp"): 6,
        ("plan", "quoted"): 7,
        ("plan", "list"): 8,
        ("plan", "inline"): 12,
        ("plan", "dotted", "key"): 13,
        ("train", "deep"): 15,
        ("train", "deep", "x"): 16,
        ("rows",): 17,
        ("rows", "y"): 18,
    }
    assert key_lines("a = 1\r\nb = 2") == {("a",): 1, ("b",): 2}
    assert key_lines("[only]") == {("only",): 1}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_written_so_that_it_reads_back(text: str) -> None:
    assert tomllib.loads(f"a = {format_value(text)}")["a"] == text


def test_an_origin_is_found_for_dotted_and_inline_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "train.steps = 5\nplan = { dp = 2, ep = 2 }\n")
    resolved = load_run([path], [], {})
    assert resolved.origins["train.steps"] == f"{path}:1"
    assert resolved.origins["plan.ep"] == f"{path}:2"


def test_config_error_is_a_value_error_with_its_problems() -> None:
    problem = Problem(code="c", key="a.b", value=3, origin="o", message="m", fix="f")
    error = ConfigError([problem])
    assert isinstance(error, ValueError)
    assert error.problems == (problem,)
    assert str(error) == "1 problem in the configuration\n1. a.b = 3   (o)\n    m [c]\n    fix: f"
    assert is_user_error(error)
    assert not is_user_error(ValueError("x"))


@pytest.mark.parametrize(
    ("overrides", "lr", "warmup"),
    [
        ([], 3e-3, 20),
        (["train.steps=5000"], 3e-3, 20),
        (["train.steps=25"], 3e-3, 2),
        (["train.steps=1"], 3e-3, 0),
        (["train.steps=25", "train.warmup_steps=20", "train.lr=0.5"], 0.5, 20),
        (["model.path=HERE"], 1e-5, 20),
        (["model.path=HERE", "lora.rank=4", "train.steps=30"], 1e-4, 3),
        (["model.path=HERE", "train.lr=0.003"], 3e-3, 20),
    ],
)
def test_rate_and_warm_up_follow_from_the_rest(
    tmp_path: Path, overrides: list[str], lr: float, warmup: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    given = [one.replace("HERE", str(tmp_path)) for one in overrides]
    loaded = load_run([], given, {})
    assert (loaded.config.train.lr, loaded.config.train.warmup_steps) == (lr, warmup)
    for key in ("train.lr", "train.warmup_steps"):
        is_given = any(one.startswith(f"{key}=") for one in overrides)
        assert loaded.origins[key].startswith("--set" if is_given else "default by ")
    # Written values load as given values, even if other keys change.
    (tmp_path / "run.toml").write_text(resolved_toml(loaded.config))
    again = load_run([tmp_path / "run.toml"], ["train.steps=9000"], {}).config.train
    assert (again.lr, again.warmup_steps) == (lr, warmup)


def test_what_follows_is_kept_by_a_run_that_goes_on(tmp_path: Path) -> None:
    first = load_run([], ["train.steps=20"], {}).config
    assert with_recorded(first, tmp_path) == first  # a new run
    recorded = load_run([], ["train.lr=0.5", "train.warmup_steps=7"], {}).config
    (tmp_path / "config.toml").write_text(resolved_toml(recorded))
    longer = with_recorded(load_run([], ["train.steps=40"], {}).config, tmp_path).train
    assert (longer.lr, longer.warmup_steps, longer.steps) == (0.5, 7, 40)
    given = with_recorded(load_run([], ["train.lr=0.1"], {}).config, tmp_path).train
    assert (given.lr, given.warmup_steps) == (0.1, 7)
    # A file of an earlier version has no such keys: their defaults hold.
    (tmp_path / "config.toml").write_text("[train]\nsteps = 20\n")
    assert with_recorded(first, tmp_path).train.warmup_steps == 20


def test_epochs_give_the_warm_up_when_they_are_steps() -> None:
    config = load_run([], ["train.epochs=1.0"], {}).config
    assert "warmup_steps" not in resolved_toml(config)
    assert config.with_following(steps=50, epochs=None).train.warmup_steps == 5
    given = load_run([], ["train.epochs=1.0", "train.warmup_steps=30"], {}).config
    assert "warmup_steps = 30" in resolved_toml(given)
    assert given.with_following(steps=50, epochs=None).train.warmup_steps == 30


def test_the_folder_of_a_run_is_its_configuration(tmp_path: Path) -> None:
    home = tmp_path / "a folder"
    home.mkdir()
    (home / "config.toml").write_text("[train]\nsteps = 7\n")
    loaded = load_run([home], [], {})
    assert loaded.config.train.steps == 7
    assert loaded.origins["train.steps"] == f"{home / 'config.toml'}:2"
    (home / "config.toml").unlink()
    with pytest.raises(ConfigError, match="the folder of a run"):
        load_run([home], [], {})
    (home / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"--set 'model.path={home}'"):
        load_run([home], [], {})
