"""Rates of every schedule at chosen steps, computed by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from moemesh.config import learning_rate
from moemesh.config.train import TrainConfig


def rates(**keys: object) -> list[float]:
    """The rates of all steps of a run of ten with two of warm-up."""
    given = {"lr": 1.0, "steps": 10, "warmup_steps": 2, "final_lr_ratio": 0.2, **keys}
    train = TrainConfig(**given)  # type: ignore[arg-type]
    return [train.learning_rate(step) for step in range(1, train.steps + 1)]


def test_every_schedule_warms_up_and_ends_at_its_lowest_rate() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        values = rates(lr_schedule=schedule)
        assert values[:2] == [0.5, 1.0]
        assert values[-1] == pytest.approx(0.2)
    assert rates(lr_schedule="constant", final_lr_ratio=0.1)[1:] == [1.0] * 9


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    values = rates()
    assert values[5] == pytest.approx(0.6)
    assert values[3] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))


def test_a_line_falls_by_the_same_amount_in_every_step() -> None:
    values = rates(lr_schedule="linear")
    steps = [a - b for a, b in pairwise(values[1:])]
    assert steps == pytest.approx([0.1] * 8)


def test_wsd_is_constant_until_its_decay() -> None:
    assert rates(lr_schedule="wsd", decay_steps=4)[1:] == pytest.approx(
        [1.0] * 5 + [0.8, 0.6, 0.4, 0.2]
    )
    assert rates(lr_schedule="wsd")[1:] == pytest.approx([1.0] * 7 + [0.6, 0.2])


def test_the_square_root_falls_fast_at_first() -> None:
    values = rates(lr_schedule="wsd", decay_steps=4, decay_shape="sqrt")
    want = [1 - 0.8 * math.sqrt(part) for part in (0.25, 0.5, 0.75, 1.0)]
    assert values[6:] == pytest.approx(want)


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_an_extended_run_keeps_its_past(schedule: str) -> None:
    """Constant and stable rates do not depend on the number of steps; a cosine does."""
    keys = {"lr_schedule": schedule, "final_lr_ratio": 0.1}
    short, long = rates(**keys, steps=10), rates(**keys, steps=20)
    assert short[:8] == long[:8]
    assert rates(steps=10)[:8] != rates(steps=20)[:8]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr_schedule": "wsd", "decay_steps": 9}, "need more than the 10 steps"),
        ({"decay_steps": 3}, "has no use with lr_schedule"),
        ({"decay_shape": "sqrt"}, "has no use with lr_schedule"),
        ({"lr_schedule": "constant", "final_lr_ratio": 0.3}, "has no use with lr_schedule"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, object], message: str) -> None:
    train = TrainConfig(**{"steps": 10, "warmup_steps": 2} | keys)  # type: ignore[arg-type]
    (problem,) = train.check()
    assert message in problem.message and problem.fix


def test_a_row_reads_the_warmup_and_the_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inverse square root from the steps of the warm-up, with a linear end."""

    def height(at: learning_rate.DecayPosition) -> float:
        left = min((1 - at.progress) / at.decay, 1.0)
        return left * math.sqrt(at.warmup / (at.warmup + at.progress))

    monkeypatch.setitem(learning_rate.SCHEDULES, "mine", height)
    values = rates(lr_schedule="mine", final_lr_ratio=0.0, decay_steps=2)
    assert values[1:8] == pytest.approx([math.sqrt(2 / step) for step in range(2, 9)])
    assert values[8:] == pytest.approx([math.sqrt(2 / 9) / 2, 0.0])
    # The table decides which schedules may set decay_steps and final_lr_ratio.
    assert TrainConfig(lr_schedule="mine", decay_steps=2, final_lr_ratio=0.5).check() == []
    (problem,) = TrainConfig(lr_schedule="cosine", decay_steps=2).check()
    assert "wsd" in problem.fix and "mine" in problem.fix
