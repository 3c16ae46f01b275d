"""Strict JSON, as every verb prints it: numbers that are not finite are null."""

from __future__ import annotations

import json
import math
from typing import Any


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
