"""The verb layout: who holds what under a plan."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, app
from moemesh.cli.options import options_from
from moemesh.cli.terminal import beside, interval, progress, spans, table
from moemesh.planner.requests import BATCH_HELP, LENGTH_HELP, MODEL_HELP, PLAN_HELP
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.planner.holdings import Holdings, RankShare

#: A column of the table: its name, whether the plan cuts what it tells, and its cell of a rank.
_Column: TypeAlias = "tuple[str, bool, Callable[[RankShare], str]]"
#: Rows of ranks, and groups of an axis, that are printed unless ranks are asked for.
MOST_ROWS, MOST_GROUPS = 32, 8


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """A plan, with a model and a batch, or the configuration of a run."""

    config: ConfigFile = None
    overrides: Overrides = None
    plan: Annotated[str | None, PLAN_HELP, "PLAN"] = None
    model: Annotated[str | None, MODEL_HELP, "M"] = None
    seq_len: Annotated[int | None, LENGTH_HELP, {"tokens": True, "metavar": "S"}] = None
    global_batch: Annotated[int | None, BATCH_HELP, {"min": 1}] = None
    rank: Annotated[list[int] | None, "Only this rank. May be repeated.", {"min": 0}] = None
    svg: Annotated[Path | None, "Draw the two meshes.", "FILE"] = None


@app.command(
    "layout", short_help="Show who holds what under a plan: groups, layers, experts, tokens."
)
@options_from(LayoutRequest)
def show_layout(request: LayoutRequest, as_json: AsJson = False) -> None:
    """Print the groups of every axis, and what each rank holds of the model and of a batch.

    Either of a configuration, as for train, or of --plan and --model, as for estimate; without a
    model only the groups. Everything is counted from 0. Examples:

        moemesh layout --plan dp=4,tp=4,ep=4,etp=4 --model tiny --svg meshes.svg

        moemesh layout --set plan.pp=4 --set plan.dp=2 --rank 5
    """
    from moemesh.planner.holdings import Holdings

    model, plan = request.model, request.plan
    seq_len, global_batch = request.seq_len, request.global_batch
    if plan is None:
        own = (("--model", model), ("--seq-len", seq_len), ("--global-batch", global_batch))
        if given := ", ".join(name for name, value in own if value is not None):
            raise typer.BadParameter(f"{given} goes with --plan")
        from moemesh.sharding.load_run import load_run

        run = load_run([request.config] if request.config else [], request.overrides or []).config
        data = run.data
        held = Holdings(run.plan, run.model, seq_len=data.seq_len, global_batch=data.global_batch)
    else:
        if request.config is not None or request.overrides:
            raise typer.BadParameter("give --plan, or a configuration (CONFIG.toml, --set)")
        held = Holdings.named(plan, model, seq_len=seq_len, global_batch=global_batch)
    ranks = sorted(set(request.rank or ()))
    if ranks and ranks[-1] >= held.world_size:
        raise typer.BadParameter(
            f"there is no rank {ranks[-1]}: the plan has {held.world_size}, from 0"
        )
    if request.svg is not None:
        from moemesh.report.files import write_texts
        from moemesh.report.meshes import draw

        num_experts = 0 if held.model is None else held.model.num_experts
        write_texts([(request.svg, draw(held.layout, num_experts) + "\n")])
    with progress("counting shares", quiet=as_json):
        text = strict_json(held.to_json(ranks or None)) if as_json else layout_text(held, ranks)
    typer.echo(text)


def layout_text(held: "Holdings", ranks: Sequence[int] = ()) -> str:
    """The answer for a person: axes, then a row a rank (some of them, where there are many)."""
    shown = ranks or range(min(held.world_size, MOST_ROWS))
    left = held.world_size - len(shown) if not ranks else 0
    nodes = f" on {held.num_nodes} nodes of {held.ranks_per_node}" if held.num_nodes > 1 else ""
    lines = [f"{held.world_size} ranks{nodes}", "", _axes_table(held), ""]
    if held.model is None:
        header = ("rank", "node", *(axis.axis for axis in held.axes))
        rows = [
            (str(rank), str(held.node_of(rank)), *map(str, held.coordinates(rank).values()))
            for rank in shown
        ]
        lines.append(table(header, rows, left=0))
    else:
        lines.append(_shares_table(held, shown))
    if left:
        lines.append(f"... {left} more: --rank NUMBER shows one, --json all of them")
    if held.model is not None:
        lines += [
            "",
            f"sequences: of the {held.global_batch} of a step, each of {held.seq_len} positions.",
            "tokens: of the rank's first microbatch, outside of attention and MLP.",
        ]
        if held.plan.spare_slots:
            lines.append(
                f"spare_slots: {held.plan.spare_slots} replicas of experts more on every rank; "
                "the loads of a step decide which."
            )
    return "\n".join(lines)


def _axes_table(held: "Holdings") -> str:
    rows: list[tuple[str, ...]] = []
    for axis in held.axes:
        groups = [spans(group) for group in axis.groups[:MOST_GROUPS]]
        groups += [f"... {more} more"] if (more := len(axis.groups) - MOST_GROUPS) > 0 else []
        where = "one node" if axis.nodes == 1 else f"{axis.nodes} nodes"
        text = " | ".join(groups) if len(axis.groups[0]) > 1 else "each rank by itself"
        rows.append((axis.axis, str(len(axis.groups[0])), str(len(axis.groups)), where, text))
    lines = table(("axis", "size", "groups", "a group is on"), [row[:4] for row in rows])
    return beside(lines, ["ranks of each group", *(row[4] for row in rows)])


def _shares_table(held: "Holdings", ranks: Sequence[int]) -> str:
    """A row a rank, of what the plan cuts; below, in one line, what every rank holds whole."""
    shares = [held.share(rank) for rank in ranks]
    layout = held.layout
    columns: list[_Column] = [
        ("rank", True, lambda one: str(one.rank)),
        ("node", held.num_nodes > 1, lambda one: str(one.node)),
        ("layers", layout.pp > 1, lambda one: " + ".join(map(spans, one.layers))),
        ("vocabulary", layout.pp * layout.tp > 1, lambda one: interval(one.vocabulary)),
        ("heads", layout.tp > 1, lambda one: interval(one.heads)),
        ("kv heads", layout.tp > 1, lambda one: interval(one.kv_heads)),
        ("experts", layout.ep > 1, lambda one: interval(one.experts)),
        ("columns of each", layout.etp > 1, lambda one: interval(one.expert_columns)),
        ("sequences", layout.dp > 1, lambda one: interval(one.sequences)),
        ("positions", layout.cp > 1, lambda one: " + ".join(map(interval, one.positions))),
        ("tokens", True, lambda one: f"{one.tokens:,}"),
        ("parameters", True, lambda one: f"{one.parameters:,}"),
    ]
    # A rank without MoE layers has no experts: then the others' are no word for every rank.
    cut = [column for column in columns if column[1] or len({column[2](one) for one in shares}) > 1]
    rows = [[cell(one) for _, _, cell in cut] for one in shares]
    found = table([name for name, _, _ in cut], rows, left=0)
    whole = [
        f"{name} {cell(shares[0])}"
        for name, is_cut, cell in columns
        if (name, is_cut, cell) not in cut and name != "node" and cell(shares[0]) != "-"
    ]
    return found + (f"\nevery rank: {', '.join(whole)}" if whole else "")
