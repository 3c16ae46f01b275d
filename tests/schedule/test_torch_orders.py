"""Orders that torch's private pipelining runtime also has, operation by operation."""

from __future__ import annotations

import pytest

from moemesh.schedule.action import Op, Schedule
from moemesh.schedule.build import build

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_orders(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[list[Op]]]:
    """Entries of every rank by torch, where blocks are lists of several."""
    try:
        made = object.__new__(getattr(schedules, name))
        made.pp_group_size = ranks
        made.n_local_stages = chunks
        made._num_stages = made.num_stages = ranks * chunks
        made._n_microbatches = microbatches
        made.number_of_rounds = max(1, microbatches // ranks)
        made.microbatches_per_round = microbatches // made.number_of_rounds
        made._stages = [None] * chunks
        mapping = schedules.generate_stage_to_rank_mapping
        style = "v" if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else "loop"
        made.stage_index_to_group_rank = mapping(ranks, ranks * chunks, style=style)
        lists = [made._calculate_single_rank_operations(rank) for rank in range(ranks)]
        return [
            [entry for action in actions if (entry := [*flattened(action)])] for actions in lists
        ]
    except (AttributeError, TypeError) as error:
        pytest.skip(f"torch's private schedules have moved: {error}")


def flattened(action: object) -> list[Op]:
    if action is None:
        return []
    parts = getattr(action, "sub_actions", None) or [action]
    return [
        Op(KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
        for part in parts
    ]


def ours(schedule: Schedule) -> list[list[list[Op]]]:
    return [[list(entry) for entry in order] for order in schedule.orders]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved(ranks: int, groups: int, chunks: int) -> None:
    schedule = build("interleaved_1f1b", ranks, groups * ranks, stages_per_rank=chunks)
    theirs = torch_orders("ScheduleInterleaved1F1B", ranks, groups * ranks, chunks)
    assert ours(schedule) == theirs


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 11), (8, 16)])
def test_dualpipe_v(ranks: int, microbatches: int) -> None:
    theirs = torch_orders("ScheduleDualPipeV", ranks, microbatches, 2)
    assert ours(build("dualpipe_v", ranks, microbatches)) == theirs


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 20)])
def test_zb_v(ranks: int, microbatches: int) -> None:
    theirs = torch_orders("ScheduleZBVZeroBubble", ranks, microbatches, 2)
    assert ours(build("zb_v", ranks, microbatches)) == theirs
