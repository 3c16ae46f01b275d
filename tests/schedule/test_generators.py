"""Every generator: legal on grids, its formulas equal the simulator, its conditions raise."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest

from moemesh.config.schedule_table import SCHEDULES, FormNumbers, MicrobatchTimes, value_of
from moemesh.schedule.action import Schedule
from moemesh.schedule.ampnet import ampnet
from moemesh.schedule.build import build, closed_form
from moemesh.schedule.check import check
from moemesh.schedule.costs import Costs
from moemesh.schedule.generators import pipedream_2bw
from moemesh.schedule.simulate import simulate
from moemesh.schedule.terapipe import terapipe
from moemesh.schedule.text import from_text, to_text

NAMES = tuple(SCHEDULES)
RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 4, 6, 7, 8, 12, 16)
#: tF, tI, tW and tFB (None: the sum), with every relation that the region of a formula depends on.
TIMES = (
    (1, 1, 1, None),
    (2, 1, 1, None),
    (1, 2, 1, None),
    (5, 3, 2, None),
    (5, 7, 2, None),
    (2, 1, 3, None),
    (3, 3, 0, None),
    (4, 4, 1, 5),
    (2, 2, 2, 5),
    (0.7, 0.7, 0.3, 1.1),
)


def legal(name: str) -> list[Schedule]:
    """The schedule on the grid, where its conditions hold."""
    schedules: list[Schedule] = []
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for chunks in (1, 2, 3) if name == "interleaved_1f1b" else (1,):
                try:
                    schedules.append(build(name, ranks, microbatches, stages_per_rank=chunks))
                except ValueError:
                    continue
    return schedules


@pytest.mark.parametrize("name", NAMES)
def test_every_legal_schedule_is_proved(name: str) -> None:
    schedules = legal(name)
    assert len(schedules) >= 8
    for schedule in schedules:
        check(schedule)
        assert schedule.name == name
        assert from_text(to_text(schedule)) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_formulas_equal_the_simulator(name: str) -> None:
    compared: Counter[str] = Counter()
    for number, schedule in enumerate(legal(name)):
        for forward, dgrad, wgrad, block in TIMES:
            costs = Costs(
                forward=forward, input_gradient=dgrad, weight_gradient=wgrad, overlapped=block
            )
            held = (1, 0.25)[number % 2]
            simulation = simulate(schedule, costs, weight_memory=held)
            times = MicrobatchTimes(forward=forward, dgrad=dgrad, wgrad=wgrad, block=block)
            formula = closed_form(schedule, times, held=held)
            assert formula is not None
            if formula.bubble is not None:
                bubble = simulation.span_bubble
                if formula.row.metric == "rank_idle":
                    bubble = simulation.rank_idle
                assert bubble == pytest.approx(formula.bubble, abs=1e-9), schedule.parameters
                compared["bubble"] += 1
            if formula.peak_activation is not None:
                peaks = pytest.approx(formula.peak_activation, abs=1e-9)
                assert simulation.peak_activation == peaks
                compared["peak"] += 1
    if name not in ("pipedream", "pipedream_2bw", "ampnet"):
        assert compared["bubble"] >= 10
    if name != "ampnet":
        assert compared["peak"] >= 50


class TestOrders:
    @pytest.mark.parametrize("name", ["chimera", "dualpipe"])
    def test_two_pipes_are_mirror_images(self, name: str) -> None:
        schedule = build(name, 4, 16)
        for rank in range(4):
            mirror = [
                tuple(op._replace(pipe=1 - op.pipe) for op in entry)
                for entry in schedule.orders[3 - rank]
            ]
            same = [set(a) == set(b) for a, b in zip(schedule.orders[rank], mirror, strict=True)]
            assert all(same)
        assert schedule.num_microbatches == (8, 8)

    def test_first_and_last_layers_meet(self) -> None:
        assert build("zb_v", 4, 8).stages_of(0) == ((0, 0), (0, 7))
        assert build("dualpipe_v", 4, 8).stages_of(0) == ((0, 0), (0, 7))
        assert build("dualpipe", 4, 8).stages_of(0) == ((0, 0), (1, 3))


class TestTeraPipe:
    def test_unequal_slices(self) -> None:
        """q * sum + (p-1) * max when the slowest forward and backward are of one slice."""
        lengths = (3, 5, 2)
        costs = Costs(
            forward=lambda op: lengths[op.slice], backward=lambda op: 2 * lengths[op.slice]
        )
        for ranks in (1, 2, 5):
            for sequences in (1, 3):
                simulation = simulate(terapipe(ranks, sequences, 3), costs)
                work = 3 * sum(lengths) * sequences
                assert simulation.makespan == work + (ranks - 1) * 3 * max(lengths)
                assert simulation.rank_idle == (ranks - 1) * 3 * max(lengths)


class TestAsynchronous:
    def test_2bw_picks_a_window_that_divides(self) -> None:
        chosen = [pipedream_2bw(4, m).update.window for m in (4, 8, 10, 11)]
        assert chosen == [4, 4, 5, 11]

    @pytest.mark.parametrize("in_flight", [1, 2, 4, 7])
    @pytest.mark.parametrize("window", [1, 3])
    def test_ampnet_lags_at_most_as_far_as_said(self, in_flight: int, window: int) -> None:
        report = check(ampnet(4, 20, max_in_flight=in_flight, window=window))
        bound = -(-(in_flight - 1) // window)
        assert max(stage.lag for stage in report.versions.values()) <= bound
        assert {stage.copies for stage in report.versions.values()} == {1}
        assert max(peak.contexts for peak in report.peaks) <= in_flight

    def test_ampnet_with_one_microbatch_at_a_time_is_plain_training(self) -> None:
        simulation = simulate(ampnet(4, 5, max_in_flight=1))
        assert simulation.makespan == 5 * 4 * 3


ILLEGAL = [
    ("gpipe", 0, 4, {}, "gpipe needs ranks >= 1, got 0 < 1"),
    ("1f1b", 4, 0, {}, "1f1b needs microbatches >= 1, got 0 < 1"),
    ("zb_h1", 2, -1, {}, "zb_h1 needs microbatches >= 1, got -1 < 1"),
    ("zb_h2", 0, 1, {}, "zb_h2 needs ranks >= 1, got 0 < 1"),
    ("zb_v", 4, 0, {}, "zb_v needs microbatches >= 1, got 0 < 1"),
    ("pipedream", 4, 0, {}, "pipedream needs microbatches >= 1, got 0 < 1"),
    (
        "interleaved_1f1b",
        4,
        10,
        {"stages_per_rank": 2},
        "interleaved_1f1b needs microbatches % ranks == 0, got 10 % 4 == 2 "
        "(nearest: microbatches 8 or 12",
    ),
    (
        "interleaved_1f1b",
        4,
        8,
        {"stages_per_rank": 0},
        "interleaved_1f1b needs stages_per_rank >= 1, got 0 < 1 (nearest: stages_per_rank 1)",
    ),
    ("terapipe", 4, 8, {"num_slices": 0}, "terapipe needs num_slices >= 1, got 0 < 1"),
    ("chimera", 3, 6, {}, "chimera needs an even number of ranks, got 3 (nearest: ranks 2"),
    ("chimera", 5, 7, {}, "got 7 % 5 == 2 (nearest: ranks 4, microbatches 8)"),
    ("chimera", 4, 6, {}, "chimera needs microbatches % ranks == 0, got 6 % 4 == 2"),
    ("dualpipe", 5, 20, {}, "dualpipe needs an even number of ranks, got 5"),
    (
        "dualpipe",
        4,
        9,
        {},
        "dualpipe needs an even number of microbatches, got 9 (nearest: microbatches 8 or 10)",
    ),
    ("dualpipe", 4, 6, {}, "dualpipe needs microbatches >= 2 * ranks, got 6 < 8"),
    ("dualpipe_v", 4, 7, {}, "dualpipe_v needs microbatches >= 2 * ranks, got 7 < 8"),
    ("pipedream_2bw", 4, 3, {}, "pipedream_2bw needs microbatches >= ranks, got 3 < 4"),
    ("pipedream_2bw", 4, 9, {"window": 3}, "pipedream_2bw needs window >= ranks, got 3 < 4"),
    (
        "pipedream_2bw",
        4,
        10,
        {"window": 4},
        "pipedream_2bw needs microbatches % window == 0, got 10 % 4 == 2",
    ),
    ("ampnet", 4, 8, {"max_in_flight": 0}, "ampnet needs max_in_flight >= 1, got 0 < 1"),
    ("ampnet", 4, 8, {"window": 0}, "ampnet needs window >= 1, got 0 < 1"),
    ("gpipe", 4, 8, {"stages_per_rank": 2}, "gpipe needs stages_per_rank == 1, got 2"),
    ("zb_v", 4, 8, {"stages_per_rank": 3}, "zb_v needs stages_per_rank == 1 or 2, got 3"),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options", "message"), ILLEGAL)
def test_a_broken_condition_names_its_numbers(
    name: str, ranks: int, microbatches: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, ranks, microbatches, **options)


def test_every_condition_is_in_one_message() -> None:
    with pytest.raises(ValueError) as caught:
        build("dualpipe", 3, 5, stages_per_rank=2)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_numbers_are_legal(name: str) -> None:
    """Whatever a message proposes can be built."""
    proposed = 0
    for ranks in range(-1, 8):
        for microbatches in range(-2, 20):
            try:
                build(name, ranks, microbatches)
                continue
            except ValueError as error:
                hint = re.search(r"\(nearest: (.*)\)$", str(error))
            assert hint is not None
            given = {"ranks": ranks, "microbatches": microbatches}
            if ", or " in hint[1] or not re.search(r", \w", hint[1]):
                for option in hint[1].split(", or "):
                    word, values = option.split(" ", 1)
                    for value in values.split(" or "):
                        numbers = given | {word: int(value)}
                        build(name, numbers.pop("ranks"), numbers.pop("microbatches"), **numbers)
                        proposed += 1
            else:
                numbers = given | {
                    word: int(value)
                    for word, value in (part.split(" ") for part in hint[1].split(", "))
                }
                build(name, numbers["ranks"], numbers["microbatches"])
                proposed += 1
    assert proposed > 20


def test_work_grows_with_the_operations() -> None:
    """Four times the microbatches are four times the operations: generating and simulating them
    takes far less than sixteen times the time. The smallest of three, since machines are shared."""
    for name, options in (("zb_v", {}), ("interleaved_1f1b", {"stages_per_rank": 2})):

        def seconds(microbatches: int, name: str = name, options: Any = options) -> float:
            times: list[float] = []
            for _ in range(3):
                start = time.process_time()
                simulate(build(name, 16, microbatches, **options))
                times.append(time.process_time() - start)
            return min(times)

        assert seconds(256) < 10 * seconds(64)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("min(m, 2(p-r)-1)", 5),
        ("min(m, p-r) + min(r, 2(p-1-r), m)", 4),
        ("2 min(min(m, p), r), with a remark (p, r)", 2),
    ],
)
def test_formulas_may_nest_brackets(formula: str, value: int) -> None:
    numbers = FormNumbers(ranks=4, microbatches=6, chunks=1, times=MicrobatchTimes())
    assert value_of(formula, numbers, rank=1) == value
