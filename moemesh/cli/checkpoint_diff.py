"""The verb checkpoint diff: which tensors of two checkpoints differ, without torch."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from typing import Annotated, Any

import typer

from moemesh.cli.application import AsJson, checkpoint_app
from moemesh.cli.checkpoint_place import find
from moemesh.cli.terminal import table
from moemesh.trace.strict_json import strict_json

#: Rows of a table of differences, unless all are asked for.
_LINES = 20


@checkpoint_app.command(short_help="List tensors that differ in two checkpoints, and by how much.")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run (its newest), or RUN/step-N.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    all_lines: Annotated[bool, typer.Option("--all", help="Print every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by logical names, whatever layouts wrote them.

    largest: the largest absolute difference of two numbers; relative: over the largest magnitude
    in A. Exit code 1 where anything differs. Example:

        moemesh checkpoint diff runs/a/step-100 runs/b/step-100
    """
    from moemesh.checkpoint.numbers import difference
    from moemesh.checkpoint.stored import open_stored

    a, b = (open_stored(found.folder, found.steps[0]) for found in (find(first), find(second)))
    ours, theirs = set(a.names()), set(b.names())
    rows: list[dict[str, Any]] = []
    others: list[str] = []
    for name in sorted(ours & theirs):
        one, other = a.entry(name), b.entry(name)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            kinds = (f"{entry.dtype} {list(entry.shape)}" for entry in (one, other))
            others.append(f"{name}: {' and '.join(kinds)}")
        elif (found := difference(a, b, name)).num_different:
            rows.append({"tensor": name, "dtype": one.dtype, **found._asdict()})
    rows.sort(key=lambda row: (-row["relative"], row["tensor"]))
    keys = sorted({*a.state, *b.state})
    pairs = {key: [a.state.get(key), b.state.get(key)] for key in keys}
    states = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    content: dict[str, Any] = {
        "first": str(a.path),
        "second": str(b.path),
        "equal": len(ours & theirs) - len(rows) - len(others),
        "different": rows,
        "other_shape_or_dtype": others,
        "only_in_first": sorted(ours - theirs),
        "only_in_second": sorted(theirs - ours),
        "state": states,
    }
    differs = bool(rows or others or ours ^ theirs)
    if as_json:
        typer.echo(strict_json(content, indent=1))
        raise typer.Exit(int(differs))
    shown = rows if all_lines else rows[:_LINES]
    if rows:
        header = ["tensor", "dtype", "numbers that differ", "largest", "relative"]
        lines = [
            [
                row["tensor"],
                row["dtype"],
                f"{row['num_different']:,} of {row['num_elements']:,}",
                f"{row['largest']:.3g}",
                f"{row['relative']:.3g}",
            ]
            for row in shown
        ]
        typer.echo(table(header, lines, left=2))
    if len(shown) < len(rows):
        typer.echo(f"... and {len(rows) - len(shown)} more: --all shows them")
    for row in rows:
        if any(row["num_nonfinite"]):
            here, there = row["num_nonfinite"]
            typer.echo(f"{row['tensor']}: {here} numbers in A and {there} in B are not finite")
    for line in others:
        typer.echo(line)
    for key, side in (("only_in_first", "A"), ("only_in_second", "B")):
        names: list[str] = content[key]
        for name in names if all_lines else names[:_LINES]:
            typer.echo(f"{name}: only in {side}")
        if len(names) > _LINES and not all_lines:
            typer.echo(f"... and {len(names) - _LINES} more only in {side}: --all shows them")
    for key, (old, new) in content["state"].items():
        if len(text := f"{key}: {strict_json(old)} and {strict_json(new)}") <= 100:
            typer.echo(text)
        else:
            typer.echo(f"{key}: differs")
    typer.echo(
        f"{content['equal']} tensors are equal to the bit, {len(rows)} differ, "
        f"{len(content['only_in_first'])} are only in A, {len(content['only_in_second'])} only in B"
    )
    raise typer.Exit(int(differs))
