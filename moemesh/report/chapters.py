"""Chapters of a run's page: configuration, training, time, traffic, memory, expert loads,
events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from moemesh.config.changes import flat
from moemesh.config.errors import ConfigError
from moemesh.config.load import config_values
from moemesh.config.plan import Plan
from moemesh.config.schema import SCHEMA_KEY
from moemesh.config.toml import format_value
from moemesh.report import bars, curves, heat_maps
from moemesh.report import timeline_picture as pictures
from moemesh.report.document import (
    MAX_TABLE_ROWS,
    Chapter,
    Table,
    figures,
    left_out,
    missing,
    plural,
    spread,
)
from moemesh.report.facts import RunFacts
from moemesh.report.svg import clip, short
from moemesh.report.timeline_picture import KINDS, LONG_NAMES
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import MEASURED_HELD, PARTS, PREDICTED_HELD, format_bytes
from moemesh.trace.run import Run, median_of
from moemesh.trace.strict_json import finite
from moemesh.trace.timeline import COMMUNICATION, MICROSECONDS, Timeline

#: Most rows of the table of memory.
_MAX_COMPARED_ROWS = 512
#: Most boxes in the picture of the last step and in that of its pipeline: they bound the page.
_MOST_BOXES = 800, 300
#: Kinds of events of a run without incidents; all others are decisions or problems.
_ORDINARY = ("start", "note", "saved", "finished")
#: Most characters of a text in a table, of a traceback, and of a value of the configuration.
_MAX_TEXT, _MAX_TRACE, _MAX_VALUE = 400, 16_000, 300
_ABOUT = "About the predictions"


#: Keys of `failure.json` that are not for readers, or have a place of their own on the page.
_NOT_SHOWN = ("schema", "epoch", "frames", "advice")


def failure(report: Mapping[str, object]) -> Chapter:
    """Records of a failure (`failure.json`): its facts in words, and its traceback."""
    frames = report.get("frames")
    lines = map(str, cast("list[object]", frames)) if isinstance(frames, list) else ()
    text = "\n".join(line.rstrip("\n") for line in lines)
    facts = [
        (clip(key.replace("_", " "), 60), clip(_words(value), _MAX_TEXT))
        for key, value in report.items()
        if key not in _NOT_SHOWN and value not in ("", None, [])
    ][:MAX_TABLE_ROWS]
    header = ("Fact", "Value")
    table = Table(caption="Facts of failure.json", header=header, rows=facts, num_names=2)
    return Chapter(
        "failure",
        "Failure",
        tables=[table] if facts else [],
        code=("Traceback", text[-_MAX_TRACE:]),
    )


def _words(value: object, depth: int = 0) -> str:
    """A JSON value as text, without brackets down to three levels."""
    if depth < 3 and isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return ", ".join(
            f"{key.replace('_', ' ')} {_words(item, depth + 1)}" for key, item in pairs
        )
    if depth < 3 and isinstance(value, list):
        return "; ".join(_words(item, depth + 1) for item in cast("list[object]", value))
    return str(value)


def configuration(run: Run) -> Chapter:
    """Keys that differ from the defaults, and all others in a folded table."""
    if not run.config:
        return Chapter(missing="No config.toml.")
    # Keys that differ from the defaults of the model's preset; keys of a model in a folder follow
    # from the folder.
    values = flat({key: value for key, value in run.config.items() if key != SCHEMA_KEY})
    path, preset = values.get("model.path"), values.get("model.preset")
    defaults = _defaults(preset if isinstance(preset, str) else None)
    differing = [
        (key, value, defaults.get(key))
        for key, value in sorted(values.items())
        if value != defaults.get(key)
    ]
    baseline = "the defaults"
    if path is not None:
        names = ("model.path", "model.preset")
        differing = [
            item for item in differing if not item[0].startswith("model.") or item[0] in names
        ]
        baseline = "the defaults and the model's folder"
    elif isinstance(preset, str):
        # The preset's own keys follow from its name, which is itself a choice.
        usual = _defaults(None).get("model.preset")
        if preset != usual:
            differing.insert(0, ("model.preset", preset, usual))
        baseline = "the defaults and the preset"
    tables: list[Table] = []
    if len(run.plans) > 1:  # every plan of the run, with its steps and its speed
        plan = Plan().model_dump(mode="json")
        rows: list[tuple[str, ...]] = []
        for number, steps in enumerate(run.plans, start=1):
            chosen = [f"{key} = {toml_text(value)}" for key, value in steps.record.items()
                      if value != plan.get(key)]  # fmt: skip
            metrics = [row for row in run.metrics if steps.first <= row.step <= steps.last]
            speed = median_of(metrics[1:] or metrics, "tokens_per_second")
            shown = "" if speed is None else short(speed)
            rows.append((str(number), ", ".join(chosen) or "the defaults", steps.words, shown))
        tables.append(
            Table(
                caption="Plans of the run; speed, memory and traffic on this page are those of the "
                "last",
                header=("Plan", "Keys that differ from the defaults", "Steps", "Tokens/s, median"),
                rows=rows[-MAX_TABLE_ROWS:],
                num_names=3,
            )
        )
    if differing:
        tables.append(
            Table(
                caption=f"Keys that differ from {baseline}",
                header=("Key", "Value", "Default"),
                rows=[
                    (clip(key, 60), toml_text(value), toml_text(default))
                    for key, value, default in differing[:MAX_TABLE_ROWS]
                ],
                num_names=3,
            )
        )
    changed = {key for key, _, _ in differing}
    others = [(key, value) for key, value in flat(run.config).items() if key not in changed]
    if others:
        rows = [(clip(key, 60), toml_text(value)) for key, value in others[: 4 * MAX_TABLE_ROWS]]
        caption = f"The other {len(others)} keys"
        tables.append(
            Table(caption=caption, header=("Key", "Value"), rows=rows, num_names=2, folded=True)
        )
    note = "" if differing else f"No key differs from {baseline}."
    return Chapter(tables=tables, note=note + left_out(len(differing), "keys"))


def toml_text(value: object, longest: int = _MAX_VALUE) -> str:
    """A value as in a TOML file, clipped to `longest` characters."""
    return "unset" if value is None else clip(format_value(value), longest)


def _defaults(preset: str | None) -> dict[str, object]:
    """Default of every key, in TOML types; for an unknown preset (of an older run) those without a
    preset."""
    chosen = [] if preset is None else [f"model.preset={format_value(preset)}"]
    try:
        config = load_run([], chosen, environ={}).config
    except ConfigError:
        config = load_run([], [], environ={}).config
    # TOML has lists, not tuples.
    return flat({name: finite(section) for name, section in config_values(config).items()})


def training(run: Run) -> Chapter:
    """Curves over all steps, and the numbers of some steps (`metrics.jsonl`)."""
    if not run.metrics:
        text = missing(run, "metrics.jsonl")
        if (run.folder / "metrics.jsonl").is_file():
            text = "No step is finished yet."
        return Chapter(missing=text)
    rows = run.metrics
    marks, unit = run.marks, run.loss_unit
    curve, speed = partial(curves.one_curve, rows, marks=marks), "tokens per second"
    validated = [i for i, row in enumerate(rows) if row.validation_loss is not None]
    indices = {validated[i] for i in spread(len(validated), 8)}.union(spread(len(rows), 12))
    table = Table(
        caption=f"Some steps, evenly spread, and those with a validation; losses in {unit}",
        header=(
            *("Step", "Loss", "Validation loss", "Auxiliary loss", "Gradient norm"),
            *("Learning rate", "Tokens/s"),
        ),
        rows=[
            (
                *(f"{row.step:,}", f"{row.loss:.5f}"),
                "" if row.validation_loss is None else f"{row.validation_loss:.5f}",
                *(f"{row.aux_loss:.5f}", f"{row.grad_norm:.4g}", f"{row.lr:.4g}"),
                short(row.tokens_per_second),
            )
            for row in (rows[i] for i in sorted(indices))
        ],
    )
    drawn = figures(
        ("Loss", *curves.loss_curve(rows, unigram_loss=run.unigram_loss, unit=unit, marks=marks)),
        ("Auxiliary loss", *curves.auxiliary_curve(rows, unit=unit, marks=marks)),
        ("Gradient norm", *curve("grad_norm", "Gradient norm")),
        ("Learning rate", *curve("lr", "Learning rate")),
        ("Throughput", *curve("tokens_per_second", "Throughput", y_label=speed)),
    )
    return Chapter(figures=drawn, tables=[table])


def timeline(run: Run) -> Chapter:
    """Time of a step: `timeline.json` (the last step), and the medians of `metrics.jsonl`."""
    medians = _medians(run)
    if run.timeline is None or not run.timeline.records:
        return Chapter(missing=missing(run, "timeline.json"), tables=medians)
    last = run.timeline.last_step()
    unit = "ticks" if last.unit == "ticks" else "milliseconds"
    factor = MICROSECONDS[last.unit] / MICROSECONDS[unit]
    # The note: shares of all ranks' time.
    ranks = last.statistics()
    longest = last.span or 1.0
    waits = last.of_kind(COMMUNICATION).statistics()
    # Ranks idle between their records, and wait for others inside of them.
    waited = sum(rank.busy for rank in waits) / (len(ranks) * longest)
    note = f"{last.source.capitalize()}; {last.bubble_rate:.1%} of ranks × span without work."
    if waited:
        computing = 1 - waited - last.bubble_rate
        note = (
            f"{last.source.capitalize()}; in the last step ranks compute {computing:.1%} of the "
            f"time, communicate {waited:.1%} and idle {last.bubble_rate:.1%}."
        )
    if run.simulated is not None and run.simulated.records:
        bubble = bars.pipeline_bubble(last, run.simulated.ranks)
        note += (
            f" Bubble of the pipeline: {run.simulated.bubble_rate:.1%} simulated, "
            f"{bubble:.1%} measured."
        )
    pipeline = ""
    if (simulated := run.simulated) is not None:
        # Operations of the simulated ranks: simulated on top, measured below.
        records = tuple(
            record
            for record in last.records
            if record.rank in simulated.ranks and record.kind in KINDS
        )
        pipeline = pictures.timeline_rows(
            simulated,
            replace(last, ranks=simulated.ranks, records=records),
            title="Pipeline, simulated above measured",
            identity="timeline-simulated",
            most=_MOST_BOXES[1],
        )
    tables: list[Table] = []
    if run.seconds is not None:
        steps = plural(run.seconds.steps, "step")
        caption = (
            "Seconds of a step by part, mean rank, in milliseconds: predicted from rates measured "
            f"before the first step, and the mean of {steps}"
        )
        header = ("Part", "Predicted", "Measured", "Difference", "Share, measured")
        tables.append(Table(caption=caption, header=header, rows=bars.seconds_rows(run.seconds)))
    if run.seconds is None or run.simulated is not None:
        caption = "Parts of the last step, mean rank, in milliseconds"
        if run.simulated is not None:
            caption += (
                ": the pipeline simulated with the median time of each operation, and measured"
            )
        header = ("Part", "Simulated", "Measured", "Difference", "Share, measured")
        rows = bars.time_rows(run.simulated, last)
        if run.seconds is not None:  # the table above has the parts that are not simulated
            rows = [row for row in rows if row[1]]
        tables.append(Table(caption=caption, header=header, rows=rows))
    columns = ("Span", "Computing", "Communication", "Idle", "Waiting for inputs")
    of_ranks = Table(
        caption=f"Time of each rank in the last step, in {unit}",
        header=("Rank", *columns, "Computing, of the longest span"),
        rows=[
            (
                str(rank.rank),
                f"{rank.span * factor:,.3f}",
                f"{(rank.busy - wait.busy) * factor:,.3f}",
                f"{wait.busy * factor:,.3f}" if waited else "",
                *(f"{value * factor:,.3f}" for value in (rank.idle, rank.wait)),
                f"{(rank.busy - wait.busy) / longest:.1%}",
            )
            for rank, wait in zip(ranks[:MAX_TABLE_ROWS], waits, strict=False)
        ],
        folded=run.seconds is not None,
    )
    return Chapter(
        figures=figures(
            ("Last step of each rank", pictures.timeline_rows(last, most=_MOST_BOXES[0])),
            ("Pipeline of the last step, simulated above measured", pipeline),
        ),
        tables=[*tables, *medians, of_ranks, _by_name(last, factor, unit)],
        lists=[(_ABOUT, [] if run.seconds is None else bars.about_seconds(run.seconds))],
        note=note + left_out(len(ranks), "ranks"),
    )


#: X of the field "Xseconds" of a row of metrics -> what takes these seconds.
_OF_RANK_0 = {
    "": "step",
    "data_": "waiting for data",
    "communication_": "waiting for other ranks, in operations",
}


def _medians(run: Run) -> list[Table]:
    """Medians of rank 0 over the steps of the current plan but the first, which builds caches."""
    of_rank_0 = RunFacts.of(run).medians
    medians = {name: of_rank_0.get(f"{name}seconds") for name in _OF_RANK_0}
    if (step := medians[""]) is None:
        return []
    tables: list[Table] = []
    if run.seconds is None:
        caption = f"Median over all steps but the first{run.of_steps}, in milliseconds, rank 0"
        rows = [
            (_OF_RANK_0[name], *bars.of_step(seconds, step))
            for name, seconds in medians.items()
            if seconds is not None
        ]
        header = ("Part", "Time", "Share of the step")
        tables.append(Table(caption=caption, header=header, rows=rows))
    if run.planned is not None:
        tables.append(
            Table(
                caption="Communication that no computation hides, in milliseconds a step: as "
                f"planned on {clip(run.planned.cluster, 60)}, and the median of rank 0",
                header=("Part", "Planned", "Share, planned", "Measured", "Share, measured"),
                rows=bars.exposed_rows(run.planned, medians["communication_"], step),
            )
        )
    return tables


def _by_name(last: Timeline, factor: float, unit: str) -> Table:
    """Time by operation; `factor`: from the timeline's unit to `unit`."""
    of_name: dict[str, dict[int, float]] = {}
    counts: Counter[str] = Counter()
    for record in last.records:
        name = LONG_NAMES.get(record.kind, record.name)
        of_rank = of_name.setdefault(name, {})
        of_rank[record.rank] = of_rank.get(record.rank, 0.0) + record.duration * factor
        counts[name] += 1
    totals = {name: sum(of_rank.values()) for name, of_rank in of_name.items()}
    names = sorted(totals, key=lambda name: (-totals[name], name))[:MAX_TABLE_ROWS]
    return Table(
        caption=f"Time by operation, in {unit} (one inside another counts in both)",
        header=("Operation", "Times, all ranks", "Mean rank", "Longest rank"),
        rows=[
            (
                clip(name, 60),
                f"{counts[name]:,}",
                f"{totals[name] / len(last.ranks):,.3f}",
                f"{max(of_name[name].values()):,.3f}",
            )
            for name in names
        ],
        folded=True,
    )


def traffic(run: Run) -> Chapter:
    """Bytes between ranks, from the ledgers of the run and of the planner."""
    steps = run.ledger_steps
    rows = bars.traffic_rows(run.ledgers, steps=steps)
    if not rows:
        empty = "No rank sent anything to another."
        return Chapter(missing=empty if run.ledgers else missing(run, "ledger.json"))
    covered = f", averaged over {plural(steps, 'step')}" if steps > 1 else ""
    by_operation = Table(
        caption=f"By operation; the number of operations is that of {plural(steps, 'step')}",
        header=(
            *("Axis", "Operation", "Phase", "Operations, busiest rank"),
            *(f"{what} in a step, busiest rank" for what in ("Payload", "Sent", "Received")),
            *("Sent in a step, all ranks", "Sent in a step, all ranks (bytes)"),
        ),
        rows=[
            (
                *(clip(name, 40) for name in (row.axis, row.op, row.phase)),
                f"{row.max_count * steps:,.0f}",
                *map(format_bytes, row[4:]),
                f"{row.sum_wire_bytes:,.0f}",
            )
            for row in rows[:MAX_TABLE_ROWS]
        ],
        num_names=3,
        folded=True,
    )
    by_axis = Table(
        caption="Bytes sent in one step by all ranks, predicted before it and measured",
        header=("Axis", "Phase", "Predicted", "Measured", "Difference", "Share, measured"),
        rows=bars.traffic_by_axis(run.predicted_ledgers, run.ledgers, steps=steps)[:MAX_TABLE_ROWS],
        num_names=2,
    )
    drawn = bars.traffic_bars(run.ledgers, run.predicted_ledgers, steps=steps)
    return Chapter(
        figures=figures(("Bytes sent in one step by all ranks, by axis and phase", drawn)),
        tables=[by_axis, by_operation],
        lists=[(_ABOUT, bars.about_traffic(run.predicted_ledgers, run.ledgers, steps=steps))],
        note=f"From the ledgers of {plural(len(run.ledgers), 'rank')}{covered}. Predictions are "
        "for uniform routing; validation and control are not predicted."
        + left_out(len(rows), "rows"),
    )


def memory(run: Run) -> Chapter:
    """Memory of every rank, predicted and measured (`memory.json`)."""
    if run.memory is None or not run.memory.ranks:
        return Chapter(missing=missing(run, "memory.json"))
    ranks, predicted = run.memory.ranks, run.memory.predicted
    tables: list[Table] = []
    header = ("Rank", "Class", "Predicted", "Measured", "Difference")
    fullest = max(ranks, key=lambda profile: (profile.total, -profile.rank))
    if rows := bars.memory_rows(predicted, [fullest]):
        caption = (
            f"Memory of rank {fullest.rank}, which holds most: {PREDICTED_HELD} before the run "
            f"for uniform routing, and {MEASURED_HELD}"
        )
        tables.append(Table(caption=caption, header=header, rows=rows, num_names=2))
    if len(ranks) > 1 and (rows := bars.memory_rows(predicted, ranks)):
        rows = rows[:_MAX_COMPARED_ROWS]
        caption = f"Memory of each rank: {PREDICTED_HELD}, and {MEASURED_HELD}"
        tables.append(Table(caption=caption, header=header, rows=rows, num_names=2, folded=True))
    names = (name.replace("_", " ").capitalize() for name in PARTS)
    tables.append(
        Table(
            caption=f"Memory of each rank: {MEASURED_HELD}, and {run.memory.peak_words}",
            header=("Rank", *names, "Total", "Peak"),
            rows=[
                (str(p.rank), *map(format_bytes, (*p.parts().values(), p.total, p.peak)))
                for p in ranks[:MAX_TABLE_ROWS]
            ],
            folded=bool(tables),
        )
    )
    return Chapter(
        figures=figures(("Memory by what it holds", bars.memory_bars(run.memory))),
        tables=tables,
        lists=[(_ABOUT, bars.about_memory(predicted, fullest))],
        note=f"{run.memory.peak_words.capitalize()}: {format_bytes(run.memory.peak)} on the "
        "fullest rank. On a CPU it is that of the whole process, torch itself included; on a GPU "
        "that of torch's allocator." + left_out(len(ranks), "ranks"),
    )


def loads(run: Run) -> Chapter:
    """Loads of experts (`loads.jsonl`)."""
    if not run.loads:
        return Chapter(missing=missing(run, "loads.jsonl"))
    layers = heat_maps.by_layer(run.loads)
    fullest = "Fullest expert / mean"
    table = Table(
        caption="Balance of each layer (1 = balanced; entropy 1 = uniform)",
        header=(
            *("Layer", "Experts", f"{fullest}, average of the steps", f"{fullest}, last steps"),
            *("Fullest rank / mean, last steps", "Entropy, last steps"),
            *("Experts without a token, last steps", "Dropped, over the run"),
        ),
        rows=[
            (
                *(f"{layer}", f"{len(items[-1].tokens_per_expert)}"),
                f"{heat_maps.mean_imbalance(items):.3f}",
                *(f"{items[-1].expert_max_over_mean:.3f}", f"{items[-1].rank_max_over_mean:.3f}"),
                *(f"{items[-1].entropy:.4f}", f"{items[-1].dead_experts}"),
                f"{sum(load.dropped for load in items):,}",
            )
            for layer, items in layers.items()
        ][:MAX_TABLE_ROWS],
    )
    whole = heat_maps.mean_heat_map(run.loads) if len(layers) > 1 else ""
    drawn = figures(
        ("Load imbalance", *curves.imbalance_curve(run.loads, run.marks)),
        (
            "Load of each expert over its layer's mean, by step",
            heat_maps.layer_heat_maps(run.loads),
        ),
        ("Load of each expert over its layer's mean, whole run", whole),
    )
    note = f"{plural(len(layers), 'layer')} with experts." + left_out(len(layers), "layers")
    return Chapter(figures=drawn, tables=[table], note=note)


def events(run: Run) -> Chapter:
    """Events other than steps: alarms and decisions first, ordered by time (`events.jsonl`)."""
    if not run.events:
        return Chapter(missing=missing(run, "events.jsonl"))
    ordinary = [event for event in run.events if event.kind in _ORDINARY]
    alarms = [event for event in run.events if event.kind not in _ORDINARY]
    tables: list[Table] = []
    for caption, group in (
        ("Alarms, warnings and decisions", alarms),
        ("Notes of the start and the end", ordinary),
    ):
        shown = group[-MAX_TABLE_ROWS:]
        more = f", the last {len(shown)} of {len(group):,}" if len(shown) < len(group) else ""
        table = Table(
            caption=caption + more,
            header=("Time (UTC)", "Step", "Kind", "Text"),
            rows=[
                (
                    clip(event.time.replace("T", " ").removesuffix("+00:00"), 30),
                    "" if event.step is None else f"{event.step:,}",
                    clip(event.kind, 30),
                    clip(event.text, _MAX_TEXT),
                )
                for event in shown
            ],
            num_names=4,
            folded=group is ordinary,
        )
        tables += [table] if group else []
    return Chapter(tables=tables, note="" if alarms else "No alarm and no warning.")


#: Identity, title and function of each chapter, in page order.
CHAPTERS: tuple[tuple[str, str, Callable[[Run], Chapter]], ...] = (
    ("training", "Training", training),
    ("timeline-section", "Time of a step", timeline),
    ("traffic-section", "Traffic", traffic),
    ("memory-section", "Memory", memory),
    ("loads", "Expert load", loads),
    ("events", "Events", events),
    ("configuration", "Configuration", configuration),
)
