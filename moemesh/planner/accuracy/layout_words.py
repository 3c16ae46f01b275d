"""Layouts in one cell of a table of runs: "FSDP 8 + TP 4", "TP=4, PP=2", "8-way tensor", and the
degrees of a column "TP x PP".

Words are those of ``presets/calibration/rows.toml``. A cell is read whole or not at all: a word
that was skipped could change the layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moemesh.config.sources import read_preset_table

#: Separators between numbers of one cell, and between the words of one name.
_SEPARATORS = r"[\s_×x*/,;+|&()\[\]-]+"
#: Words around degrees in the name of a column: "Parallelism (TP, PP)".
_FRAMES = "(?:[23]d|parallel(?:ism)?|layout|mesh|strategy|config(?:uration)?|degrees?|sizes?)"
#: Words without which a layout reads the same.
_FILLERS = r"[^\w.]+|\b(?:and|with|parallel(?:ism)?|x)\b"


def _words() -> dict[str, str]:
    """Column -> pattern of its words; "fsdp" is the degree of ZeRO-3."""
    table: dict[str, Any] = read_preset_table("rows", "calibration")
    return table["layout"]


def joined_degrees(name: str) -> list[str]:
    """The words of a column's name that lists degrees ("TP x PP", "(t, p, d)"); none for others."""
    words = re.split(_SEPARATORS, re.sub(r"(?<=[a-z]p)x(?=[a-z]+p)", ",", name).strip(" ()[]"))
    words = [word for word in words if not re.fullmatch(_FRAMES, word)]
    is_listed = re.search(r"[×*/,+|&]| x |px[a-z]", name) or all(1 < len(x) < 5 for x in words)
    known = (any(re.fullmatch(pattern, x) for pattern in _words().values()) for x in words)
    return words if len(words) > 1 and is_listed and all(known) else []


def joined_cell(words: Sequence[str], text: str) -> str:
    """The numbers of a cell with the words of its column; any other cell is unchanged."""
    numbers = re.split(_SEPARATORS, text.strip(" ()[]"))
    if len(numbers) != len(words) or not all(number.isdecimal() for number in numbers):
        return text
    return ", ".join(f"{word} {number}" for word, number in zip(words, numbers, strict=True))


def layout_in_words(text: str) -> dict[str, str]:
    """Column -> value of a layout in one cell. `hsdp` is the number of shards of an HSDP of two
    numbers, whose order the cell does not state. Raises ValueError for words that are not read."""
    values: dict[str, str] = {}

    def take(name: str, pattern: str, rest: str) -> str:
        if numbers := {next(filter(None, m.groups()), "") for m in re.finditer(pattern, rest)}:
            if len(numbers) > 1 or name in values:
                raise ValueError(f"layout is `{text}`: two numbers for {name}")
            values[name] = numbers.pop()
        return re.sub(pattern, " ", rest)

    rest = re.sub(r"fsdp[12](?!\d)", "fsdp", text.lower())  # the version of PyTorch's
    if pair := re.search(r"hsdp[ :=(]*(\d+) ?[x×*] ?(\d+)\)?", rest):
        replicas, values["hsdp"] = pair.groups()
        values |= {"dp": str(int(replicas) * int(pair[2])), "zero": f"3(shard within {pair[2]})"}
        rest = rest.replace(pair[0], " ")
    rest = re.sub(r"(?<=\d)\s*[x×*]\s*(?=[a-z])", ", ", rest)
    for name, words in _words().items():
        word = rf"(?<![a-z])(?:{words})"
        number = r"(?:[ _-]+(?:size|degree))?[ _-]*[=:]?\s*(\d+)(?:[ -]way)?(?![\w.]*[.x×*]\d)"
        rest = take(name, rf"(?<![\d.])(\d+)[ -]?way[ -](?:{words})(?![a-z])|{word}{number}", rest)
        if name in ("fsdp", "hsdp", "dp", "sp"):
            rest = take(name, rf"(?<!\d){word}(?!\s*[\w=:])", rest)
    if unread := re.sub(_FILLERS, " ", rest).strip():
        raise ValueError(f"layout is `{text}`: `{unread}` is not read; write TP 4, PP 2, FSDP 8")
    return _as_columns(values, text)


def _as_columns(values: Mapping[str, str], text: str) -> dict[str, str]:
    columns = {name: value for name, value in values.items() if name != "fsdp"}
    if values.get("hsdp") == "":
        columns["zero"] = "3(shard within node)"
    elif values.get("hsdp") and "zero" not in values:
        raise ValueError(f"layout is `{text}`: write HSDP with replicas and shards, HSDP 2 x 8")
    if "sp" in values:
        columns["sp"] = values["sp"] or "1"
        if columns["sp"] not in ("0", "1"):
            raise ValueError(f"layout is `{text}`: sp is on or off, not a degree")
    if (shards := values.get("fsdp")) is not None:
        if values.get("zero", "3") != "3":
            raise ValueError(f"layout is `{text}`: FSDP is ZeRO-3, not ZeRO-{values['zero']}")
        replicas = values.get("dp") or "1"
        columns["zero"] = f"3(shard within {shards})" if shards and replicas != "1" else "3"
        columns["dp"] = str(int(replicas) * int(shards)) if shards else values.get("dp", "")
    return {name: value for name, value in columns.items() if value}
