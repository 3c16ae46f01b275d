"""Errors of predictions for sources that the fit had not seen: what intervals are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log

from moemesh.config.toml import format_value
from moemesh.planner.accuracy.calibrate import cross_validate, study_of
from moemesh.planner.accuracy.predict import predict, run_memory
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.intervals import Intervals, MemoryErrors, SecondsErrors
from moemesh.planner.peak_memory import Allocation
from moemesh.planner.timing.calibration import Calibration, prior_calibration

#: Memory before anybody looked at a run: the byte counts of single matrices that published runs
#: have shown are left out.
_NEUTRAL = Allocation(layer_gradient_bytes=0.0, head_gradient_bytes=0.0)
#: Four digits: an interval needs no more.
_DIGITS = 4

_HEADING = """\
# Errors of the planner on published runs whose source the fit had not seen, by
# `moemesh validate RUNS.csv --intervals FILE`; moemesh/planner/intervals.py says what they become.
# [[seconds]]: log(measured / predicted) of step times, by source and generation of the device.
# [[memory]]: log(measured / predicted) bytes ("errors"), or the log of a device's memory over the
# predicted bytes, of runs that "ran" and that ran "out" of memory. Habits of the source's software
# are not known to these predictions."""


def left_out_errors(runs: Sequence[PublishedRun], start: Calibration) -> Intervals:
    """Predict each source by what all others taught. `start` is what a fit begins with."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in cross_validate(runs, start, left_out="source"):
        if one.seconds and one.run.seconds and one.run.device:
            key = study_of(one.run), one.run.device.generation
            seconds[key].append(round(log(one.run.seconds / one.seconds), _DIGITS))
    errors: defaultdict[str, list[float]] = defaultdict(list)
    labels: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {"ok": [], "OOM": []})
    untaught = replace(prior_calibration(), allocations={})
    for one in predict(runs, untaught):
        run = one.run
        if one.memory is None or run.device is None or run.software.recomputed_share > 0:
            continue
        memory = run_memory(run, _NEUTRAL)
        if run.memory_bytes:
            found = log(run.memory_bytes / memory.allocated)
            errors[study_of(run)].append(round(found, _DIGITS))
        elif run.ended in ("ok", "OOM"):
            usable = run.device.memory_bytes * _NEUTRAL.usable_share
            labels[study_of(run)][run.ended].append(round(log(usable / memory.needed), _DIGITS))
    measured = [
        MemoryErrors(source=source, errors=tuple(sorted(found)))
        for source, found in sorted(errors.items())
    ]
    # Runs that all ended well bound the need from one side only.
    bounded = [
        MemoryErrors(source=source, ran=tuple(sorted(found["ok"])), out=tuple(sorted(found["OOM"])))
        for source, found in sorted(labels.items())
        if found["OOM"] and found["ok"]
    ]
    return Intervals(
        seconds=tuple(
            SecondsErrors(source=source, generation=generation, errors=tuple(sorted(errors)))
            for (source, generation), errors in sorted(seconds.items())
        ),
        memory=(*measured, *bounded),
    )


def intervals_toml(intervals: Intervals) -> str:
    """The file that :func:`moemesh.planner.intervals.read_intervals` reads."""
    lines = [_HEADING]
    for one in intervals.seconds:
        lines += ["", "[[seconds]]", f'source = "{one.source}"', f'generation = "{one.generation}"']
        lines += _numbers("errors", one.errors)
    for one in intervals.memory:
        lines += ["", "[[memory]]", f'source = "{one.source}"']
        for name in ("errors", "ran", "out"):
            if values := getattr(one, name):
                lines += _numbers(name, values)
    return "\n".join(lines) + "\n"


def _numbers(name: str, values: Sequence[float]) -> list[str]:
    texts = [format_value(value) for value in values]
    rows = [", ".join(texts[start : start + 12]) for start in range(0, len(texts), 12)]
    return [f"{name} = [", *(f"    {row}," for row in rows), "]"]
