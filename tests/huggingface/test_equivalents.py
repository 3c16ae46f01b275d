"""Models that differ from every family only in how they are written down can be exported, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moemesh as mm
from moemesh.checkpoint.huggingface.convert import write_huggingface
from moemesh.checkpoint.huggingface.derived import equivalent
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.export import config_json, exported, families_for
from moemesh.model.initialization import initialize
from moemesh.model.transformer import Transformer
from moemesh.sharding.load_run import load_run
from moemesh.train.weights.conversion import convert
from tests.huggingface import ours
from tests.huggingface.tiny import load, logits, make

pytest.importorskip("transformers")

TOKENS = torch.arange(2 * 256).view(2, 256) * 7 % 256
DENSE = [
    "model.num_experts=0",
    "model.first_dense_layers=3",
    "model.num_shared_experts=0",
    "model.rope_interleave=true",
]
SMALL = ["model.num_layers=3", "model.hidden_size=64"]


def _spread(model: Transformer) -> Transformer:
    """Every matrix times 3, so that routing is spread; vectors are drawn."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return model


@pytest.mark.parametrize(
    ("keys", "family"),
    [
        ([], "ernie4_5_moe"),  # the default model
        ([*DENSE, "model.num_kv_heads=2", "model.qkv_bias=true"], "qwen2"),
        ([*DENSE, "model.partial_rotary_factor=1.0"], "llama"),
    ],
)
def test_transformers_computes_the_same(tmp_path: Path, keys: list[str], family: str) -> None:
    config = load_run([], [*SMALL, *keys]).config.model
    assert not families_for(config)
    other = exported(config)
    assert other != config and families_for(other)[0] == family
    model = Transformer(config)
    initialize(model, seed=0, dtype=torch.float32)
    _spread(model)
    write_huggingface(
        equivalent(ours.weights(model), config, other),
        other,
        family,
        tmp_path / "out",
        config_json(other, family),
        dtype=torch.float32,
    )
    theirs = load(tmp_path / "out", dtype=torch.float32)
    ours.assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))


def test_what_no_family_computes_is_refused_with_the_nearest() -> None:
    config = load_run([], ["model.qk_norm=true"]).config.model
    with pytest.raises(ConfigError, match="no family of transformers computes this model"):
        exported(config)


@pytest.mark.parametrize(
    ("kind", "key", "written"),
    [("olmoe", "clip_qkv", None), ("granite", "attention_multiplier", 12**-0.5)],
)
def test_what_is_off_is_not_written_as_0(
    tmp_path: Path, kind: str, key: str, written: float | None
) -> None:
    """The code of these families clips or multiplies by 0."""
    make(kind).save_pretrained(tmp_path)
    config = ours.config_of(tmp_path).model_copy(update={key: 0.0})
    assert config_json(config, kind).get(key) == written
    assert kind in families_for(config)


def test_an_export_of_bytes_has_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    small = ["model.num_layers=2", "data.seq_len=8", "data.global_batch=1", "train.steps=1"]
    mm.train(mm.load(None, [*small, "train.validation_batches=1"]), tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("".join(map(chr, range(300))), " two  spaces\r\n café ☕ don't </s>", ""):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    # The folder is one of bytes here, too, without the package tokenizers.
    resolved = load_run([], [f"model.path={tmp_path / 'out'}"], {})
    assert resolved.config.data.tokenizer == "bytes" and not resolved.notes
