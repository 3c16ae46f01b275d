"""The words of run tables made uniform: states, blanks, ZeRO stages, recomputation, counts.

Tables of other teams say "OOM" or "out of memory", "ZeRO-1" or "1", "4k" or "4096", "n/a" or
nothing. What a cell does not say in a known word is left as it is, and ends up in the row's reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
