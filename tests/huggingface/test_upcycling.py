"""A dense model made a mixture of experts: the same logits at first, and experts that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint.huggingface.derived import upcycled
from moemesh.checkpoint.huggingface.logical import logical_shapes
from moemesh.checkpoint.huggingface.pieces import Read
from moemesh.checkpoint.huggingface.weight_folder import HuggingFaceWeights
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import read_config
from moemesh.train.weights.conversion import upcycle, upcycled_model
from moemesh.train.weights.weight_sources import UpcycleRecipe, config_of, read_recipe
from tests.huggingface import ours
from tests.huggingface.tiny import load, logits, save

TOKENS = torch.arange(2 * 40).view(2, 40) * 7 % 288
SIBLINGS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe", "granite": "granitemoe"}


@pytest.mark.representative("qwen3-1", "qwen3-2")
@pytest.mark.parametrize(("dense", "every"), [*((one, 1) for one in SIBLINGS), ("qwen3", 2)])
def test_copies_compute_the_dense_model(tmp_path: Path, dense: str, every: int) -> None:
    folder, moe = save(dense, tmp_path / dense), tmp_path / "moe"
    upcycle(folder, moe, UpcycleRecipe(experts=4, k=3, every=every))
    assert read_config(moe)["model_type"] == SIBLINGS[dense]
    config = ours.config_of(moe)
    has_experts = [index % every == every - 1 for index in range(3)]
    assert [config.is_moe_layer(index) for index in range(3)] == has_experts
    before, after = (
        ours.logits(ours.load(path, torch.float64), TOKENS)[0] for path in (folder, moe)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    moe_logits = logits(load(moe, dtype=torch.float32), TOKENS)
    assert (moe_logits.double() - before).abs().max() <= 4e-6


def opened(folder: Path, **keys: Any) -> tuple[Read, Callable[[str], torch.Tensor], Read]:
    """The weights of three experts, whole ones by name, and those of the dense model."""
    config = ours.config_of(folder)
    dense = HuggingFaceWeights(folder, config).read
    model = upcycled_model(config, UpcycleRecipe(experts=3))
    weights, shapes = upcycled(dense, model, **keys), logical_shapes(model)
    return weights, lambda name: weights(name, [range(size) for size in shapes[name]]), dense


def test_channels_are_drawn_anew_and_follow_from_the_seed(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "dense")
    block = "layers.1.feed_forward"
    weights, whole, dense = opened(folder, drop=0.25, seed=3)
    gate_up, down = (whole(f"{block}.experts.{leaf}") for leaf in ("gate_up", "down"))
    plain = [
        dense(f"{block}.{leaf}", [range(size) for size in shape])
        for leaf, shape in (("gate_up", gate_up.shape[1:]), ("down", down.shape[1:]))
    ]
    channels = [(gate_up[e] != plain[0]).all(2).all(0) for e in range(3)]
    for expert, fresh in enumerate(channels):
        assert fresh.sum() == round(0.25 * 56)
        assert torch.equal((down[expert] != plain[1]).all(0), fresh)
        assert torch.equal(gate_up[expert][:, ~fresh], plain[0][:, ~fresh])
    assert not torch.equal(channels[0], channels[1])
    drawn = gate_up[0][:, channels[0]]
    assert 0.8 < float(drawn.std() / plain[0].std()) < 1.2
    again, other = (
        opened(folder, drop=0.25, seed=seed)[1](f"{block}.experts.down") for seed in (3, 4)
    )
    assert torch.equal(again, down) and not torch.equal(other, down)
    part = weights(f"{block}.experts.2.gate_up", [range(1, 2), range(9, 40), range(5, 8)])
    assert torch.equal(part, gate_up[2][1:2, 9:40, 5:8])


def test_noise_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "dense")
    _, whole, dense = opened(folder, noise=0.1)
    name = "layers.0.feed_forward.experts.down"
    found, plain = (whole(name), dense("layers.0.feed_forward.down", [range(48), range(56)]))
    for expert in found:
        assert 0.09 < float((expert - plain).std() / plain.std()) < 0.11


def test_a_run_is_made(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path / "dense")
    with pytest.raises(ConfigError):  # qwen2_moe has shared experts
        upcycle(folder, tmp_path / "moe", UpcycleRecipe(experts=4))
    with pytest.raises(ConfigError):  # mixtral has experts in every layer
        upcycle(save("llama", tmp_path / "llama"), tmp_path / "moe", UpcycleRecipe(4, every=2))
    upcycle(folder, tmp_path / "run", UpcycleRecipe(experts=4), "moemesh")
    config = config_of(tmp_path / "run", ["data.tokenizer=bytes"])
    assert (config.model.num_experts, config.model_path) == (4, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experts=1", "experts must be at least 2, not 1"),
        ("drop=1.5", "drop must be from 0 to 1, not 1.5"),
        ("k=2,k=3", "k is given twice"),
    ],
)
def test_recipes_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_recipe(text)


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "moe")
    with pytest.raises(ConfigError, match="has 4 experts already"):
        upcycle(folder, tmp_path / "out", UpcycleRecipe())
