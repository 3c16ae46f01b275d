"""Cells of tables of measured runs: names of columns, uniform spellings, numbers with their units.

Tables of other teams write "OOM" or "out of memory", "ZeRO-1" or "1", "4k" or "4096", "n/a" or
nothing. An unknown spelling is left unchanged. In most columns it is reported in the row's reason;
in `recompute` it counts as not published. Facts that only a remark or the source of a table has are
added as columns; a table may also have these columns itself. Spellings and rules are those of
``presets/calibration/rows.toml``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise, zip_longest
from typing import Any, cast

from moemesh.config.limits import parse_json
from moemesh.config.plan import DEGREES
from moemesh.config.schema import all_keys
from moemesh.config.sources import read_preset_table
from moemesh.config.suggest import aliases
from moemesh.planner.accuracy.layout_words import joined_cell, joined_degrees, layout_in_words

#: Software stack of runs whose table names none: the author's own.
OWN_STACK = "own"
#: Columns of whole numbers; "4k" is one of them.
_COUNTS = ("gpus", "nodes", "node_gpus", "mp", "tp", "pp", "dp", "ep", "cp", "etp", "mbs",
           "accumulation", "gbs", "seq")  # fmt: skip
_COUNT = re.compile(
    r"([\d,]*\d(?:\.\d+)?)\s*(k|m?)(?: *(?:tokens|sequences|seqs|gpus))?", re.IGNORECASE
)
#: Columns that a table must have, or its title as facts.
NEEDED_COLUMNS = ("arch", "hardware", "seq")
#: Measured columns, with the least and the largest number that a run can show.
_MEASURED = {
    "step_time_s": (1e-6, 1e8),
    "tokens_s_gpu": (1e-6, 1e12),
    "tokens_s": (1e-6, 1e15),
    "samples_s": (1e-9, 1e12),
    "tflops_gpu": (1e-9, 1e9),
    "mfu_pct": (1e-9, 1e3),
    "hfu_pct": (1e-9, 1e3),
    "mem_gib": (1e-6, 1e6),
    "batch_tokens": (1, 1e12),
}
#: Columns of a rate whose unit is in its cells.
_RATES = ("throughput", "throughput_gpu")
#: Columns that are a GPT in place of its name.
GPT_SIZES = ("layers", "hidden", "heads")
#: Columns that may have another name.
READ_COLUMNS = frozenset({
    "id", *NEEDED_COLUMNS, *_COUNTS, *_MEASURED, "vpp", "zero", "sp", "precision", "recompute",
    "status", "stack", "layout", *GPT_SIZES, "size", "params_b", "method", "notes", *_RATES,
})  # fmt: skip
#: A number, "k", and a unit.
_QUANTITY = re.compile(r"[~≈]? *([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?|inf|nan) *(k?) *(.*)")
#: "± 0.2", "(±0.2)", "(± 2 %)".
_DEVIATION = r"\s*(?:\((?:±|\+/-)\s*[\d.,]+\s*%?\)|(?:±|\+/-)\s*[\d.]+)"
#: The end of a unit of one device.
_PER_DEVICE = r"(?:[_/]| per )(?:gpu|device|accelerator|chip)$"
#: Marks of a footnote or of the best figure, at the end of a cell or around it.
_MARKS = re.compile(r"^\*+(?=\S)|\s*\^?(?:[*†‡§¶¹²³]|\\(?:d?dag(?:ger)?|ast)\b|\[\d+\])+$")
#: Two figures in one cell, "30624 (29521)": those of the first and of a second setting.
_SECOND = re.compile(r"([\d.,]+k?) \([\d.,]+k?\)")
#: Memory in use and that of the device: "59/80".
_OF_WHOLE = re.compile(r"([\d.]+) ?/ ?[\d.]+")
#: A time of hours, minutes and seconds: "1m30s", "00:01:30".
_CLOCK = re.compile(
    r"(?:(\d+) ?h(?:ours?)? ?)?(?:(\d+) ?m(?:ins?)? ?)?(\d+(?:\.\d+)?) ?s(?:ec)?"
    r"|(\d+):(\d\d):(\d\d(?:\.\d+)?)"
)
#: A comma before other than three digits is that of decimals.
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=(\d{1,2}|\d{4,})(?!\d)(?!,))")


@cache
def spellings() -> dict[str, Any]:
    """``columns.names``: (pattern of a name, our column, unit); ``unit``: column -> unit -> factor,
    negative for a unit of the reciprocal; ``title`` and ``layout``: column -> pattern of its words;
    ``spelling``: column -> (pattern of a whole cell, uniform spelling), the first match counts;
    ``precision``: number type -> pattern; ``recompute``: word -> part of a layout's recomputation;
    ``rule``: in order, "when" (column -> pattern) and "set" (column -> value)."""
    return read_preset_table("rows", "calibration")


def own_columns(names: Sequence[str]) -> list[tuple[str, str]]:
    """Our column and the unit of its cells for each column of a table, as far as its name is known
    and the table has no column of that name. `/` is read as "per", `#` as "num", `%` as "percent",
    and other characters than letters and digits as underscores: "Tokens / sec / GPU" is
    "tokens_per_sec_per_gpu". Of two names for one column a key of the configuration counts, else
    that of the earlier pattern. Several columns may be a layout."""
    given = [name.strip().lower() for name in names]
    marks = str.maketrans({"#": "num ", "/": " per ", "%": " percent "})
    spoken = [name.translate(marks) for name in given]
    names = [re.sub(r"\W+", "_", name).strip("_") for name in spoken]
    dotted = {"data.seq_len": "seq", "data.global_batch": "gbs", "plan.stages_per_rank": "vpp",
              "model.preset": "arch", "model.path": "arch"}  # fmt: skip
    known: list[tuple[int, int, str, str]] = []  # priority, place, our column, unit
    for place, (spelled, name) in enumerate(zip(given, names, strict=True)):
        key = spelled if spelled in all_keys() else aliases().get(name, "")
        known += [(-1, place, dotted.get(key, key.partition(".")[2]), "")] if key else []
        known += [
            (number, place, column, unit)
            for number, (pattern, column, unit) in enumerate(spellings()["columns"]["names"])
            if re.fullmatch(pattern, name)
        ]
    joined = {place: ",".join(joined_degrees(name)) for place, name in enumerate(given)}
    columns = [
        ("layout", joined[place]) if joined[place] else (n, "") for place, n in enumerate(names)
    ]
    taken, placed = {*names} - {"layout"}, {place for place in joined if joined[place]}
    for _, place, column, unit in sorted(known):
        if column in READ_COLUMNS and column not in taken and place not in placed:
            columns[place] = column, unit
            taken |= {column} - {"layout"}
            placed.add(place)
    return columns


def table_lines(data: bytes) -> tuple[str, list[str], list[tuple[int, list[str]]]]:
    """The titles above the names, the names of the columns, and the number and cells of each line
    that is not empty, of a table separated by , ; | & or tabs, of Markdown or of LaTeX, or of
    objects in JSON, in a list or one on each line. Names in two lines are joined; a table with its
    names down the first column is turned, and its rows are numbered. Between semicolons a comma may
    be that of decimals, with points between thousands. Raises UnicodeDecodeError and csv.Error."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = data.decode("utf-16")
    elif b"\0" in data[:1000]:
        raise csv.Error("it is not text; save it as CSV")
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252")
    if records := _objects(text):
        names = list(dict.fromkeys(name for record in records for name in record))
        table = ([record.get(name, "") for name in names] for record in records)
        return "", names, list(enumerate(table, start=1))
    if re.search(r"&.*\\\\", text):
        text = re.sub(r"(?m)^[^&\n]*$|\\\\.*$", "", text)  # rules; ends of rows
        text = re.sub(r"\$?\s*\\pm\s*\$?[\d.]+|\$|\\,|\\(?=[#%_])|\\[a-z]+(?=\{)|[{}]", "", text)
    full = [line for line in text.splitlines() if line.strip(" ,;")] or [""]
    # A title has other separators than the line below it, or fewer.
    pairs = ((max(",;\t|&", key=line.count), line, below) for line, below in pairwise([*full, ""]))
    separators = (mark for mark, *two in pairs if min(x.count(mark) for x in two) > 1)
    separator = next(separators, max(",;\t|&", key=max(full, key=len).count))
    if separator == "|":
        text = re.sub(r"(?m)^[ \t]*\|?[-:| \t]*$|^[ \t]*\||\|[ \t]*$", "", text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines = [(reader.line_num, [_joined(cell.strip()) for cell in cells]) for cells in reader]
    lines = [(number, cells) for number, cells in lines if any(cells)]
    # Titles: lines of one cell, and lines without known names above a line that has some.
    titles = list[str]()
    if any(len(cells) > 1 for _, cells in lines):
        while len(lines[0][1]) == 1:
            titles += lines.pop(0)[1]
    while len(lines) > 1:
        cells, below = [list(filter(None, cells)) for _, cells in lines[:2]]
        named = num_known(below)
        is_title = num_known(cells) == 0 and (named > 2 or named == len(below) == 2)
        if not is_title and (len(cells) > 1 or len(below) == 1):
            break
        titles += lines.pop(0)[1]
    # Names down the first column: turn the table.
    down = num_known(cells[0] for _, cells in lines)
    if down > 2 and down > num_known(lines[0][1]):
        if lines[0][1][0].lower() in ("", "key", "setting", "parameter", "metric"):
            lines[0][1][0] = "id"
        columns = zip_longest(*(cells for _, cells in lines), fillvalue="")
        lines = [(number, list(cells)) for number, cells in enumerate(columns)]
    header = lines.pop(0)[1] if lines else []
    # Names in two lines: a unit in brackets is joined, another name replaces the one above it.
    if "" in header and lines and not re.search(r"\d", "".join(lines[0][1])):
        pairs = zip_longest(header, lines.pop(0)[1], fillvalue="")
        header = [f"{up} {low}" if low[:1] in ("(", "[") else low or up for up, low in pairs]
    whole = r"[+-]?(\d{1,3}(\.\d{3})+|\d+)"
    every = (cell for _, cells in lines for cell in cells)
    if separator == ";" and any(re.fullmatch(rf"{whole},\d+", cell) for cell in every):
        point = str.maketrans(",", ".", ".")
        for _, cells in lines:
            is_number = (re.fullmatch(rf"{whole}(,\d+)?", cell) for cell in cells)
            cells[:] = [
                c.translate(point) if n else c for c, n in zip(cells, is_number, strict=True)
            ]
    return " ".join(filter(None, titles)), header, lines


def _objects(text: str) -> list[dict[str, str]]:
    """The objects of a JSON list, or of JSON on every line, with their values as cells; none in any
    other text. Raises csv.Error for invalid JSON."""
    if re.match(r'\s*\[?\s*\{\s*"', text) is None:
        return []
    is_list = text.lstrip().startswith("[")
    is_whole = is_list or "\n{" not in text.strip()
    values: list[object] = []
    for number, line in enumerate([text] if is_whole else text.splitlines(), start=1):
        try:
            if line.strip():
                values.append(parse_json(line))
        except ValueError as error:
            place = "" if is_whole else f"line {number}: "
            raise csv.Error(f"{place}JSON that cannot be read: {error}") from error
    records: list[dict[str, str]] = []
    for record in cast("list[object]", values[0]) if is_list else values:
        if not isinstance(record, dict):
            return []
        items = cast("dict[str, object]", record).items()
        records.append(
            {
                name: "" if cell is None else cell if isinstance(cell, str) else json.dumps(cell)
                for name, cell in items
            }
        )
    return records


def num_known(names: Iterable[str]) -> int:
    """The number of names of known columns."""
    return sum(name in READ_COLUMNS for name, _ in own_columns([*names]))


def _joined(cell: str) -> str:
    """The cell without spaces and apostrophes between the thousands of a number."""
    is_number = re.fullmatch(r"[+-]?\d{1,3}([ '’\u00a0\u202f]\d{3})+([.,]\d+)?", cell)
    return re.sub(r"[ '’\u00a0\u202f]", "", cell) if is_number else cell


def uniform_row(row: Mapping[str, str]) -> dict[str, str]:
    """The row with uniform spellings, each rate in the column of its unit, and the degrees of a
    layout in their columns. `unread` is the reason of a cell that has no clear meaning."""
    uniform, words = dict(row), spellings()["spelling"]
    (oom,) = (pattern for pattern, word in words["status"] if word == "OOM")
    rates = {name: uniform.pop(name, "").strip() for name in _RATES}
    if not any(uniform.get(name) for name in _MEASURED.keys() - {"mem_gib", "batch_tokens"}):
        cells = [_rate_in(text, name) for name, text in rates.items() if text]
        # A rate that is a word or has no unit is dropped if another rate, the memory or the status
        # is known; else it is the row's reason.
        known = [
            rate
            for rate in cells
            for text in rate.values()
            if "unread" not in rate and (_quantity(text) or re.fullmatch(oom, text, re.IGNORECASE))
        ]
        if known or uniform.get("mem_gib") or uniform.get("status"):
            cells = known
        for rate in cells:
            uniform |= rate
    for name in uniform.keys() & {*_MEASURED, *_COUNTS, "vpp", "zero"}:
        uniform[name] = _MARKS.sub("", uniform[name].strip())
        if name != "zero":
            uniform[name] = _SECOND.sub(r"\1", uniform[name])
    # FLOP/s in place of TFLOP/s are dropped beside a rate of tokens or samples.
    rates_known = any(uniform.get(name) for name in ("tokens_s_gpu", "tokens_s", "samples_s"))
    if rates_known and re.fullmatch(r"[\d.]+e\+1\d", uniform.get("tflops_gpu", ""), re.IGNORECASE):
        uniform["tflops_gpu"] = ""
    if match := _OF_WHOLE.fullmatch(uniform.get("mem_gib", "")):
        uniform["mem_gib"] = match[1]
    if re.fullmatch(rf"{_QUANTITY.pattern}tokens", uniform.get("gbs", "").lower()):
        uniform |= {"gbs": "", "batch_tokens": uniform.get("batch_tokens") or uniform["gbs"]}
    for name in uniform.keys() & {*_MEASURED}:  # printed in place of a time or a memory
        if re.fullmatch(oom, uniform[name], re.IGNORECASE):
            uniform |= {name: "", "status": uniform.get("status") or "OOM"}
    for name in uniform.keys() & READ_COLUMNS - {"id", "arch", "hardware"}:
        text = uniform[name].strip()
        if name in _MEASURED and text.lower() == "nan":
            continue  # a measure that failed
        missing = words["missing"] if name != "status" else ()
        known = (
            match.expand(word)
            for pattern, word in (*words.get(name, ()), *missing)
            if (match := re.fullmatch(pattern, text, re.IGNORECASE))
        )
        uniform[name] = next(known, text)
        if name in _COUNTS and (number := _COUNT.fullmatch(uniform[name])):
            digits, unit = number[1].replace(",", ""), number[2].lower()
            # "k" is 1024 in every count ("4k" is 4096); "m", 1024 x 1024, is read in lengths only.
            tokens = float(digits) * 1024 ** (1 + (unit == "m"))
            if not unit or (tokens.is_integer() and (unit == "k" or name == "seq")):
                uniform[name] = str(int(tokens)) if unit else digits
    # Sequence parallelism of a degree, if it is not that of tensor groups, is context parallelism.
    if (degree := uniform.get("sp", "")).isdecimal() and int(degree) > 1:
        uniform["sp"] = "1" if degree == uniform.get("tp") else ""
        if not uniform["sp"]:
            uniform["cp"] = uniform.get("cp") or degree
    ways = uniform.get("mp") or "1"
    if ways != "1" and not (uniform.get("tp") and uniform.get("pp")):
        uniform["unread"] = f"mp is `{ways}`: tensor or pipeline parallelism? Write tp and pp"
    if text := uniform.get("layout"):
        try:
            layout = layout_in_words(text)
        except ValueError as error:
            if not any(uniform.get(name) for name in ("tp", "pp", "dp", "zero")):
                uniform["unread"] = str(error)
            layout = {}
        for name, value in layout.items():
            given = uniform.get(name) or value
            if given != value and not (name == "zero" and given[0] == value[0]):
                uniform["unread"] = f"layout is `{text}`, but {name} is `{given}`"
            uniform[name] = given
    return uniform


def _rate_in(text: str, name: str) -> dict[str, str]:
    """The measured column, and its cell, of a rate with its unit in the column `name`."""
    match = _quantity(_MARKS.sub("", text))
    if match is None:
        return {"tokens_s": _MARKS.sub("", text)}  # "OOM", or none
    unit = re.sub(_PER_DEVICE, "", match[3])
    is_of_device = unit != match[3] or name.endswith("_gpu")
    tokens, others = ("tokens_s_gpu", ()) if is_of_device else ("tokens_s", ("samples_s",))
    for column in (tokens, *others, "tflops_gpu", "step_time_s"):
        if unit in spellings()["unit"][column]:
            return {column: f"{match[1]}{match[2]} {unit}"}
    return {"unread": f"throughput is `{text}`: write tokens/s, samples/s or TFLOP/s after it"}


def annotated_row(row: Mapping[str, str], generation: str) -> dict[str, str]:
    """The row with additional columns from the rules; columns that it has are kept.

    `generation` is that of its device, "" if unknown.
    """
    columns = dict(row) | {"generation": generation}
    flags = re.IGNORECASE | re.DOTALL
    for rule in spellings()["rule"]:
        when = rule.get("when", {}).items()
        matches = [re.search(pattern, columns.get(name, ""), flags) for name, pattern in when]
        if all(matches):
            for name, word in rule["set"].items():
                # \1 in a word is the text that the last pattern captured.
                value = matches[-1].expand(word) if matches and matches[-1] else word
                columns[name] = columns.get(name) or value
    columns["stack"] = columns.get("stack") or row.get("src") or OWN_STACK
    return columns


def decimal_in(row: Mapping[str, str], name: str) -> float:
    """The number in a column, 0 for an empty cell. Raises ValueError."""
    try:
        return float(row.get(name) or 0)
    except ValueError:
        raise ValueError(f"{name} is `{row[name]}`: not a number") from None


def whole_in(row: Mapping[str, str], name: str, default: int) -> int:
    """The whole number in a column, `default` for an empty cell. Raises ValueError."""
    text = row.get(name, "").strip()
    try:
        number = float(text or default)
    except ValueError:
        number = 0.5
    if not math.isfinite(number) or number != int(number):
        raise ValueError(f"{name} is `{text}`: not a whole number")
    if number < (name in DEGREES and text != ""):
        raise ValueError(f"{name} is `{text}`: at least 1")
    return int(number)


def with_unit(text: str, unit: str) -> str:
    """The cell with the unit of its column, unless it has one of its own, or with the words of a
    column of several degrees. In a column of FSDP the first of two settings counts."""
    if unit == "fsdp":
        text = _SECOND.sub(r"\1", text)
    if "," in unit:
        return joined_cell(unit.split(","), text)
    if unit == "fsdp":  # a switch, too
        switches = spellings()["spelling"]["sp"]
        is_on = (word for form, word in switches if re.fullmatch(form, text, re.IGNORECASE))
        text = next(is_on, text)
    match = _quantity(_MARKS.sub("", text)) if unit else None
    return f"{match[0]} {unit}" if match and not match[3] else text


def _quantity(text: str) -> re.Match[str] | None:
    """Number, "k" and unit of a cell, without its deviation."""
    number_text = re.sub(_DEVIATION, "", text.strip().lower())
    return _QUANTITY.fullmatch(_DECIMAL_COMMA.sub(".", number_text))


def measured_in(row: Mapping[str, str], name: str) -> float | None:
    """The number of a measured column; None for an empty cell. Raises ValueError for a cell that is
    no number with a known unit, and for a number that is impossible for a run."""
    text = row.get(name, "")
    if not text:
        return None
    if name == "step_time_s" and (clock := _CLOCK.fullmatch(text.lower())):
        parts = clock.groups()[3:] if clock[4] else clock.groups()[:3]
        text = str(
            sum(float(part or 0) * size for part, size in zip(parts, (3600, 60, 1), strict=True))
        )
    match = _quantity(text)
    units = {"": 1.0, **spellings()["unit"][name]}
    unit = match[3] if match else None
    if unit and name.endswith(("_gpu", "_gib")):
        unit = re.sub(_PER_DEVICE, "", unit)
    if match is None or unit not in units:
        known = ", ".join(list(units)[1:])
        raise ValueError(f"{name} is `{text}`: not a number, alone or with a unit ({known})")
    number = float(match[1].replace(",", "")) * (1000 if match[2] else 1)
    if units[unit] < 0 and number:
        number = 1 / number
    number *= abs(units[unit])
    if name in ("mfu_pct", "hfu_pct") and number <= 1 and not unit:
        number *= 100  # a share
    least, most = _MEASURED[name]
    if not least <= number <= most:
        raise ValueError(f"{name} is `{text}`: a run shows from {least:g} to {most:g}")
    return number
