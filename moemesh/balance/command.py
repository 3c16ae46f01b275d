"""`moemesh balance`: a placement for a file of loads, with the balance before and after."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moemesh.balance.compiled import Floats, plain_loops
from moemesh.balance.files import load_placement, load_table
from moemesh.balance.incremental import Replan, rebalance_incremental
from moemesh.balance.inputs import BalanceError, Effort, Policy, check_loads
from moemesh.balance.rebalance import (
    balance_of,
    gpu_loads,
    lower_bound,
    rebalance_experts,
)

#: Problems with fewer slots in all layers together are solved before a compiler is even loaded.
FEW_SLOTS = 400
#: So many slots are printed; of larger placements only the worst layers.
MAX_PRINTED = 2048
#: (title, loads per GPU before, after) -> a picture as SVG text.
Draw = Callable[[Floats, Floats], str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to place where; each field is the argument or option of the same name."""

    loads: Path
    replicas: int | None
    gpus: int
    nodes: int = 1
    groups: int = 1
    previous: Path | None = None
    tolerance: float = 0.05
    effort: str = "quality"
    policy: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The three maps as arrays, loads per GPU before and after, and per layer over the mean: bound,

    balance before and after; `replan` with a previous placement.
    """

    physical_to_logical: Any
    logical_to_physical: Any
    replica_count: Any
    loads_before: Floats
    loads_after: Floats
    before: Floats
    after: Floats
    bound: Floats
    replan: Replan | None

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints. Loads per GPU are left out: they follow from the rest."""
        shown: dict[str, Any] = {
            "physical_to_logical": self.physical_to_logical.tolist(),
            "logical_to_physical": self.logical_to_physical.tolist(),
            "replica_count": self.replica_count.tolist(),
            "balance": self.after.tolist(),
            "bound": self.bound.tolist(),
            "balance_before": self.before.tolist(),
        }
        if self.replan is not None:
            shown["moved"] = list(self.replan.moved)
            shown["transfers"] = [
                [[transfer._asdict() for transfer in step] for step in rounds]
                for rounds in self.replan.transfers
            ]
        return shown


def command(
    settings: Settings, draw: Draw | None = None, *, as_json: bool = False, svg: Path | None = None
) -> int:
    """Place, print (and draw, if `svg` names a file). Raises BalanceError."""
    result = place(settings)
    if svg is not None:
        assert draw is not None
        try:
            svg.write_text(draw(result.loads_before, result.loads_after), encoding="utf-8")
        except OSError as error:
            raise BalanceError(f"{svg}: {error.strerror or error}") from error
    if as_json:
        print(json.dumps(result.to_json()))
    elif sys.stdout.isatty():
        _print_table(result, settings)
    else:
        print("\n".join(_plain_lines(result, settings)))
    return 0


def place(settings: Settings) -> Result:
    """Read, place, and measure."""
    loads = check_loads(load_table(settings.loads), str(settings.loads))
    previous = load_placement(settings.previous) if settings.previous else None
    effort = _effort(settings.effort)
    replicas = settings.replicas
    if replicas is None:
        replicas = previous.shape[-1] if previous is not None else loads.shape[1]
    if previous is not None and previous.shape[-1] != replicas:
        raise BalanceError(
            f"{settings.previous} has {previous.shape[-1]} slots a layer, "
            f"and --replicas says {replicas}"
        )
    small = loads.shape[0] * replicas <= FEW_SLOTS and isinstance(effort, str)
    with plain_loops() if small else nullcontext():
        return _place(loads, previous, replicas, effort, settings)


def _place(
    loads: Floats, previous: Any, replicas: int, effort: Effort, settings: Settings
) -> Result:
    sizes = (replicas, settings.groups, settings.nodes, settings.gpus)
    replan = None
    if previous is None:
        maps = rebalance_experts(loads, *sizes, effort=effort, policy=settings.policy)
        before = _contiguous(loads, settings.gpus)
        mean = np.maximum(loads.mean(axis=1) * loads.shape[1] / settings.gpus, 1e-300)
        bound = lower_bound(loads, *sizes, policy=settings.policy) / mean
        bound = np.where(loads.any(axis=1), bound, 1.0)
    else:
        replan = rebalance_incremental(
            loads,
            previous,
            settings.tolerance,
            num_gpus=settings.gpus,
            num_groups=settings.groups,
            num_nodes=settings.nodes,
            policy=settings.policy,
        )
        maps = (replan.physical_to_logical, replan.logical_to_physical, replan.replica_count)
        before = gpu_loads(loads, np.asarray(previous, np.int64), settings.gpus)
        bound = np.array(replan.bound)
    after = gpu_loads(loads, maps[0], settings.gpus)
    return Result(
        physical_to_logical=maps[0],
        logical_to_physical=maps[1],
        replica_count=maps[2],
        loads_before=before,
        loads_after=after,
        before=balance_of(before),
        after=balance_of(after),
        bound=bound,
        replan=replan,
    )


def _effort(text: str) -> Effort:
    if text in ("fast", "quality"):
        return text
    try:
        return float(text)
    except ValueError as error:
        raise BalanceError(f"no effort {text!r}: choose fast, quality or seconds") from error


def _contiguous(loads: Floats, num_gpus: int) -> Floats:
    """Loads per GPU without redundancy: experts in order, as evenly as their number allows."""
    held = np.zeros((len(loads), num_gpus))
    for expert in range(loads.shape[1]):
        held[:, expert * num_gpus // loads.shape[1]] += loads[:, expert]
    return held


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    for layer in range(len(result.after)):
        gap = result.after[layer] / result.bound[layer] - 1.0
        row = (
            str(layer),
            f"{result.before[layer]:.3f}",
            f"{result.after[layer]:.3f}",
            f"{result.bound[layer]:.3f}",
            f"{max(gap, 0.0):.2%}",
            str(result.replica_count[layer].max()),
        )
        yield (*row, str(result.replan.moved[layer])) if result.replan else row


def _columns(result: Result) -> tuple[str, ...]:
    return ("layer", "before", "after", "bound", "gap", "most replicas") + (
        ("moved",) if result.replan else ()
    )


def _headline(result: Result, settings: Settings) -> str:
    layers, slots = result.physical_to_logical.shape
    experts = result.replica_count.shape[1]
    head = (
        f"{layers} layer{'s' * (layers > 1)}: {experts} expert{'s' * (experts > 1)} in {slots} "
        f"slot{'s' * (slots > 1)} on "
        f"{settings.gpus} GPU{'s' * (settings.gpus > 1)}\nhottest GPU / mean "
        f"{result.before.mean():.3f} -> {result.after.mean():.3f} "
        f"(no placement below {result.bound.mean():.3f})"
    )
    if result.replan:
        rounds = max(len(steps) for steps in result.replan.transfers)
        head += f"\n{sum(result.replan.moved)} replicas move, in at most {rounds} rounds a layer"
    return head


def _placement(result: Result, num_gpus: int) -> Iterator[str]:
    """The experts of each GPU, one line a layer."""
    layers = np.arange(len(result.after))
    if result.physical_to_logical.size > MAX_PRINTED:
        keep = max(MAX_PRINTED // result.physical_to_logical.shape[1], 1)
        layers = np.sort(np.argsort(-result.after, kind="stable")[:keep])
        yield f"(the {keep} worst layers; --json prints all)"
    for layer in layers:
        gpus = result.physical_to_logical[layer].reshape(num_gpus, -1)
        yield f"layer {layer}: " + " | ".join(" ".join(map(str, gpu)) for gpu in gpus)


def _plain_lines(result: Result, settings: Settings) -> Iterator[str]:
    rows = [_columns(result), *_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield _headline(result, settings)
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield "experts of each GPU:"
    yield from _placement(result, settings.gpus)


def _print_table(result: Result, settings: Settings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_headline(result, settings))
    for name in _columns(result):
        table.add_column(name, justify="right")
    for row in _rows(result):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print("experts of each GPU:", highlight=False)
    for line in _placement(result, settings.gpus):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
