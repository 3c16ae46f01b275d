"""Evaluation: the forwards of any number of microbatches through the first pipe of a schedule."""

from __future__ import annotations

from dataclasses import replace

from moemesh.schedule.action import Op, Schedule, single


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Every rank runs its stages of pipe 0, microbatch after microbatch."""
    placement = schedule.placement[0]
    orders = tuple(
        single(
            *(
                Op("F", stage, microbatch)
                for microbatch in range(num_microbatches)
                for stage, owner in enumerate(placement)
                if owner == rank
            )
        )
        for rank in range(schedule.num_ranks)
    )
    return replace(
        schedule,
        name=f"{schedule.name}, forward only",
        placement=(placement,),
        orders=orders,
        num_microbatches=(num_microbatches,),
        num_slices=1,
        update=None,
    )
