"""Loads and placements from files: JSON, CSV, NumPy, torch, and the loads of a run."""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from moemesh.balance.inputs import BalanceError
from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_run
from moemesh.config.toml import is_number, unreadable
from moemesh.trace.loads import read_loads

#: Largest number of experts of a layer in a file, and of loads; a placement of more takes minutes.
MOST_EXPERTS, MOST_LOADS = 2**14, 2**24
#: Keys of loads and of a placement in a file.
LOAD_KEYS = ("loads", "weight", "tokens_per_expert", "logical_count", "expert_load")
PLACEMENT_KEYS = ("physical_to_logical",)
#: Keys of every line of a run's loads.
_RUN_KEYS = {"step", "steps", "tokens_per_expert"}
#: Headers of columns that number layers, experts, and steps or ranks, whose loads are summed.
_LAYERS, _EXPERTS, _SUMMED = (
    tuple(f"{name}{end}" for name in names for end in ("", "s", "_id", "_index", "_idx", "_number"))
    for names in (
        ("layer", "moe_layer"),
        ("expert", "logical_expert"),
        (
            *("step", "iteration", "iter", "forward_pass", "batch", "timestamp", "time"),
            *("rank", "ep_rank", "dp_rank", "gpu", "device", "node", "host"),
        ),
    )
)
#: Headers of a column that names the rows of a table.
_ROW_NAMES = ("", *_LAYERS, "index", "idx", "id")
#: Names of one layer, and of one expert, in a header or a first column.
_ONE_LAYER = re.compile(r"(?:.*[^a-z])?(?:layers?|l)[ _.-]?\d+(?:\D.*)?", re.IGNORECASE)
_ONE_EXPERT = re.compile(r"(?:expert|exp|e)[ _.-]?\d+", re.IGNORECASE)


def load_table(path: Path, warn: Callable[[str], None] = lambda _: None) -> np.ndarray[Any, Any]:
    """Loads [layers, experts] of a file, or of a run's folder (tokens summed over all steps).

    One row (or one list) is one layer; a leading axis of steps is summed. `warn` is called with a
    sentence for each column that is left out or may name the rows, for sums, and for tables with a
    row for each expert, or for each expert of each layer. Raises BalanceError.
    """
    if path.is_dir():
        folder, path = path, path / "loads.jsonl"
        if not path.exists() and (near := nearest_run(folder)):
            raise BalanceError(f"{folder} holds no loads: {near}")
    return _read(path, LOAD_KEYS, warn)


def load_placement(path: Path) -> np.ndarray[Any, Any]:
    """Slots [layers, slots] of a file, such as one written by `moemesh balance --json`. Raises
    BalanceError."""
    # Warnings on columns that may be counters do not apply to slots.
    return _read(path, PLACEMENT_KEYS, lambda _: None)


def gpus_of(path: Path) -> int | None:
    """Number of GPUs in a placement file of `moemesh balance`; None in other files."""
    try:
        parsed: object = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None
    value = cast("dict[str, object]", parsed).get("num_gpus") if isinstance(parsed, dict) else None
    return value if isinstance(value, int) else None


def _read(path: Path, keys: tuple[str, ...], warn: Callable[[str], None]) -> np.ndarray[Any, Any]:
    """The numbers of a file [rows, columns]; in a file of named tables, those under the first key
    of `keys` that it has."""
    readers: dict[str, Callable[[Path], Any]] = {
        # Some editors, and PowerShell, begin a file with a byte order mark.
        ".json": lambda path: parse_json(path.read_text(encoding="utf-8-sig")),
        ".jsonl": partial(_read_lines, keys=keys),
        ".csv": partial(_read_csv, keys=keys, warn=warn),
        ".tsv": partial(_read_csv, keys=keys, warn=warn),
        ".npy": _read_numpy,
        ".npz": _read_numpy,
        ".pt": _read_torch,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise BalanceError(f"{path}: not a file of a known kind ({', '.join(readers)})")
    try:
        content = reader(path)
        if isinstance(content, dict):
            values = cast("dict[str, Any]", content)
            given = [key for key in keys if key in values]
            if len(given) != 1:
                names = ", ".join(sorted(values)) or "nothing"
                wanted = "one of " * bool(given) + " or ".join(given or keys)
                raise BalanceError(f"{path}: it must have {wanted}, and has {names}")
            content = values[given[0]]
        records = cast("list[object]", content if isinstance(content, list) else [])
        if records and all(isinstance(record, dict) for record in records):
            content = _records(path, cast("list[dict[str, Any]]", records), keys, warn)
        table = _as_numbers(path, content)
    except BalanceError:
        raise
    except OSError as error:
        raise BalanceError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise BalanceError(f"{path}: lists within lists, too deep for layers x experts") from error
    except UnicodeDecodeError as error:
        raise BalanceError(f"{path}: {unreadable(error)}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise BalanceError(f"{path}: {error}") from error
    if table.ndim == 3 and keys is LOAD_KEYS:
        warn(f"{path}: loads of {len(table)} steps are summed")
        table = table.sum(axis=0)
    table = table[None] if table.ndim == 1 else table
    if keys is LOAD_KEYS and table.ndim == 2:
        _refuse_large(path, *table.shape)
    return table


def _refuse_large(path: Path, num_layers: int, num_experts: int) -> None:
    """Raise BalanceError for more loads than can be placed in reasonable time."""
    if num_experts > MOST_EXPERTS or num_layers * num_experts > MOST_LOADS:
        raise BalanceError(
            f"{path}: {num_layers:,} layer(s) of {num_experts:,} experts: a layer may have "
            f"{MOST_EXPERTS:,} experts, and a file {MOST_LOADS:,} loads"
        )


def _as_numbers(path: Path, table: Any) -> np.ndarray[Any, Any]:
    """`table` as an array of numbers. Raises BalanceError for a row with another length than the
    first one, and for a cell without a number."""
    rows = cast("list[object]", table if isinstance(table, list) else [])
    lengths = [len(cast("list[object]", row)) if isinstance(row, list) else None for row in rows]
    for number, length in enumerate(lengths):
        if length != lengths[0]:
            names = ["one number" if size is None else f"{size} numbers" for size in lengths]
            raise BalanceError(
                f"{path}: row {number} has {names[number]}, row 0 has {names[0]}: every row is a "
                "layer with a load for each expert"
            )
    array: np.ndarray[Any, Any] = np.asarray(cast("Any", table))
    if array.dtype.kind in "iuf" and not _has_bool(cast("object", table)):
        return array
    if not isinstance(table, list):
        raise BalanceError(f"{path}: holds {array.dtype}, and not numbers")
    for number, row in enumerate(rows if isinstance(rows[0], list) else [rows]):
        for cell in cast("list[object]", row):
            if isinstance(cell, bool) or not isinstance(cell, (int, float)):
                raise BalanceError(
                    f"{path}: row {number} holds {json.dumps(cell)} instead of a number"
                )
    return np.asarray(table, np.float64)  # integers of more than 64 bits


def _has_bool(table: object) -> bool:
    """Whether a nested list holds true or false, which numpy takes for 1 and 0."""
    if isinstance(table, list):
        return any(map(_has_bool, cast("list[object]", table)))
    return isinstance(table, bool)


def _read_csv(path: Path, keys: tuple[str, ...], warn: Callable[[str], None]) -> Any:
    """Numbers of a table [layers, columns], without its header and names. Cells are separated by
    tabs or semicolons if the first line has one, else by commas."""
    # Spreadsheets begin a file with a byte order mark.
    text = path.read_text(encoding="utf-8-sig")
    first_line = text.lstrip("\r\n").partition("\n")[0]
    mark = next((mark for mark in "\t;" if mark in first_line), ",")
    try:
        lines = list(csv.reader(io.StringIO(text), delimiter=mark))
    except csv.Error as error:
        raise BalanceError(f"{path}: no table: {error}") from error
    rows = [row for row in lines if any(cell.strip() for cell in row)]
    if rows and (any(map(_kind, rows[0])) or not any(map(_is_numeric, rows[0][:2]))):
        header = rows.pop(0)
    elif rows and len(rows[0]) > 1 and not any(_is_numeric(row[0]) for row in rows):
        # A first column of words names the rows.
        header = ["", *map(str, range(len(rows[0]) - 1))]
    else:
        header = None
    if not rows:
        raise BalanceError(f"{path}: no row of numbers")
    if header is not None:
        return _named_columns(path, header, rows, keys, warn)
    # Without a header a counter in the first column or row cannot be distinguished from loads.
    column = [row[0].strip() for row in rows]
    for what, cells, name in (("column", column, "layer"), ("row", rows[0], "e0,e1,...")):
        counted = [str(number) for number in range(len(cells))]
        from_one = [str(number) for number in range(1, len(cells) + 1)]
        if len(cells) > 2 and [cell.strip() for cell in cells] in (counted, from_one):
            warn(
                f"{path}: the first {what} only counts ({', '.join(cells[:3])}, ...) and is "
                f"taken for loads; if it is none, write a header that begins with {name}"
            )
    return [_numbers(path, number, row) for number, row in enumerate(rows)]


def _is_numeric(cell: str) -> bool:
    """Whether a cell is a number or was meant as one, such as "1,000", which is then refused."""
    return is_number(cell) or cell.strip()[:1].isdigit()


def _numbers(path: Path, number: int, row: Sequence[str]) -> list[float]:
    for cell in row:
        if not is_number(cell):
            raise BalanceError(f"{path}: row {number} holds {cell!r} instead of a number")
    return [float(cell) for cell in row]


def _kind(name: str) -> str | None:
    """The kind of a column, by its header: "layer", "expert", "step" (its rows are summed), or
    "row"; None for loads."""
    word = re.sub(r"[ .-]+", "_", name.strip().lower())
    kinds = {"layer": _LAYERS, "expert": _EXPERTS, "step": _SUMMED, "row": _ROW_NAMES}
    return next((kind for kind, names in kinds.items() if word in names), None)


def _named_columns(
    path: Path,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    keys: tuple[str, ...],
    warn: Callable[[str], None],
) -> np.ndarray[Any, Any]:
    """Loads [layers, experts] of a table with a header, whose rows are layers, experts, or experts
    of one layer each. Layers and experts are in the order of the numbers in their names, if any;
    rows of the same layer and expert are summed. Likewise the slots of a placement."""
    for at, row in enumerate(rows):
        if len(row) != len(header):
            raise BalanceError(f"{path}: row {at} has {len(row)} cells, the header {len(header)}")
    is_placement = keys is PLACEMENT_KEYS
    layer, expert, rest = _roles(path, header, rows, is_placement)
    is_long = layer is not None and expert is not None
    columns = _columns_of_loads(path, [header[place] for place in rest], is_placement)
    rest = [rest[place] for place in columns.places]
    by_layer = layer is None and (expert is not None or columns.are_layers)
    layers = range(len(rows)) if layer is None else _ids(path, [row[layer] for row in rows])
    experts = (
        range(len(rows)) if expert is None else _ids(path, [row[expert] for row in rows], False)
    )
    sums: dict[tuple[int, int], float] = {}
    for at, row in enumerate(rows):
        loads = _numbers(path, at, [row[place] for place in rest])
        for number, load in zip(columns.numbers, loads, strict=True):
            pair = (layers[at], experts[at] if is_long else number)
            pair = (number, experts[at]) if by_layer else pair
            sums[pair] = sums.get(pair, 0.0) + load
    is_summed = len(sums) < len(rows) * len(rest)
    if is_summed and (is_placement or not (is_long or columns.are_numbered)):
        raise BalanceError(
            f"{path}: several rows of one {'expert' if by_layer else 'layer'}: name the expert of "
            "a row in a column `expert`, and its layer in a column `layer`"
        )
    layer_ids, expert_ids = (sorted({pair[place] for pair in sums}) for place in (0, 1))
    # Names such as e1 to e8: no load of expert 0 in any layer, and none of another is missing.
    from_one = expert_ids == list(range(1, len(expert_ids) + 1))
    from_one &= len(sums) == len(layer_ids) * len(expert_ids)
    num_experts = expert_ids[-1] + 1 - from_one
    _refuse_large(path, len(layer_ids), num_experts)
    numbers = range(from_one, from_one + num_experts)
    table = np.array([[sums.get((layer, e), 0.0) for e in numbers] for layer in layer_ids])
    notes, used = list[str](), {layer, expert, *rest}
    if by_layer:
        notes.append("every row is an expert, every other column a layer")
    elif is_long or is_summed:
        counted = (
            f"{count} {name}{'s' * (count != 1)}"
            for count, name in ((len(layer_ids), "layer"), (num_experts, "expert"))
        )
        summed = "summed over its rows" if is_summed else "one row for each"
        notes.append(f"{' of '.join(counted)}, {summed}")
    elif 0 not in rest:
        notes.append("the first column names the rows and is left out of the loads")
        used.add(0)
    if others := [name for at, name in enumerate(header) if not (_kind(name) or at in used)]:
        notes.append(f"left out of the loads: {', '.join(others)}")
    if from_one:
        notes.append("experts are numbered from 1 in it, and from 0 in the answer")
    if missing := table.size - len(sums):
        if is_placement:
            raise BalanceError(f"{path}: {missing} slots of a layer have no expert")
        notes.append(
            f"{missing} expert{'s' * (missing != 1)} of a layer without a row have no load"
        )
    if notes:
        warn(f"{path}: {'; '.join(notes)}")
    return table


def _roles(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], is_placement: bool
) -> tuple[int | None, int | None, Sequence[int]]:
    """The column that names the layer of a row, that which names its expert, and those that may be
    loads."""
    kinds = [_kind(name) for name in header]
    layer, expert, step = (
        kinds.index(kind) if kind in kinds else None for kind in ("layer", "expert", "step")
    )
    rest = [place for place, kind in enumerate(kinds) if kind is None]
    if not rest:
        raise BalanceError(f"{path}: no column of loads: {', '.join(header) or 'no column at all'}")
    first = [row[0].strip() for row in rows]
    if rest[0] == 0 and len(rest) > 1 and not any(map(_is_numeric, first)):
        rest = rest[1:]  # names of the rows, under any header
    if 0 not in rest and layer is None and expert is None:
        expert = 0 if all(map(_ONE_EXPERT.fullmatch, first)) else None
        layer = 0 if all(map(_ONE_LAYER.fullmatch, first)) else None
    if is_placement and (expert is not None or step is not None):
        raise BalanceError(
            f"{path}: a row of a placement is a layer, a column the expert of a slot"
        )
    if step is not None and layer is None:
        raise BalanceError(
            f"{path}: the column {header[step]!r} counts rows to sum, and none names the layer: "
            "name it in a column `layer`, or leave that column out"
        )
    if expert is not None and layer is not None and len(rest) != 1:
        others = ", ".join(header[place] for place in rest)
        raise BalanceError(
            f"{path}: a row is one expert of one layer, and one more column is its load; there are "
            f"{others}: keep one"
        )
    return layer, expert, rest


class _Columns(NamedTuple):
    """Places of the columns of loads, the number of the expert or layer in each, and whether
    their names contain these numbers, and whether they are those of layers."""

    places: Sequence[int]
    numbers: Sequence[int]
    are_numbered: bool = False
    are_layers: bool = False


def _columns_of_loads(path: Path, names: Sequence[str], is_placement: bool) -> _Columns:
    """Those of the columns `names` that differ in one number alone, such as e0 and e1 beside a
    total; without such ones all, in their order. Slots may have the number of their GPU, too."""
    families: dict[tuple[str, ...], list[int]] = {}
    for place, name in enumerate(names):
        texts = tuple(re.split(r"\d+", name.strip().lower()))
        if len(texts) > 1:
            families.setdefault(texts, []).append(place)
    for texts, places in list(families.items()):
        of_one = _ONE_EXPERT.fullmatch(names[places[0]]) or _ONE_LAYER.fullmatch(names[places[0]])
        if len(places) == 1 and not of_one:
            del families[texts]
    if not families:
        return _Columns(range(len(names)), range(len(names)))
    (texts, places), *others = families.items()
    varying = _varying_number([names[place] for place in places])
    if varying is None and is_placement and not others:
        return _Columns(places, range(len(places)))
    if others or varying is None:
        several = ", ".join(names[places[-1]] for places in families.values())
        noun = "slot" if is_placement else "expert"
        raise BalanceError(
            f"{path}: columns such as {several} number more than {noun}s: keep one column for each "
            f"{noun}"
        )
    place, numbers = varying
    return _Columns(
        places, numbers, True, bool(re.search(r"(?<![a-z])(layers?|l)\W*_?$", texts[place]))
    )


def _varying_number(names: Sequence[str]) -> tuple[int, list[int]] | None:
    """The number that alone distinguishes the names: its place among their numbers, and its value
    in each; None if names differ in more, or not at all."""
    parts = [re.split(r"(\d+)", name.strip().lower()) for name in names]
    if any(part[::2] != parts[0][::2] for part in parts):
        return None
    columns = list(zip(*(map(int, part[1::2]) for part in parts), strict=True))
    varying = [place for place, column in enumerate(columns) if len({*column}) > 1]
    if len(names) == 1 and columns:
        varying = [len(columns) - 1]
    if len(varying) != 1 or len({*columns[varying[0]]}) < len(names):
        return None
    return varying[0], list(columns[varying[0]])


def _ids(path: Path, cells: Sequence[str], has_words: bool = True) -> list[int]:
    """Numbers of the layers or experts that the cells of a column name; with `has_words`, words
    without a number are numbered in their order."""
    names = [re.sub(r"^(\d+)\.0*$", r"\1", cell.strip()) for cell in cells]
    distinct = list(dict.fromkeys(names))
    varying = _varying_number(distinct)
    if varying is not None and not any(name.startswith("-") for name in names):
        number_of = dict(zip(distinct, varying[1], strict=True))
    elif has_words and not any(re.search(r"\d", name) for name in names):
        number_of = {name: number for number, name in enumerate(distinct)}
    else:
        at = next((at for at, name in enumerate(names) if not name.isdecimal()), 0)
        raise BalanceError(
            f"{path}: row {at} names a layer or expert {cells[at]!r}: these names must differ in "
            "one number alone, from 0 on"
        )
    return [number_of[name] for name in names]


def _read_torch(path: Path) -> Any:
    """Tensors of a file of torch.save, read without running any code of the file."""
    torch: Any = importlib.import_module("torch")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file raises errors of zipfile, pickle and torch
        raise BalanceError(f"{path}: no file of torch.save with tensors alone") from error
    tables: dict[Any, Any] = {LOAD_KEYS[0]: content}
    if isinstance(content, dict):
        tables = cast("dict[Any, Any]", content)
    return {
        str(name): value.double().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in tables.items()
    }


def _read_numpy(path: Path) -> Any:
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded  # pyright: ignore[reportUnknownVariableType]
        with loaded:
            data = {name: loaded[name] for name in loaded.files}
    except OSError:
        raise
    except Exception as error:  # a damaged file raises errors of zipfile, zlib, struct, tokenize
        raise BalanceError(f"{path}: no NumPy file of numbers, or a damaged one") from error
    return next(iter(data.values())) if len(data) == 1 else data


def _records(
    path: Path,
    records: Sequence[dict[str, Any]],
    keys: tuple[str, ...],
    warn: Callable[[str], None],
) -> np.ndarray[Any, Any]:
    """Numbers of the rows of a table that are objects with the same keys; a list in one of `keys`
    has the loads of a layer."""
    rows: list[dict[str, str]] = []
    for number, record in enumerate(records):
        cells: dict[str, str] = {}
        for name, value in record.items():
            items = {name: value}
            if name in keys and isinstance(value, list):
                items = {f"e{n}": load for n, load in enumerate(cast("list[object]", value))}
            for key, item in items.items():
                cells[key] = item if isinstance(item, str) else json.dumps(item)
        rows.append(cells)
        if cells.keys() != rows[0].keys():
            raise BalanceError(
                f"{path}: object {number} has {', '.join(cells) or 'nothing'}, object 0 has "
                f"{', '.join(rows[0]) or 'nothing'}"
            )
    header = list(rows[0])
    return _named_columns(
        path, header, [[row[name] for name in header] for row in rows], keys, warn
    )


def _read_lines(path: Path, keys: tuple[str, ...]) -> Any:
    """Rows of numbers or objects, one a line, or the loads of a run."""
    rows: list[Any] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(parse_json(line))
                except ValueError as error:
                    raise BalanceError(f"{path}: line {number}: {error}") from error
                is_run = isinstance(rows[0], dict) and rows[0].keys() >= _RUN_KEYS
                if is_run or rows[0] == {}:
                    return _read_run(path, keys)
    return rows or _read_run(path, keys)


def _read_run(path: Path, keys: tuple[str, ...]) -> Any:
    """Tokens of each layer and expert [layers, experts] of a run, summed over its steps."""
    if keys is not LOAD_KEYS:
        raise BalanceError(f"{path}: a run's loads hold no placement")
    sums: dict[int, np.ndarray[Any, Any]] = {}
    with path.open(encoding="utf-8") as file:
        for loads in read_loads(file):
            tokens = np.array(loads.tokens_per_expert)
            before = sums.get(loads.layer)
            if before is not None and len(before) != len(tokens):
                raise BalanceError(
                    f"{path}: layer {loads.layer} has {len(before)} and {len(tokens)} experts"
                )
            sums[loads.layer] = tokens if before is None else before + tokens
    if not sums:
        raise BalanceError(f"{path}: no loads in it")
    return np.stack([sums[layer] for layer in sorted(sums)])
