"""Loads and placements from files: JSON, CSV, NumPy, torch, and the loads of a run."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

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
#: Headers of columns that number layers, experts, and steps over which loads are summed.
_LAYERS, _EXPERTS, _STEPS = (
    tuple(f"{name}{end}" for name in names for end in ("", "s", "_id", "_index", "_idx"))
    for names in (
        ("layer", "moe_layer"),
        ("expert", "logical_expert"),
        ("step", "iteration", "iter", "forward_pass", "batch", "timestamp", "time"),
    )
)
#: Headers of a column that names the rows of a table.
_ROW_NAMES = ("", *_LAYERS, "index", "idx", "id")
#: Names of one layer, and of one expert, in a header or a first column.
_ONE_LAYER = re.compile(r"(?:layer|l)[ _.-]?\d+", re.IGNORECASE)
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
        ".jsonl": partial(_read_run, keys=keys),
        ".csv": partial(_read_csv, warn=warn),
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
            key = next((key for key in keys if key in values), None)
            if key is None:
                names = ", ".join(sorted(values)) or "nothing"
                raise BalanceError(f"no {' or '.join(keys)} in it: it has {names}")
            content = values[key]
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
    """Raise BalanceError for loads that no placement in reasonable time is for."""
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


def _read_csv(path: Path, warn: Callable[[str], None]) -> Any:
    """Loads of a table [layers, experts], without its header and names."""
    # Spreadsheets begin a file with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    header = rows.pop(0) if rows and not any(map(is_number, rows[0][:2])) else None
    if header is None and rows and rows[0][0].strip().lower() in _ROW_NAMES:
        header = rows.pop(0)  # as written by pandas: experts are named by numbers
    if not rows:
        raise BalanceError(f"{path}: no row of numbers with commas between them")
    if header is not None and (loads := _named_columns(path, header, rows, warn)) is not None:
        return loads
    named = header is not None and header[0].strip().lower() in _ROW_NAMES
    # A first column of words alone names the rows, too. A cell that begins with a digit, such as
    # "1,000", is not a word: it is refused as a number that cannot be read.
    named |= not any(is_number(row[0]) or row[0].strip()[:1].isdigit() for row in rows)
    if len(rows[0]) > 1 and named:
        rows = [row[1:] for row in rows]
        warn(f"{path}: the first column names the rows and is left out of the loads")
    elif header is None:
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


def _numbers(path: Path, number: int, row: Sequence[str]) -> list[float]:
    for cell in row:
        if not is_number(cell):
            raise BalanceError(f"{path}: row {number} holds {cell!r} instead of a number")
    return [float(cell) for cell in row]


def _named_columns(
    path: Path, header: list[str], rows: list[list[str]], warn: Callable[[str], None]
) -> Any:
    """Loads of a table whose header has a column of experts or steps, or columns of layers, or
    whose first column names experts; None for a table with a row for each layer."""
    names = [name.strip().lower() for name in header]
    places = {
        kind: [place for place, name in enumerate(names) if name in headers]
        for kind, headers in (("layer", _LAYERS), ("expert", _EXPERTS), ("step", _STEPS))
    }
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise BalanceError(
                f"{path}: row {number} has {len(row)} cells, the header {len(header)}"
            )
    rest = [
        place for place in range(len(names)) if not any(place in kind for kind in places.values())
    ]
    layers, experts, steps = (places[kind][:1] for kind in ("layer", "expert", "step"))
    names_experts = all(_ONE_EXPERT.fullmatch(row[0].strip()) for row in rows)
    # The first of several columns may name the experts.
    has_layers = len(rest) > 0 and all(_ONE_LAYER.fullmatch(names[p]) for p in rest[1:] or rest)

    def numbers() -> np.ndarray[Any, Any]:
        """The cells in the columns `rest` [rows, columns]."""
        cells = ([row[place] for place in rest] for row in rows)
        return np.array([_numbers(path, number, row) for number, row in enumerate(cells)])

    if not experts and not steps and not layers and (names_experts or has_layers):
        # The first column has the names of experts, if any.
        if not _ONE_LAYER.fullmatch(names[0]):
            rest = [place for place in rest if place]
        warn(f"{path}: every row is an expert, every column a layer")
        return numbers().T
    if not experts and not steps:
        return None
    if steps and not layers:
        raise BalanceError(
            f"{path}: the column {header[steps[0]]!r} counts steps and none names the layer: name "
            "it in a column `layer`, or leave the steps out"
        )
    if experts and not layers:
        order = np.argsort([_whole(path, at, row[experts[0]]) for at, row in enumerate(rows)])
        warn(f"{path}: every row is an expert, every other column a layer")
        return numbers()[order].T
    if experts and len(rest) != 1:
        others = ", ".join(header[place] for place in rest) or "none"
        raise BalanceError(
            f"{path}: a row is one expert of one layer, and one more column is its load; there are "
            f"{others}: keep one"
        )
    sums: dict[tuple[int, int], float] = {}
    for at, row in enumerate(rows):
        layer = _whole(path, at, row[layers[0]])
        loads = _numbers(path, at, [row[place] for place in rest])
        first = _whole(path, at, row[experts[0]]) if experts else 0
        for expert, load in enumerate(loads, start=first):
            sums[layer, expert] = sums.get((layer, expert), 0.0) + load
    layer_ids = sorted({layer for layer, _ in sums})
    num_experts = 1 + max(expert for _, expert in sums)
    _refuse_large(path, len(layer_ids), num_experts)
    table = np.full((len(layer_ids), num_experts), np.nan)
    row_of = {layer: row for row, layer in enumerate(layer_ids)}
    for (layer, expert), load in sums.items():
        table[row_of[layer], expert] = load
    summed = "summed over its rows" if len(rows) * len(rest) > len(sums) else "one row for each"
    text = f"{path}: {len(layer_ids)} layers of {num_experts} experts, {summed}"
    if missing := int(np.isnan(table).sum()):
        text += f"; {missing} experts of a layer have no row and no load"
    warn(text)
    return np.nan_to_num(table)


def _whole(path: Path, number: int, cell: str) -> int:
    """The number of a layer or an expert in a cell."""
    digits = re.fullmatch(r"\s*[A-Za-z_. -]*?(\d{1,6})(?:\.0*)?\s*", cell)
    if digits is None:
        raise BalanceError(f"{path}: row {number} names a layer or expert {cell!r}, no number")
    return int(digits[1])


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
