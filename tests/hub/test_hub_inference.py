"""Text of transformers' models, token by token, as their own `generate` makes it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation
from moemesh.train.weights.weight_sources import config_of
from tests.hub.families import family_names, random_model

#: Attention alone, a linear attention, a Mamba, a router by tables.
REPRESENTATIVES = ("qwen3_next", "nemotron_h", "gemma4_text", "deepseek_v4")
NAMES = [
    pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
    for name in family_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    theirs = type(random_model(name)).from_pretrained(tmp_path)
    prompt = [7, 3, 9, 200, 31, 31, 5]
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
        )
    given = ["model.implementation=transformers"]
    parallel = load(config_of(tmp_path, given), Mesh.single(torch.device("cpu")), tmp_path)
    tokens = [*islice(continuation(parallel.model, prompt, chooser()), 8)]
    parallel.close()
    assert tokens == wanted[0, len(prompt) :].tolist()
