"""Pages of a run, and of the comparison of runs, as self-contained HTML files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any, cast

from moemesh.config.changes import compare
from moemesh.config.load import following
from moemesh.config.plan import DEGREES
from moemesh.report import bars, curves, svg
from moemesh.report.chapters import CHAPTERS, failure, toml_text
from moemesh.report.document import (
    MAX_TABLE_ROWS,
    Chapter,
    NoticeBox,
    PageDocument,
    Table,
    figures,
    glossary,
    left_out,
)
from moemesh.report.explain import explain
from moemesh.report.facts import RunFacts
from moemesh.report.files import replace_file
from moemesh.trace.memory_profile import MEASURED_HELD, MEASURED_PEAKS, PARTS, format_bytes
from moemesh.trace.run import REPORT, Run
from moemesh.trace.step_seconds import duration

COMPARISON = "comparison.html"

#: Longest texts in characters, which bound the size of the page: config.toml, a value, a value in a
#: comparison.
_MAX_TEXT, _MAX_VALUE, _MAX_SHOWN = 32_000, 300, 200
_UNREAD = "Not everything could be read"


def write(run: Run | Path | str, out: Path | None = None) -> Path:
    """Write `report.html` into the folder of `run`, or the page to `out`, and return its path.

    Raises RunError (a ValueError) if the folder holds no run. An older report is replaced when the
    new one is complete.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    return replace_file(out or run.folder / REPORT, document(run).to_html())


def document(run: Run) -> PageDocument:
    """Document of all records in the folder of `run`."""
    explanation = explain(run)
    of_run, explained = explanation.of_run, " ".join(explanation.sentences)
    # Time, hosts and command of the run's starts, if recorded.
    starts = [str(start.get("started", "")) for start in run.starts]
    starts = starts or [event.time for event in run.events if event.kind == "start"]
    last: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    lines: list[str] = []
    if starts:
        resumed = f", resumed {starts[-1][:16].replace('T', ' ')} UTC" if len(starts) > 1 else ""
        lines.append(f"Started {_cut(starts[0][:19].replace('T', ' '), 40)} UTC{resumed}.")
    hosts = last.get("hosts")
    if isinstance(hosts, list):
        hosts_named = ", ".join(
            str(cast("dict[str, object]", host).get("host", "unknown"))
            if isinstance(host, dict)
            else "unknown"
            for host in cast("list[object]", hosts)
        )
        lines.append(f"On {_cut(hosts_named, _MAX_VALUE)}.")
    if of_run.command:
        lines.append(f"Command: {_cut(of_run.command, 4 * _MAX_VALUE)}")
    # Missing degrees are 1; the number of ranks is the product of pp, dp, cp and tp.
    plan = run.plan or run.section("plan")
    values = [plan.get(name, 1) for name in DEGREES] if plan else []
    degrees = [(name, _cut(str(n), 20)) for name, n in zip(DEGREES, values, strict=False)]
    ranks = [n for n in values[:4] if isinstance(n, int) and n is not True and 0 < n < 10**9]
    if len(ranks) == 4:
        degrees.insert(0, ("ranks", str(prod(ranks))))
    # The most important numbers.
    facts: list[tuple[str, str]] = [("State", of_run.state)]
    if of_run.state == "finished" and (reason := run.summary.get("early_stop")):
        facts.append(("Early stop", _cut(str(reason), _MAX_VALUE)))
    medians = of_run.medians
    if of_run.last is not None:
        facts.append(("Steps", of_run.progress))
        facts.append((f"Last training loss, {run.loss_unit}", f"{of_run.last.loss:.4f}"))
        if of_run.validation is not None:
            facts.append((f"Last validation loss, {run.loss_unit}", f"{of_run.validation[1]:.4f}"))
        if of_run.lowest is not None and of_run.lowest[0] != of_run.last.step:
            step, lowest = of_run.lowest
            facts.append((f"Lowest validation loss, step {step:,}", f"{lowest:.4f}"))
        median = f"median{run.of_steps}"
        if (speed := medians.get("tokens_per_second")) is not None:
            facts.append((f"Tokens per second, {median}", svg.short(speed)))
        if (mfu := medians.get("mfu")) is not None:
            facts.append((f"MFU, {median}", f"{mfu:.1%}"))
        if (rate := medians.get("tflops_per_rank")) is not None:
            facts.append((f"Model FLOP/s of a rank, {median}", svg.short(rate * 1e12)))
        facts.append(("Tokens", svg.short(of_run.totals["tokens"])))
        facts.append(("Time in steps", duration(of_run.totals["seconds"])))
    if run.memory is not None and of_run.peak_bytes is not None:
        facts.append((f"Memory: {run.memory.peak_words}", format_bytes(of_run.peak_bytes)))
    if run.loads:
        newest = max(load.step for load in run.loads)
        worst = max(load.expert_max_over_mean for load in run.loads if load.step == newest)
        facts.append(("Fullest expert / mean, last step", f"{worst:.2f}"))
    commands = [("Next", explanation.command)] if explanation.command else []
    commands.append(
        ("This text on a terminal", shlex.join(["moemesh", "explain", str(run.folder)]))
    )
    text = _cut(run.config_text, _MAX_TEXT)
    configuration = Chapter(
        "file",
        "config.toml",
        missing="" if text else "No config.toml.",
        code=("The configuration as resolved", text),
    )
    has_failed = run.failure is not None
    chapters = [
        *([failure(run.failure)] if run.failure is not None else []),
        *(replace(make(run), identity=name, title=title) for name, title, make in CHAPTERS),
    ]
    if has_failed and not run.last_step:
        chapters = [chapter for chapter in chapters if not chapter.missing]
    words = glossary(chapters, *(name for name, degree in degrees if degree != "1"))
    return PageDocument(
        kind="moemesh run",
        title=run.folder.resolve().name,
        lines=lines,
        cards=[("Parallel degrees", degrees), ("Results", facts)],
        boxes=[
            NoticeBox(
                "explanation",
                "This run failed" if has_failed else "In short",
                [("", _cut(explained, 8 * _MAX_VALUE))],
                has_failed,
                [(name, _cut(command, 8 * _MAX_VALUE)) for name, command in commands],
            ),
            NoticeBox("warnings", _UNREAD, [("", _cut(x, _MAX_VALUE)) for x in run.warnings]),
        ],
        chapters=[*chapters, words, configuration],
    )


def _cut(value: str, length: int) -> str:
    """The first `length` characters; a cut text ends with the number of characters of `value`."""
    return value if len(value) <= length else f"{value[:length]} … ({len(value):,} characters)"


def write_comparison(*folders: Path | str, out: Path | None = None) -> Path:
    """Write the comparison of run folders to `out`, by default `comparison.html` in the first.

    Raises RunError (a ValueError) if a folder holds no run.
    """
    runs = [Run.load(folder) for folder in folders]
    return replace_file(out or runs[0].folder / COMPARISON, comparison(*runs).to_html())


def comparison(*runs: Run) -> PageDocument:
    """Document of the differences between at least two runs."""
    # Names of the folders, with their parents if two have the same name.
    folders = [run.folder.resolve() for run in runs]
    names = [folder.name for folder in folders]
    if len({*names}) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    if len({*names}) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    names = [svg.clip(name, 40) for name in names]
    named = list(zip(names, runs, strict=True))
    explained = [
        (name, _cut(" ".join(explain(run).sentences), 8 * _MAX_VALUE)) for name, run in named
    ]
    chapters = [
        replace(make(runs, names), identity=title.lower(), title=title)
        for title, make in (
            ("Configuration", _configuration),
            ("Results", _results),
            ("Training", _training),
            ("Seconds", _seconds),
            ("Traffic", _traffic),
            ("Memory", _memory),
        )
    ]
    return PageDocument(
        kind=f"{len(runs)} moemesh runs",
        title=", ".join(names),
        lines=[str(folder) for folder in folders],
        boxes=[
            NoticeBox("explanation", "In short", explained),
            NoticeBox(
                "warnings", _UNREAD, [(name, x) for name, run in named for x in run.warnings]
            ),
        ],
        chapters=[*chapters, glossary(chapters)],
    )


def _configuration(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    if not all(run.config for run in runs):
        return Chapter(missing="A run has no config.toml, so nothing can be compared.")
    texts = [run.config_text for run in runs]
    # Changes of each run from the first one, by key; rows of (key, value in each run).
    changes = [{change.key: change for change in compare(texts[0], text)} for text in texts]
    rows: list[tuple[str, Sequence[object]]] = []
    for key in sorted({key for by_key in changes for key in by_key}):
        first = next(by_key[key].old for by_key in changes if key in by_key)
        rows.append((key, [by_key[key].new if key in by_key else first for by_key in changes]))
    follows = [following(text) for text in texts]
    # Keys of [train] with equal values that follow from others in some of the runs only.
    equal = {*chain(*follows)} - follows[0].intersection(*follows) - {key for key, _ in rows}
    if not rows and not equal:
        return Chapter(note="Every key has the same value.")
    for key in sorted(equal):
        name = key.removeprefix("train.")
        rows.append((key, [run.section("train").get(name) for run in runs]))
    table = Table(
        caption="Keys that differ",
        header=("Key", *names),
        rows=[
            (
                svg.clip(key, 60),
                *(
                    toml_text(value, _MAX_SHOWN) + " (not set)" * (key in keys)
                    for value, keys in zip(values, follows, strict=True)
                ),
            )
            for key, values in rows[:MAX_TABLE_ROWS]
        ],
        num_names=1 + len(names),
    )
    return Chapter(tables=[table], note=left_out(len(rows), "keys"))


#: Lines that are left out if all runs have seconds by part, which have a chapter of their own.
_OF_PARTS = ("Waiting for data in a step, seconds", "Exposed communication, seconds")
#: Lines of the table of results: name, number of a run (None: unknown), its text.
_LINES: tuple[tuple[str, Callable[[RunFacts], float | None], Callable[[float], str]], ...] = (
    ("Steps", lambda run: run.last and run.last.step, "{:,.0f}".format),
    ("Tokens", lambda run: run.totals.get("tokens"), svg.short),
    ("Training loss, mean of the last tenth", lambda run: run.end_loss, "{:.4f}".format),
    ("Last validation loss", lambda run: run.validation and run.validation[1], "{:.4f}".format),
    ("Tokens per second, median", lambda run: run.medians.get("tokens_per_second"), svg.short),
    ("Seconds of a step, median", lambda run: run.medians.get("seconds"), "{:.4g}".format),
    ("Time in steps, seconds", lambda run: run.totals.get("seconds"), "{:,.1f}".format),
    ("MFU, median", lambda run: run.medians.get("mfu"), "{:.2%}".format),
    (_OF_PARTS[0], lambda run: run.medians.get("data_seconds"), "{:.3g}".format),
    (_OF_PARTS[1], lambda run: run.medians.get("communication_seconds"), "{:.3g}".format),
    (f"Memory: {MEASURED_PEAKS['']}", lambda run: run.peak_bytes, format_bytes),
    ("Sent in a step of training, all ranks", lambda run: run.sent_bytes, format_bytes),
)


def _results(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    facts = [RunFacts.of(run) for run in runs]
    rows: list[tuple[str, ...]] = [("State", *(of_run.state for of_run in facts), "")]
    have_parts = all(run.seconds is not None for run in runs)
    for label, number, form in _LINES:
        if have_parts and label in _OF_PARTS:
            continue
        values = [number(of_run) for of_run in facts]
        if any(value is not None for value in values):
            shown = ("" if value is None else form(value) for value in values)
            rows.append((label, *shown, _change(*values)))
    units = [run.loss_unit for run in runs]
    note = f"Losses in {units[0]}."
    if len({*units}) > 1:
        of_runs = (f"of {name} in {unit}" for name, unit in zip(names, units, strict=True))
        note = f"Losses {', '.join(of_runs)}: not comparable."
    for name, run in zip(names, runs, strict=True):
        if run.of_steps:
            note += (
                f" Of {name}, which has had {len(run.plans)} plans, medians, memory and traffic "
                f"are those of the last one{run.of_steps}."
            )
    table = Table(
        caption="Results, speed, memory and traffic", header=("", *names, "Change"), rows=rows
    )
    return Chapter(tables=[table], note=note)


def _change(first: float | None, second: float | None, *others: float | None) -> str:
    """Relative change from the first run to the second, as text; "" for more runs."""
    if first is None or second is None or others:
        return ""
    if first == second:
        return "none"
    return f"{second / first - 1:+.1%}".replace("%", " %") if first else ""


def _training(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    if not any(run.metrics for run in runs):
        return Chapter(missing="No run has finished a step.")
    unit = " or ".join(dict.fromkeys(run.loss_unit for run in runs))
    marks = [
        (place, f"{svg.clip(name, 20)}: {plan}")
        for name, run in zip(names, runs, strict=True)
        for place, plan in run.marks
    ]
    # Cumulative seconds in steps.
    clocks = [list(accumulate(row.seconds for row in run.metrics)) for run in runs]

    def chart(
        title: str, key: str, y_label: str, *, over_time: bool = False
    ) -> tuple[str, str, str]:
        series: list[curves.Series] = []
        for number, (name, run, clock) in enumerate(zip(names, runs, clocks, strict=True)):
            pairs = zip(clock, run.metrics, strict=True)
            values = [(s if over_time else row.step, getattr(row, key)) for s, row in pairs]
            points = [point for point in values if point[1] is not None]
            dots = len(points) < 30
            if points:
                series.append(curves.Series(name=name, points=points, colour=number, dots=dots))
        counts = " and ".join(f"{len(item.points)} values of {item.name}" for item in series)
        text, identity = f"{title}: {counts or 'no values'}.", title.lower().replace(" ", "-")
        look = {"x_label": "seconds"} if over_time else {"marks": marks}
        pictures = curves.line_charts(identity, title, series, y_label, text, **look)
        return ("Loss over the time in steps" if over_time else title), *pictures

    drawn = figures(
        chart("Loss", "loss", unit),
        chart("Loss over time", "loss", unit, over_time=True),
        chart("Validation loss", "validation_loss", unit),
        chart("Gradient norm", "grad_norm", "gradient norm"),
        chart("Learning rate", "lr", "learning rate"),
        chart("Throughput", "tokens_per_second", "tokens per second"),
    )
    return Chapter(figures=drawn)


def _differences(
    caption: str,
    heads: Sequence[str],
    names: Sequence[str],
    columns: Sequence[Mapping[tuple[str, ...], float]],
    form: Callable[[float], str],
) -> Chapter:
    """A table of the runs. `columns`: key -> number, of each run; `heads`: titles of the parts of a
    key; `form` formats a number."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [
        (
            *(svg.clip(part, 40) for part in key),
            *("" if value is None else form(value) for value in values),
            _change(*values),
        )
        for key in list(keys)[:MAX_TABLE_ROWS]
        for values in ([column.get(key) for column in columns],)
    ]
    header = (*heads, *names, "Change")
    return Chapter(tables=[Table(caption=caption, header=header, rows=rows, num_names=len(heads))])


def _seconds(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    measured = [run.seconds.mean() if run.seconds is not None else {} for run in runs]
    if not any(measured):
        return Chapter(missing="No run has a seconds.json.")
    return _differences(
        "Seconds of a step by part, mean rank and mean step, in milliseconds",
        ("Part",),
        names,
        [{(part,): seconds for part, seconds in parts.items()} for parts in measured],
        bars.milliseconds,
    )


def _traffic(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    totals = [bars.by_axis_and_phase(run.ledgers, steps=run.ledger_steps) for run in runs]
    keys = sorted({*chain(*totals)})
    if not keys:
        has_ledger = any(run.ledgers for run in runs)
        nothing = "No rank of a run sent anything to another."
        return Chapter(missing=nothing if has_ledger else "No run has a ledger.json.")
    sent = [{key: total.get(key, 0.0) for key in keys} for total in totals]
    caption = "Bytes sent in one step by all ranks"
    return _differences(caption, ("Axis", "Phase"), names, sent, format_bytes)


def _memory(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    profiles = [run.memory.ranks if run.memory else () for run in runs]
    if not any(profiles):
        return Chapter(missing="No run has a memory.json.")
    sizes = [[{**profile.parts(), "peak": profile.peak} for profile in ranks] for ranks in profiles]
    filled = [part for part in (*PARTS, "peak") if any(x[part] for ranks in sizes for x in ranks)]
    return _differences(
        f"Memory of the rank that holds most of each class ({MEASURED_HELD})",
        ("Class",),
        names,
        [
            {(part.replace("_", " "),): max((x[part] for x in ranks), default=0) for part in filled}
            for ranks in sizes
        ],
        format_bytes,
    )
