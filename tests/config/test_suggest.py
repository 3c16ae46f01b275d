"""Every single-character typo of every key is caught, and nearly all get the right suggestion."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.schema import SECTIONS, all_keys, explain_unknown_key, keys_of
from moemesh.config.suggest import aliases, nearest_choice, nearest_path
from moemesh.sharding.load_run import load_run

ALPHABET = string.ascii_lowercase + "_"

#: Typos that are another key: degrees one letter apart, which cannot be detected.
COLLISIONS = {
    "dp": {"pp", "cp", "tp", "ep"},
    "pp": {"dp", "cp", "tp", "ep"},
    "cp": {"pp", "dp", "tp", "ep"},
    "tp": {"pp", "dp", "cp", "ep", "etp"},
    "ep": {"pp", "dp", "cp", "tp", "etp"},
    "etp": {"tp", "ep"},
}


def typos(key: str) -> set[str]:
    """Every string one deletion, substitution, insertion or swap of neighbours away."""
    variants = {key[:i] + key[i + 1 :] for i in range(len(key))}
    variants |= {key[:i] + c + key[i + 1 :] for i in range(len(key)) for c in ALPHABET}
    variants |= {key[:i] + c + key[i:] for i in range(len(key) + 1) for c in ALPHABET}
    variants |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
    return variants - {key, ""}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_typo_is_an_unknown_key(section: str) -> None:
    names = set(keys_of(section))
    for key in names:
        expected = COLLISIONS.get(key, set()) if section == "plan" else set()
        assert typos(key) & names == expected, key


@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.slow), 36])
@pytest.mark.parametrize("section", SECTIONS)
def test_suggestions_are_right_for_95_of_100_typos(section: str, part: int) -> None:
    right, wrong = 0, []
    for key in keys_of(section):
        sample = sorted(typos(key) - set(keys_of(section)))
        # More of them for short keys, where guessing is hard.
        for typo in sample[:: 3 * part] if len(key) <= 8 else sample[:: 19 * part]:
            _, fix = explain_unknown_key(f"{section}.{typo}")
            first = re.search(r"\b\w+\.\w+", fix)
            if first and first.group() == f"{section}.{key}":
                right += 1
            else:
                wrong.append((key, typo, fix))
    share = right / (right + len(wrong))
    assert share >= 0.95, wrong[:20]


def test_every_key_with_one_typo_stops_a_run() -> None:
    for key in all_keys():
        section, leaf = key.split(".")
        wrong = f"{section}.{leaf[:-1]}q"
        with pytest.raises(ConfigError) as caught:
            load_run([], [f"{wrong}=1"], {})
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == ("unknown-key", wrong)


def test_names_of_other_trainers() -> None:
    for name, key in aliases().items():
        section = key.split(".")[0]
        for written in (f"{section}.{name}", name, f"train.{name}") if name[0] != "-" else ():
            assert key in explain_unknown_key(written)[1], written


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("plan.micro_batch_size", "data.global_batch / (plan.dp x plan.microbatches) sequences"),
        ("model.rope_scaling", "model.rope_factor and others"),
        ("model.seq_len", "`seq_len` belongs to [data]"),
        (
            "train.path",
            "belongs to [model] and [data] and [lora]: model.path or data.path or lora.path",
        ),
        ("paln.ep", "plan.ep"),
        ("plan.num-layers", "model.num_layers"),
        ("train.learning_rte", "train.lr"),
        ("model.aux_loss", "model.aux_loss_coefficient"),
        ("model.expert_size", "did you mean model.expert_intermediate_size?"),
        (
            "model.router_bias",
            "model.router_bias_rate or model.router_logit_bias or model.router_s",
        ),
        ("plan.zzzzzz", "`moemesh config show` lists all of [plan]"),
        ("lora.zzzzzz", "keys of [lora]: rank, alpha"),
        ("zzzzzz.qqqqqq", "sections: model, plan, data, train"),
        ("plan", "[plan]"),
        ("", "sections"),
    ],
)
def test_explanations(key: str, expected: str) -> None:
    message, fix = explain_unknown_key(key)
    assert message
    assert expected in fix


@pytest.mark.parametrize(
    ("value", "choices", "expected"),
    [
        ("adam", ("adamw", "sgd"), "did you mean adamw?"),
        ("All-To-All", ("all_gather", "all_to_all"), "did you mean all_to_all?"),
        ("xyz", ("adamw", "sgd"), "choices: adamw, sgd"),
    ],
)
def test_choices(value: str, choices: tuple[str, ...], expected: str) -> None:
    assert nearest_choice(value, choices).startswith(expected)


def test_a_typing_error_counts_before_a_pattern_of_other_names() -> None:
    key, choices = "train.lr_schedule", ("cosine", "inverse_sqrt")
    assert nearest_choice("inverse_sqr", choices, key).startswith("did you mean inverse_sqrt?")
    assert nearest_choice("inverse_time", choices, key).startswith("this schedule does not exist")


def test_a_dangling_link_is_not_suggested_in_its_own_place(tmp_path: Path) -> None:
    link = tmp_path / "chats.jsonl"
    link.symlink_to("moved/chats.jsonl")
    assert nearest_path(link) == "it is a symbolic link to moved/chats.jsonl, which does not exist"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/chats.jsonl").touch()
    assert nearest_path(tmp_path / "chat.jsonl") == f"did you mean {link}?"


def test_the_path_of_a_url_of_this_machine_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "chats.jsonl").write_text("")
    name = tmp_path / "my data" / "chats.jsonl"
    assert nearest_path(Path(name.as_uri())) == f"did you mean {name}?"
    assert nearest_path(Path(name.as_uri().replace("chats", "chat"))) == f"did you mean {name}?"
    assert nearest_path(Path("gs://bucket/chats.jsonl")).startswith("gs:// is not read here")
    with pytest.raises(ConfigError, match=f"did you mean {tmp_path}"):
        load_run([], [f"model.path={tmp_path.as_uri()}"], {})
    with pytest.raises(ConfigError, match=r"fix: model\.path=Qwen/Qwen3-0\.6B"):
        load_run([], ["model.path=hf://Qwen/Qwen3-0.6B"], {})


def test_a_typing_error_in_the_name_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "own").mkdir(parents=True)
    (tmp_path / "runs" / "own" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert nearest_path(Path("runs/onw")) == "did you mean runs/own?"
    with pytest.raises(ConfigError, match=r"fix: did you mean runs/own\?"):
        load_run([Path("runs/onw")], [], {})
