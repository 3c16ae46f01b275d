"""Configurations of released models with all the keys they come with, and what those models count.

Totals are those of the released weights where their files state them, and equal the published model
code, built without memory, wherever that is part of Transformers (4.57 and 5.23); Kimi-K2, Grok-1,
Arctic and Ling are added up by hand from theirs. Selection biases of routers and extra prediction
layers are in no total.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Released(NamedTuple):
    """A configuration, its total, and the active parameters in billions to the digits printed by
    its makers (None: they print none)."""

    config: dict[str, Any]
    total: int
    active: str | None = None


def _read(kind: str) -> dict[str, Released]:
    """Name of a model -> its row of ``published_configs.json``."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: Released(**row) for name, row in table[kind].items()}


DENSE, WITH_EXPERTS = map(_read, ("DENSE", "WITH_EXPERTS"))
