"""Whose code computes a folder's model, and what is refused before a rank starts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.architecture import _read, read_architecture
from moemesh.config.huggingface.model import model_values
from moemesh.config.trainable import refusals
from moemesh.model.hub.architecture import read
from moemesh.model.hub.build import blueprint
from moemesh.model.hub.experts import adds_up, is_experts
from moemesh.sharding.load_run import load_run
from tests.hub.families import random_model, tiny_config
from tests.hub.training import values_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("folders")
    for name in ("qwen3_moe", "qwen3_next", "gemma4_text", "olmo2"):
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(values_of(name)))
    return home


@pytest.mark.parametrize(
    ("name", "wanted", "implementation"),
    [
        ("qwen3_moe", "auto", "moemesh"),
        ("qwen3_moe", "transformers", "transformers"),
        ("qwen3_next", "auto", "transformers"),
        ("olmo2", "auto", "transformers"),
    ],
)
def test_the_choice_is_recorded_and_told(
    folders: Path, name: str, wanted: str, implementation: str
) -> None:
    given = [f"model.path={folders / name}", f"model.implementation={wanted}"]
    resolved = load_run([], given, {})
    assert resolved.config.model.implementation == implementation
    assert (resolved.config.model.architecture is not None) == (implementation == "transformers")
    is_told = any("computed by the code of transformers" in note for note in resolved.notes)
    assert is_told == (implementation == "transformers")


@pytest.mark.parametrize("key", ["ep", "etp"])
def test_axes_of_experts_are_refused_for_a_dense_model(folders: Path, key: str) -> None:
    keys = [f"model.path={folders / 'olmo2'}", "plan.dp=2"]
    assert load_run([], keys, {}).config.model.num_experts == 0
    with pytest.raises(ConfigError, match="the model has none"):
        load_run([], [*keys, f"plan.{key}=2"], {})


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_that_reads_later_tokens_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="depend on later tokens"):
        read(values_of(name))


def test_a_family_without_a_small_form_is_refused_with_the_reason() -> None:
    values = CONFIG_MAPPING["xglm"](vocab_size=64, d_model=32, num_layers=2).to_dict()
    with pytest.raises(ConfigError, match=r"a small model of the family, which fails: value"):
        read(values)


def test_a_dropout_that_is_null_is_off_or_refused_by_its_key() -> None:
    read(values_of("llama") | {"attention_dropout": None})
    with pytest.raises(ConfigError, match="refuses for this family") as raised:
        read(values_of("olmoe") | {"attention_dropout": None})
    (problem,) = raised.value.problems
    fix = "attention_dropout = 0.0, its default"
    assert (problem.key, problem.fix) == ("attention_dropout", fix)


@pytest.mark.parametrize(
    ("name", "key", "value", "fault", "words"),
    [
        ("gpt2", "activation_function", "no", "activation_function", "KeyError: 'no'"),
        ("gpt2", "n_layer", -1, "n_layer", "must be at least 1"),
        ("gpt2", "n_head", 3, "config.json", "must be divisible by num_heads"),
        ("qwen3_next", "layer_types", ["full_attention"], "layer_types", "num_hidden_layers"),
    ],
)
def test_a_value_of_which_transformers_makes_no_model(
    name: str, key: str, value: object, fault: str, words: str, tmp_path: Path
) -> None:
    """One problem, which names the key and the reason, and no other version of transformers."""
    (tmp_path / "config.json").write_text(json.dumps({**values_of(name), key: value}))
    with pytest.raises(ConfigError, match=words) as raised:
        load_run([], [f"model.path={tmp_path}"], {})
    (problem,) = raised.value.problems
    assert problem.key == fault and "version" not in problem.fix


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        ("raise ImportError('it needs PIL\\nrestart')", "ImportError: it needs PIL", "the package"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9", "more memory"),
    ],
)
def test_a_model_that_fails_for_another_reason_than_its_values(
    code: str, words: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = "moemesh.config.huggingface.architecture.python_command"
    monkeypatch.setattr(place, lambda _: [sys.executable, "-c", code])
    with pytest.raises(ConfigError, match=words) as raised:
        read_architecture({**values_of("gpt2"), "note": code})
    assert fix in raised.value.problems[0].fix and "mend" not in raised.value.problems[0].fix


# An unknown name has a second problem, that of our own reading, with the nearest name.
@pytest.mark.parametrize(
    ("name", "message", "problems"),
    [
        ("lama", "does not know this family", 2),
        ("qwen3_mo", "does not know this family", 2),
        ("", "names its family", 1),
    ],
)
def test_transformers_is_not_started_for_an_unknown_family(
    name: str, message: str, problems: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", None)
    (tmp_path / "config.json").write_text(json.dumps({**values_of("llama"), "model_type": name}))
    with pytest.raises(ConfigError, match=message) as raised:
        load_run([], [f"model.path={tmp_path}"], {})
    assert len(raised.value.problems) == problems


@pytest.mark.parametrize(
    ("key", "fix"),
    [("plan.tp=2", "tp = 1"), ("plan.cp=2", "cp = 1"), ("plan.recompute=selective", "full")],
)
def test_what_it_cannot_do_is_refused_by_name(folders: Path, key: str, fix: str) -> None:
    config = load_run([], [f"model.path={folders / 'qwen3_next'}", key], {}).config
    (problem,) = refusals(config)
    assert problem.key == key.partition("=")[0]
    assert "qwen3_next" in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("qwen3_next", ["plan.schedule=chimera"], ("plan.schedule", "chimera", "1f1b")),
        ("qwen3_next", ["plan.schedule=terapipe"], ("plan.schedule", "terapipe", "1f1b")),
        pytest.param(
            "gemma4_text",
            [],
            ("plan.pp", "read more than the output", "pp = 1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pipeline_that_it_cannot_run_is_refused_by_name(
    folders: Path, name: str, keys: list[str], words: tuple[str, str, str]
) -> None:
    given = [f"model.path={folders / name}", "model.implementation=transformers"]
    given += ["plan.pp=2", "plan.microbatches=2", *keys]
    (problem,) = refusals(load_run([], given, {}).config)
    key, message, fix = words
    assert problem.key == key
    assert name in problem.message and message in problem.message
    assert fix in problem.fix


def test_a_pipeline_that_it_can_run_is_not_refused(folders: Path) -> None:
    given = [f"model.path={folders / 'qwen3_next'}", "plan.pp=2", "plan.microbatches=2"]
    assert not refusals(load_run([], given, {}).config)


def test_experts_whose_width_cannot_be_shared_are_refused_by_name(folders: Path) -> None:
    given = [f"model.path={folders / 'qwen3_next'}", "plan.dp=2", "plan.etp=2"]
    config = load_run([], given, {}).config
    assert not refusals(config)
    architecture = config.model.architecture
    assert architecture is not None
    whole = [replace(record, cut=None) for record in architecture.parameters]
    model = config.model.with_architecture(replace(architecture, parameters=tuple(whole)))
    (problem,) = refusals(replace(config, model=model))
    assert problem.key == "plan.etp" and "qwen3_next" in problem.message
    assert problem.fix == "etp = 1, ep = 2"


def test_a_norm_of_results_is_no_sum_over_parts_of_the_width() -> None:
    module: Any = next(filter(is_experts, random_model("qwen3_moe").modules()))
    assert adds_up(module.double())
    module.act_fn = nn.Softmax(-1)
    assert not adds_up(module)


def test_a_key_that_its_code_does_not_read_is_refused(folders: Path) -> None:
    with pytest.raises(ConfigError, match="rope_theta is none of its keys"):
        load_run([], [f"model.path={folders / 'qwen3_next'}", "model.rope_theta=5000.0"], {})


def test_our_own_code_alone_names_the_family(folders: Path) -> None:
    given = [f"model.path={folders / 'qwen3_next'}", "model.implementation=moemesh"]
    with pytest.raises(ConfigError, match="qwen3_next"):
        load_run([], given, {})


def test_transformers_needs_a_folder() -> None:
    (problem,) = refusals(load_run([], ["model.implementation=transformers"], {}).config)
    assert problem.key == "model.implementation"
    assert "model.path" in problem.fix


@pytest.mark.parametrize("change", ["without a cost", "without costs", "costs of another form"])
def test_an_older_record_in_the_cache_is_read_once_more(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read.cache_clear()
    expected = read_architecture(values_of("olmoe"))
    (answer := tmp_path / "answer").write_text(expected.to_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = "moemesh.config.huggingface.architecture"
    monkeypatch.setattr(f"{module}.python_command", lambda _: ["cat", str(answer)])
    _read.cache_clear()
    assert read_architecture(values_of("olmoe")) == expected
    (file,) = (tmp_path / "moemesh" / "architectures").glob("*.json")
    record = json.loads(file.read_text())
    if change == "without a cost":
        del record["costs"]["flops_per_key"]
    else:
        record["costs"] = {} if change == "without costs" else []
    file.write_text(json.dumps(record))
    _read.cache_clear()
    assert read_architecture(values_of("olmoe")) == expected
    assert json.loads(file.read_text())["costs"].keys() == expected.costs.keys()


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (None, "the package is not installed"),
        ("4.57.1", r"transformers 4\.57\.1 is too old .*5\.20"),
    ],
)
def test_transformers_that_is_missing_or_too_old_is_named(
    installed: str | None, words: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("moemesh.config.huggingface.architecture.version", version)
    for implementation in ("auto", "transformers"):
        given = [f"model.path={folders / 'qwen3_next'}", f"model.implementation={implementation}"]
        with pytest.raises(ConfigError, match=words) as raised:
            load_run([], given, {})
        (problem,) = raised.value.problems
        assert problem.fix == "pip install 'transformers>=5.20'"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen9"}, r"does not know this family[\s\S]*model card names"),
        (
            {"model_type": "qwen9", "transformers_version": "6.1.0"},
            r"does not know this family[\s\S]*transformers 6\.1\.0 or later",
        ),
        (
            {"model_type": "qwen9", "auto_map": {"AutoModelForCausalLM": "modeling.Qwen9"}},
            r"code in the folder is never run[\s\S]*has the family itself",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights are not read"),
        (
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            "quantized weights are not read",
        ),
    ],
)
def test_a_folder_that_transformers_cannot_train_is_refused_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        blueprint({**values_of("qwen3_next"), **changes})


def test_a_text_part_is_computed_as_in_the_larger_model() -> None:
    """The code of aya_vision does not scale its logits, and that of its text part does."""
    words = "Cohere2ForCausalLM and AyaVisionForConditionalGeneration compute other logits"
    with pytest.raises(ConfigError, match=words):
        read(tiny_config("aya_vision").to_dict())
    with pytest.raises(ConfigError, match="MllamaForCausalLM has no base model"):
        read(CONFIG_MAPPING["mllama"]().to_dict())
    config = {"text_config": values_of("qwen3_moe"), "vision_config": {}, "model_type": "any"}
    with pytest.raises(ConfigError, match="text part of a larger model "):
        model_values(config)
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ConfigError, match="and quantized weights are not read into its models"):
        model_values(config | {"quantization_config": quantized})


@pytest.mark.parametrize(
    ("name", "experts"),
    [("llama4_text", "Llama4TextExperts"), ("longcat_flash", "LongcatFlashExperts")],
)
def test_experts_that_do_not_pass_through_the_interface_are_named(name: str, experts: str) -> None:
    words = rf"experts \(.*{experts}.*\) do not pass through the interface of transformers"
    with pytest.raises(ConfigError, match=words):
        read(CONFIG_MAPPING[name]().to_dict())
