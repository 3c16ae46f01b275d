"""Tables of measured runs: model, layout, hardware and software of each row.

Columns are those of published run tables (`id`, `src`, `arch`, `hardware`, `gpus`, `tp`, ...,
`notes`); empty cells mean "not published". A row that cannot be priced keeps the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moemesh.config.devices import GIB, Accelerator, accelerator_of
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.plan import ScheduleName
from moemesh.planner.accuracy.architectures import (
    architectures,
    is_model,
    named_shape,
    sized_gpt,
)
from moemesh.planner.accuracy.cells import (
    NEEDED_COLUMNS,
    READ_COLUMNS,
    annotated_row,
    decimal_in,
    measured_in,
    num_known,
    own_columns,
    spellings,
    table_lines,
    uniform_row,
    whole_in,
    with_unit,
)
from moemesh.planner.accuracy.implied import ROUNDED, batch, machines, one_a_stage
from moemesh.planner.accuracy.titles import number_types, title_facts, with_model
from moemesh.planner.parameters import count_flops
from moemesh.planner.planned_layout import AttentionKernel, PlannedLayout, Precision
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import cut_by_weight, even_cut
from moemesh.planner.timing.columns import KERNELS, Software
from moemesh.schedule.build import require_defined


def recompute_from_words(text: str) -> frozenset[str]:
    """The recomputation in a table's column `recompute`; raises KeyError for unknown words."""
    inner = re.sub(r"^selective\s*\((.*)\)$", r"\1", text.strip().lower())
    parts = re.split(r"[,+;]", inner or "none")
    return frozenset(spellings()["recompute"][part.strip()] for part in parts) - {""}


def from_run(row: Mapping[str, str]) -> PlannedLayout:
    """The layout of one row of a table of published runs.

    An empty degree is 1, except `dp`, which takes the remaining devices; an empty `sp` means no
    sequence parallelism. Raises ConfigError if the row lacks devices, sequence length or batch, or
    breaks a rule of layouts, and ValueError or KeyError for a cell that is not read.
    """
    zero_text = row.get("zero", "").strip()
    grouped = re.fullmatch(r"(\d)\s*\(shard within (\d+|node)\)", zero_text)
    if not grouped and zero_text not in ("", *"0123"):
        raise ValueError(f"zero is `{zero_text}`: a stage of ZeRO from 0 to 3, or FSDP")
    zero = int(grouped.group(1) if grouped else zero_text or 0)
    is_sized = grouped and grouped.group(2).isdecimal()
    group = int(grouped.group(2)) if grouped and is_sized else whole_in(row, "shard_group", 0)
    if missing := [name for name in ("gpus", "seq", "gbs") if not row.get(name, "").strip()]:
        problems: list[Problem] = []
        for name in missing:
            unclear = unclear_batch(row) if name == "gbs" else ""
            message = f"the row prints no `{name}`" + (f" ({unclear})" if unclear else "")
            problems.append(Problem.of("missing", name, None, message))
        raise ConfigError(problems)
    chunks = row.get("vpp", "").strip()
    dualpipe = chunks.lower() == "dualpipe"
    stages = 1 if dualpipe else whole_in(row, "vpp", 1)
    tp, pp, cp = (whole_in(row, name, 1) for name in ("tp", "pp", "cp"))
    others = tp * pp * cp
    dp = whole_in(row, "dp", 0) or max(whole_in(row, "gpus", others) // others, 1)
    several: ScheduleName = "interleaved_1f1b" if stages > 1 else "1f1b"
    # Wordings such as "MXFP8" and "amp_bf16".
    text, patterns = row.get("precision", "").strip().lower(), spellings()["precision"]
    precision: Precision | None = next((x for x in patterns if re.search(patterns[x], text)), None)
    if precision is None:
        raise ValueError(f"precision is `{text}`: known are bf16, fp16, fp32, fp8 and fp4")
    if re.fullmatch(r"(mx|nv)?(bf|fp)(4|8|16)\S*\s*(/|,|or)\s*(mx|nv)?(bf|fp)(4|8|16)\S*", text):
        raise ValueError(f"precision is `{text}`: two number types; write one in each row")
    kernels: dict[str, AttentionKernel] = {kernel: kernel for kernel in KERNELS}
    # Frozen weights have neither gradients nor optimizer states; those of adapters are small.
    trained = 0.0 if (adapters := row.get("adapters") == "1") else 1.0
    return PlannedLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=whole_in(row, "ep", 1),
        etp=whole_in(row, "etp", 1),
        dp=dp,
        seq_len=whole_in(row, "seq", 0),
        global_batch=whole_in(row, "gbs", 0),
        microbatch=whole_in(row, "mbs", 1),
        schedule="dualpipe" if dualpipe else several,
        stages_per_rank=stages,
        sequence_parallel=row.get("sp", "").strip() == "1",
        context="all_to_all" if row.get("context") == "all_to_all" else "ring",
        zero=zero,
        zero_group=group,
        recompute=recompute_from_words(row.get("recompute", "")),
        attention_kernel=kernels.get(row.get("kernel", ""), "flash"),
        fused_norm=row.get("fused_norm") != "0",
        adapters=adapters,
        trained_dense=trained,
        trained_experts=trained,
        base="nf4" if row.get("base") == "nf4" else "same",
        loss="chunked" if row.get("loss") == "chunked" else "fused",
        precision=precision,
        dtype=precision if precision in ("float16", "float32") else "bfloat16",
    )


def unclear_batch(row: Mapping[str, str]) -> str:
    """Words on a column that is not read because its name does not state whose sequences it
    counts; "" for a row without one."""
    names = ("batch_size", "batch", "bs", "train_batch_size")
    name = next((name for name in names if row.get(name, "").strip()), "")
    if not name:
        return ""
    return f"`{name}` is not read: of a step or of a microbatch? Name it gbs or mbs"


#: Kinds of `mem_gib` that an allocator measured (others are analytic bars or the driver's view).
_MEASURED_MEMORY = ("", "max_memory_allocated", "peak (max over ranks)", "peak", "allocated")

#: A release by year and month, as container images are numbered, at the head of the column
#: `release`, or of the notes of a row without one.
_RELEASE = re.compile(r"\d\d\.\d\d(\.\d\d)?(?=[ ;,]|$)")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row of a table, parsed.

    `seconds` is the measured step (converted from the reported unit), `memory_bytes` the peak that
    an allocator measured, `ended` the outcome ("ok", "OOM", ...), `cluster` the key of its
    constants. `layout` is None if and only if `reason` is set.
    """

    id: str
    source: str
    cluster: str
    #: Release of the software if the row has one: "stack 26.02".
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
    #: Whether the table has the microbatch and the recomputation; otherwise they are chosen.
    microbatch_printed: bool = True
    recompute_printed: bool = True
    row: Mapping[str, str]

    @property
    def group(self) -> tuple[str, ...]:
        """Key of runs that are alternatives: same model, hardware, devices, sequence length, and
        one number type in one release of one software, which a plan does not choose."""
        row, layout = self.row, self.layout
        given = self.cluster, self.release, layout.precision if layout else ""
        return (self.model, row.get("hardware", ""), row["gpus"], row["seq"], *given)

    @property
    def model(self) -> str:
        return self.row.get("model") or self.row.get("arch", "")

    @property
    def priced(self) -> tuple[ModelShape, PlannedLayout, Accelerator]:
        """Model, layout and device of a row that has all three."""
        assert self.shape is not None and self.layout is not None and self.device is not None
        return self.shape, self.layout, self.device

    @property
    def is_silent(self) -> bool:
        """Whether a finished run has neither time nor memory that a prediction is compared with."""
        return self.ended == "ok" and not self.seconds and not self.memory_bytes

    @property
    def is_before_sequence_parallelism(self) -> bool:
        """Whether the software may be older than sequence parallelism (arXiv:2205.05198), which
        later trainers use beside every tensor parallelism: it sends no more bytes."""
        return self.device is not None and self.device.generation in ("volta", "ampere")

    @property
    def is_sharded_by_choice(self) -> bool:
        """Whether ZeRO or sequence parallelism, which the table leaves out, was chosen so that it
        fits."""
        layout, row = self.layout, self.row
        return layout is not None and (
            (layout.zero > 0 and not row.get("zero"))
            or (
                layout.sequence_parallel and "sp" not in row and self.is_before_sequence_parallelism
            )
        )

    @property
    def fits_by_choice(self) -> bool:
        """Whether recomputation or sharding, which the table leaves out, was chosen so that it
        fits."""
        return self.software.recomputed_share > 0 or self.is_sharded_by_choice

    @property
    def is_moe(self) -> bool:
        return self.shape is not None and self.shape.is_moe


def read_runs(table: Path, archs: Path | None = None, hardware: str = "") -> list[PublishedRun]:
    """Every row of a table. Architectures come from `archs`, by default ``model_archs.json`` in the
    table's folder, and from the packaged table. `hardware` is the device of a table without that
    column, by default the only one that its title names. Raises UserError for unreadable files,
    missing or doubled columns, no rows, headings between rows, and duplicate ids."""
    try:
        title, header, lines = table_lines(table.read_bytes())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the table {table}: {error}") from None
    own = own_columns(header)
    columns = [name for name, _ in own]
    rows = [_cells(cells, own, number) for number, cells in lines]
    entries = architectures(table, archs)
    facts = title_facts(title, columns, rows, entries)
    if "arch" not in columns and rows and all(is_model(row["id"], entries) for row in rows):
        rows = [row | {"arch": row["id"]} for row in rows]
    if hardware and "hardware" not in columns:
        facts["hardware"] = hardware
    if "precision" not in columns:
        for row in rows:
            types = number_types(note := row.get("notes", ""))
            # Beside other words one of 32 bits is that of gradients, sums or the optimizer.
            if types and ("32" not in types or len(note.split()) == 1):
                row["precision"] = number_types(f"{types} {facts.get('precision', '')}")
    rows = [with_model(facts | row, entries) for row in rows]
    known = {*columns, *facts, *(rows[0] if rows else ())}
    if missing := [name for name in NEEDED_COLUMNS if name not in known]:
        raise UserError(f"{table} lacks {_lacks(missing, columns, header)}")
    if twice := [name for name in READ_COLUMNS if columns.count(name) > 1 and name != "layout"]:
        raise UserError(f"{table} has two columns {twice[0]}: leave one out, or rename it")
    if not rows:
        raise UserError(f"{table} has no rows below its first line")
    for number, cells in lines:
        used = facts if (number, cells) != lines[-1] else {}  # the last line may be a footnote
        if _begins_part(cells, columns, used, entries):
            raise UserError(
                f"{table}: line {number} (`{', '.join(filter(None, cells))}`) is a fact of "
                "several rows; give each part of a table a file of its own, with its facts in the "
                "line above the names"
            )
    runs = [parse_run(row, entries) for row in rows]
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise UserError(f"{table}: two rows have the id {run.id}; ids name rows in the answer")
        seen.add(run.id)
    return runs


def _lacks(missing: Sequence[str], columns: Sequence[str], header: Sequence[str]) -> str:
    """The columns that a table lacks, and the remedy."""
    plural = "s" if len(missing) > 1 else ""
    words = f"the column{plural} {', '.join(missing)}; its first line names "
    words += ", ".join(columns[:8]) or "none"
    if "hardware" in missing:
        words += "; --cluster NAME or a title that names one device replaces hardware"
    if "arch" in missing and "size" in columns:
        words += "; sizes are those of a family that the title names (Llama 3)"
    is_measure = re.compile(r"/|\b[tp]?flops?\b|mfu|time|second", re.IGNORECASE)
    joined = (name for name in header if is_measure.search(name) and accelerator_of(name))
    if "hardware" in missing and (name := next(joined, "")):
        words += f"; `{name}` is a device and a measure: write one row for each device"
    return words


def _begins_part(
    cells: Sequence[str],
    columns: Sequence[str],
    facts: Mapping[str, str],
    archs: Mapping[str, Any],
) -> bool:
    """Whether a line is the first of another table, or a heading to whose rows the title's facts
    need not apply, or which has facts of its own."""
    words = list(filter(None, cells))
    if any(word[0].isdigit() for word in words[1:]):
        return False
    if num_known(cells) > _FEWEST_NAMES:
        return True
    if len(words) > 1 or len(columns) < _FEWEST_NAMES or not re.search(r"[^\W\d]{2}", words[0]):
        return False
    return len(facts.keys() - {"title"}) > 0 or len(title_facts(words[0], columns, (), archs)) > 1


def _cells(given: Sequence[str], own: Sequence[tuple[str, str]], line: int) -> dict[str, str]:
    """The cells of one line by column, with their units. `line` names a row without an id."""
    cells = dict.fromkeys((name for name, _ in own), "")
    for (name, unit), text in zip(own, given, strict=False):
        text = with_unit(text, unit)
        cells[name] = ", ".join(filter(None, (cells[name], text))) if name == "layout" else text
    if (more := len(given) - len(own)) > 0:
        cells["unread"] = f"line {line} has {more} more cells than the first line has columns"
    return cells | {"line": str(line), "id": cells.get("id") or f"line {line}"}


def parse_run(row: Mapping[str, str], archs: Mapping[str, Any]) -> PublishedRun:
    """One row; `reason` reports missing or contradictory columns."""
    device = accelerator_of(row.get("hardware", ""))
    row = annotated_row(uniform_row(row), device.generation if device else "")
    try:
        recompute_from_words(row.get("recompute", ""))
    except KeyError:
        row["recompute"] = ""  # unknown words count as not published
    if row.get("rest") == "unstated":
        row["recompute"] = ""
    row["gpus"], device = machines(row, device)
    if row.get("microbatches") == "pp" and not row.get("mbs"):
        row["mbs"] = one_a_stage(row)
    if row.get("shard_group") == "node" and device:
        row["shard_group"] = str(device.node_size)
    if (copies := row.get("replicas", "")).isdecimal() and row.get("gpus", "").isdecimal():
        row["shard_group"] = str(int(row["gpus"]) // max(int(copies), 1))
    if not row.get("gbs"):
        row["gbs"] = batch(row)
    release = _RELEASE.match(row.get("release") or row.get("notes", ""))
    run = PublishedRun(
        id=row.get("id", ""),
        source=row.get("src", ""),
        cluster=f"{row['stack']}/{device.name if device else row.get('hardware', '')}",
        release=f"{row['stack']} {release.group()}" if release else "",
        tier=row.get("tier", ""),
        ended=row.get("status", "") or "ok",
        device=device,
        microbatch_printed=bool(row.get("mbs", "")),
        recompute_printed=bool(row.get("recompute", "")),
        row=row,
    )
    if unread := row.get("unread"):
        return replace(run, reason=unread)
    named = (accelerator_of(word) for word in row.get("hardware", "").split())
    if len(several := {one.name for one in named if one}) > 1:
        names = " and ".join(sorted(several))
        return replace(run, reason=f"hardware is `{row['hardware']}`: {names}, not one device")
    if device is None:
        return replace(run, reason=f"hardware is `{row.get('hardware', '')}`: no known device")
    if row.get("hsdp", node := str(device.node_size)) != node:
        reason = f"layout is `{row['layout']}`: which number is that of the shards is not stated"
        return replace(run, reason=f"{reason} (the devices of a node are {node})")
    try:
        shape = sized_gpt(row) or named_shape(row.get("arch", ""), archs)
        layout = from_run(row)
        _check(row, shape, layout, device)
        seconds, memory = _measured_seconds(row, shape, layout, device), measured_in(row, "mem_gib")
        software = software_of(row, layout)
        if capacity := decimal_in(row, "capacity"):
            # With real routing the fullest expert rank is full, with padded experts every rank is.
            is_full = software.natural_routing or row.get("padded") == "1"
            layout = layout.changed(imbalance=max(capacity, 1.0) if is_full else 1.0)
            software = replace(software, natural_routing=False)
        # Under FSDP beside TP, trainers cut experts over TP as they cut other weights.
        can_cut = layout.dp * layout.cp * layout.tp % (layout.ep * layout.tp) == 0
        if layout.zero == 3 and shape.is_moe and layout.ep > 1 and not row.get("etp") and can_cut:
            layout = layout.changed(etp=layout.tp)
        is_measured = row.get("mem_kind", "").strip().lower() in _MEASURED_MEMORY
        if layout.pp > 1:
            # Embedding and head count as layers where equal numbers of layers are impossible.
            is_balanced = row.get("balanced") == "1" or shape.num_layers % layout.pp > 0
            cut = cut_by_weight if is_balanced and layout.stages_per_rank == 1 else even_cut
            layout = layout.changed(layers_per_stage=cut(shape, layout.num_stages))
        if shape.activation == "gelu" and software.fsdp:
            layout = layout.changed(dropout=False)
    except ConfigError as error:
        first = error.problems[0]
        return replace(run, reason=f"{first.key}: {first.message}")
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        return replace(run, reason=str(error))
    return replace(
        run,
        shape=shape,
        layout=layout,
        software=software,
        seconds=seconds,
        memory_bytes=GIB * memory if memory and is_measured else None,
    )


#: A line with more names of known columns is a first line; a table with fewer columns has no
#: headings between its rows.
_FEWEST_NAMES = 3


#: Multiple of the peak from which a time must be in another unit.
_IMPOSSIBLE_SHARE = 20


def _check(
    row: Mapping[str, str], shape: ModelShape, layout: PlannedLayout, device: Accelerator
) -> None:
    world = whole_in(row, "gpus", 1)
    if world > 1 and not any(row.get(name) for name in ("tp", "pp", "dp", "zero")):
        raise ValueError("tp, pp, dp, zero: the row prints no layout")
    tokens = layout.global_batch * layout.seq_len
    seconds, rate = measured_in(row, "step_time_s"), measured_in(row, "tokens_s_gpu")
    if seconds and rate and not 0.8 < seconds * rate * world / tokens < 1.25:
        raise ValueError(
            f"step_time_s x tokens_s_gpu x gpus is {seconds * rate * world:,.0f} tokens, but gbs x "
            f"seq is {tokens:,}: another unit, or another batch"
        )
    if seconds:
        flops = 2 / 3 * count_flops(shape, layout.seq_len, "causal").training * tokens
        share = flops / seconds / world / max(device.peak_flops)
        if share > _IMPOSSIBLE_SHARE:
            raise ValueError(
                f"step_time_s is {seconds:g}: that is {share:.3g} times the peak of {device.name}, "
                "so it is in another unit or of another batch"
            )
    narrow = {"float8": 1, "float4": 2}.get(layout.precision, 0)
    peak = device.peak_flops[narrow]
    limits = {"tflops_gpu": peak / 1e12, "mfu_pct": 100 * peak / device.peak_flops[0]}
    for name, limit in limits.items():
        if (rate := measured_in(row, name) or 0) > limit * (1 + ROUNDED):
            raise ValueError(
                f"{name} is {rate:g}, above the peak of {device.name} ({limit:g}): of several "
                "devices, or in another unit"
            )
    if layout.seq_len % layout.cp:
        raise ValueError(f"seq {layout.seq_len} does not divide over cp {layout.cp}")
    if problems := layout.check(shape.sizes if layout.pp == 1 else None):
        raise ConfigError(problems)
    if layout.world_size != world:
        degrees = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp}"
        raise ValueError(f"{degrees} = {layout.world_size}, but the row has {world} gpus")
    if layout.global_batch % layout.dp:
        raise ValueError(f"gbs {layout.global_batch} does not divide over dp {layout.dp}")
    if (share := layout.global_batch // layout.dp) < layout.microbatch:
        raise ValueError(
            f"mbs is {layout.microbatch}, more than the {share} sequences of a replica: gbs "
            f"{layout.global_batch} / dp {layout.dp}"
        )
    # Embedding and head may be stages of their own.
    if layout.num_stages > shape.num_layers + 2:
        raise ValueError(
            f"pp {layout.pp} x {layout.stages_per_rank} chunks = {layout.num_stages} stages, "
            f"but the model has {shape.num_layers} layers"
        )
    if layout.pp > 1:
        require_defined(
            layout.schedule,
            ranks=layout.pp,
            microbatches=layout.microbatches,
            stages_per_rank=layout.stages_per_rank,
        )


#: Field of Software -> its column, where that has another name; "" for none.
_COLUMNS = {
    "deduplicated": "dedup", "overlapped_exchange": "overlap",
    "overlapped_tensor": "tensor_overlap", "natural_routing": "natural", "recomputed_share": "",
}  # fmt: skip


def software_of(row: Mapping[str, str], layout: PlannedLayout) -> Software:
    """Properties of the framework from the columns of :func:`annotated_row`."""
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = vars(Software())
    for name, default in defaults.items():
        if text := row.get(_COLUMNS.get(name, name)):
            is_switch = isinstance(default, bool)
            values[name] = text == "1" if is_switch else type(default)(text)
    software = Software(**values)
    return replace(
        software,
        overlapped_exchange=software.overlapped_exchange or layout.schedule == "dualpipe",
        fsdp=software.fsdp or layout.zero == 3,
    )


def _measured_seconds(
    row: Mapping[str, str], shape: ModelShape, layout: PlannedLayout, device: Accelerator
) -> float | None:
    """The step time: printed, from a rate of tokens or samples, or converted from TFLOP/s, MFU or
    HFU by the row's own convention. None for a run that did not finish, and without any of them."""
    if (row.get("status", "") or "ok") != "ok":
        return None
    if printed := measured_in(row, "step_time_s"):
        return printed
    tokens = layout.global_batch * layout.seq_len / layout.world_size
    if rate := measured_in(row, "tokens_s"):
        return layout.global_batch * layout.seq_len / rate
    if rate := measured_in(row, "samples_s"):
        return layout.global_batch / rate
    if rate := measured_in(row, "tokens_s_gpu"):
        return tokens / rate
    peak, convention = device.peak_flops[0] / 1e12, row.get("flop_conv", "")
    tflops = measured_in(row, "tflops_gpu")
    if tflops is None and (mfu := measured_in(row, "mfu_pct")):
        tflops = peak * mfu / 100
    if tflops is None and (hfu := measured_in(row, "hfu_pct")):
        tflops, convention = peak * hfu / 100, convention or "causal, incl. recompute"
    if tflops is None:
        return None
    return step_flops(convention, shape, layout) / layout.world_size / tflops / 1e12


def step_flops(convention: str, shape: ModelShape, layout: PlannedLayout) -> float:
    """FLOPs of one step in the convention of a source: full or causal attention, with or without
    recomputation. Without a convention: causal attention."""
    folded = convention.lower() or "causal"
    recomputed = "incl. recompute" in folded or "sc21" in folded
    causal = ("causal" in folded or "halved" in folded) and "non-causal" not in folded
    counted = count_flops(shape, layout.seq_len, "causal" if causal else "full")
    per_token = counted.training
    if recomputed and "full" in layout.recompute:
        # The forward of all layers is recomputed, that of the head is not.
        per_token += counted.forward - counted.head
    return per_token * layout.global_batch * layout.seq_len
