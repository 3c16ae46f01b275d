"""Bytes on the wire of every dispatcher: the closed formulas of seeds 000 and 001 (corrected) equal
the ledger, rank by rank, to the byte, for a routing that is uneven in every way."""

from typing import Any

import pytest
import torch

from moemesh.config.layout import Layout
from tests.parallel.dispatching import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_SLOTS,
    TOKENS,
    dispatch_on_rank,
    routed,
)
from tests.ranks import mesh_on_ranks

ROW = HIDDEN * 8  # float64
LAYOUTS = [Layout(dp=4, ep=4), Layout(dp=2, tp=2, ep=2, etp=2), Layout(dp=4, ep=2)]


def wire(ledger: list[dict[str, Any]], caller: str, phase: str, op: str) -> tuple[int, int]:
    """(sent, received) of one caller; the harness dispatches twice, so forward dispatch halves."""
    rows = [r for r in ledger if (r["caller"], r["phase"], r["op"]) == (caller, phase, op)]
    sent, received = (sum(r[f"{k}_bytes"] for r in rows) for k in ("wire", "received"))
    twice = phase == "forward" and caller.startswith("moe.dispatch")
    return (sent // 2, received // 2) if twice else (sent, received)


def ep_of(experts: torch.Tensor, layout: Layout) -> torch.Tensor:
    return torch.where(experts < 0, -1, experts // (NUM_EXPERTS // layout.ep))


def rows_between(source: int, ep: int, layout: Layout) -> int:
    """(token, slot) pairs of rank `source` whose expert lives at ep index `ep` of its group."""
    return int((ep_of(routed(source).experts_TK, layout) == ep).sum())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_to_all_sends_each_routed_row_once(layout: Layout) -> None:
    ranks = mesh_on_ranks(layout, dispatch_on_rank, "all_to_all")
    for rank, got in enumerate(ranks):
        group = layout.group_of("ep", rank)
        here = group.index(rank)
        sent = sum(rows_between(rank, ep, layout) for ep in range(layout.ep) if ep != here)
        received = sum(rows_between(peer, here, layout) for peer in group if peer != rank)
        ledger = got["ledger"]
        forward = (sent * ROW, received * ROW)
        assert wire(ledger, "moe.dispatch", "forward", "all_to_all") == forward
        assert wire(ledger, "moe.combine", "forward", "all_to_all") == forward[::-1]
        assert wire(ledger, "moe.dispatch", "backward", "all_to_all") == forward[::-1]
        assert wire(ledger, "moe.combine", "backward", "all_to_all") == forward
        weights = (sent * 8, received * 8)
        assert wire(ledger, "moe.dispatch.weights", "forward", "all_to_all") == weights
        # Expert-tensor lanes: every lane gathers what the others received, own rows go to each.
        lanes = layout.group_of("etp", rank)
        lane = [
            sum(rows_between(peer, here, layout) for peer in layout.group_of("ep", one))
            for one in lanes
        ]
        own, rest = lane[lanes.index(rank)], sum(lane) - lane[lanes.index(rank)]
        gathered = ((len(lanes) - 1) * own * ROW, rest * ROW)
        assert wire(ledger, "moe.dispatch", "forward", "all_gather") == gathered
        assert wire(ledger, "moe.combine", "forward", "reduce_scatter") == gathered[::-1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", ["dense", "uneven"])
def test_all_gather_sends_every_token_to_the_group(form: str, layout: Layout) -> None:
    ranks = mesh_on_ranks(layout, dispatch_on_rank, f"all_gather_{form}")
    for rank, got in enumerate(ranks):
        group = layout.group_of("ep_etp", rank)
        own, total = TOKENS[rank], sum(TOKENS[peer] for peer in group)
        ledger = got["ledger"]
        gathered = ((len(group) - 1) * own * ROW, (total - own) * ROW)
        assert wire(ledger, "moe.dispatch", "forward", "all_gather") == gathered
        assert wire(ledger, "moe.dispatch", "backward", "reduce_scatter") == gathered[::-1]
        slots = ((len(group) - 1) * own * NUM_SLOTS * 8, (total - own) * NUM_SLOTS * 8)
        assert wire(ledger, "moe.dispatch.weights", "forward", "all_gather") == slots
        if form == "dense":
            # Seed 001 says "far smaller than the all-gather": only the uneven form is.
            back = gathered[::-1]
            assert wire(ledger, "moe.combine", "forward", "reduce_scatter") == back
        else:
            here = group.index(rank) // layout.etp
            visits = [(ep_of(routed(p).experts_TK, layout) == here).any(1).sum() for p in group]
            sent = sum(int(v) for v, peer in zip(visits, group, strict=True) if peer != rank)
            mine = ep_of(routed(rank).experts_TK, layout)
            received = sum(
                int((mine == index // layout.etp).any(1).sum())
                for index, peer in enumerate(group)
                if peer != rank
            )
            back = (sent * ROW, received * ROW)
            assert wire(ledger, "moe.combine", "forward", "all_to_all") == back
            assert back[0] <= gathered[1]
        assert (
            wire(ledger, "moe.combine", "backward", {"dense": "all_gather"}.get(form, "all_to_all"))
            == back[::-1]
        )
