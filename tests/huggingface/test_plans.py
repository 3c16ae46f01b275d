"""A folder of transformers under every plan: its loss is that of transformers on one device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moemesh.comm.mesh import Mesh
from moemesh.train.inference.evaluation import Evaluation, run
from moemesh.train.weights.weight_sources import config_of
from tests.huggingface.tiny import DENSE, FAMILIES, build, save
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")

SEQ_LEN = 64
PLANS = {
    "one device": [],
    "tp=2": ["plan.tp=2"],
    "ep=4": ["plan.dp=4", "plan.ep=4"],
    "pp=2": ["plan.pp=2", "plan.microbatches=2"],
    "cp=2": ["plan.cp=2", "plan.ep=2"],
    "tp=2 etp=2 zero1": ["plan.dp=2", "plan.tp=2", "plan.etp=2", "plan.ep=2", "plan.data=zero1"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten windows and a rest."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(1 + (7 * i * i + 3 * i) % 251 for i in range(10 * SEQ_LEN + 20)))
    return path


@pytest.fixture(scope="module", params=[kind for kind in FAMILIES if kind not in DENSE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("models") / request.param)


def expected(kind: str, text: Path) -> float:
    """The mean loss over the windows, by transformers, in fp32."""
    ids = torch.tensor(list(text.read_bytes()))
    windows = torch.stack([ids[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(10)])
    with torch.no_grad():
        logits_BSV = build(kind)(windows[:, :-1]).logits.double()
    return float(F.cross_entropy(logits_BSV.flatten(0, 1), windows[:, 1:].flatten()))


def _evaluate(rank: int, folder: Path, text: Path, plan: list[str]) -> Evaluation:
    given = ["train.dtype=float64", "data.global_batch=4", "data.tokenizer=bytes", *plan]
    given += [f"data.path={text}", f"data.seq_len={SEQ_LEN}"]
    config = config_of(folder, given)
    layout = config.plan.layout
    mesh = Mesh.single("cpu") if layout.world_size == 1 else Mesh.create(layout, "cpu")
    return run(config, mesh, folder)


def all_plans(folder: Path, text: Path, name: str) -> list[Evaluation]:
    plan = PLANS[name]
    sizes = dict(part.split("=") for part in plan if not part.endswith("zero1"))
    ranks = math.prod(int(sizes.get(f"plan.{axis}", 1)) for axis in ("pp", "dp", "cp", "tp"))
    if ranks == 1:
        return [_evaluate(0, folder, text, plan)]
    return run_on_ranks(ranks, _evaluate, folder, text, plan)


REPRESENTATIVE = ("minimax_m2-ep=4", "gpt_oss-pp=2")


@pytest.mark.representative(*REPRESENTATIVE)
@pytest.mark.parametrize("name", PLANS)
def test_the_loss_of_a_folder_under_a_plan(folder: Path, text: Path, name: str) -> None:
    reference = expected(folder.name, text)
    for found in all_plans(folder, text, name):
        assert found.tokens == 10 * SEQ_LEN
        assert found.loss == pytest.approx(reference, abs=2e-6)
        assert found.perplexity == pytest.approx(math.exp(found.loss))
