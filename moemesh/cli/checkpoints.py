"""Verbs `checkpoint ls`, `verify`, `prune` and `diff`: stored checkpoints, without torch."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moemesh.cli.application import AsJson, checkpoint_app, print_answer
from moemesh.cli.terminal import table
from moemesh.config.suggest import nearest_run
from moemesh.trace.step_seconds import duration
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.checkpoint.remote import Place as Folder
    from moemesh.checkpoint.stored import Damage

#: Most rows of a table of differences without --all.
_LINES = 20

Place = Annotated[
    str, "A run, its folder checkpoints (or its address), or one checkpoint: RUN/step-N.", "<RUN>"
]


class CheckpointPlace(NamedTuple):
    """A folder of checkpoints, and the selected steps, newest first."""

    folder: "Folder"
    steps: list[int]

    def path(self, step: int) -> "Folder":
        return self.folder / f"step-{step}"


def find(text: str) -> CheckpointPlace:
    """Checkpoints at a path or address of the command line. Raises CheckpointError without any."""
    from moemesh.checkpoint.files import COMMITTED, CheckpointError
    from moemesh.checkpoint.remote import place_of
    from moemesh.checkpoint.stored import candidates
    from moemesh.train.records.run_folder import checkpoints_of

    place = place_of(text)
    match = COMMITTED.fullmatch(place.name)
    above = place.parent if match else place
    # Folders that may hold the checkpoints: that of a run at this place, and the place itself.
    folders = [checkpoints_of(above), above] if isinstance(above, Path) else [above]
    if match:
        for folder in folders:
            if (folder / place.name).is_dir():
                return CheckpointPlace(folder, [int(match[1])])
        steps = next(filter(None, map(candidates, folders)), [])
        others = f"; it has the steps {', '.join(map(str, reversed(steps)))}" if steps else ""
        raise CheckpointError(f"{place}: this checkpoint does not exist{others}")
    for folder in folders:
        if steps := candidates(folder):
            return CheckpointPlace(folder, steps)
    near = f" ({near})" if isinstance(place, Path) and (near := nearest_run(place)) else ""
    state = "holds no checkpoint" if place.is_dir() else "no folder"
    raise CheckpointError(f"{place}: {state}{near}")


@contextmanager
def held(folder: "Folder", run: Path | None) -> Iterator[Callable[[], None]]:
    """Lock `folder`, the checkpoints of the run in the folder `run` (None: unknown), so that no run
    writes there. Yields a function that raises CheckpointError if a run has taken it over since.
    Raises CheckpointError if an active run holds it."""
    from moemesh.checkpoint.files import CheckpointError
    from moemesh.checkpoint.ownership import Claim, has_owner
    from moemesh.monitor.lease import RunFolderError
    from moemesh.train.records.run_folder import LEASE, RunFolder

    log = partial(typer.echo, err=True)
    holding: RunFolder | Claim | None = None
    try:
        if run is not None and (run / LEASE).exists():
            holding = RunFolder(run, has_run=True, checkpoints=folder)
            holding.lock(log=log)
        elif has_owner(folder):
            holding = Claim.take(folder, uuid.uuid4().hex, log=log)
    except RunFolderError as error:
        if not error.holder:
            raise
        raise CheckpointError(
            f"{folder} is in use by a run ({error.holder}), which deletes old checkpoints by "
            "itself (train.checkpoints_kept): prune when it has ended, or stop it first"
        ) from error

    def check() -> None:
        if holding is not None and (why := holding.lost()) is not None:
            raise CheckpointError(f"{why}; nothing more was deleted")

    try:
        yield check
    finally:
        if holding is not None:
            holding.release()


@checkpoint_app.command(short_help="List steps, sizes and layouts, and which are verified.")
def ls(place: Place, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, newest first. Nothing is read but manifests and headers.

    verified: read back since it was written, and selected right. Example:

        moemesh checkpoint ls runs/tiny
    """
    from moemesh.checkpoint.files import CheckpointError, written_at
    from moemesh.checkpoint.manifest import MANIFEST
    from moemesh.checkpoint.retention import VALIDATION_LOSS, validated, verified_state
    from moemesh.checkpoint.stored import read_manifest, unfinished
    from moemesh.trace.memory_profile import format_bytes

    selected = find(place)
    rows: list[dict[str, Any]] = []
    for step in selected.steps:
        state = verified_state(selected.folder, step, read_back=False)
        row: dict[str, Any] = {
            "step": step,
            "verified": state.is_verified,
            "finite": state.is_finite,
        }
        with suppress(CheckpointError, OSError):
            manifest = read_manifest(selected.path(step))
            row["bytes"] = sum(file.size for file in manifest.files.values())
            row["tensors"] = len(manifest.tensors)
            row["ranks"] = manifest.world_size
            row["layout"] = manifest.state.get("layout")
            row[VALIDATION_LOSS] = manifest.state.get(VALIDATION_LOSS)
            written = written_at(selected.path(step) / MANIFEST)
            row["age_seconds"] = max(time.time() - written, 0.0)
        rows.append({**row, "problem": state.problem})
    leftovers, losses = unfinished(selected.folder), validated(selected.folder)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if "bytes" not in row:
            cells.append((str(row["step"]), "-", "-", "-", "damaged", "-"))
            continue
        verified = "yes" if row["verified"] else "damaged" if row["problem"] else "no"
        if row["finite"] is False:
            verified += ", not finite"
        layout = f"{row['ranks']} rank(s)"
        if row["layout"]:
            layout = " ".join(f"{key}{n}" for key, n in row["layout"].items() if n != 1) or "1 rank"
        numbers = format_bytes(row["bytes"]), str(row["tensors"])
        cells.append((str(row["step"]), *numbers, layout, verified, duration(row["age_seconds"])))
    lines = [table(("step", "size", "tensors", "layout", "verified", "age"), cells)]
    lines += [
        f"step {row['step']} cannot be used: {row['problem']}" for row in rows if row["problem"]
    ]
    lines += [
        f"{name}: being written or deleted, or left over from a run that was killed"
        for name in leftovers
    ]
    if losses:
        loss, step = losses[0]
        lines.append(f"step {step} has the lowest validation loss, {loss:.4f}: --best reads it")
    best = losses[0][1] if losses else None
    content = {"folder": str(selected.folder), "checkpoints": rows, "best": best}
    content["unfinished"] = leftovers
    print_answer(as_json, lambda: content, lambda: "\n".join(lines), indent=1)


@checkpoint_app.command(short_help="Read every byte back; name damaged files and tensors.")
def verify(
    place: Place,
    all_lines: Annotated[
        bool, "Print every damage, not the first of a file.", {"names": ("--all", "-v")}
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every chunk of every file on the disk with its digest.

    Names the first damage of each file and how many there are (each one, with tensor and chunk, by
    --all and --json), and the tensors with numbers that are not finite. Exit code 1 where anything
    is damaged. Example:

        moemesh checkpoint verify runs/tiny/step-100
    """
    from moemesh.checkpoint.retention import VerifiedState, nonfinite, remember
    from moemesh.checkpoint.stored import examine, open_stored
    from moemesh.trace.memory_profile import format_bytes

    selected = find(place)
    content: list[dict[str, Any]] = []
    for step in selected.steps:
        damages, size = examine(selected.folder, step), 0
        names: Sequence[str] = ()
        if not damages:
            stored = open_stored(selected.folder, step)
            names, size = nonfinite(stored), stored.num_bytes
            with suppress(OSError):  # the folder may be read-only
                digest = stored.manifest.digest
                remember(selected.folder, [VerifiedState(step, digest, True, not names)])
        content.append(
            {
                "step": step,
                "damaged": bool(damages),
                "bytes": size,
                "damages": [damage._asdict() for damage in damages],
                "nonfinite": list(names),
            }
        )
        faults = [str(damage) for damage in damages] if all_lines else by_file(damages)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            faults = [f"numbers that are not finite: {', '.join(names[:3])}{more}"]
        state = "DAMAGED" if damages else f"{format_bytes(size)} are intact"
        if not as_json:  # printed as soon as the checkpoint is read
            typer.echo("\n  ".join([f"{selected.path(step)}: {state}", *faults]))
    if as_json:
        typer.echo(strict_json({"folder": str(selected.folder), "checkpoints": content}, indent=1))
    raise typer.Exit(int(any(row["damaged"] for row in content)))


def by_file(damages: "Sequence[Damage]") -> list[str]:
    """The first damage of each file, and the number of further damages and their tensors: a
    truncated file has a damage for each missing chunk."""
    lines, groups = list[str](), defaultdict[str, "list[Damage]"](list)
    for damage in damages:
        groups[damage.file].append(damage)
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
    place: Annotated[str, "A run, or a folder of checkpoints (its address).", "<RUN>"],
    keep: Annotated[
        int | None,
        "Newest verified checkpoints that stay.",
        {"min": 1, "show_default": "train.checkpoints_kept of the run, or 2"},
    ] = None,
    dry_run: Annotated[bool, "Print what would be deleted; delete nothing."] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the newest verified checkpoints with finite numbers, and the one with the lowest
    validation loss; delete the older ones.

    A checkpoint that is not verified is read back first; the last verified checkpoint is never
    deleted. The folder of an active run is refused. Example:

        moemesh checkpoint prune runs/tiny --keep 1 --dry-run
    """
    from moemesh.checkpoint import retention
    from moemesh.checkpoint.files import CheckpointError
    from moemesh.checkpoint.remote import place_of
    from moemesh.config.train import TrainConfig
    from moemesh.trace.run import recorded

    selected = find(place)
    if len(selected.steps) == 1 and place.rstrip("/").endswith(f"/step-{selected.steps[0]}"):
        raise CheckpointError(f"{place}: is one checkpoint; give the run")
    named = place_of(place)
    # For an address without its run, other writers are unknown: keep partial checkpoints.
    run = None
    if isinstance(named, Path):
        run = named if selected.folder != named else named.parent
    if keep is None:
        if run is None:
            why = "give the run, or --keep: how many stay is not known here"
            raise CheckpointError(f"{place}: {why}")
        keep = TrainConfig().checkpoints_kept  # default without a readable config.toml
        with suppress(ValueError, TypeError):
            keep = max(int(recorded(run, "train", "checkpoints_kept")), 1)
    is_on_disk = run is not None
    with nullcontext(lambda: None) if dry_run else held(selected.folder, run) as check:
        plan = retention.plan_pruning(selected.folder, keep, with_leftovers=is_on_disk)
        if not dry_run:
            retention.prune(selected.folder, keep, with_leftovers=is_on_disk, check=check)
    lines: list[str] = []
    for state in plan.kept:
        why = f"damaged: {state.problem}" if state.problem else "verified"
        if state.is_verified and not state.is_finite:
            why += "; holds numbers that are not finite, so that it replaces no older one"
        lines.append(f"step {state.step}: kept, {why}")
    gone = [*(f"step {step}" for step in plan.doomed), *plan.leftovers]
    lines += [f"{name}: {'would be ' * dry_run}deleted" for name in gone]
    lines += [] if gone else ["nothing to delete"]
    content = {
        "kept": [state._asdict() for state in plan.kept],
        "deleted": plan.doomed,
        "leftovers": plan.leftovers,
        "dry_run": dry_run,
    }
    print_answer(as_json, lambda: content, lambda: "\n".join(lines), indent=1)


@checkpoint_app.command(short_help="List tensors that differ in two checkpoints, and by how much.")
def diff(
    first: Annotated[str, "A run (its newest), or RUN/step-N.", "<A>"],
    second: Annotated[str, "The run or checkpoint to compare with.", "<B>"],
    all_lines: Annotated[bool, "Print every tensor.", {"names": ("--all",)}] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by logical names, independent of their layouts.

    largest: the largest absolute difference of two numbers; relative: over the largest magnitude
    in A. Exit code 1 where anything differs. Example:

        moemesh checkpoint diff runs/a/step-100 runs/b/step-100
    """
    from moemesh.checkpoint.stored import difference, open_stored

    a, b = (open_stored(place.folder, place.steps[0]) for place in (find(first), find(second)))
    ours, theirs = set(a.names()), set(b.names())
    rows: list[dict[str, Any]] = []
    mismatches: list[str] = []  # of shapes or dtypes
    for name in sorted(ours & theirs):
        left, right = a.entry(name), b.entry(name)
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            kinds = (f"{entry.dtype} {list(entry.shape)}" for entry in (left, right))
            mismatches.append(f"{name}: {' and '.join(kinds)}")
        elif (numbers := difference(a, b, name)).num_different:
            rows.append({"tensor": name, "dtype": left.dtype, **numbers._asdict()})
    rows.sort(key=lambda row: (-row["relative"], row["tensor"]))
    keys = sorted({*a.state, *b.state})
    pairs = {key: [a.state.get(key), b.state.get(key)] for key in keys}
    states = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    content: dict[str, Any] = {
        "first": str(a.path),
        "second": str(b.path),
        "equal": len(ours & theirs) - len(rows) - len(mismatches),
        "different": rows,
        "other_shape_or_dtype": mismatches,
        "only_in_first": sorted(ours - theirs),
        "only_in_second": sorted(theirs - ours),
        "state": states,
    }
    most = len(a.names()) + len(b.names()) if all_lines else _LINES
    lines: list[str] = []
    if rows:
        header = ("tensor", "dtype", "numbers that differ", "largest", "relative")
        cells = [
            (
                *(row["tensor"], row["dtype"]),
                f"{row['num_different']:,} of {row['num_elements']:,}",
                *(f"{row['largest']:.3g}", f"{row['relative']:.3g}"),
            )
            for row in rows[:most]
        ]
        lines.append(table(header, cells, left=2))
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more: --all shows them")
    for row in rows:
        if any(row["num_nonfinite"]):
            in_a, in_b = row["num_nonfinite"]
            lines.append(f"{row['tensor']}: {in_a} numbers in A and {in_b} in B are not finite")
    lines += mismatches
    for key, side in (("only_in_first", "A"), ("only_in_second", "B")):
        names: list[str] = content[key]
        lines += [f"{name}: only in {side}" for name in names[:most]]
        if len(names) > most:
            lines.append(f"... and {len(names) - most} more only in {side}: --all shows them")
    for key, (old, new) in states.items():
        text = f"{key}: {strict_json(old)} and {strict_json(new)}"
        lines.append(text if len(text) <= 100 else f"{key}: differs")
    lines.append(
        f"{content['equal']} tensors are equal to the bit, {len(rows)} differ, "
        f"{len(content['only_in_first'])} are only in A, {len(content['only_in_second'])} only in B"
    )
    print_answer(as_json, lambda: content, lambda: "\n".join(lines), indent=1)
    raise typer.Exit(int(bool(rows or mismatches or ours ^ theirs)))
