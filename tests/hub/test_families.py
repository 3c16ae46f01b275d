"""Tiny configurations of all families with experts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers

from tests.hub.families import (
    END,
    family_names,
    kinds,
    model_class,
    on_meta,
    random_model,
    text_of_images,
    tiny_config,
    tiny_folder,
)


def test_a_tiny_model_has_the_kinds_of_layers_of_the_default() -> None:
    config = tiny_config("deepseek_v4")
    assert config.mlp_layer_types == ["hash_moe", "moe", "moe"]
    assert {*config.layer_types} == {"heavily_compressed_attention", "compressed_sparse_attention"}
    assert len({*kinds(on_meta(config))}) == 3
    assert tiny_config("qwen3_moe", layers=4).num_hidden_layers == 4


def test_a_tiny_folder_has_random_weights_and_a_tokenizer(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_folder("qwen3_moe", tmp_path))
    model = model_class(config).from_pretrained(tmp_path)
    assert not torch.equal(model.model.norm.weight, torch.ones(64))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("é")["input_ids"] == [*map(tokenizer.convert_tokens_to_ids, "Ã©")]
    assert tokenizer.eos_token_id == config.eos_token_id == END
    assert tokenizer.decode(tokenizer("ok é")["input_ids"]) == "ok é"


@pytest.mark.slow
@pytest.mark.parametrize("name", family_names())
def test_every_family_runs(name: str) -> None:
    model = model_class(tiny_config(name))._from_config(tiny_config(name)).eval()
    logits = model(input_ids=torch.arange(24)[None], use_cache=False).logits
    assert logits.shape[:2] == (1, 24) and logits.isfinite().all()


@pytest.mark.slow
def test_most_families_of_images_and_text_alone_run_on_text() -> None:
    """Those that transformers reaches by no model of text."""
    runs: list[str] = []
    for name in text_of_images():
        with suppress(AssertionError, RuntimeError):
            logits = random_model(name)(input_ids=torch.arange(24)[None], use_cache=False).logits
            runs += [name] if logits.isfinite().all() else []
    assert len(runs) >= 10, runs
