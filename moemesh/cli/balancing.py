"""The verb balance: place experts for a file of loads, print the balance before and after."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moemesh.cli.application import AsJson, app
from moemesh.cli.options import options_from
from moemesh.cli.table import table

#: Problems with fewer slots in all layers together are solved before a compiler is even loaded.
FEW_SLOTS = 400
#: Layers with larger loads, or with smaller ones than its inverse, are scaled by a power of two.
LARGEST_LOAD = 1e290
#: So many slots are printed; of larger placements only the worst layers.
MAX_PRINTED = 2048


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """Which loads to place where."""

    loads: Annotated[
        Path,
        "JSON, CSV, NumPy file, or a run's folder.",
        {"argument": True, "metavar": "LOADS"},
    ]
    gpus: Annotated[int, "GPUs; all get equally many slots."]
    replicas: Annotated[
        int | None, "Slots in all; one per expert (only a permutation) if not given."
    ] = None
    nodes: Annotated[int, "Nodes of the GPUs."] = 1
    groups: Annotated[int, "Groups of experts that share a node."] = 1
    previous: Annotated[
        Path | None, "Placement in use: move few replicas.", {"metavar": "FILE"}
    ] = None
    tolerance: Annotated[float, "With --previous: how far from the bound is near enough."] = 0.05
    shares: Annotated[
        bool,
        "With --previous: move nothing, split each expert's load over its replicas.",
        {"names": ("--shares",)},
    ] = False
    effort: Annotated[str, "fast, quality or seconds."] = "quality"
    policy: Annotated[
        Literal["hierarchical", "global", "published"] | None,
        "published: DeepSeek's EPLB. Default: hierarchical where groups fit nodes.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The three maps, loads per GPU [layers, GPUs] before and after, the bound over the mean.

    `moved` replicas a layer and their `transfers` with a previous placement, `shares` [layers,
    slots] where nothing is moved.
    """

    physical_to_logical: Any
    logical_to_physical: Any
    replica_count: Any
    loads_before: Any
    loads_after: Any
    bound: Any
    moved: tuple[int, ...] | None = None
    transfers: tuple[Any, ...] = ()
    shares: Any = None

    @property
    def before(self) -> Any:
        """Load of the hottest GPU over the mean, per layer."""
        from moemesh.balance import balance_of

        return balance_of(self.loads_before)

    @property
    def after(self) -> Any:
        from moemesh.balance import balance_of

        return balance_of(self.loads_after)

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
        if self.moved is not None:
            shown["moved"] = list(self.moved)
            shown["transfers"] = [
                [[transfer._asdict() for transfer in step] for step in rounds]
                for rounds in self.transfers
            ]
        if self.shares is not None:
            shown["shares"] = self.shares.tolist()
        return shown


@app.command(short_help="Place replicas of experts on GPUs.")
@options_from(BalanceSettings)
def balance(
    settings: BalanceSettings,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the load of each GPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Place replicas of experts on GPUs for given loads; one row of loads is one layer.

    Example:

        moemesh balance loads.json --replicas 288 --gpus 32 --nodes 4 --groups 8
    """
    from moemesh.balance import BalanceError
    from moemesh.report.balance import balance_heat_maps

    placed = place(settings)
    if svg is not None:
        drawn = balance_heat_maps(placed.loads_before, placed.loads_after)
        try:
            svg.write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise BalanceError(f"{svg}: {error.strerror or error}") from error
    if settings.policy is None and settings.groups % settings.nodes:
        _warn(
            f"nodes ({settings.nodes}) do not divide groups ({settings.groups}), "
            "so the policy is global: experts of a group, and replicas, may be on any node"
        )
    typer.echo(json.dumps(placed.to_json()) if as_json else _text(placed, settings))


def _warn(text: str) -> None:
    print(f"moemesh: warning: {text}", file=sys.stderr)


def place(settings: BalanceSettings) -> Placed:
    """Read the files, place the experts, measure. Raises BalanceError."""
    import numpy as np

    from moemesh.balance import BalanceError
    from moemesh.balance.compiled import plain_loops
    from moemesh.balance.files import load_placement, load_table
    from moemesh.balance.inputs import check_loads, scaled
    from moemesh.config.divisors import nearest_divisors

    if settings.gpus > 0 and settings.nodes > 0 and settings.gpus % settings.nodes:
        # The function, like the published one, passes over nodes under the global policy.
        near = nearest_divisors(settings.gpus, settings.nodes)
        raise BalanceError(
            f"nodes ({settings.nodes}) must divide gpus ({settings.gpus}), whatever the policy: "
            f"take {near} nodes"
        )
    loads = check_loads(load_table(settings.loads, _warn), str(settings.loads))
    # All that is printed are ratios: sums of the largest numbers must not overflow, nor vanish.
    top = loads.max(axis=1, keepdims=True)
    loads = np.where((top > LARGEST_LOAD) | (top < 1 / LARGEST_LOAD), scaled(loads), loads)
    previous = load_placement(settings.previous) if settings.previous else None
    if previous is None and settings.shares:
        raise BalanceError("--shares needs the placement in use: --previous FILE")
    replicas = settings.replicas
    if replicas is None:
        replicas = loads.shape[1] if previous is None else previous.shape[-1]
    if previous is not None and previous.shape[-1] != replicas:
        raise BalanceError(
            f"{settings.previous} has {previous.shape[-1]} slots a layer, "
            f"and --replicas says {replicas}"
        )
    small = loads.shape[0] * replicas <= FEW_SLOTS and settings.effort in ("fast", "quality")
    with plain_loops() if small else nullcontext():
        if previous is None:
            return _anew(loads, replicas, settings)
        return _from_previous(loads, previous, settings)


def _anew(loads: Any, replicas: int, settings: BalanceSettings) -> Placed:
    import numpy as np

    from moemesh.balance import gpu_loads, lower_bound, rebalance_experts, rebalance_published

    sizes = (replicas, settings.groups, settings.nodes, settings.gpus)
    if settings.policy == "published":
        policy = None
        maps = rebalance_published(loads, *sizes)
    else:
        policy = settings.policy
        maps = rebalance_experts(loads, *sizes, effort=_effort(settings.effort), policy=policy)
    # Before: experts in order, as evenly as their number allows.
    before = np.zeros((len(loads), settings.gpus))
    for expert in range(loads.shape[1]):
        before[:, expert * settings.gpus // loads.shape[1]] += loads[:, expert]
    mean = np.maximum(loads.mean(axis=1) * loads.shape[1] / settings.gpus, 1e-300)
    bound = lower_bound(loads, *sizes, policy=policy) / mean
    return Placed(
        physical_to_logical=maps[0],
        logical_to_physical=maps[1],
        replica_count=maps[2],
        loads_before=before,
        loads_after=gpu_loads(loads, maps[0], settings.gpus),
        bound=np.where(loads.any(axis=1), bound, 1.0),
    )


def _from_previous(loads: Any, previous: Any, settings: BalanceSettings) -> Placed:
    import numpy as np

    from moemesh.balance import BalanceError, gpu_loads, rebalance_incremental, split_loads
    from moemesh.balance.rebalance import maps_of

    if settings.policy == "published":
        raise BalanceError("the published policy plans from scratch: leave out --previous")
    if settings.shares:
        split = split_loads(loads, previous, num_gpus=settings.gpus)
        slots = np.asarray(previous, np.int64)
        maps = maps_of(slots, loads.shape[1])
        return Placed(
            physical_to_logical=maps[0],
            logical_to_physical=maps[1],
            replica_count=maps[2],
            loads_before=gpu_loads(loads, slots, settings.gpus),
            loads_after=split.gpu_loads,
            bound=np.array(split.balance),  # the optimum of this placement
            shares=split.shares,
        )
    replan = rebalance_incremental(
        loads,
        previous,
        settings.tolerance,
        num_gpus=settings.gpus,
        num_groups=settings.groups,
        num_nodes=settings.nodes,
        policy=settings.policy,
    )
    return Placed(
        physical_to_logical=replan.physical_to_logical,
        logical_to_physical=replan.logical_to_physical,
        replica_count=replan.replica_count,
        loads_before=gpu_loads(loads, np.asarray(previous, np.int64), settings.gpus),
        loads_after=gpu_loads(loads, replan.physical_to_logical, settings.gpus),
        bound=np.array(replan.bound),
        moved=replan.moved,
        transfers=replan.transfers,
    )


def _effort(text: str) -> Any:
    """The effort of `rebalance_experts`: a name, or seconds."""
    try:
        return float(text)
    except ValueError:
        return text


def _text(placed: Placed, settings: BalanceSettings) -> str:
    before, after, bound = placed.before, placed.after, placed.bound
    header = ["layer", "before", "after", "bound", "gap", "most replicas"]
    rows = [
        [
            str(layer),
            *(f"{value[layer]:.3f}" for value in (before, after, bound)),
            f"{max(after[layer] / bound[layer] - 1.0, 0.0):.2%}",
            str(placed.replica_count[layer].max()),
        ]
        for layer in range(len(after))
    ]
    layers, slots = placed.physical_to_logical.shape
    sizes = ((layers, "layer"), (placed.replica_count.shape[1], "expert"), (slots, "slot"))
    named = [f"{number} {name}{'s' * (number > 1)}" for number, name in sizes]
    lines = [
        f"{named[0]}: {named[1]} in {named[2]} on {settings.gpus} GPU{'s' * (settings.gpus > 1)}",
        f"hottest GPU / mean {before.mean():.3f} -> {after.mean():.3f} "
        f"(no placement below {bound.mean():.3f})",
    ]
    if placed.shares is not None:
        lines[1] = f"hottest GPU / mean {before.mean():.3f} -> {after.mean():.3f} by shares"
    if placed.moved is not None:
        rounds = max(len(steps) for steps in placed.transfers)
        lines.append(f"{sum(placed.moved)} replicas move, in at most {rounds} rounds a layer")
        header.append("moved")
        for row, moved in zip(rows, placed.moved, strict=True):
            row.append(str(moved))
    shown = [table(header, rows, left=0), "experts of each GPU:"]
    return "\n".join([*lines, *shown, *_gpu_lines(placed, after, settings.gpus)])


def _gpu_lines(placed: Placed, after: Any, num_gpus: int) -> Iterator[str]:
    """The experts of each GPU, one line a layer; with shares, the share of each replica."""
    layers = list(range(len(after)))
    slots = placed.physical_to_logical
    if slots.size > MAX_PRINTED:
        keep = max(MAX_PRINTED // slots.shape[1], 1)
        layers = sorted(sorted(layers, key=lambda layer: -after[layer])[:keep])
        yield f"(the {keep} worst layers; --json prints all)"
    for layer in layers:
        names = [str(expert) for expert in slots[layer]]
        if placed.shares is not None:
            pairs = zip(names, placed.shares[layer], strict=True)
            names = [f"{name} ({share:.0%})" for name, share in pairs]
        per_gpu = len(names) // num_gpus
        gpus = (names[start : start + per_gpu] for start in range(0, len(names), per_gpu))
        yield f"layer {layer}: " + " | ".join(" ".join(gpu) for gpu in gpus)
