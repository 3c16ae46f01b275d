"""Rows that every dispatcher must send from each rank to each other, from the routing alone.

The closed side of the benchmark's ledger: rank q holds tokens with known experts, experts live on
ranks in contiguous blocks, nodes are contiguous blocks of ranks, and all ranks form one
expert-parallel group. Per token and destination:

| dispatcher | dispatch sends | combine returns |
|---|---|---|
| all_to_all | one row per expert there | as many |
| all_gather | one row to every rank | one row from every rank that it visits |
| hierarchical | one row per node, then one per rank inside | as many |
| low_latency | the same number of slots to every rank, or as all_to_all on overflow | as many |

Legend: R ranks (senders first, then receivers), T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowsBetween(NamedTuple):
    """Rows that rank i sends to rank j: in the dispatch, and in the combine (int64 [R, R])."""

    dispatch_RR: Tensor
    combine_RR: Tensor


class Sent(NamedTuple):
    """Bytes of token rows that one rank sends to other ranks: of its own node, and across nodes."""

    own_node: int
    across: int

    @property
    def total(self) -> int:
        return self.own_node + self.across


def rows_between(
    dispatcher: str,
    experts: Sequence[Tensor],
    *,
    num_experts: int,
    ranks_per_node: int,
    num_slots: int = 0,
) -> RowsBetween:
    """The rows of one layer whose rank i routes its tokens to ``experts[i]`` (int64 [T, K]).

    `num_slots` are the row slots of low_latency for each pair of ranks.
    """
    num_ranks = len(experts)
    per_rank = num_experts // num_ranks
    homes = [torch.where(chosen < 0, -1, chosen // per_rank) for chosen in experts]
    places = torch.arange(num_ranks)
    copies = torch.stack([(home[:, :, None] == places).sum((0, 1)) for home in homes])
    visits = [(home[:, :, None] == places).any(1) for home in homes]
    match dispatcher:
        case "all_to_all":
            return RowsBetween(copies, copies.t())
        case "low_latency":
            slots = torch.full_like(copies, num_slots)
            there = copies if bool((copies > slots).any()) else slots
            return RowsBetween(there, there.t())
        case "all_gather":
            own = torch.tensor([len(home) for home in homes])
            gathered = own[:, None].expand(num_ranks, num_ranks)
            return RowsBetween(gathered, torch.stack([visit.sum(0) for visit in visits]).t())
        case "hierarchical":
            there = _by_node(visits, ranks_per_node)
            return RowsBetween(there, there.t())
        case _:
            raise AssertionError(f"no closed formula for {dispatcher}")


def _by_node(visits: list[Tensor], ranks_per_node: int) -> Tensor:
    """Rows of both hops: across between ranks in the same place of their nodes, then inside."""
    num_ranks = len(visits)
    there_RR = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    for source, visits_TR in enumerate(visits):
        place = source % ranks_per_node
        for node in range(num_ranks // ranks_per_node):
            first = node * ranks_per_node
            inside_TP = visits_TR[:, first : first + ranks_per_node]
            gateway = first + place
            there_RR[source, gateway] += inside_TP.any(1).sum()
            there_RR[gateway, first : first + ranks_per_node] += inside_TP.sum(0)
    return there_RR


def bytes_sent(
    rows: RowsBetween,
    rank: int,
    *,
    ranks_per_node: int,
    row_bytes: int,
    coded_row_bytes: int,
    with_backward: bool,
) -> dict[tuple[str, str], Sent]:
    """(caller, phase) -> what `rank` sends, as the ledger names them.

    Dispatched rows take `coded_row_bytes`, results and gradients `row_bytes`.
    """
    there, back = rows
    moved = {
        ("moe.dispatch", "forward"): (there, coded_row_bytes),
        ("moe.combine", "forward"): (back, row_bytes),
    }
    if with_backward:
        moved[("moe.dispatch", "backward")] = (there.t(), row_bytes)
        moved[("moe.combine", "backward")] = (back.t(), row_bytes)
    ranks = torch.arange(len(there))
    same_node = ranks // ranks_per_node == rank // ranks_per_node
    return {
        key: Sent(
            int(matrix[rank][same_node & (ranks != rank)].sum()) * size,
            int(matrix[rank][~same_node].sum()) * size,
        )
        for key, (matrix, size) in moved.items()
    }
