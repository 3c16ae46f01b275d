"""80 % intervals: their coverage on left-out sources, and its arithmetic."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from math import exp, log

import pytest

from moemesh.planner.accuracy.calibrate import intervals_toml, left_out_errors
from moemesh.planner.accuracy.published import parse_run
from moemesh.planner.intervals import (
    Interval,
    Intervals,
    MemoryErrors,
    SecondsErrors,
    fits_chance,
    own_width,
    read_intervals,
    shipped_intervals,
)
from moemesh.planner.timing.calibration import prior_calibration
from tests.planner.published_rows import ARCHS, ROWS


def test_shipped_intervals_of_seconds_hold_four_fifths_of_left_out_sources() -> None:
    coverage = shipped_intervals().seconds_coverage()
    assert len(coverage.by_source) >= 14
    assert sum(coverage.rows.values()) > 550
    assert 0.75 <= coverage.of_sources <= 0.85
    assert 0.75 <= coverage.of_rows <= 0.85


def test_shipped_intervals_of_memory_hold_four_fifths_of_left_out_sources() -> None:
    coverage = shipped_intervals().memory_coverage()
    assert len(coverage.by_source) >= 5
    assert 0.75 <= coverage.of_sources <= 0.85


def test_a_device_that_few_sources_measured_has_the_wider_interval() -> None:
    intervals = shipped_intervals()
    assert intervals.well_measured == {"ampere", "hopper"}
    assert intervals.seconds_width("hopper") < intervals.seconds_width("blackwell")
    assert intervals.seconds_width("") == intervals.seconds_width("blackwell")
    low, high = Interval.around(10.0, intervals.seconds_width("hopper"))
    assert low * high == pytest.approx(100.0)
    assert Interval.around(8.0, log(2)) == pytest.approx((4.0, 16.0))


def errors(source: str, *values: float) -> SecondsErrors:
    return SecondsErrors(source=source, generation="g", errors=values)


def test_a_source_with_many_rows_weighs_as_much_as_one_with_few() -> None:
    many = errors("a", *[0.1] * 1000)
    few = [errors(name, 0.3) for name in "bcde"]
    intervals = Intervals(seconds=(many, *few), memory=())
    assert intervals.seconds_width("g") == pytest.approx(0.3)
    without = intervals.seconds_width("g", without="b")
    assert without <= intervals.seconds_width("g")


def test_coverage_judges_a_source_by_the_others() -> None:
    intervals = Intervals(seconds=(errors("a", 0.1), errors("b", 0.1), errors("c", 5.0)), memory=())
    coverage = intervals.seconds_coverage()
    assert coverage.by_source == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert coverage.of_sources == pytest.approx(2 / 3)


def test_labels_bound_the_memory_of_runs() -> None:
    # Needs are at most 0.75 times the prediction in one run of four, 1.2 times in three.
    ran = tuple(log(x) for x in (0.75, 1.2, 1.2, 1.2, 2.0))
    out = tuple(log(x) for x in (0.5, 0.75, 0.75, 0.75, 1.2))
    memory = MemoryErrors(source="a", ran=ran, out=out)
    assert memory.within(log(1.25)) == pytest.approx(0.75 - 0.25)
    assert memory.within(log(4)) == 1.0
    bytes_known = MemoryErrors(source="b", errors=(-0.5, 0.0, 0.1, 0.2))
    assert bytes_known.within(0.1) == 0.5


def test_errors_of_a_source_come_from_a_fit_without_it_and_survive_the_file() -> None:
    """A source that measures everything twice as slow is predicted as before: its runs taught
    nothing."""
    runs = [parse_run(one, ARCHS) for one in ROWS]
    runs = [replace(run, source="one" if index % 2 else "two_x") for index, run in enumerate(runs)]
    slow = [
        replace(run, seconds=2 * run.seconds) if run.source == "one" and run.seconds else run
        for run in runs
    ]
    first = left_out_errors(runs, prior_calibration())
    second = left_out_errors(slow, prior_calibration())
    assert {one.source for one in first.seconds} == {"one", "two"}
    own = [each.seconds[0].errors for each in (first, second)]
    assert own[1] == pytest.approx([error + log(2) for error in own[0]], abs=2e-4)
    theirs = [each.seconds[-1].errors for each in (first, second)]
    assert theirs[0] != theirs[1]
    assert read_intervals(tomllib.loads(intervals_toml(first))) == first


def test_memory_of_a_known_stack_is_within_an_eighth() -> None:
    intervals = shipped_intervals()
    assert intervals.known_width <= log(1.13)
    assert min(intervals.memory_coverage(known=True).by_source.values()) >= 0.8
    known = intervals.known_width
    assert known < intervals.memory_width
    assert fits_chance(80.0, 80.0, known) == pytest.approx(0.5)
    edge = 80.0 * exp(known)
    assert fits_chance(80.0, edge, known) == pytest.approx(0.9, abs=1e-3)
    assert fits_chance(80.0, edge, intervals.memory_width) < fits_chance(80.0, edge, known)


def test_the_interval_goes_from_that_of_strangers_to_that_of_own_runs() -> None:
    small = [0.01, -0.02, 0.015, -0.01]
    assert own_width([], 0.3) == 0.3
    assert own_width(small, 0.3) == pytest.approx(0.3)
    assert own_width(small * 3, 0.3) < 0.1
    assert own_width(small * 12, 0.3) == pytest.approx(0.02, abs=0.005)
    low, high = Interval.around(
        10.0, own_width(small * 12, shipped_intervals().seconds_width("hopper"))
    )
    assert high / low < 1.05
