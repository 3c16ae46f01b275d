"""Loads and placements from files: JSON, CSV, NumPy, and the loads of a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from moemesh.balance.inputs import BalanceError
from moemesh.trace.loads import read_loads

#: Names under which a file may hold its loads, and its placement.
LOAD_KEYS = ("loads", "weight", "tokens_per_expert")
PLACEMENT_KEYS = ("physical_to_logical",)


def load_table(path: Path) -> np.ndarray[Any, Any]:
    """Loads [layers, experts] of a file, or of a run's folder (tokens over all its steps).

    One row (or one list) is one layer. Raises BalanceError.
    """
    if path.is_dir():
        path = path / "loads.jsonl"
    return _read(path, LOAD_KEYS)


def load_placement(path: Path) -> np.ndarray[Any, Any]:
    """Slots [layers, slots] of a file, as `moemesh balance --json` writes it."""
    return _read(path, PLACEMENT_KEYS)


def _read(path: Path, keys: tuple[str, ...]) -> np.ndarray[Any, Any]:
    readers: dict[str, Callable[[Path, tuple[str, ...]], Any]] = {
        ".json": _read_json,
        ".jsonl": _read_run,
        ".csv": _read_csv,
        ".npy": _read_numpy,
        ".npz": _read_numpy,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise BalanceError(f"{path}: not a file of a known kind ({', '.join(readers)})")
    try:
        found = reader(path, keys)
        _check_rows(path, found)
        table = np.asarray(found)
    except BalanceError:
        raise
    except OSError as error:
        raise BalanceError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise BalanceError(f"{path}: lists within lists, too deep for layers x experts") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BalanceError(f"{path}: {error}") from error
    if table.dtype.kind not in "iufb":
        raise BalanceError(f"{path}: holds {table.dtype}, and not numbers")
    return table[None] if table.ndim == 1 else table


def _check_rows(path: Path, table: Any) -> None:
    """Lists in a list must be equally long. Raises BalanceError with the first that is not."""
    if not isinstance(table, list) or not table:
        return
    rows = cast("list[object]", table)
    lengths = [len(cast("list[object]", row)) if isinstance(row, list) else None for row in rows]
    for number, length in enumerate(lengths):
        if length != lengths[0]:
            names = ["one number" if size is None else f"{size} numbers" for size in lengths]
            raise BalanceError(
                f"{path}: row {number} has {names[number]}, row 0 has {names[0]}: every row is a "
                "layer with a load for each expert"
            )


def _read_json(path: Path, keys: tuple[str, ...]) -> Any:
    data: Any = json.loads(path.read_text(encoding="utf-8"))
    return _pick(data, keys) if isinstance(data, dict) else data  # pyright: ignore[reportUnknownArgumentType]


def _pick(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in data:
            return data[key]
    raise BalanceError(
        f"no {' or '.join(keys)} in it: it has {', '.join(sorted(data)) or 'nothing'}"
    )


def _read_csv(path: Path, keys: tuple[str, ...]) -> Any:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    if rows and not _is_number(rows[0][0]):
        rows = rows[1:]  # a header
    if not rows:
        raise BalanceError(f"{path}: no row of numbers with commas between them")
    table: list[list[float]] = []
    for number, row in enumerate(rows):
        wrong = [cell for cell in row if not _is_number(cell)]
        if wrong:
            raise BalanceError(f"{path}: row {number} holds {wrong[0]!r}, which is no number")
        table.append([float(cell) for cell in row])
    return table


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_numpy(path: Path, keys: tuple[str, ...]) -> Any:
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
    return next(iter(data.values())) if len(data) == 1 else _pick(data, keys)


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
