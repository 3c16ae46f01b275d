"""The verb dispatch: who sends which rows to whom, under each dispatcher."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import AsJson, app, print_answer
from moemesh.cli.options import given
from moemesh.cli.terminal import table

if TYPE_CHECKING:
    from moemesh.planner.dispatches import DispatchExchanges, Exchange, RoutingExample

#: Ranks whose matrices are printed.
MOST_RANKS = 16
_LEGEND = """
copies of a token leave its rank, across: its node. MB that a rank sends. GB/s:
over the network between nodes, or the links inside of a node.
Uniform routing; links at the calibrated share of their data sheet, or measured."""


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """A routing and the dispatchers that carry it out, or the settings of the table of all."""

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
    cluster: Annotated[str | None, "Cluster preset or TOML file; with --compare.", "C"] = None
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
    random = ("experts", "experts_per_token", "tokens", "seed")
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
        _refuse(request, *random, why=why)
        own = {name: getattr(request, name) for name in ("plan", "hidden_size", "dtype")}
        example = read_example(request.routing, dispatchers=dispatchers, **own)
    if svg is not None:
        from moemesh.report.files import write_texts
        from moemesh.report.pairs import draw

        panels = [
            (name, *_panel(found, one))
            for name in example.dispatchers
            for found in [example.exchanges(name)]
            for one in found.of_rows()
        ]
        write_texts([(svg, draw(panels) + "\n")])
    print_answer(as_json, lambda: to_json(example), lambda: dispatch_text(example))


def _refuse(request: DispatchRequest, *names: str, why: str) -> None:
    """Raise BadParameter for the first of these options that has a value."""
    for flag in given(request, *names):
        raise typer.BadParameter(f"{flag.replace('--routing', 'ROUTING')} {why}")


def _compare(request: DispatchRequest, as_json: bool) -> None:
    """Print the table of all dispatchers on a cluster."""
    from moemesh.config.cluster import load_cluster
    from moemesh.config.errors import ConfigError, Problem
    from moemesh.config.suggest import nearest_choice
    from moemesh.planner.dispatches import DISPATCHERS, DispatchLoad, dispatch_times

    if request.cluster is None:
        raise typer.BadParameter("--compare needs --cluster, such as hgx_h800")
    payload, wanted = request.payload or "fp8", tuple(request.dispatcher or DISPATCHERS)
    choices = [("payload", payload, ("fp8", "bfloat16"))]
    choices += [("dispatcher", name, DISPATCHERS) for name in wanted]
    if problems := [
        Problem.of(
            "not-a-choice",
            key,
            value,
            f"{key} is one of {', '.join(legal)}",
            nearest_choice(value, legal),
        )
        for key, value, legal in choices
        if value not in legal
    ]:
        raise ConfigError(problems)
    machine = load_cluster(request.cluster)
    names = ("tokens", "hidden_size", "experts", "experts_per_token", "groups", "groups_kept")
    own = {name: value for name in names if (value := getattr(request, name)) is not None}
    load = DispatchLoad(**own, fp8=payload == "fp8")
    found = [
        one
        for ranks in request.ep or (8, 16, 32, 64)
        for one in dispatch_times(machine, load, ranks, wanted)
    ]

    def text() -> str:
        rows: list[tuple[str, ...]] = []
        for row in found:
            cells = [str(row.ep), row.dispatcher, f"{row.copies:.2f}", f"{row.copies_across:.2f}"]
            for one in (row.dispatch, row.combine):
                size = (one.across_bytes + one.inside_bytes) / 1e6
                cells += [f"{size:,.1f}", f"{one.seconds * 1e6:,.0f}", f"{one.rate / 1e9:.1f}"]
            rows.append(tuple(cells))
        header = ("ep", "dispatcher", "copies", "across", "MB", "us", "GB/s", "MB", "us", "GB/s")
        limit = f", from {load.groups_kept} of {load.groups} groups" if load.groups else ""
        return (
            f"{load.tokens:,} tokens a rank, {load.hidden_size:,} channels, "
            f"{load.experts_per_token} of {load.experts} experts{limit}\n"
            f"on {machine.name}; {payload} to the experts (first MB, us, GB/s), bfloat16 back "
            f"(second)\n\n{table(header, rows, left=2)}\n{_LEGEND}"
        )

    print_answer(as_json, lambda: [row.to_json() for row in found], text, indent=2)


def dispatch_text(example: "RoutingExample") -> str:
    """The matrices of every dispatcher, in rows, then the bytes of each."""
    counts = sorted({len(own) for own in example.choices})
    each = "-".join(map(str, (counts[0], counts[-1]))) if len(counts) > 1 else str(counts[0])
    lines = [
        *([example.about] if example.about else []),
        f"{len(example.choices)} ranks, {example.num_experts} experts, {each} tokens a rank, "
        f"up to {example.slots} experts a token, {example.hidden_size} channels of {example.dtype}",
    ]
    summary: list[tuple[str, ...]] = []
    for name in example.dispatchers:
        found = example.exchanges(name)
        note = ": more rows for a rank than it has slots, so they go by all_to_all"
        lines += ["", name + (note if found.overflows else "")]
        for one in found.of_rows():
            title, rows = _panel(found, one)
            lines.append(f"  {title}")
            if len(rows) > MOST_RANKS:
                continue
            # Rows by pair of ranks, what a rank keeps in brackets, with what crosses a wire.
            matrix: list[tuple[str, ...]] = []
            for sender, line in enumerate(rows):
                cells = [f"({n})" if to == sender else str(n) for to, n in enumerate(line)]
                matrix.append((f"    from {sender}", *cells, str(sum(line) - line[sender])))
            totals = [sum(line[to] for line in rows) - rows[to][to] for to in range(len(rows))]
            matrix.append(("    received", *map(str, totals), str(sum(totals))))
            lines.append(table(("", *(f"to {rank}" for rank in range(len(rows))), "sent"), matrix))
        ranks = range(len(found.ledgers))
        forward = [one for one in found.exchanges if one.phase == "forward"]
        sent = [sum(one.wire_sent(rank) for one in forward) for rank in ranks]
        received = [sum(one.wire_received(rank) for one in forward) for rank in ranks]
        headers = [one for one in forward if one.caller in ("moe.counts", "moe.headers")]
        before = sum(one.wire_sent(rank) for one in headers for rank in ranks)
        sums = (sum(sent), max(sent), max(received), before)
        summary.append((name, *(f"{round(n):,}" for n in sums)))
    header = ("forward", "sent, all ranks", "busiest rank", "received, busiest rank", "counts")
    lines += ["", table(header, summary)]
    lines.append("Bytes over wires; counts are ids and sizes that go before the rows.")
    if len(example.choices) > MOST_RANKS:
        lines.append(f"Pairs of more than {MOST_RANKS} ranks: --svg draws them, --json lists them.")
    return "\n".join(lines)


def _panel(found: "DispatchExchanges", one: "Exchange") -> tuple[str, list[list[int]]]:
    """The title of an exchange of rows, and its rows by (from, to)."""
    is_dispatch = one.caller == "moe.dispatch"
    what = "rows to the experts" if is_dispatch else "results back"
    size = found.row_out if is_dispatch else found.row_back
    rows = [[round(sent / size) for sent in line] for line in one.sent]
    return f"{what}: {one.op} over {one.axis}, rows of {size:,.0f} B", rows
