"""Interleaved 1F1B: several chunks of layers per rank, so that the pipeline fills sooner.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from moemesh.schedule.action import Op, Schedule, looped, single
from moemesh.schedule.conditions import ALWAYS, at_least, divisible, require

CONDITIONS = (*ALWAYS, at_least("stages_per_rank", 1), divisible("microbatches", "ranks"))


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Chunk c of rank r is stage c*p + r; microbatches pass in groups of p.

    Bubble (p-1)(tF+tB)/v for v chunks a rank, and v times the messages; rank r holds
    min(mv, 2(p-1-r) + (v-1)p + 1)/v microbatches. Raises ValueError unless m % p == 0 and v >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(interleaved_1f1b(2, 4, 2)).timeline))
    rank 0: F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
    rank 1: .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3---
    """
    require(
        "interleaved_1f1b",
        CONDITIONS,
        ranks=num_ranks,
        microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    return Schedule(
        name="interleaved_1f1b",
        num_ranks=num_ranks,
        num_stages=num_ranks * stages_per_rank,
        placement=(looped(num_ranks, stages_per_rank),),
        orders=tuple(
            single(*_order(rank, num_ranks, num_microbatches, stages_per_rank))
            for rank in range(num_ranks)
        ),
        num_microbatches=(num_microbatches,),
    )


def _order(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> list[Op]:
    """1F1B over the rank's numbered forwards and backwards."""
    total = num_microbatches * chunks

    def numbered(kind: str, number: int) -> Op:
        group, place = divmod(number, num_ranks * chunks)
        chunk = place // num_ranks
        microbatch = group * num_ranks + place % num_ranks
        if kind == "F":
            return Op("F", chunk * num_ranks + rank, microbatch)
        return Op("B", (chunks - 1 - chunk) * num_ranks + rank, microbatch)

    warm_up = min(total, 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
    found = [numbered("F", number) for number in range(warm_up)]
    for number in range(total):
        if number + warm_up < total:
            found.append(numbered("F", number + warm_up))
        found.append(numbered("B", number))
    return found
