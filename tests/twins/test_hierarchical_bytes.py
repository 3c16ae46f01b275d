"""Bytes of the node-aware dispatch: each token crosses to a node once, not once an expert."""

from typing import Any

import pytest
import torch

from moemesh.config.layout import Layout
from tests.parallel.dispatching import HIDDEN, NUM_EXPERTS, NUM_SLOTS, dispatch_on_rank, routed
from tests.ranks import mesh_on_ranks

ROW = HIDDEN * 8
LAYOUTS = [
    Layout(dp=8, ep=8, ranks_per_node=4),
    Layout(dp=4, ep=4, ranks_per_node=2),
    Layout(dp=4, ep=4),
    Layout(dp=4, tp=2, ep=4, etp=2, ranks_per_node=4),
]


def sent(ledger: list[dict[str, Any]], axis: str, caller: str, phase: str) -> int:
    rows = [r for r in ledger if (r["axis"], r["caller"], r["phase"]) == (axis, caller, phase)]
    twice = phase == "forward" and caller.startswith("moe.dispatch")
    return sum(r["wire_bytes"] for r in rows) // (2 if twice else 1)


def visits(owner: int, layout: Layout, parts: int) -> torch.Tensor:
    """[tokens, parts]: whether a token of `owner` has an expert in each equal part of them."""
    experts_TK = routed(owner).experts_TK
    part_TK = torch.where(experts_TK < 0, -1, experts_TK // (NUM_EXPERTS // parts))
    return (part_TK[:, :, None] == torch.arange(parts)).any(1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_across_and_inside(layout: Layout) -> None:
    ranks = mesh_on_ranks(layout, dispatch_on_rank, "hierarchical")
    for rank, got in enumerate(ranks):
        here = layout.coordinates(rank)
        node, place = here["ep_rail"], here["ep_node"]
        across = visits(rank, layout, layout.ep_rail).sum(0)
        out = int(across.sum() - across[node])
        # What arrived here from the rail: tokens of its ranks with an expert in this node.
        forwarded = [
            visits(peer, layout, layout.ep)[:, node * layout.ep_node : (node + 1) * layout.ep_node]
            for peer in layout.group_of("ep_rail", rank)
        ]
        inside = torch.cat(forwarded).sum(0)
        on = int(inside.sum() - inside[place])
        ledger = got["ledger"]
        assert sent(ledger, "ep_rail", "moe.dispatch", "forward") == out * ROW
        assert sent(ledger, "ep_node", "moe.dispatch", "forward") == on * ROW
        assert sent(ledger, "ep_rail", "moe.combine", "backward") == out * ROW
        assert sent(ledger, "ep_node", "moe.combine", "backward") == on * ROW
        assert sent(ledger, "ep_rail", "moe.dispatch.weights", "forward") == out * NUM_SLOTS * 8
