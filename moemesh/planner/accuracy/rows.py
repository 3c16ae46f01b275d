"""Rows of run tables: uniform words, columns from what notes and sources mean, and the layout.

Tables of other teams say "OOM" or "out of memory", "ZeRO-1" or "1", "4k" or "4096", "n/a" or
nothing. What a cell does not say in a known word is left as it is, and ends up in the row's reason.
What only the source of a table or a remark says is data: ``presets/calibration/rows.toml`` turns it
into columns, which any table may have itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.plan import ScheduleName
from moemesh.planner.layout import AttentionKernel, PlannedLayout, Precision

_BLANK = frozenset({"", "-", "--", "n/a", "na", "nan", "null", "none", "unknown", "?"})
_ENDED = {
    "ok": "ok", "success": "ok", "succeeded": "ok", "completed": "ok", "finished": "ok",
    "oom": "OOM", "cuda oom": "OOM", "out of memory": "OOM", "out-of-memory": "OOM",
}  # fmt: skip
_TRUE = frozenset({"1", "1.0", "true", "yes", "on"})
_FALSE = frozenset({"0", "0.0", "false", "no", "off"})
_COUNTS = ("gpus", "tp", "pp", "dp", "ep", "cp", "etp", "mbs", "gbs", "seq")
_RECOMPUTE = {
    "none": "none", "no": "none", "off": "none", "false": "none", "0": "none", "disabled": "none",
    "full": "full", "yes": "full", "on": "full", "true": "full", "1": "full", "all": "full",
    "selective": "selective",
}  # fmt: skip
_ONE_CHUNK = frozenset({"0", "1f1b", "gpipe", "no", "off"})
_FULL_SHARD = re.compile(r"fsdp2?|full[ _-]?shard|hsdp")
_ZERO_STAGE = re.compile(r"(?:zero[ _-]?)?(?:stage[ _-]?)?([0-3])(?:\.0)?")
_GROUPED = re.compile(r"(?:zero[ _-]?)?([0-3])\s*\((?:.*\D)?(\d+)\s*\)")
_COUNT = re.compile(r"([\d,]*\d(?:\.\d+)?)\s*([kK]?)")


def uniform_row(row: Mapping[str, str]) -> dict[str, str]:
    """The row with known spellings replaced; other columns as they are."""
    found = dict(row)
    for name in _COUNTS:
        if name in found:
            found[name] = _count(found[name])
    for name, word in (
        ("status", _status), ("zero", _zero), ("sp", _flag), ("vpp", _chunks),
        ("recompute", _recompute),
    ):  # fmt: skip
        if name in found:
            found[name] = word(found[name].strip())
    return found


@cache
def _rules() -> tuple[tuple[dict[str, re.Pattern[str]], dict[str, str]], ...]:
    """(column -> what it must match, column -> value) of every rule, in order."""
    home = files("moemesh.config") / "presets" / "calibration"
    table = tomllib.loads((home / "rows.toml").read_text(encoding="utf-8"))
    flags = re.IGNORECASE | re.DOTALL
    return tuple(
        (
            {name: re.compile(text, flags) for name, text in rule.get("when", {}).items()},
            rule["set"],
        )
        for rule in table["rule"]
    )


def told_row(row: Mapping[str, str], generation: str) -> dict[str, str]:
    """The row with the columns that its words mean; columns that it has are kept.

    `generation` of its device, "" when unknown.
    """
    found = dict(row) | {"generation": generation}
    for when, values in _rules():
        if all(pattern.search(found.get(name, "")) for name, pattern in when.items()):
            found |= {name: value for name, value in values.items() if not found.get(name)}
    found["stack"] = found.get("stack") or row.get("src", "")
    return found


def _count(text: str) -> str:
    folded = text.strip()
    if folded.lower() in _BLANK:
        return ""
    if not (number := _COUNT.fullmatch(folded)):
        return text
    digits = number.group(1).replace(",", "")
    if not number.group(2):
        return digits
    # Sequences are counted in 1024 tokens: "4k" is 4096.
    value = float(digits) * 1024
    return str(int(value)) if value.is_integer() else text


def _status(text: str) -> str:
    return _ENDED.get(text.lower(), text)


def _flag(text: str) -> str:
    folded = text.lower()
    if folded in _TRUE:
        return "1"
    return "0" if folded in _FALSE else text


def _chunks(text: str) -> str:
    folded = text.lower()
    return "" if folded in _BLANK or folded in _ONE_CHUNK else text


def _zero(text: str) -> str:
    folded = text.lower()
    if folded in _BLANK or folded in ("ddp", "no", "off"):
        return ""
    if grouped := _GROUPED.fullmatch(folded):
        return f"{grouped.group(1)}(shard within {grouped.group(2)})"
    if stage := _ZERO_STAGE.fullmatch(folded):
        return stage.group(1)
    return "3" if _FULL_SHARD.search(folded) else text


def _recompute(text: str) -> str:
    folded = text.lower()
    if folded in _RECOMPUTE:
        return _RECOMPUTE[folded]
    if folded in _BLANK:
        return ""
    return "full" if re.fullmatch(r"full\b.*", folded) else text


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
    """The recomputation in a table's column `recompute`; raises ConfigError for unknown words."""
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
                        code="not-a-choice",
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
    schedule: ScheduleName = "1f1b"
    if dualpipe:
        schedule = "dualpipe"
    elif stages > 1:
        schedule = "interleaved_1f1b"
    kernels: dict[str, AttentionKernel] = {"eager": "eager", "fused": "fused"}
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
        context="all_to_all" if row.get("context") == "all_to_all" else "ring",
        zero=zero,
        zero_group=int(grouped.group(2)) if grouped else 0,
        recompute=recompute_from_words(row.get("recompute", "")),
        attention_kernel=kernels.get(row.get("kernel", ""), "flash"),
        fused_norm=row.get("fused_norm") != "0",
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
