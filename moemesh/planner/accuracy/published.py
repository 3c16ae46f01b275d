"""Tables of measured runs: what each row says about model, layout, hardware and software.

Columns are those of published run tables (`id`, `src`, `arch`, `hardware`, `gpus`, `tp`, ...,
`notes`); empty cells mean "not published". A row that cannot be priced keeps the reason why.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, cast

from moemesh.config.errors import ConfigError, UserError
from moemesh.planner.accuracy.rows import from_run, recompute_from_words, told_row, uniform_row
from moemesh.planner.flops import Convention, count_flops
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.shapes.architectures import from_arch_table
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import cut_by_weight, even_cut
from moemesh.planner.timing.columns import KERNELS, Kernel, Software
from moemesh.planner.timing.hardware import GIB, Accelerator, accelerator_of

#: Columns without which a table says nothing that could be compared.
NEEDED_COLUMNS = ("id", "arch", "hardware", "gpus", "tp", "pp", "gbs", "seq")

#: Kinds of `mem_gib` that an allocator measured (others are analytic bars or the driver's view).
_MEASURED_MEMORY = ("max_memory_allocated", "peak (max over ranks)", "peak", "allocated")

#: A release by year and month, as container images are numbered, at the head of the notes.
_RELEASE = re.compile(r"\d\d\.\d\d(\.\d\d)?(?=[ ;,]|$)")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row, as far as it can be understood.

    `seconds` is the measured step (converted from what was reported), `memory_bytes` what an
    allocator measured, `ended` how the run ended ("ok", "OOM", ...), `cluster` the key of its
    constants. `layout` is None exactly when `reason` says why.
    """

    id: str
    source: str
    cluster: str
    #: "stack 26.02" where the row names the release of its software.
    release: str = ""
    tier: str
    ended: str
    reason: str = ""
    shape: ModelShape | None = None
    layout: PlannedLayout | None = None
    device: Accelerator | None = None
    software: Software = field(default_factory=Software)
    seconds: float | None = None
    memory_bytes: float | None = None
    #: Neither microbatch nor recomputation is printed: they are chosen, not read.
    microbatch_printed: bool = True
    recompute_printed: bool = True
    metric: str = ""
    row: Mapping[str, str]

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Runs between which a user would choose: same model, hardware, devices, sequence."""
        row = self.row
        return (row.get("model", ""), row.get("hardware", ""), row["gpus"], row["seq"])

    @property
    def is_moe(self) -> bool:
        return self.shape is not None and self.shape.is_moe


def read_runs(table: Path, archs: Path | None = None) -> list[PublishedRun]:
    """Every row of a CSV table. Architectures come from `archs`, by default ``model_archs.json``
    beside the table; names that it lacks from the packaged table. Raises UserError for unreadable
    files, missing columns or doubled ids."""
    rows = _read_rows(table)
    entries = _read_archs(archs, table)
    runs = [parse_run(row, entries) for row in rows]
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise UserError(f"{table}: two rows have the id {run.id}; ids name rows in the answer")
        seen.add(run.id)
    return runs


def _read_rows(table: Path) -> list[dict[str, str]]:
    try:
        text = table.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the table {table}: {error}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = [name.strip().lower() for name in reader.fieldnames or []]
    reader.fieldnames = columns
    if missing := [name for name in NEEDED_COLUMNS if name not in columns]:
        raise UserError(
            f"{table} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"its first line names {', '.join(columns[:8]) or 'none'}"
        )
    rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
    if not rows:
        raise UserError(f"{table} has no rows below its first line")
    return rows


def _read_archs(archs: Path | None, table: Path) -> dict[str, Any]:
    path = archs or table.with_name("model_archs.json")
    if archs is None and not path.exists():
        return known_architectures()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the architectures {path}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold one JSON object, name -> sizes")
    return known_architectures() | cast("dict[str, Any]", found)


@cache
def known_architectures() -> dict[str, Any]:
    """The sizes of published models that are part of the package, by name."""
    home = files("moemesh.config") / "presets" / "calibration"
    return tomllib.loads((home / "architectures.toml").read_text(encoding="utf-8"))


def parse_run(row: Mapping[str, str], archs: Mapping[str, Any]) -> PublishedRun:
    """One row; what is missing or contradictory ends up in `reason`."""
    device = accelerator_of(row.get("hardware", ""))
    row = _with_known_recomputation(uniform_row(row))
    row = told_row(row, device.generation if device else "")
    run = PublishedRun(
        id=row.get("id", ""),
        source=row.get("src", ""),
        cluster=f"{row['stack']}/{device.name if device else row.get('hardware', '')}",
        release=_release(row),
        tier=row.get("tier", ""),
        ended=row.get("status", "") or "ok",
        device=device,
        memory_bytes=_measured_memory(row),
        microbatch_printed=bool(row.get("mbs", "")),
        recompute_printed=bool(row.get("recompute", "")),
        metric=row.get("metric_reported", ""),
        row=row,
    )
    if device is None:
        return replace(run, reason=f"no device known in `{row.get('hardware', '')}`")
    try:
        shape = from_arch_table(_entry_name(row.get("arch", ""), archs), archs)
        layout = from_run(row)
        _check_world(row, layout)
        _check_stages(shape, layout)
    except ConfigError as error:
        first = error.problems[0]
        return replace(run, reason=f"{first.key}: {first.message}")
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        return replace(run, reason=str(error))
    software = software_of(row, shape, layout)
    if layout.zero == 3 and shape.is_moe and layout.ep > 1 and not row.get("etp"):
        # FSDP beside TP cuts experts as TP cuts everything.
        layout = _expert_tensor_as_tensor(layout)
    if layout.pp > 1:
        cut = even_cut
        if software.balanced_stages and layout.stages_per_rank == 1:
            cut = cut_by_weight
        layout = layout.changed(layers_per_stage=cut(shape, layout.num_stages))
    if shape.activation == "gelu" and software.fsdp:
        layout = layout.changed(dropout=False)
    return replace(
        run,
        shape=shape,
        layout=layout,
        software=software,
        seconds=_measured_seconds(row, shape, layout, device),
    )


def _with_known_recomputation(row: Mapping[str, str]) -> Mapping[str, str]:
    """The row; recomputation told in words that nobody knows counts as not published."""
    try:
        recompute_from_words(row.get("recompute", ""))
    except ConfigError:
        return {**row, "recompute": ""}
    return row


def _entry_name(arch: str, archs: Mapping[str, Any]) -> str:
    """The name as the table of architectures spells it."""
    name, mark, layers = arch.partition("#")
    same = [known for known in archs if known.lower() == name.lower()]
    return f"{same[0]}{mark}{layers}" if name not in archs and same else arch


def _expert_tensor_as_tensor(layout: PlannedLayout) -> PlannedLayout:
    ranks = layout.dp * layout.cp * layout.tp
    if ranks % (layout.ep * layout.tp):
        return layout
    return layout.changed(etp=layout.tp)


def _check_world(row: Mapping[str, str], layout: PlannedLayout) -> None:
    world = int(float(row["gpus"]))
    if layout.world_size != world:
        degrees = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp}"
        raise ValueError(f"{degrees} = {layout.world_size}, but the row has {world} gpus")
    if layout.global_batch % layout.dp:
        raise ValueError(f"gbs {layout.global_batch} does not divide over dp {layout.dp}")


def _check_stages(shape: ModelShape, layout: PlannedLayout) -> None:
    # Embedding and head may be stages of their own.
    if layout.num_stages > shape.num_layers + 2:
        raise ValueError(
            f"pp {layout.pp} x {layout.stages_per_rank} chunks = {layout.num_stages} stages, "
            f"but the model has {shape.num_layers} layers"
        )


def _release(row: Mapping[str, str]) -> str:
    found = _RELEASE.match(row.get("notes", ""))
    return f"{row['stack']} {found.group()}" if found else ""


def software_of(row: Mapping[str, str], shape: ModelShape, layout: PlannedLayout) -> Software:
    """What the columns of :func:`told_row` say about the framework."""

    def has(column: str, usual: str = "0") -> bool:
        return (row.get(column) or usual) == "1"

    stages = layout.pp * layout.stages_per_rank
    kernels: dict[str, Kernel] = {known: known for known in KERNELS}
    return Software(
        kernel=kernels.get(row.get("kernel", ""), "flash"),
        native_kernel=has("native_kernel", "1"),
        fused_norm=has("fused_norm", "1"),
        balanced_stages=has("balanced") or shape.num_layers % stages != 0,
        scatter_gather=has("scatter_gather", "1"),
        deduplicated=has("dedup"),
        overlapped_exchange=has("overlap") or layout.schedule == "dualpipe",
        natural_routing=has("natural"),
        token_drop=has("token_drop"),
        graphs=has("graphs"),
        block_scales=has("block_scales"),
        adapters=has("adapters"),
        parallel_block=has("parallel_block"),
        window=int(row.get("window") or 0),
        fsdp=layout.zero == 3 or has("fsdp"),
        slow_startup=has("slow_startup"),
    )


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        found = float(row.get(name, "") or "nan")
    except ValueError:
        return None
    return found if isfinite(found) and found > 0 else None


def _measured_memory(row: Mapping[str, str]) -> float | None:
    found = _number(row, "mem_gib")
    if found is None or row.get("mem_kind", "").strip().lower() not in _MEASURED_MEMORY:
        return None
    return found * GIB


def _measured_seconds(
    row: Mapping[str, str], shape: ModelShape, layout: PlannedLayout, device: Accelerator
) -> float | None:
    """The step time, printed or converted from TFLOP/s or MFU by the row's own convention."""
    if (row.get("status", "") or "ok") != "ok":
        return None
    if printed := _number(row, "step_time_s"):
        return printed
    tokens = layout.global_batch * layout.seq_len / layout.world_size
    if rate := _number(row, "tokens_s_gpu"):
        return tokens / rate
    tflops, mfu = _number(row, "tflops_gpu"), _number(row, "mfu_pct")
    if tflops is None and mfu is not None:
        tflops = device.peak_flops[0] * mfu / 100 / 1e12
    if tflops is None:
        return None
    return step_flops(row.get("flop_conv", ""), shape, layout) / layout.world_size / tflops / 1e12


def step_flops(convention: str, shape: ModelShape, layout: PlannedLayout) -> float:
    """FLOPs of one step as a source counts them: attention full or causal, recomputation counted
    where its convention says so. Without a word about attention: causal for rates, full for MFU."""
    folded = convention.lower()
    words: tuple[str, ...] = ("causal", "halved")
    recomputed = "incl. recompute" in folded or "sc21" in folded
    causal = any(word in folded for word in words) and "non-causal" not in folded
    if not folded:
        causal = True
    kind: Convention = "causal" if causal else "full"
    counted = count_flops(shape, layout.seq_len, kind)
    per_token = counted.training
    if recomputed and "full" in layout.recompute:
        # Layers run forward once more; the head does not.
        per_token += counted.forward - counted.head
    return per_token * layout.global_batch * layout.seq_len
