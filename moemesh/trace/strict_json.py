"""Strict JSON, as verbs print it and runs write it: numbers that are not finite are null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
#: Functions that read the fields of these types.
_READ: Mapping[str, Any] = {"int": int, "float": float, "str": str}


def strict_json(value: Any, indent: int | None = None) -> str:
    """`value` as a JSON text; NaN and infinities, which JSON does not know, are null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """`value`, of mappings and lists, with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_fields(kind: type[T], data: Mapping[str, Any]) -> T:
    """A data class from a mapping: numbers and texts are converted by its annotations, unknown keys
    left out. Raises KeyError, TypeError or ValueError on other data."""
    found: dict[str, Any] = {}
    for name, read, is_optional, is_needed in _fields(kind):
        if name in data:
            value = data[name]
            found[name] = value if read is None or (is_optional and value is None) else read(value)
        elif is_needed:
            raise KeyError(name)
    return kind(**found)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool, bool]]:
    """(name, function that reads it, whether it may be None, whether it has no default)."""
    found: list[tuple[str, Any, bool, bool]] = []
    for one in fields(kind):
        name, *optional = str(one.type).split(" | ")
        is_needed = one.default is MISSING and one.default_factory is MISSING
        found.append((one.name, _READ.get(name), bool(optional), is_needed))
    return found
