"""Seconds, microbatches in flight and weight copies of a step, against simulation and a walk."""

from __future__ import annotations

import random
from itertools import product

import pytest

from moemesh.config.conditions import ScheduleConditionError
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import peak_memory
from moemesh.schedule.simulate import simulate
from moemesh.schedule.step import PipelineStep, alive, duration, weight_copies

SYNCHRONOUS = (
    "1f1b", "gpipe", "interleaved_1f1b", "terapipe", "chimera", "zb_h1", "zb_h2", "zb_v",
    "dualpipe", "dualpipe_v",
)  # fmt: skip


def in_flight(step: PipelineStep, rank: int) -> float:
    """Microbatches that a rank holds at its peak: the mean over its stages."""
    return max(sum(moment) / len(moment) for moment in alive(step)[rank])


def steps(name: str, ranks: int, counts: range) -> list[tuple[PipelineStep, object]]:
    """Every legal step with a number of microbatches from `counts`, and its schedule."""
    pairs: list[tuple[PipelineStep, object]] = []
    chunks = 3 if name == "interleaved_1f1b" else 1
    slices = 2 if name == "terapipe" else 1
    for count in counts:
        try:
            schedule = build(
                name, ranks, count, stages_per_rank=chunks,
                num_slices=slices if name == "terapipe" else None,
            )  # fmt: skip
        except ScheduleConditionError:
            continue
        pairs.append((PipelineStep(name, ranks, count, chunks, slices), schedule))
    return pairs


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(
    "ranks", [1, 2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6))]
)
def test_a_step_takes_as_long_as_its_simulation(name: str, ranks: int) -> None:
    """m = 1 ... 4p and beyond, even, uneven and nearly even stages, with and without messages."""
    chance = random.Random(ranks)
    every = steps(name, ranks, range(1, 4 * ranks + 1)) + steps(
        name, ranks, range(9 * ranks, 10 * ranks + 1)
    )
    for (step, schedule), kind in product(every, range(3)):
        spread = ((1.0, 1.0), (0.3, 2.0), (1.0, 1.02))[kind]
        forward, inputs, weights = (
            [chance.uniform(*spread) for _ in range(step.num_stages)] for _ in range(3)
        )
        message = chance.choice([0.0, 0.1, 0.7])
        costs = Costs(
            forward=forward, input_gradient=inputs, weight_gradient=weights, message=message
        )
        truth = simulate(schedule, costs, transport="blocking")  # type: ignore[arg-type]
        times = duration(step, forward, inputs, weights, message)
        assert times.makespan == pytest.approx(truth.makespan, rel=1e-9)
        assert times.span == pytest.approx(truth.span, rel=1e-9)
        sent = message * step.share * step.microbatches * step.slices
        busy = [own + sent * step.messages_of(rank) for rank, own in enumerate(truth.busy)]
        assert times.busy == pytest.approx(max(busy), rel=1e-9)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_microbatches_in_flight_are_those_of_the_orders(name: str, ranks: int) -> None:
    """Weight memory included, at every number of microbatches."""
    counts = [*range(1, 4 * ranks + 1), 9 * ranks, 12 * ranks]
    for count in counts:
        for step, schedule in steps(name, ranks, range(count, count + 1)):
            pipes = schedule.num_pipes  # type: ignore[attr-defined]
            truth = [one.activation / pipes for one in peak_memory(schedule)]  # type: ignore[arg-type]
            assert [in_flight(step, rank) for rank in range(ranks)] == pytest.approx(truth)


def test_published_counts() -> None:
    assert [in_flight(PipelineStep("zb_h2", 4, 8), rank) for rank in range(4)] == [7] * 4
    assert [in_flight(PipelineStep("1f1b", 4, 8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(PipelineStep("dualpipe", 8, 20), 3) == 9 / 2  # of two stages each
    assert alive(PipelineStep("1f1b", 4, 100_000)) == alive(PipelineStep("1f1b", 4, 16))


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "ampnet"])
def test_streams_hold_the_same_for_every_step(name: str) -> None:
    """A stream never drains between steps: its memory does not depend on their length."""
    short, long = PipelineStep(name, 4, 1), PipelineStep(name, 4, 64)
    assert alive(short) == alive(long)
    times = duration(short, [1.0, 2.0, 1.0, 1.0], [1.0] * 4, [1.0] * 4, 0.5)
    assert times.makespan == times.busy == 5.0


def test_versions_of_weights() -> None:
    copies = {
        name: [weight_copies(PipelineStep(name, 4, 1), rank) for rank in range(4)]
        for name in ("pipedream", "pipedream_2bw", "ampnet", "1f1b", "dualpipe")
    }
    assert copies == {
        "pipedream": [4, 3, 2, 1], "pipedream_2bw": [2] * 4, "ampnet": [1] * 4,
        "1f1b": [1] * 4, "dualpipe": [1] * 4,
    }  # fmt: skip
