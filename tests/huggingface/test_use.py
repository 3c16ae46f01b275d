"""Text from weights of transformers: greedy, drawn, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, UserError
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation, generate
from moemesh.train.weights.weight_sources import config_of
from tests.huggingface.tiny import build, save
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")

PROMPT = list(b"def generate(")


def of_transformers(model: Any, count: int) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, len(PROMPT) :].tolist()


def _continue(rank: int, folder: Path, plan: list[str], count: int) -> list[int]:
    config = config_of(folder, ["data.tokenizer=bytes", "train.dtype=float64", *plan])
    layout = config.plan.layout
    mesh = Mesh.single("cpu") if layout.world_size == 1 else Mesh.create(layout, "cpu")
    found = continuation(load(config, mesh, folder).model, PROMPT, chooser())
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Latents, windows and sinks with kept keys and values."""
    folder = save(kind, tmp_path / kind)
    assert _continue(0, folder, [], 24) == of_transformers(build(kind), 24)


def test_a_generated_token_competes_with_no_other(tmp_path: Path) -> None:
    """A capacity holds for whole sequences; token by token nothing is dropped."""
    folder = save("qwen3_moe", tmp_path / "model")
    limited = _continue(0, folder, ["model.capacity_factor=0.5"], 8)
    assert limited == _continue(0, folder, [], 8)


def test_ranks_write_the_same_text(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    plan = ["plan.tp=2", "plan.dp=2", "plan.ep=4", "plan.data=zero3"]
    expected = _continue(0, folder, [], 8)
    assert run_on_ranks(4, _continue, folder, plan, 8) == [expected] * 4


def test_choices() -> None:
    logits_V = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    assert chooser()(logits_V) == 0
    draw = chooser(temperature=1.0, seed=1)
    counts = torch.bincount(torch.tensor([draw(logits_V) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, logits_V.exp(), atol=0.03)
    draw = chooser(temperature=1.0, top_p=0.6, seed=1)
    assert {draw(logits_V) for _ in range(500)} == {0, 1}, "0.5, and the one that passes 0.6"
    draw = chooser(temperature=1.0, top_p=0.0)
    assert {draw(logits_V) for _ in range(50)} == {0}
    assert chooser(temperature=1e-320)(logits_V) == 0
    with pytest.raises(UserError, match="weights are not numbers"):
        chooser()(logits_V * torch.nan)
    same = chooser(temperature=1.0, seed=7), chooser(temperature=1.0, seed=7)
    assert [same[0](logits_V) for _ in range(9)] == [same[1](logits_V) for _ in range(9)]


def test_what_generation_refuses(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"plan\.pp.*\n.*keeps a sequence whole"):
        generate(folder, "x", ["plan.pp=2"])
    with pytest.raises(UserError, match="--prompt is empty"):
        generate(folder, "")
    with pytest.raises(UserError, match="--prompt is not UTF-8 text: its character 3"):
        generate(folder, "ab\udc80", ["data.tokenizer=bytes"])
    with pytest.raises(ConfigError, match="neither a run nor a folder"):
        generate(tmp_path, "x")
