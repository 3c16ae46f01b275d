"""Layouts from Python: `moemesh.plan` and `moemesh.estimate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemesh.config.plan import Plan
from moemesh.config.toml import format_value


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One layout: its `plan`, predicted `seconds` of a step with their `breakdown`, the bytes that
    its fullest device needs, the `command` that trains it (None where
    nothing does), and what of it `moemesh train` does not
    carry out yet (empty: all is)."""

    plan: Plan
    seconds: float
    memory_bytes: float
    breakdown: dict[str, float]
    command: str | None
    not_trained: tuple[str, ...]


def plan(
    *,
    model: str | Path,
    cluster: str | Path,
    seq_len: int,
    global_batch: int,
    nodes: int | None = None,
    top: int = 5,
    precision: str = "bfloat16",
    anywhere: bool = False,
    trainable: bool = False,
) -> list[Answer]:
    """The `top` best layouts, fastest first; options as of ``moemesh plan``.

    Raises ConfigError with every problem, NothingFits (a ValueError) when no layout fits in memory.
    """
    from moemesh.planner.search.command import command

    text = command(
        str(model),
        str(cluster),
        seq_len,
        global_batch,
        nodes=nodes,
        top=top,
        precision=precision,  # type: ignore[arg-type]
        anywhere=anywhere,
        trainable=trainable,
        as_json=True,
    )
    return [
        Answer(
            plan=Plan.model_validate(found["plan"]),
            seconds=found["seconds"],
            memory_bytes=found["memory_bytes"],
            breakdown=found["breakdown"],
            command=found["command"],
            not_trained=tuple(found["not_trained"]),
        )
        for found in json.loads(text)["plans"]
    ]


def estimate(
    *,
    model: str | Path,
    cluster: str | Path,
    plan: Plan | Mapping[str, Any] | str,
    seq_len: int | None = None,
    global_batch: int | None = None,
) -> dict[str, Any]:
    """The object of ``moemesh estimate --json``: parameters, flops, memory, traffic, seconds.

    `plan`: a Plan, a dict of keys of [plan], or what ``--plan`` takes. Raises ConfigError with
    every problem.
    """
    from moemesh.planner.estimate import command

    text = command(str(model), str(cluster), _text(plan), seq_len, global_batch, as_json=True)
    return json.loads(text)


def _text(plan: Plan | Mapping[str, Any] | str) -> str:
    """As after ``--plan``."""
    if isinstance(plan, str):
        return plan
    if isinstance(plan, Plan):
        plan = plan.model_dump(exclude_defaults=True) or {"pp": 1}
    return ",".join(f"{key}={format_value(value)}" for key, value in plan.items())
