"""The verbs checkpoint ls, verify and prune: what lies on the disk, without torch."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemesh.cli.application import AsJson, checkpoint_app
from moemesh.cli.checkpoint_place import find, held
from moemesh.cli.terminal import table
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.checkpoint.stored import Damage

Place = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run, its folder checkpoints (or its address), or one checkpoint: RUN/step-N.",
    ),
]


@checkpoint_app.command(short_help="List steps, sizes and layouts, and which are verified.")
def ls(place: Place, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, newest first. Nothing is read but manifests and headers.

    verified: read back since it was written, and found right. Example:

        moemesh checkpoint ls runs/tiny
    """
    from moemesh.checkpoint.files import CheckpointError, written_at
    from moemesh.checkpoint.manifest import MANIFEST
    from moemesh.checkpoint.retention import standing
    from moemesh.checkpoint.stored import read_manifest, unfinished

    found = find(place)
    rows: list[dict[str, Any]] = []
    for step in found.steps:
        one = standing(found.folder, step, read_back=False)
        row: dict[str, Any] = {"step": step, "verified": one.is_verified, "finite": one.is_finite}
        with suppress(CheckpointError, OSError):
            manifest = read_manifest(found.path(step))
            row["bytes"] = sum(file.size for file in manifest.files.values())
            row["tensors"] = len(manifest.tensors)
            row["ranks"] = manifest.world_size
            row["layout"] = manifest.state.get("layout")
            written = written_at(found.path(step) / MANIFEST)
            row["age_seconds"] = max(time.time() - written, 0.0)
        rows.append({**row, "problem": one.problem})
    left = unfinished(found.folder)
    if as_json:
        content = {"folder": str(found.folder), "checkpoints": rows, "unfinished": left}
        typer.echo(strict_json(content, indent=1))
        return
    header = ["step", "size", "tensors", "layout", "verified", "age"]
    typer.echo(table(header, [_row(row) for row in rows], left=1))
    for row in rows:
        if row["problem"]:
            typer.echo(f"step {row['step']} cannot be used: {row['problem']}")
    for name in left:
        typer.echo(f"{name}: being written or deleted, or left over from a run that was killed")


def _row(row: dict[str, Any]) -> list[str]:
    from moemesh.trace.memory_profile import format_bytes

    if "bytes" not in row:
        return [str(row["step"]), "-", "-", "-", "damaged", "-"]
    verified = "yes" if row["verified"] else "damaged" if row["problem"] else "no"
    if row["finite"] is False:
        verified += ", not finite"
    seconds = row["age_seconds"]
    age = f"{seconds:.0f} s"
    for unit, length in (("min", 60), ("h", 3600), ("d", 86400)):
        if seconds >= 2 * length:
            age = f"{seconds / length:.0f} {unit}"
    layout = row["layout"]
    degrees = [f"{key}{n}" for key, n in (layout or {}).items() if n != 1]
    words = " ".join(degrees) or "1 rank"
    return [
        str(row["step"]),
        format_bytes(row["bytes"]),
        str(row["tensors"]),
        words if layout else f"{row['ranks']} rank(s)",
        verified,
        age,
    ]


@checkpoint_app.command(short_help="Read every byte back; name damaged files and tensors.")
def verify(
    place: Place,
    all_lines: Annotated[
        bool, typer.Option("--all", "-v", help="Print every damage, not the first of a file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every chunk of every file on the disk with its digest.

    Names the first damage of each file and how many there are (each one, with tensor and chunk, by
    --all and --json), and the tensors with numbers that are not finite. Exit code 1 where anything
    is damaged. Example:

        moemesh checkpoint verify runs/tiny/step-100
    """
    from moemesh.checkpoint.retention import Standing, nonfinite, remember
    from moemesh.checkpoint.stored import examine, open_stored
    from moemesh.trace.memory_profile import format_bytes

    found = find(place)
    content: list[dict[str, Any]] = []
    is_damaged = False
    for step in found.steps:
        damages, size = examine(found.folder, step), 0
        names: Sequence[str] = ()
        if not damages:
            stored = open_stored(found.folder, step)
            names, size = nonfinite(stored), stored.num_bytes
            with suppress(OSError):  # a folder that is only read is verified all the same
                digest = stored.manifest.digest
                remember(found.folder, [Standing(step, digest, True, not names)])
        is_damaged = is_damaged or bool(damages)
        content.append(
            {
                "step": step,
                "damaged": bool(damages),
                "bytes": size,
                "damages": [damage._asdict() for damage in damages],
                "nonfinite": list(names),
            }
        )
        if not as_json:
            told = [str(one) for one in damages] if all_lines else by_file(damages)
            path = found.path(step)
            if damages:
                typer.echo(f"{path}: DAMAGED")
                for damage in told:
                    typer.echo(f"  {damage}")
                continue
            typer.echo(f"{path}: {format_bytes(size)} are what was written")
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                typer.echo(f"  numbers that are not finite: {', '.join(names[:3])}{more}")
    if as_json:
        folder = str(found.folder)
        typer.echo(strict_json({"folder": folder, "checkpoints": content}, indent=1))
    raise typer.Exit(int(is_damaged))


def by_file(damages: "Sequence[Damage]") -> list[str]:
    """The first damage of each file, and how many more of how many tensors it has: a file that is
    cut has one for each chunk behind the cut."""
    groups: dict[str, list[Damage]] = {}
    for damage in damages:
        groups.setdefault(damage.file, []).append(damage)
    lines: list[str] = []
    for group in groups.values():
        line = str(group[0])
        if len(group) > 1:
            tensors = {damage.tensor for damage in group if damage.tensor is not None}
            of = f" of {len(tensors)} tensors" if len(tensors) > 1 else ""
            line += f"; and {len(group) - 1} more{of} in this file (--all shows them)"
        lines.append(line)
    return lines


@checkpoint_app.command(short_help="Delete old checkpoints as a run would.")
def prune(
    place: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or a folder of checkpoints (its address).")
    ],
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Newest verified checkpoints that stay.",
            show_default="train.checkpoints_kept of the run, or 2",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the newest verified checkpoints with finite numbers, delete the older ones.

    A checkpoint that is not verified is read back first; the last verified checkpoint is never
    deleted. A folder in which a run is at work is refused. Example:

        moemesh checkpoint prune runs/tiny --keep 1 --dry-run
    """
    import tomllib

    from moemesh.checkpoint import retention
    from moemesh.checkpoint.files import CheckpointError
    from moemesh.checkpoint.remote import place_of
    from moemesh.config.train import TrainConfig

    found = find(place)
    if len(found.steps) == 1 and place.rstrip("/").endswith(f"/step-{found.steps[0]}"):
        raise CheckpointError(f"{place}: is one checkpoint; give the run")
    named = place_of(place)
    # Of an address alone it is not known who else writes there: what is being written stays.
    run = None
    if isinstance(named, Path):
        run = named if found.folder != named else named.parent
    if keep is None and run is None:
        raise CheckpointError(f"{place}: give the run, or --keep: how many stay is not known here")
    if keep is None and run is not None:
        keep = TrainConfig().checkpoints_kept  # where the run does not say
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = (run / "config.toml").read_text(encoding="utf-8")
            keep = max(int(tomllib.loads(text)["train"]["checkpoints_kept"]), 1)
    assert keep is not None
    is_on_disk = run is not None
    with nullcontext(lambda: None) if dry_run else held(found.folder, run) as check:
        plan = retention.plan_pruning(found.folder, keep, with_leftovers=is_on_disk)
        if not dry_run:
            retention.prune(found.folder, keep, with_leftovers=is_on_disk, check=check)
    if as_json:
        kept = [one._asdict() for one in plan.kept]
        content = {"kept": kept, "deleted": plan.doomed, "leftovers": plan.leftovers}
        typer.echo(strict_json({**content, "dry_run": dry_run}, indent=1))
        return
    for one in plan.kept:
        why = f"damaged: {one.problem}" if one.problem else "verified"
        if one.is_verified and not one.is_finite:
            why += "; holds numbers that are not finite, so that it replaces no older one"
        typer.echo(f"step {one.step}: kept, {why}")
    word = "would be deleted" if dry_run else "deleted"
    for step in plan.doomed:
        typer.echo(f"step {step}: {word}")
    for name in plan.leftovers:
        typer.echo(f"{name}: {word}")
    if not plan.doomed and not plan.leftovers:
        typer.echo("nothing to delete")
