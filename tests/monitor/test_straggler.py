"""Slow ranks, from simulated work: named early and right, and hardly ever without one."""

from __future__ import annotations

import random

import pytest

from moemesh.monitor.progress import ProgressRecord
from moemesh.monitor.supervisor import Straggler, StragglerDetector
from tests.monitor.statuses import record


def simulated(
    generator: random.Random,
    *,
    ranks: int,
    steps: int,
    noise: float,
    slow: dict[int, float],
    stages: int = 1,
    stride: int = 1,
) -> list[Straggler]:
    """Stragglers that are named in a run with noise, polled every `stride` steps.

    Each rank's work varies by `noise`, all of it by more, and one step of twenty of a rank takes up
    to eight times the usual seconds.
    """
    watched, worked, named = StragglerDetector(), [0.0] * ranks, list[Straggler]()
    for step in range(1, steps + 2):
        if step % stride == 0 or stride == 1:
            records = [look_of(r, step, worked[r], r * stages // ranks) for r in range(ranks)]
            named += watched.poll(records)
        common = 0.1 * generator.lognormvariate(0.0, 0.3)
        for rank in range(ranks):
            one = common * generator.lognormvariate(0.0, noise) * slow.get(rank, 1.0)
            one *= 1.0 + rank * stages // ranks  # stages need not be equal
            worked[rank] += one * (generator.uniform(1, 8) if generator.random() < 0.05 else 1)
    return named


def look_of(rank: int, step: int, worked: float, stage: int) -> ProgressRecord:
    return record(rank, step=step, worked=worked, stage=stage)


def test_a_slow_rank_is_named_once_within_twenty_steps() -> None:
    generator = random.Random(3)
    named = simulated(generator, ranks=4, steps=20, noise=0.1, slow={2: 1.5})
    assert [one.rank for one in named] == [2] and named[0].step <= 20
    assert named[0].ratio == pytest.approx(1.5, rel=0.15)
    assert named[0].seconds == pytest.approx(0.05, rel=0.5)
    assert "rank 2 is slow" in str(named[0])
    assert len(simulated(generator, ranks=4, steps=300, noise=0.1, slow={2: 1.5})) == 1
    # Several short steps between two looks.
    seldom = simulated(generator, ranks=4, steps=90, noise=0.1, slow={0: 1.5}, stride=4)
    assert [one.rank for one in seldom] == [0]


def test_stages_are_not_compared_with_one_another() -> None:
    generator = random.Random(4)
    assert not simulated(generator, ranks=2, steps=60, noise=0.1, slow={}, stages=2)
    assert not simulated(generator, ranks=4, steps=60, noise=0.1, slow={}, stages=2)
    named = simulated(generator, ranks=4, steps=20, noise=0.1, slow={1: 1.5}, stages=2)
    assert [one.rank for one in named] == [1]


def test_lateness_that_costs_nothing_is_not_told() -> None:
    watched = StragglerDetector()
    for step in range(1, 100):
        # The second rank works three times the seconds, which is a millisecond more a step.
        records = [record(r, step=step, worked=step * (5e-4, 1.5e-3)[r]) for r in range(2)]
        assert not watched.poll(records)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_a_thousand_runs_of_each(ranks: int, noise: float) -> None:
    """1.5 times as slow: at least 95 % right within 20 steps, and at most 1 % false alarms."""
    generator = random.Random(1000 * ranks + int(100 * noise))
    right = false = 0
    for _ in range(1000):
        culprit = generator.randrange(ranks)
        named = simulated(generator, ranks=ranks, steps=20, noise=noise, slow={culprit: 1.5})
        right += [one.rank for one in named] == [culprit]
    for _ in range(200):
        false += bool(simulated(generator, ranks=ranks, steps=200, noise=noise, slow={}))
    print(f"{ranks} ranks, noise {noise}: {right} of 1000 right, {false} of 200 false")
    assert right >= 950 and false <= 2
