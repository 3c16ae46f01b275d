"""Layouts from a Plan of our own, and from a row of a table of published runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from math import ceil
from typing import cast, get_args

from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan, Recompute, ScheduleName
from moemesh.config.rules import plan_problem
from moemesh.config.run import RunConfig
from moemesh.config.stages import cut_layers
from moemesh.config.train import TrainConfig
from moemesh.config.trainable import refusals
from moemesh.planner.layout import DATA, RECOMPUTED, AttentionKernel, PlannedLayout, Precision
from moemesh.planner.shapes.load import Model
from moemesh.schedule.build import step_problems

#: Keys that a Plan and a layout share, values included.
_SAME = (
    *DEGREES, "schedule", "stages_per_rank", "attention_exit", "context", "dispatcher", "payload",
    "combine", "dispatch_chunks", "spare_slots",
)  # fmt: skip
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
    if plan.schedule not in get_args(ScheduleName):
        raise UserError(
            f"schedule = {plan.schedule} has no formulas to be priced by: give the name of a "
            "schedule like it (1f1b, zb_h1, ...); `moemesh schedule` simulates a file or a search"
        )
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    wide = 8 if dtype == "float64" else 4
    masters = 4 if dtype in ("bfloat16", "float16") else 0
    layers_per_stage = plan.layers_per_stage
    if model is not None and layers_per_stage is None and plan.num_stages > 1:
        layers_per_stage = tuple(len(cut) for cut in cut_layers(model, plan.num_stages))
    return PlannedLayout(
        **{key: getattr(plan, key) for key in _SAME},
        seq_len=seq_len,
        global_batch=global_batch,
        microbatch=max(share, 1),
        layers_per_stage=layers_per_stage,
        zero=_ZERO[plan.data],
        recompute=RECOMPUTED[plan.recompute],
        precision=dtype,
        dtype=dtype,
        gradient_bytes=wide,
        optimizer_bytes=2 * wide + masters,
        ranks_per_node=plan.ranks_per_node or 0,
    )


def plan_of(layout: PlannedLayout) -> Plan:
    """The Plan next to a layout: equal to it where :func:`from_plan` gives the layout back."""
    recompute = next((word for word, parts in RECOMPUTED.items() if parts == layout.recompute), "")
    node, world = layout.ranks_per_node, layout.world_size
    return Plan(
        **{name: getattr(layout, name) for name in _SAME},
        layers_per_stage=layout.layers_per_stage,
        microbatches=layout.microbatches,
        data=DATA[layout.zero],
        recompute=cast("Recompute", recompute or "none"),
        # A single node is what a plan without node borders has.
        ranks_per_node=node if 0 < node < world else None,
    )


def untrained(layout: PlannedLayout, model: Model) -> list[Problem]:
    """What of a layout `moemesh train` refuses or has no key for; empty where it carries it out."""
    if model.config is None:
        message = "`moemesh train` has the models of its presets and of [model] tables only"
        return [Problem(code="not-available", key="model", message=message)]
    plan, batch = plan_of(layout), {"seq_len": layout.seq_len, "global_batch": layout.global_batch}
    config = RunConfig(
        model=model.config,
        plan=plan,
        data=DataConfig(**batch),
        train=TrainConfig(dtype="bfloat16"),
    )
    again = from_plan(plan, **batch).changed(
        ranks_per_node=layout.ranks_per_node, layers_per_stage=layout.layers_per_stage
    )
    unsaid = [
        plan_problem(layout, "not-available", item.name, "no key of [plan] says this", "")
        for item in fields(layout)
        if getattr(again, item.name) != getattr(layout, item.name)
    ]
    return [*unsaid, *config.check(), *refusals(config), *step_problems(plan)]


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
