"""Strict JSON for the output of verbs and the files of runs: infinities and NaN become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
#: Type of a field, as annotated -> its converter.
_READ: Mapping[str, Any] = {"int": int, "float": float, "str": str}


def strict_json(value: Any, indent: int | None = None) -> str:
    """`value` as a JSON text; NaN and infinities, which JSON lacks, are null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """`value`, also nested in mappings and lists, with None for infinities and NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_fields(kind: type[T], data: Mapping[str, Any]) -> T:
    """A data class from a mapping: numbers and texts are converted by its annotations, unknown keys
    are ignored. Raises KeyError, TypeError, ValueError or OverflowError on other data."""
    values: dict[str, Any] = {}
    for name, read, is_optional, is_needed in _fields(kind):
        if name in data:
            value = data[name]
            values[name] = value if read is None or (is_optional and value is None) else read(value)
        elif is_needed:
            raise KeyError(name)
    return kind(**values)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool, bool]]:
    """Fields as (name, converter, whether it may be None, whether it has no default)."""
    result: list[tuple[str, Any, bool, bool]] = []
    for item in fields(kind):
        name, *optional = str(item.type).split(" | ")
        is_needed = item.default is MISSING and item.default_factory is MISSING
        result.append((item.name, _READ.get(name), bool(optional), is_needed))
    return result
