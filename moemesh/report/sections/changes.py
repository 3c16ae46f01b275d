"""The configuration of a run: its plans, and first the keys whose value is not the default."""

from __future__ import annotations

from moemesh.config.plan import Plan
from moemesh.config.toml import format_value
from moemesh.report.configuration import differences, flat
from moemesh.report.section import MAX_TABLE_ROWS, Chapter, Table, left_out
from moemesh.report.svg import clip, short
from moemesh.trace.run import Run, median_of

_MAX_VALUE = 300


def changes(run: Run) -> Chapter:
    """Keys that the user set, and folded away all others."""
    identity, title = "configuration", "Configuration"
    if not run.config:
        return Chapter(identity=identity, title=title, missing="No config.toml.")
    found, baseline = differences(run.config)
    tables = [_plans(run)] if len(run.plans) > 1 else []
    if found:
        tables.append(
            Table(
                caption=f"Keys that differ from {baseline}",
                header=("Key", "Value", "Default"),
                rows=[
                    (clip(key, 60), _value(value), _value(default))
                    for key, value, default in found[:MAX_TABLE_ROWS]
                ],
                num_names=3,
            )
        )
    changed = {key for key, _, _ in found}
    rest = [(key, value) for key, value in flat(run.config).items() if key not in changed]
    if rest:
        tables.append(
            Table(
                caption=f"The other {len(rest)} keys",
                header=("Key", "Value"),
                rows=[(clip(key, 60), _value(value)) for key, value in rest[: 4 * MAX_TABLE_ROWS]],
                num_names=2,
                folded=True,
            )
        )
    note = "" if found else f"No key differs from {baseline}."
    note += left_out(len(found), "keys")
    return Chapter(identity=identity, title=title, tables=tables, note=note)


def _plans(run: Run) -> Table:
    """Every plan that the run has had, with its steps and its speed."""
    usual = Plan().model_dump(mode="json")
    rows: list[tuple[str, ...]] = []
    for number, steps in enumerate(run.plans, start=1):
        chosen = [f"{key} = {_value(value)}" for key, value in steps.record.items()
                  if value != usual.get(key)]  # fmt: skip
        own = [row for row in run.metrics if steps.first <= row.step <= steps.last]
        speed = median_of(own[1:] or own, "tokens_per_second")
        shown = "" if speed is None else short(speed)
        rows.append((str(number), ", ".join(chosen) or "the defaults", steps.words, shown))
    return Table(
        caption="Plans of the run; speed, memory and traffic on this page are those of the last",
        header=("Plan", "Keys that differ from the defaults", "Steps", "Tokens/s, median"),
        rows=rows[-MAX_TABLE_ROWS:],
        num_names=3,
    )


def _value(value: object) -> str:
    """As in a TOML file."""
    return "unset" if value is None else clip(format_value(value), _MAX_VALUE)
