"""Loads and placements from files: JSON, CSV, NumPy, and the loads of a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from moemesh.balance.inputs import BalanceError
from moemesh.config.limits import parse_json
from moemesh.config.toml import is_number, unreadable
from moemesh.trace.loads import read_loads

#: Names under which a file may hold its loads, and its placement.
LOAD_KEYS = ("loads", "weight", "tokens_per_expert")
PLACEMENT_KEYS = ("physical_to_logical",)
#: Headers of a column that names the rows of a table.
_ROW_NAMES = ("", "layer", "layers", "layer_id", "layer_index", "layer_idx", "index", "idx", "id")


def load_table(path: Path, warn: Callable[[str], None] = lambda _: None) -> np.ndarray[Any, Any]:
    """Loads [layers, experts] of a file, or of a run's folder (tokens over all its steps).

    One row (or one list) is one layer. `warn` is told of a first column that names the rows and is
    left out, and of one that may do so. Raises BalanceError.
    """
    if path.is_dir():
        path = path / "loads.jsonl"
    return _read(path, LOAD_KEYS, warn)


def load_placement(path: Path) -> np.ndarray[Any, Any]:
    """Slots [layers, slots] of a file, as `moemesh balance --json` writes it."""
    # Slots that only count are as good as others.
    return _read(path, PLACEMENT_KEYS, lambda _: None)


def gpus_of(path: Path) -> int | None:
    """The GPUs of the placement in a file, where it says them: a file of `moemesh balance`."""
    try:
        found: object = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = cast("dict[str, object]", found).get("num_gpus") if isinstance(found, dict) else None
    return value if isinstance(value, int) else None


def _read(path: Path, keys: tuple[str, ...], warn: Callable[[str], None]) -> np.ndarray[Any, Any]:
    readers: dict[str, Callable[[Path], Any]] = {
        ".json": lambda path: parse_json(path.read_text(encoding="utf-8")),
        ".jsonl": partial(_read_run, keys=keys),
        ".csv": partial(_read_csv, warn=warn),
        ".npy": _read_numpy,
        ".npz": _read_numpy,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise BalanceError(f"{path}: not a file of a known kind ({', '.join(readers)})")
    try:
        found = reader(path)
        if isinstance(found, dict):
            held = cast("dict[str, Any]", found)
            key = next((key for key in keys if key in held), None)
            if key is None:
                names = ", ".join(sorted(held)) or "nothing"
                raise BalanceError(f"no {' or '.join(keys)} in it: it has {names}")
            found = held[key]
        table = _as_numbers(path, found)
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
    return table[None] if table.ndim == 1 else table


def _as_numbers(path: Path, table: Any) -> np.ndarray[Any, Any]:
    """An array of numbers. Raises BalanceError with the first row of another length than the first,
    or the first cell that is no number."""
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
    if array.dtype.kind in "iufb":
        return array
    if not isinstance(table, list):
        raise BalanceError(f"{path}: holds {array.dtype}, and not numbers")
    for number, row in enumerate(rows if isinstance(rows[0], list) else [rows]):
        for cell in cast("list[object]", row):
            if isinstance(cell, bool) or not isinstance(cell, (int, float)):
                raise BalanceError(
                    f"{path}: row {number} holds {json.dumps(cell)}, which is no number"
                )
    return np.asarray(table, np.float64)  # integers of more than 64 bits


def _read_csv(path: Path, warn: Callable[[str], None]) -> Any:
    # Spreadsheets begin a file with a mark of its encoding.
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    header = rows.pop(0) if rows and not any(map(is_number, rows[0][:2])) else None
    if header is None and rows and rows[0][0].strip().lower() in _ROW_NAMES:
        header = rows.pop(0)  # as pandas writes it: experts have numbers for names
    if not rows:
        raise BalanceError(f"{path}: no row of numbers with commas between them")
    if header is not None and header[0].strip().lower().rstrip("s") in ("expert", "expert_id"):
        raise BalanceError(
            f"{path}: its rows are experts (the first column is {header[0]!r}); "
            "every row is a layer, with a load for each expert"
        )
    named = header is not None and header[0].strip().lower() in _ROW_NAMES
    # Words in every row are names, too ("1,000" is a number that we do not read, and no word).
    named |= not any(is_number(row[0]) or row[0].strip()[:1].isdigit() for row in rows)
    if len(rows[0]) > 1 and named:
        rows = [row[1:] for row in rows]
        warn(f"{path}: the first column names the rows: it is no expert's load")
    elif header is None:
        # A first column or row that only counts cannot be told from loads without a header.
        column = [row[0].strip() for row in rows]
        for what, cells, name in (("column", column, "layer"), ("row", rows[0], "e0,e1,...")):
            counted = [str(number) for number in range(len(cells))]
            from_one = [str(number) for number in range(1, len(cells) + 1)]
            if len(cells) > 2 and [cell.strip() for cell in cells] in (counted, from_one):
                warn(
                    f"{path}: the first {what} only counts ({', '.join(cells[:3])}, ...) and is "
                    f"taken for loads; if it is none, write a header that begins with {name}"
                )
    table: list[list[float]] = []
    for number, row in enumerate(rows):
        wrong = [cell for cell in row if not is_number(cell)]
        if wrong:
            raise BalanceError(f"{path}: row {number} holds {wrong[0]!r}, which is no number")
        table.append([float(cell) for cell in row])
    return table


def _read_numpy(path: Path) -> Any:
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded  # pyright: ignore[reportUnknownVariableType]
        with loaded:
            data = {name: loaded[name] for name in loaded.files}
    except OSError:
        raise
    except Exception as error:  # damage ends in errors of zipfile, zlib, struct, tokenize and numpy
        raise BalanceError(f"{path}: no NumPy file of numbers, or a damaged one") from error
    return next(iter(data.values())) if len(data) == 1 else data


def _read_run(path: Path, keys: tuple[str, ...]) -> Any:
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
