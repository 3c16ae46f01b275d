"""Communication that shall run beside computation does: what a rank's kernels wait for, of it.

Whole steps on the simulated device give what every rank queues; costs are those of a slow machine,
on which small tensors take as long as large ones on a GPU. Each test fails where the overlap that
it names is switched off.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from benchmarks.simulated_device.counts import Arrival, Exchange, Kernel, Queued
from benchmarks.simulated_device.timeline import RankTimeline, simulate
from moemesh.config.cluster import Cluster, load_cluster
from moemesh.parallel.parallelize import RankModel
from moemesh.planner.timing.price import pricing
from moemesh.schedule.step import PipelineStep, duration
from moemesh.sharding import buckets
from tests.device.stepping import Counted, steps_on_rank
from tests.device.test_waits import SMALL
from tests.parity.training import Shape
from tests.ranks import run_on_ranks

#: Bytes/s of the links.
LINK = 2e7
#: Tokens of a sequence.
LENGTH = 32
MODEL = SMALL | {"first_dense_layers": 0}
SHALLOW = MODEL | {"num_layers": 2}
PLANNED = pricing(load_cluster("dgx_h100")).constants


def machine(link: float = LINK, latency: float = 0.0, gpus_per_node: int = 8) -> Cluster:
    return Cluster(
        name="slow",
        nodes=2,
        gpus_per_node=gpus_per_node,
        memory_bytes=1 << 30,
        memory_bandwidth=1e10,
        peak_flops={"bfloat16": 1e9},
        intra_node_bandwidth=link,
        intra_node_latency=latency,
        inter_node_bandwidth=link / 10,
        inter_node_latency=10 * latency,
    )


class Case(NamedTuple):
    """A plan and the same without its overlap: as another plan, or the code changed; `callers` of
    the transfers, and the share of their time that the planner takes to be exposed."""

    plan: dict[str, Any]
    callers: tuple[str, ...]
    planned: float
    without: dict[str, Any] | Callable[[RankModel], None]
    global_batch: int = 8


def gather_when_read(parallel: RankModel) -> None:
    units = parallel.reducer.units
    assert units is not None and units._next
    units._next.clear()


def sum_at_the_end(parallel: RankModel) -> None:
    parallel.reducer.arm = lambda parameters: None  # pyright: ignore


EXCHANGES = "moe.dispatch", "moe.combine"
EP = {"dp": 2, "ep": 2, "dispatcher": "all_to_all"}
DUAL = EP | {"pp": 2, "microbatches": 8}
EXCHANGED = float(PLANNED.overlapped_exchange_exposed)
GRADIENTS = float(PLANNED.gradient_exposed)
#: A unit of FSDP takes max(compute + slowdown * transfer, ...), and at most the sum of both.
GATHERED = min(float(PLANNED.overlap_slowdown), 1.0)
CASES = {
    "chunks": Case(EP | {"dispatch_chunks": 4}, EXCHANGES, EXCHANGED, {"dispatch_chunks": 1}),
    "gradients": Case({"dp": 2}, ("gradients",), GRADIENTS, sum_at_the_end),
    "zero1": Case({"dp": 2, "data": "zero1"}, ("gradients",), GRADIENTS, sum_at_the_end),
    "zero3": Case({"dp": 2, "data": "zero3"}, ("weights",), GATHERED, gather_when_read),
    "dualpipe_v": Case(
        DUAL | {"schedule": "dualpipe_v"}, EXCHANGES, EXCHANGED, {"overlap_blocks": False}, 16
    ),
    "dualpipe": Case(
        DUAL | {"schedule": "dualpipe"}, EXCHANGES, EXCHANGED, {"overlap_blocks": False}, 16
    ),
}
SLOW = "chunks", "zero1", "dualpipe", "dualpipe_v"


def _step(rank: int, *args: Any) -> Counted:
    # Small enough that a small model has many.
    with mock.patch.object(buckets, "BUCKET_BYTES", 1 << 14):
        return steps_on_rank(rank, *args)


def queued(
    plan: dict[str, Any], batch: int, change: Callable[[RankModel], None] | None = None
) -> list[list[Queued]]:
    ranks = plan.get("dp", 1) * plan.get("pp", 1)
    # The first gather of a step has no computation beside it: a small share of several.
    model = MODEL if plan.keys() & {"pp", "data"} else SHALLOW
    counted = run_on_ranks(ranks, _step, model, plan, Shape(batch, LENGTH), 1, change)
    return [one.queued["gradients"] for one in counted]


def timelines(
    plan: dict[str, Any], batch: int, change: Callable[[RankModel], None] | None = None
) -> list[RankTimeline]:
    return simulate(queued(plan, batch, change), machine(), launch=0.0)


def share(timelines: list[RankTimeline], callers: tuple[str, ...]) -> float:
    """Share of the transfers of all ranks that no computation hides."""
    total = sum(one.transferring(*callers) for one in timelines)
    assert total > 0.1 * max(one.computing for one in timelines), "too small to measure"
    return sum(one.exposed(*callers) for one in timelines) / total


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in CASES]
)
def test_communication_is_hidden(name: str) -> None:
    plan, callers, planned, without, batch = CASES[name]
    hidden = share(timelines(plan, batch), callers)
    if isinstance(without, dict):
        bare = share(timelines(plan | without, batch), callers)
    else:
        bare = share(timelines(plan, batch, without), callers)
    assert hidden <= planned and 2 * hidden < bare, (hidden, bare, planned)


#: Schedules with the stages of a rank. On NCCL nothing hides a message of two ranks: both queue it
#: between their kernels. (Published trainers hide a part: `pipeline_exposed` of the planner.)
EXPOSED = 1.1
PIPELINES = {
    "1f1b": 1,
    "zb_v": 2,
    "interleaved_1f1b": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_messages_between_stages_cost_no_more_than_whole_transfers(name: str) -> None:
    """A step grows by its messages as a simulation of the schedule with whole transfers grows."""
    count, stages = 8, PIPELINES[name]
    plan = {"pp": 2, "microbatches": count, "schedule": name}
    queues = queued(plan | ({"stages_per_rank": stages} if stages > 1 else {}), count)
    free, slow = (
        max(one.seconds for one in simulate(queues, machine(link), launch=0.0))
        for link in (1e15, LINK)
    )
    lines = simulate(queues, machine(), launch=0.0)
    size = LENGTH * MODEL["hidden_size"] * 2
    message = EXPOSED * size / LINK
    third = max(one.computing for one in lines) / count / stages / 3
    work = [[third] * 2 * stages] * 3
    step = PipelineStep(name, 2, count, stages)
    planned = duration(step, *work, message).makespan - duration(step, *work).makespan
    assert 0 < slow - free <= planned, (slow - free, planned, free)
    # Sent twice, they would cost more.
    twice = max(one.seconds for one in simulate(queues, machine(LINK / 2), launch=0.0))
    assert twice - free > planned, (twice - free, planned)


def kernel(seconds: float) -> Kernel:
    return Kernel("mm", int(seconds * 1e9), 0, torch.bfloat16, "")


def exchange(seconds: float, number: int = 1, ranks: tuple[int, ...] = (0, 1)) -> Exchange:
    return Exchange("all_to_all", "moe", int(seconds * LINK), ranks, "group", number)


def test_a_transfer_is_exposed_where_nothing_is_computed_beside_it() -> None:
    queue = [kernel(1), exchange(3), kernel(2), Arrival("group", 1), kernel(1)]
    for rank in simulate([queue, queue], machine(), launch=0.0):
        assert (rank.seconds, rank.computing) == (pytest.approx(5), pytest.approx(4))
        assert rank.exposed() == pytest.approx(1) and rank.late == 0
        assert rank.transferring("moe") == pytest.approx(3) and not rank.of("pipeline")


def test_who_comes_late_is_told_from_what_travels() -> None:
    early = [exchange(3), Arrival("group", 1)]
    late = [kernel(5), *early]
    first, second = simulate([early, late], machine(), launch=0.0)
    assert (first.late, first.exposed()) == (pytest.approx(5), pytest.approx(3))
    assert (second.late, second.exposed()) == (0, pytest.approx(3))
    assert first.seconds == second.seconds == pytest.approx(8)


def test_exchanges_of_a_group_follow_one_another_and_cross_nodes_slowly() -> None:
    queue = [exchange(1), exchange(1, 2), Arrival("group", 2), Arrival("group", 1)]
    inside, across = machine(), machine(latency=0.5, gpus_per_node=1)
    assert simulate([queue, queue], inside)[0].exposed() == pytest.approx(2)
    assert simulate([queue, queue], across)[0].exposed() == pytest.approx(30)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    queue = [exchange(1), Arrival("group", 1)]
    with pytest.raises(ValueError, match=r"wait for each other: \{0: Arrival"):
        simulate([queue, []], machine())
    # What started before is over.
    assert simulate([[Arrival("group", 7), kernel(1)]], machine(), launch=0.0)[0].seconds == 1
