"""Text of transformers' models, token by token, as their own `generate` makes it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.model.hub.architecture import read
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation
from moemesh.train.weights.weight_sources import config_of
from tests.hub.families import family_names, random_model

#: A Mamba, and state outside of the modules of parameters.
REPRESENTATIVES = ("nemotron_h", "zaya")
NAMES = [
    pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
    for name in family_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The record alone, in this process: its costs and its proofs take seconds.
    for reader in ("huggingface.folder", "load"):
        monkeypatch.setattr(
            f"moemesh.config.{reader}.read_architecture",
            lambda values: read(values, documents="rows"),
        )
    model = random_model(name)
    model.save_pretrained(tmp_path)
    prompt = [7, 3, 9, 200, 31, 31, 5]
    try:
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
            )
    except Exception as error:
        pytest.skip(f"transformers itself: {type(error).__name__}: {error}")
    given = ["model.implementation=transformers"]
    parallel = load(config_of(tmp_path, given), Mesh.single(torch.device("cpu")), tmp_path)
    tokens = [*islice(continuation(parallel.model, prompt, chooser()), 8)]
    parallel.close()
    assert tokens == wanted[0, len(prompt) :].tolist()
