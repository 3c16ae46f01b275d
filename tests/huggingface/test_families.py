"""Every family of transformers: the same logits from the same folder, and the same folder back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, StoredTensor
from moemesh.checkpoint.huggingface.logical import checked_tensors
from moemesh.checkpoint.stored import candidates
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.export import config_json, differences
from moemesh.config.huggingface.model import model_values
from moemesh.config.model import ModelConfig
from moemesh.planner.shapes.shape import from_huggingface, from_model_config
from moemesh.sharding.load_run import load_run
from moemesh.train.weights.conversion import convert
from tests.huggingface.ours import assert_same_weights, config_of
from tests.huggingface.tiny import COMMON, FAMILIES, build, load_complete, logits, save

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one family, named after it."""
    return save(request.param, tmp_path_factory.mktemp("models") / request.param)


def tokens(length: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, COMMON["vocab_size"], (2, length), generator=generator)


def test_a_folder_comes_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    assert convert(folder, run) == "moemesh"
    assert candidates(run / "checkpoints") == [0]
    assert convert(run, back) == "huggingface"
    assert_same_weights(folder, back)
    assert config_of(back) == config_of(folder)


@pytest.mark.representative("qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2")
def test_transformers_loads_what_we_write(folder: Path, tmp_path: Path) -> None:
    """Without the folder that the run started from, config.json is ours alone."""
    run, back = tmp_path / "run", tmp_path / "back"
    convert(folder, run)
    recorded = (run / "config.toml").read_text()
    (run / "config.toml").write_text(recorded.replace(str(folder), str(tmp_path / "gone")))
    convert(run, back)
    found, expected = (logits(one, tokens()) for one in (load_complete(back), build(folder.name)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.3.input_layernorm.weight": (48,)}, "is after the 3 layers"),
        ({f"model.layers.{i}.mlp.x": (1,) for i in range(3, 11)}, r"3.mlp.x .*\(and 7 more\)"),
        ({"model.layers.0.self_attn.other.weight": (1,)}, "other.weight belongs to no part"),
        ({"model.norm.weight": (47,)}, r"norm.weight has shape \[47\]"),
        ({"model.norm.weight": None}, "norm.weight is missing"),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"model.layers.1.self_attn.rotary_emb.inv_freq": (4,)}, None),
        ({"model.layers.1.mlp.other.up_proj.weight": (0, 48)}, None),
        ({"mtp.norm.weight": (4,)}, None),
    ],
)
def test_every_tensor_is_used_or_named(
    folder: Path, change: dict[str, tuple[int, ...] | None], words: str | None
) -> None:
    contents = FolderContents(folder)
    for name, shape in change.items():
        contents.tensors.pop(name, None)
        if shape is not None:
            contents.tensors[name] = StoredTensor("", "float32", shape)
    given = json.loads((folder / "config.json").read_text())
    if words is None:
        checked_tensors(contents, config_of(folder), given)
        return
    with pytest.raises(CheckpointError, match=words):
        checked_tensors(contents, config_of(folder), given)


def test_our_configuration_means_the_same(folder: Path) -> None:
    assert differences(config_of(folder), folder.name) == {}


def test_what_is_planned_is_what_is_trained(folder: Path) -> None:
    """The planner's shape of a config.json is that of the configuration that is trained, but for
    extra prediction layers, which are trained on demand only."""
    planned = from_huggingface(json.loads((folder / "config.json").read_text()))
    trained = from_model_config(config_of(folder))
    assert {**planned.to_json(), "notes": (), "num_mtp_layers": 0} == trained.to_json()


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_that_are_left_out_mean_what_they_do_in_transformers(
    kind: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(
        kind, **{**COMMON, **FAMILIES[kind], "rope_parameters": None}
    ).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    for key in (
        "rms_norm_eps",
        "rope_parameters",
        "attention_multiplier",
        "logits_scaling",
        "sliding_window",
        "n_group",
        "topk_group",
    ):
        file.write_text(json.dumps({name: one for name, one in written.items() if name != key}))
        ours = config_of(tmp_path)
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert ours == config_of(tmp_path), key


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
def test_null_is_no_window_where_a_missing_key_is_one(kind: str) -> None:
    with_window = {**COMMON, **FAMILIES[kind], "model_type": kind, "rms_norm_eps": 1e-5}
    del with_window["sliding_window"]
    assert model_values(with_window)["sliding_window"]
    assert "sliding_window" not in model_values({**with_window, "sliding_window": None})


def test_stretched_positions_need_their_factor() -> None:
    table = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 128}
    config = {**COMMON, "model_type": "llama", "rope_scaling": table}
    with pytest.raises(ConfigError, match="llama3 needs low_freq_factor and high_freq_factor"):
        model_values(config)
    with pytest.raises(ConfigError, match="yarn needs factor"):
        model_values({**config, "rope_scaling": {"type": "yarn"}})


def test_transformers_reads_the_stretched_positions_that_we_write() -> None:
    """Those of Llama 3.1, whose factors are our defaults."""
    from transformers import AutoConfig

    table = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
    table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = model_values({**COMMON, "model_type": "llama", "rope_scaling": table})
    written = config_json(ModelConfig.model_validate(values), "llama")
    read = AutoConfig.for_model(**written).to_dict()["rope_parameters"]
    assert {**table, **read} == read


def test_sequences_are_no_longer_than_the_positions_of_a_small_model(tmp_path: Path) -> None:
    config = {**COMMON, "model_type": "llama", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = f"model.path={tmp_path}"
    assert load_run([], [path]).config.data.seq_len == 64
    assert load_run([], [path, "data.seq_len=17"]).config.data.seq_len == 17
