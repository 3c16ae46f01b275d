"""The verb dispatch: who sends which rows to whom, under each dispatcher."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli import completion
from moemesh.cli.application import AsJson, app
from moemesh.cli.options import tokens as option_tokens
from moemesh.cli.terminal import table
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.planner.dispatches import (
        DispatchExchanges,
        DispatchLoad,
        DispatchTime,
        Exchange,
        RoutingExample,
    )

#: Ranks whose matrices are printed.
MOST_RANKS = 16


@app.command("dispatch", short_help="Show who sends which rows to whom, under each dispatcher.")
def show_dispatch(
    routing: Annotated[
        str | None,
        typer.Argument(
            metavar="ROUTING",
            autocompletion=completion.routings,
            help="A packaged routing, or a JSON or TOML file; without it tokens choose at random.",
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help='Layout: "dp=4,ep=4"; by default that of the routing.')
    ] = None,
    dispatcher: Annotated[
        list[str] | None,
        typer.Option(autocompletion=completion.dispatchers, help="Show this one. May be repeated."),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts (random routing). [default: 8, or 256]")
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(min=1, help="Experts of each token. [default: 2, or 8]")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=option_tokens, help="Tokens of each rank. [default: 8, or 4096]"
        ),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Channels of a row. [default: 1024, or 7168]")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="A table of times and rates on --cluster instead; the second defaults, which are "
            "DeepEP's published settings.",
        ),
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            autocompletion=completion.clusters,
            help="Cluster preset or TOML file; with --compare.",
        ),
    ] = None,
    ep: Annotated[
        list[int] | None,
        typer.Option(help="Ranks that share the experts; with --compare. [default: 8 16 32 64]"),
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=0, help="Groups of experts, 0: no limit; with --compare.")
    ] = None,
    groups_kept: Annotated[
        int | None, typer.Option(min=1, help="Groups that a token may choose from; with --compare.")
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(help="Payload of dispatch, fp8 (default) or bfloat16; with --compare."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of rows. [default: bfloat16]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the routing.", show_default="0")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one dispatch and combine of an MoE layer for a small routing, with bytes.

    Packaged routings: even-all-to-all, uneven-all-to-all, uneven-reduce-scatter. A file has the
    keys plan, num_experts and experts (a list of ranks, of tokens, of expert ids; -1 is none).
    Examples:

        moemesh dispatch uneven-reduce-scatter

        moemesh dispatch --plan dp=8,ep=8,ranks_per_node=4 --tokens 16 --svg dispatch.svg

        moemesh dispatch --compare --cluster hgx_h800 --tokens 4096
    """
    if compare:
        for name, value in (
            ("ROUTING", routing), ("--plan", plan), ("--svg", svg), ("--dtype", dtype),
            ("--seed", seed),
        ):  # fmt: skip
            if value is not None:
                raise typer.BadParameter(
                    f"{name} shows a routing, --compare a table: leave one out"
                )
        if cluster is None:
            raise typer.BadParameter("--compare needs --cluster, such as hgx_h800")
        given = {
            "tokens": tokens, "hidden_size": hidden_size, "experts": experts,
            "experts_per_token": experts_per_token, "groups": groups, "groups_kept": groups_kept,
        }  # fmt: skip
        load = {name: value for name, value in given.items() if value is not None}
        _compare(cluster, load, payload or "fp8", ep or [8, 16, 32, 64], dispatcher, as_json)
        return
    for name, value in (
        ("--cluster", cluster), ("--ep", ep), ("--groups", groups),
        ("--groups-kept", groups_kept), ("--payload", payload),
    ):  # fmt: skip
        if value is not None:
            raise typer.BadParameter(f"{name} goes with --compare")
    from moemesh.planner.dispatches import random_example, read_example, to_json

    if routing is None:
        example = random_example(
            plan or "dp=4,ep=4",
            num_experts=experts or 8,
            experts_per_token=experts_per_token or 2,
            tokens=tokens or 8,
            hidden_size=hidden_size or 1024,
            dtype=dtype or "bfloat16",
            seed=seed or 0,
            dispatchers=dispatcher or (),
        )
    else:
        for name, value in (
            ("--experts", experts), ("--experts-per-token", experts_per_token),
            ("--tokens", tokens), ("--seed", seed),
        ):  # fmt: skip
            if value is not None:
                raise typer.BadParameter(f"{name} draws a random routing; {routing} names its own")
        example = read_example(
            routing, plan=plan, dispatchers=dispatcher or (), hidden_size=hidden_size, dtype=dtype
        )
    if svg is not None:
        from moemesh.report.files import write_texts
        from moemesh.report.pairs import draw

        panels = [
            (name, _title(found, one), _rows(found, one))
            for name in example.dispatchers
            for found in [example.exchanges(name)]
            for one in found.of_rows()
        ]
        write_texts([(svg, draw(panels) + "\n")])
    if as_json:
        typer.echo(strict_json(to_json(example)))
    else:
        typer.echo(dispatch_text(example))


def _compare(
    cluster: str,
    load: dict[str, int],
    payload: str,
    ep: list[int],
    dispatchers: list[str] | None,
    as_json: bool,
) -> None:
    """Print the table of all dispatchers on a cluster."""
    from moemesh.config.cluster import load_cluster
    from moemesh.config.errors import ConfigError, Problem
    from moemesh.config.suggest import nearest_choice
    from moemesh.planner.dispatches import DISPATCHERS, DispatchLoad, dispatch_times

    wanted = tuple(dispatchers or DISPATCHERS)
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
    machine = load_cluster(cluster)
    settings = DispatchLoad(**load, fp8=payload == "fp8")
    found = [row for ranks in ep for row in dispatch_times(machine, settings, ranks, wanted)]
    if as_json:
        typer.echo(strict_json([row.to_json() for row in found], indent=2))
    else:
        typer.echo(compare_text(machine.name, settings, found))


def compare_text(cluster: str, load: "DispatchLoad", found: "list[DispatchTime]") -> str:
    """The table of dispatchers, one dispatch and one combine each."""
    rows = [
        (
            str(row.ep),
            row.dispatcher,
            f"{row.copies:.2f}",
            f"{row.copies_across:.2f}",
            *(
                cell
                for one in (row.dispatch, row.combine)
                for cell in (
                    f"{(one.across_bytes + one.inside_bytes) / 1e6:,.1f}",
                    f"{one.seconds * 1e6:,.0f}",
                    f"{one.rate / 1e9:.1f}",
                )
            ),
        )
        for row in found
    ]
    header = ("ep", "dispatcher", "copies", "across", "MB", "us", "GB/s", "MB", "us", "GB/s")
    limit = f", from {load.groups_kept} of {load.groups} groups" if load.groups else ""
    dtype = "fp8" if load.fp8 else "bfloat16"
    return "\n".join(
        [
            f"{load.tokens:,} tokens a rank, {load.hidden_size:,} channels, "
            f"{load.experts_per_token} of {load.experts} experts{limit}",
            f"on {cluster}; {dtype} to the experts (first MB, us, GB/s), bfloat16 back (second)",
            "",
            table(header, rows, left=2),
            "",
            "copies of a token leave its rank, across: its node. MB that a rank sends. GB/s:",
            "over the network between nodes, or the links inside of a node.",
            "Uniform routing; links at the calibrated share of their data sheet, or measured.",
        ]
    )


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
            lines.append(f"  {_title(found, one)}")
            if len(example.choices) <= MOST_RANKS:
                lines.append(_matrix(_rows(found, one)))
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


def _title(found: "DispatchExchanges", one: "Exchange") -> str:
    what = "rows to the experts" if one.caller == "moe.dispatch" else "results back"
    return f"{what}: {one.op} over {one.axis}, rows of {_row_bytes(found, one):,.0f} B"


def _row_bytes(found: "DispatchExchanges", one: "Exchange") -> float:
    return found.row_out if one.caller == "moe.dispatch" else found.row_back


def _rows(found: "DispatchExchanges", one: "Exchange") -> list[list[int]]:
    """Rows by (from, to)."""
    size = _row_bytes(found, one)
    return [[round(sent / size) for sent in line] for line in one.sent]


def _matrix(rows: list[list[int]]) -> str:
    """Rows by pair of ranks, what a rank keeps in brackets, with what crosses a wire."""
    lines: list[tuple[str, ...]] = []
    for sender, line in enumerate(rows):
        cells = [f"({n})" if to == sender else str(n) for to, n in enumerate(line)]
        lines.append((f"    from {sender}", *cells, str(sum(line) - line[sender])))
    totals = [sum(line[to] for line in rows) - rows[to][to] for to in range(len(rows))]
    lines.append(("    received", *map(str, totals), str(sum(totals))))
    return table(("", *(f"to {rank}" for rank in range(len(rows))), "sent"), lines)
