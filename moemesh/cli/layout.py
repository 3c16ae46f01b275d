"""Verbs `layout` (shares of each rank under a plan) and `dispatch` (rows between ranks)."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, app, load, print_answer
from moemesh.cli.options import given
from moemesh.cli.terminal import interval, progress, spans, table, with_texts
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_choice
from moemesh.planner.requests import BATCH_HELP, LENGTH_HELP, MODEL_HELP, PLAN_HELP
from moemesh.report.files import write_texts
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.planner.dispatches import DispatchExchanges, Exchange, RoutingExample
    from moemesh.planner.holdings import Holdings, RankShare

#: Column of the table: name, whether the plan shards its quantity, and the cell of a rank.
_Column: TypeAlias = "tuple[str, bool, Callable[[RankShare], str]]"
#: Most printed rows of ranks and groups of an axis without --rank.
MOST_ROWS, MOST_GROUPS = 32, 8


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """A plan with a model and a batch, or the configuration of a run."""

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
        if others := ", ".join(given(request, "model", "seq_len", "global_batch")):
            raise typer.BadParameter(f"{others} goes with --plan; fix: --plan dp=2")
        run = load(request.config, request.overrides).config
        data = run.data
        held = Holdings(run.plan, run.model, seq_len=data.seq_len, global_batch=data.global_batch)
    else:
        if request.config is not None or request.overrides:
            raise typer.BadParameter("give --plan, or a configuration (CONFIG.toml, --set)")
        held = Holdings.named(plan, model, seq_len=seq_len, global_batch=global_batch)
        if held.model is None and (others := given(request, "seq_len", "global_batch")):
            raise typer.BadParameter(f"{others[0]} goes with --model; fix: --model tiny")
    ranks = sorted(set(request.rank or ()))
    if ranks and ranks[-1] >= held.world_size:
        raise typer.BadParameter(
            f"rank {ranks[-1]} does not exist: the plan has {held.world_size}, from 0"
        )
    if request.svg is not None:
        from moemesh.report.rank_pictures import draw_meshes

        num_experts = 0 if held.model is None else held.model.num_experts
        write_texts([(request.svg, draw_meshes(held.layout, num_experts) + "\n")])
    with progress("counting shares", quiet=as_json):
        text = strict_json(held.to_json(ranks or None)) if as_json else layout_text(held, ranks)
    typer.echo(text)


def layout_text(held: "Holdings", ranks: Sequence[int] = ()) -> str:
    """The answer as text: axes, then one row per rank (at most :data:`MOST_ROWS`)."""
    from moemesh.planner.holdings import MOST_LISTED

    shown = ranks or range(min(held.world_size, MOST_ROWS))
    nodes = f" on {held.num_nodes} nodes of {held.ranks_per_node}" if held.num_nodes > 1 else ""
    rows: list[tuple[str, ...]] = []
    texts = ["ranks of each group"]
    for axis in held.axes:
        groups = [spans(group) for group in axis.groups(MOST_GROUPS)]
        groups += [f"... {more} more"] if (more := axis.count - MOST_GROUPS) > 0 else []
        where = "one node" if axis.nodes == 1 else f"{axis.nodes} nodes"
        rows.append((axis.axis, str(axis.size), str(axis.count), where))
        texts.append(" | ".join(groups) if axis.size > 1 else "each rank by itself")
    axes = table(("axis", "size", "groups", "a group is on"), rows, wraps=False)
    lines = [f"{held.world_size} ranks{nodes}", "", with_texts(axes, texts), ""]
    if held.model is None:
        header = ("rank", "node", *(axis.axis for axis in held.axes))
        places = [(rank, held.node_of(rank), *held.coordinates(rank).values()) for rank in shown]
        lines.append(table(header, [tuple(map(str, place)) for place in places], left=0))
    else:
        # One row per rank with sharded quantities; below, one line with those that all ranks share.
        shares = [held.share(rank) for rank in shown]
        layout = held.layout
        columns: list[_Column] = [
            ("rank", True, lambda share: str(share.rank)),
            ("node", held.num_nodes > 1, lambda share: str(share.node)),
            ("layers", layout.pp > 1, lambda share: " + ".join(map(spans, share.layers))),
            ("vocabulary", layout.pp * layout.tp > 1, lambda share: interval(share.vocabulary)),
            ("heads", layout.tp > 1, lambda share: interval(share.heads)),
            ("kv heads", layout.tp > 1, lambda share: interval(share.kv_heads)),
            ("experts", layout.ep > 1, lambda share: interval(share.experts)),
            ("columns of each", layout.etp > 1, lambda share: interval(share.expert_columns)),
            ("sequences", layout.dp > 1, lambda share: interval(share.sequences)),
            ("positions", layout.cp > 1, lambda share: " + ".join(map(interval, share.positions))),
            ("tokens", True, lambda share: f"{share.tokens:,}"),
            ("parameters", True, lambda share: f"{share.parameters:,}"),
        ]
        # Ranks without MoE layers have no experts: then the experts are not the same for all ranks.
        names = [
            name
            for name, is_cut, cell in columns
            if is_cut or len({cell(share) for share in shares}) > 1
        ]
        cells = [[cell(share) for name, _, cell in columns if name in names] for share in shares]
        lines.append(table(names, cells, left=0))
        if whole := [
            f"{name} {cell(shares[0])}"
            for name, _, cell in columns
            if name not in (*names, "node") and cell(shares[0]) != "-"
        ]:
            lines.append(f"every rank: {', '.join(whole)}")
    if not ranks and len(shown) < held.world_size:
        left = held.world_size - len(shown)
        every = ", --json all of them" * (held.world_size <= MOST_LISTED)
        lines.append(f"... {left} more: --rank NUMBER shows one{every}")
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


#: Most ranks with printed matrices.
MOST_RANKS = 16
_LEGEND = """
copies of a token leave its rank, across: its node. MB that a rank sends. GB/s:
over the network between nodes, or the links inside of a node.
Uniform routing; links at the calibrated share of their data sheet, or measured."""


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """A routing and its dispatchers, or the settings of the table of all dispatchers."""

    routing: Annotated[
        str | None,
        "A packaged routing, or a JSON or TOML file; without it tokens choose at random.",
        "<ROUTING>",
    ] = None
    plan: Annotated[str | None, 'Layout: "dp=4,ep=4"; by default that of the routing.'] = None
    dispatcher: Annotated[list[str] | None, "Show this one. May be repeated."] = None
    experts: Annotated[int | None, "Experts (random routing). [default: 8, or 256]", {"min": 1}] = (
        None
    )
    experts_per_token: Annotated[
        int | None, "Experts of each token. [default: 2, or 8]", {"min": 1}
    ] = None
    tokens: Annotated[
        int | None, "Tokens of each rank. [default: 8, or 4096]", {"tokens": True}
    ] = None
    hidden_size: Annotated[
        int | None, "Channels of a row. [default: 1024, or 7168]", {"min": 1}
    ] = None
    compare: Annotated[
        bool,
        "A table of times and rates on --cluster instead; the second defaults, which are "
        "DeepEP's published settings.",
    ] = False
    cluster: Annotated[
        str | None, "Cluster preset, TOML file, or devices (8xMI300X); with --compare.", "C"
    ] = None
    ep: Annotated[
        list[int] | None, "Ranks that share the experts; with --compare. [default: 8 16 32 64]"
    ] = None
    groups: Annotated[int | None, "Groups of experts, 0: no limit; with --compare.", {"min": 0}] = (
        None
    )
    groups_kept: Annotated[
        int | None, "Groups that a token may choose from; with --compare.", {"min": 1}
    ] = None
    payload: Annotated[
        str | None, "Payload of dispatch, fp8 (default) or bfloat16; with --compare."
    ] = None
    dtype: Annotated[str | None, "Type of rows. [default: bfloat16]"] = None
    seed: Annotated[int | None, "Seed of the routing.", {"show_default": "0"}] = None
    svg: Annotated[Path | None, "Draw it.", "FILE"] = None


@app.command("dispatch", short_help="Show who sends which rows to whom, under each dispatcher.")
def show_dispatch(request: DispatchRequest, as_json: AsJson = False) -> None:
    """Show one dispatch and combine of an MoE layer for a small routing, with bytes.

    Packaged routings: even-all-to-all, uneven-all-to-all, uneven-reduce-scatter. A file has the
    keys plan, num_experts and experts (a list of ranks, of tokens, of expert ids; -1 is none).
    Examples:

        moemesh dispatch uneven-reduce-scatter

        moemesh dispatch --plan dp=8,ep=8,ranks_per_node=4 --tokens 16 --svg dispatch.svg

        moemesh dispatch --compare --cluster hgx_h800 --tokens 4096
    """
    if request.compare:
        why = "shows a routing, --compare a table: leave one out"
        _refuse(request, "routing", "plan", "svg", "dtype", "seed", why=why)
        _compare(request, as_json)
        return
    _refuse(request, "cluster", "ep", "groups", "groups_kept", "payload", why="goes with --compare")
    from moemesh.planner.dispatches import random_example, read_example, to_json

    dispatchers, svg = request.dispatcher or (), request.svg
    if request.routing is None:
        example = random_example(
            request.plan or "dp=4,ep=4",
            num_experts=request.experts or 8,
            experts_per_token=request.experts_per_token or 2,
            tokens=request.tokens or 8,
            hidden_size=request.hidden_size or 1024,
            dtype=request.dtype or "bfloat16",
            seed=request.seed or 0,
            dispatchers=dispatchers,
        )
    else:
        why = f"draws a random routing; {request.routing} names its own"
        _refuse(request, "experts", "experts_per_token", "tokens", "seed", why=why)
        options = {name: getattr(request, name) for name in ("plan", "hidden_size", "dtype")}
        example = read_example(request.routing, dispatchers=dispatchers, **options)
    if svg is not None:
        from moemesh.report.rank_pictures import draw_pairs

        panels: list[tuple[str, str, list[list[int]]]] = []
        for name in example.dispatchers:
            dispatch = example.exchanges(name)
            panels += [(name, *_panel(dispatch, exchange)) for exchange in dispatch.of_rows()]
        write_texts([(svg, draw_pairs(panels) + "\n")])
    print_answer(as_json, lambda: to_json(example), lambda: dispatch_text(example))


def _refuse(request: DispatchRequest, *names: str, why: str) -> None:
    """Raise BadParameter for the first of these options that has a value."""
    for flag in given(request, *names):
        raise typer.BadParameter(f"{flag.replace('--routing', 'ROUTING')} {why}")


def _compare(request: DispatchRequest, as_json: bool) -> None:
    """Print the table of all dispatchers on a cluster."""
    from moemesh.config.cluster import load_cluster
    from moemesh.config.dispatcher_table import PREDICTED
    from moemesh.planner.dispatches import DispatchLoad, dispatch_times

    if request.cluster is None:
        raise typer.BadParameter("--compare needs --cluster, such as hgx_h800")
    payload, wanted = request.payload or "fp8", tuple(request.dispatcher or PREDICTED)
    choices = [("payload", payload, ("fp8", "bfloat16"))]
    choices += [("dispatcher", name, tuple(PREDICTED)) for name in wanted]
    problems: list[Problem] = []
    for key, value, legal in choices:
        if value not in legal:
            message, fix = f"{key} is one of {', '.join(legal)}", nearest_choice(value, legal)
            problems.append(Problem.of("not-a-choice", key, value, message, fix))
    if problems:
        raise ConfigError(problems)
    machine = load_cluster(request.cluster)
    names = ("tokens", "hidden_size", "experts", "experts_per_token", "groups", "groups_kept")
    options = {name: value for name in names if (value := getattr(request, name)) is not None}
    if "experts" in options:  # the default groups are those of the default experts
        options.setdefault("groups", 0)
    load = DispatchLoad(**options, fp8=payload == "fp8")
    if request.groups_kept is not None and not load.groups:
        raise typer.BadParameter("--groups-kept needs groups; fix: --groups 8")
    sizes = [ranks for ranks in (8, 16, 32, 64) if load.experts % ranks == 0]
    times = [
        row
        for ranks in request.ep or sizes or [load.experts]
        for row in dispatch_times(machine, load, ranks, wanted)
    ]

    def text() -> str:
        rows: list[tuple[str, ...]] = []
        for row in times:
            cells = [str(row.ep), row.dispatcher, f"{row.copies:.2f}", f"{row.copies_across:.2f}"]
            for way in (row.dispatch, row.combine):
                size = (way.across_bytes + way.inside_bytes) / 1e6
                cells += [f"{size:,.1f}", f"{way.seconds * 1e6:,.0f}", f"{way.rate / 1e9:.1f}"]
            rows.append(tuple(cells))
        header = ("ep", "dispatcher", "copies", "across", "MB", "us", "GB/s", "MB", "us", "GB/s")
        limit = f", from {load.groups_kept} of {load.groups} groups" if load.groups else ""
        return (
            f"{load.tokens:,} tokens a rank, {load.hidden_size:,} channels, "
            f"{load.experts_per_token} of {load.experts} experts{limit}\n"
            f"on {machine.name}; {payload} to the experts (first MB, us, GB/s), bfloat16 back "
            f"(second)\n\n{table(header, rows, left=2)}\n{_LEGEND}"
        )

    print_answer(as_json, lambda: [row.to_json() for row in times], text, indent=2)


def dispatch_text(example: "RoutingExample") -> str:
    """Matrices of rows of every dispatcher, then a table of their bytes."""
    counts = sorted({len(tokens) for tokens in example.choices})
    each = "-".join(map(str, (counts[0], counts[-1]))) if len(counts) > 1 else str(counts[0])
    lines = [
        *([example.about] if example.about else []),
        f"{len(example.choices)} ranks, {example.num_experts} experts, {each} tokens a rank, "
        f"up to {example.slots} experts a token, {example.hidden_size} channels of {example.dtype}",
    ]
    summary: list[tuple[str, ...]] = []
    for name in example.dispatchers:
        dispatch = example.exchanges(name)
        note = ": more rows for a rank than it has slots, so they go by all_to_all"
        lines += ["", name + (note if dispatch.overflows else "")]
        for exchange in dispatch.of_rows():
            title, rows = _panel(dispatch, exchange)
            lines.append(f"  {title}")
            if len(rows) > MOST_RANKS:
                continue
            # Rows by pair of ranks; rows that stay on a rank are in brackets and not in the sums.
            matrix: list[tuple[str, ...]] = []
            for sender, line in enumerate(rows):
                cells = [f"({n})" if to == sender else str(n) for to, n in enumerate(line)]
                matrix.append((f"    from {sender}", *cells, str(sum(line) - line[sender])))
            totals = [sum(line[to] for line in rows) - rows[to][to] for to in range(len(rows))]
            matrix.append(("    received", *map(str, totals), str(sum(totals))))
            lines.append(table(("", *(f"to {rank}" for rank in range(len(rows))), "sent"), matrix))
        ranks = range(len(dispatch.ledgers))
        forward = [exchange for exchange in dispatch.exchanges if exchange.phase == "forward"]
        sent = [sum(exchange.wire_sent(rank) for exchange in forward) for rank in ranks]
        received = [sum(exchange.wire_received(rank) for exchange in forward) for rank in ranks]
        headers = [
            exchange for exchange in forward if exchange.caller in ("moe.counts", "moe.headers")
        ]
        before = sum(exchange.wire_sent(rank) for exchange in headers for rank in ranks)
        sums = (sum(sent), max(sent), max(received), before)
        summary.append((name, *(f"{round(n):,}" for n in sums)))
    header = ("forward", "sent, all ranks", "busiest rank", "received, busiest rank", "counts")
    lines += ["", table(header, summary)]
    lines.append("Bytes over wires; counts are ids and sizes that go before the rows.")
    if len(example.choices) > MOST_RANKS:
        lines.append(f"Pairs of more than {MOST_RANKS} ranks: --svg draws them, --json lists them.")
    return "\n".join(lines)


def _panel(dispatch: "DispatchExchanges", exchange: "Exchange") -> tuple[str, list[list[int]]]:
    """Title of an exchange of rows, and its number of rows by (from, to)."""
    is_dispatch = exchange.caller == "moe.dispatch"
    what = "rows to the experts" if is_dispatch else "results back"
    size = dispatch.row_out if is_dispatch else dispatch.row_back
    rows = [[round(sent / size) for sent in line] for line in exchange.sent]
    return f"{what}: {exchange.op} over {exchange.axis}, rows of {size:,.0f} B", rows
