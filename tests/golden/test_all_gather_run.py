"""Seed 001's worked example out of the ledger of a real all-gather dispatch over four ranks."""

import json
from pathlib import Path

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.parallel.expert.all_gather import AllGatherDispatcher
from tests.ranks import mesh_on_ranks

EXAMPLE = json.loads((Path(__file__).parent / "seed_examples.json").read_text())[
    "uneven_reduce_scatter"
]
HIDDEN = 4


def example_on_rank(mesh: Mesh) -> dict[str, object]:
    """Four tokens a rank; those named in the example go to the group's experts, tensor-sharded."""
    here = [int(name[1]) - 1 for name in EXAMPLE["tokens_owned_and_routed_here"][str(mesh.rank)]]
    experts_TK = torch.full((4, 1), -1)
    experts_TK[here] = 0
    dispatcher = AllGatherDispatcher(mesh["ep"], mesh["ep_etp"], 2, "fewest_bytes")
    plan = dispatcher.plan(experts_TK)
    rows = dispatcher.dispatch(torch.ones(4, HIDDEN), torch.ones(4, 1), plan).wait()
    y_TH = dispatcher.combine(rows.source_NH[rows.map.source_R], plan).wait()
    return {
        "kept": int((y_TH[:, 0] != 0).sum()),
        "sums": y_TH[here].unique().tolist(),
        "ledger": [r for r in mesh.ledger.rows() if r["caller"] == "moe.combine"],
    }


def test_rows_kept_sent_and_received() -> None:
    ranks = mesh_on_ranks(Layout(dp=4, etp=4), example_on_rank)
    row = HIDDEN * 4
    combine = [sum_of(rank["ledger"]) for rank in ranks]
    assert [rank["kept"] for rank in ranks] == EXAMPLE["rows_kept"]
    assert [sent // row for sent, _ in combine] == EXAMPLE["rows_sent"]
    assert [received // row for _, received in combine] == EXAMPLE["rows_received"]
    # The four partial results are summed, never averaged.
    assert all(rank["sums"] == [4.0] for rank in ranks)


def sum_of(ledger: list[dict[str, int]]) -> tuple[int, int]:
    return sum(r["wire_bytes"] for r in ledger), sum(r["received_bytes"] for r in ledger)
