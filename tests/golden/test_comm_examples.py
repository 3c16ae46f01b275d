"""The worked examples of the seed documents that concern communication, through the library."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from tests.ranks import mesh_on_ranks

EXAMPLES = json.loads((Path(__file__).parent / "seed_examples.json").read_text())
WIDTH = 3


def groups(mesh: Mesh) -> tuple[list[int], list[int]]:
    return list(mesh["ep"].ranks), list(mesh["edp"].ranks)


def test_expert_groups():
    example = EXAMPLES["expert_groups"]
    layout = Layout(dp=example["world"], ep=example["ep"])
    assert [list(group) for group in layout.groups("ep")] == example["ep_groups"]
    assert [list(group) for group in layout.groups("edp")] == example["edp_groups"]
    for rank, (ep, edp) in enumerate(mesh_on_ranks(layout, groups)):
        assert rank in ep and ep in example["ep_groups"]
        assert rank in edp and edp in example["edp_groups"]


def scatter_partial_sums(mesh: Mesh, sizes: list[int]) -> tuple[list[list[float]], int, int]:
    axis = mesh["etp"]
    partial = torch.arange(sum(sizes), dtype=torch.float64)[:, None].repeat(1, WIDTH)
    partial = partial * 10**mesh.rank
    kept = collectives.reduce_scatter(partial, axis, sizes, caller="combine")
    total = mesh.ledger.total(axis="etp", op="reduce_scatter", caller="combine")
    row_bytes = WIDTH * 8
    return kept.tolist(), total.wire_bytes // row_bytes, total.received_bytes // row_bytes


def test_uneven_reduce_scatter():
    """Every rank keeps the sums of the tokens it owns; the four partial results are summed."""
    example = EXAMPLES["uneven_reduce_scatter"]
    owned = [example["tokens_owned_and_routed_here"][str(rank)] for rank in range(4)]
    sizes = [len(tokens) for tokens in owned]
    found = mesh_on_ranks(Layout(dp=4, etp=4), scatter_partial_sums, sizes)
    assert [len(kept) for kept, _, _ in found] == example["rows_kept"]
    assert [sent for _, sent, _ in found] == example["rows_sent"]
    assert [received for _, _, received in found] == example["rows_received"]
    values = [row[0] for kept, _, _ in found for row in kept]
    assert values == [token * 1111.0 for token in range(10)]
