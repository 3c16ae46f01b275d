"""The clock of the parts of a step: marks by hand, the modules of a model, and a whole run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.transformer import Transformer
from moemesh.trace import step_seconds as parts
from moemesh.trace.run import Run
from moemesh.trace.step_seconds import communication
from moemesh.trace.timeline import COMMUNICATION, TimelineRecorder
from moemesh.train.records import step_clock
from moemesh.train.records.step_clock import StepClock

EP, DP = communication("ep"), communication("dp_cp")
MODEL = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
    intermediate_size=16, num_experts=4, experts_per_token=2, expert_intermediate_size=8,
    first_dense_layers=0,
)  # fmt: skip


class Clock(StepClock):
    """A clock that is set by the test."""

    now = 0.0

    def at(self, now: float, part: str) -> None:
        Clock.now = now
        self._mark(part)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: Clock.now)
    return Clock(Transformer(MODEL))


def recorder_of_a_step(step: int, backward: str = "B") -> TimelineRecorder:
    recorder = TimelineRecorder(0)
    recorder.step = step
    for name, start, end, kind in (
        ("data", -1, 0, ""),
        ("0F0", 0, 10, "F"),
        (f"0{backward}0", 12, 20, backward),
        ("reduce", 20, 24, ""),
        ("optimizer", 24, 25, ""),
    ):
        recorder.add(name=name, start=start, end=end, kind=kind)
    return recorder


def run_step(clock: Clock) -> None:
    """Marks of a step: attention 1 to 3, experts 3 to 8 with an exchange from 4 to 6, their
    backward from 13 to 17, and a sum of gradients from 21 to 22."""
    clock.at(1, parts.ATTENTION)
    clock.at(3, parts.EXPERTS)
    clock._waited("ep", 4, 6)
    clock.at(8, parts.REST)
    clock.at(13, parts.EXPERTS)
    clock.at(17, parts.REST)
    clock._waited("dp_cp", 21, 22)


def test_each_moment_of_a_step_belongs_to_one_part(clock: Clock) -> None:
    recorder = recorder_of_a_step(1)
    run_step(clock)
    clock.finish_step(recorder, 1, 27.0)
    steps, seconds = clock.result()
    expected = {parts.ATTENTION: 2, parts.EXPERTS: 1 + 2 + 4, EP: 2, DP: 1, parts.DATA: 1}
    expected |= {parts.OPTIMIZER: 4 - 1 + 1, parts.REST: 10}
    assert (steps, seconds) == (1, expected) and sum(seconds.values()) == 27
    waits = recorder.timeline().of_kind(COMMUNICATION).records
    assert [(r.name, r.start, r.end, r.step) for r in waits] == [(EP, 4, 6, 1), (DP, 21, 22, 1)]


def test_the_first_step_counts_only_where_no_other_follows(clock: Clock) -> None:
    for step, seconds in ((1, 100.0), (2, 27.0), (3, 29.0)):
        run_step(clock)
        clock.finish_step(recorder_of_a_step(step), step, seconds)
    steps, mean = clock.result()
    assert steps == 2 and sum(mean.values()) == 28 and mean[EP] == 2


def test_weight_gradients_of_their_own_leave_the_passes_together(clock: Clock) -> None:
    run_step(clock)
    clock.finish_step(recorder_of_a_step(1, "W"), 1, 27.0)
    seconds = clock.result()[1]
    assert seconds[parts.TOGETHER] == 10 + 8 - 2 and not {*parts.PASSES} & {*seconds}
    assert sum(seconds.values()) == 27


def test_forward_and_backward_of_every_block_are_marked_and_nothing_changes() -> None:
    tokens_BS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = Batch(
        tokens_BS=tokens_BS[:, :-1], targets_BS=tokens_BS[:, 1:], sequences_B=torch.arange(2)
    )
    gradients: list[list[torch.Tensor]] = []
    marked: list[str] = []
    for is_measured in (False, True):
        model = Transformer(MODEL)
        initialize(model, seed=3, dtype=torch.float64)
        if is_measured:
            clock = StepClock(model)
            clock._mark = marked.append  # type: ignore[method-assign]
        model(batch).losses_T.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    layer = [parts.ATTENTION, parts.REST, parts.EXPERTS, parts.REST]
    back = [parts.EXPERTS, parts.REST, parts.ATTENTION, parts.REST]
    ends = [parts.HEAD, parts.REST]
    assert marked == [*layer, *layer, *ends, *ends, *back, *back]


def assert_seconds_of_two_ranks(folder: Path) -> None:
    """The seconds of a run of four steps, whose experts are on two ranks."""
    run = Run.load(folder)
    assert run.seconds is not None and run.seconds.steps == 3
    measured, predicted = run.seconds.ranks, run.seconds.predicted
    assert measured.keys() == predicted.keys() == {0, 1}
    # The row of a step has the seconds of rank 0.
    assert sum(measured[0].values()) == pytest.approx(fmean(r.seconds for r in run.metrics[1:]))
    for part in (parts.ATTENTION, parts.EXPERTS, parts.HEAD, parts.OPTIMIZER, EP):
        assert measured[0][part] > 0 and predicted[0][part] > 0, part
    page = (folder / "report.html").read_text()
    assert "communication over ep" in page and "ranks compute" in page
    assert "of a step by part" in page
    # The ledger leaves out the measurement of rates.
    assert all(e.caller != "rates" for ledger in run.ledgers.values() for e in ledger.entries())
