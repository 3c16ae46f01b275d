"""Layouts from a Plan of our own, and from a row of a table of published runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import get_args

from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan, ScheduleName
from moemesh.config.stages import cut_layers
from moemesh.planner.layout import AttentionKernel, PlannedLayout, Precision

_ZERO = {"replicate": 0, "zero1": 1, "zero2": 2, "zero3": 3, "parameter_server": 0}


def from_plan(
    plan: Plan,
    model: ModelConfig | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: Precision = "bfloat16",
) -> PlannedLayout:
    """What `moemesh train` does under `plan`: fp32 gradients, flash attention, fused loss.

    With `model`, stages are cut as a run would cut them. Raises ValueError when they cannot be, and
    for a plan whose schedule has no name: closed forms are those of names.
    """
    name = next((name for name in get_args(ScheduleName) if name == plan.schedule), None)
    if name is None:
        raise UserError(
            f"schedule = {plan.schedule} has no formulas to be priced by: give the name of a "
            "schedule like it (1f1b, zb_h1, ...); `moemesh schedule` simulates a file or a search"
        )
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    wide = 8 if dtype == "float64" else 4
    masters = 4 if dtype in ("bfloat16", "float16") else 0
    layers_per_stage = plan.layers_per_stage or ()
    if model is not None and not layers_per_stage and plan.num_stages > 1:
        layers_per_stage = tuple(len(cut) for cut in cut_layers(model, plan.num_stages))
    return PlannedLayout(
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        cp=plan.cp,
        ep=plan.ep,
        etp=plan.etp,
        seq_len=seq_len,
        global_batch=global_batch,
        microbatch=max(share, 1),
        schedule=name,
        stages_per_rank=plan.stages_per_rank,
        layers_per_stage=layers_per_stage,
        attention_exit=plan.attention_exit,
        context=plan.context,
        dispatcher=plan.dispatcher,
        payload=plan.payload,
        combine=plan.combine,
        dispatch_chunks=plan.dispatch_chunks,
        spare_slots=plan.spare_slots,
        zero=_ZERO[plan.data],
        recompute=RECOMPUTED[plan.recompute],
        precision=dtype,
        dtype=dtype,
        gradient_bytes=wide,
        optimizer_bytes=2 * wide + masters,
        ranks_per_node=plan.ranks_per_node or 0,
    )


#: What `plan.recompute` computes again (`moemesh.parallel.recompute`). Our "selective" is more than
#: that of the tables, the attention core alone: also the product of a dense or shared SwiGLU. (The
#: product of routed experts is never kept; "activation" says so of them, too.)
RECOMPUTED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"attention", "activation"}),
    "full": frozenset({"full"}),
}

#: How published tables word what they recompute.
_RECOMPUTE_WORDS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "none": frozenset(),
    "full": frozenset({"full"}),
    "selective": frozenset({"attention"}),
    "selective(attn core)": frozenset({"attention"}),
    "selective(op)": frozenset({"operators"}),
    "selective(layernorm,moe)": frozenset({"norm", "moe"}),
    "selective(RMSNorm, MLA up-proj)": frozenset({"norm", "mla_up"}),
    "norm,act": frozenset({"norm", "activation"}),
    "norm,act,shared_expert": frozenset({"norm", "activation", "shared_expert"}),
}
_WORDS: dict[str, str] = {
    "attn": "attention", "core_attn": "attention", "attention": "attention", "core": "attention",
    "layernorm": "norm", "norm": "norm", "rmsnorm": "norm", "act": "activation",
    "moe_act": "activation", "activation": "activation", "moe": "moe", "mla_up_proj": "mla_up",
    "mla up-proj": "mla_up", "op": "operators", "ops": "operators",
    "shared_expert": "shared_expert", "shared_experts": "shared_expert", "mlp": "activation",
    "attn core": "attention",
}  # fmt: skip


def recompute_from_words(text: str) -> frozenset[str]:
    """What a table's `recompute` column names; raises ConfigError for unknown words."""
    text = text.strip()
    if text in _RECOMPUTE_WORDS:
        return _RECOMPUTE_WORDS[text]
    inner = re.sub(r"^selective\s*\((.*)\)$", r"\1", text.lower())
    found: set[str] = set()
    for part in (piece.strip() for piece in re.split(r"[,+;]", inner)):
        if part not in _WORDS:
            raise ConfigError(
                [
                    Problem(
                        code="unknown-value",
                        key="recompute",
                        value=text,
                        message=f"`{part}` names nothing that can be recomputed",
                        fix=f"known: none, full, selective, {', '.join(sorted(_WORDS))}",
                    )
                ]
            )
        found.add(_WORDS[part])
    return frozenset(found)


def from_run(row: Mapping[str, str]) -> PlannedLayout:
    """The layout of one row of a table of published runs (columns of its README).

    An empty degree is 1, an empty `sp` no sequence parallelism. Raises ConfigError when the row
    lacks sequence length or batch, or when its degrees do not fit.
    """
    zero_text = row.get("zero", "").strip()
    grouped = re.fullmatch(r"(\d)\s*\(shard within (\d+)\)", zero_text)
    zero = int(grouped.group(1) if grouped else zero_text or 0)
    notes = row.get("notes", "").lower()
    missing = [name for name in ("seq", "gbs") if not row.get(name, "").strip()]
    if missing:
        raise ConfigError(
            [
                Problem(code="missing", key=name, message=f"the row prints no `{name}`")
                for name in missing
            ]
        )
    chunks = row.get("vpp", "").strip()
    dualpipe = chunks.lower() == "dualpipe"
    stages = 1 if dualpipe else _int(row, "vpp", 1)
    tp, pp, cp = (_int(row, name, 1) for name in ("tp", "pp", "cp"))
    others = tp * pp * cp
    dp = _int(row, "dp", 0) or max(_int(row, "gpus", others) // others, 1)
    kernel: AttentionKernel = "flash"
    if "attention kernel: torch" in notes:
        kernel = "eager"
    elif "attention kernel: fused" in notes:
        kernel = "fused"
    schedule: ScheduleName = "1f1b"
    if dualpipe:
        schedule = "dualpipe"
    elif stages > 1:
        schedule = "interleaved_1f1b"
    return PlannedLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_int(row, "ep", 1),
        etp=_int(row, "etp", 1),
        dp=dp,
        seq_len=_int(row, "seq", 0),
        global_batch=_int(row, "gbs", 0),
        microbatch=_int(row, "mbs", 1),
        schedule=schedule,
        stages_per_rank=stages,
        sequence_parallel=row.get("sp", "").strip() == "1",
        context="all_to_all" if row.get("src") == "simumax_b200" else "ring",
        zero=zero,
        zero_group=int(grouped.group(2)) if grouped else 0,
        recompute=recompute_from_words(row.get("recompute", "")),
        attention_kernel=kernel,
        fused_norm="attention kernel" not in notes or "rms kernel" in notes,
        precision=_precision(row.get("precision", "")),
        dtype="float16" if row.get("precision", "") == "fp16" else "bfloat16",
    )


def _int(row: Mapping[str, str], name: str, default: int) -> int:
    text = row.get(name, "").strip()
    return int(float(text)) if text else default


def _precision(text: str) -> Precision:
    """Of the matrix products, from a table's wording ("MXFP8", "amp_bf16", ...)."""
    folded = text.lower()
    if "fp4" in folded:
        return "float4"
    if "fp8" in folded:
        return "float8"
    return "float16" if "fp16" in folded else "bfloat16"
