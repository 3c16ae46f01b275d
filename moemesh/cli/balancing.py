"""Verb `balance`: places experts for a file of loads, prints the balance before and after."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moemesh.cli.application import AsJson, app
from moemesh.cli.terminal import progress, table
from moemesh.report.files import write_texts
from moemesh.trace.strict_json import strict_json

#: Problems with at most this many slots in all layers run without the compiler, whose import takes
#: longer.
FEW_SLOTS = 400
#: Layers whose largest load is above it, or below its inverse, are scaled by a power of two.
LARGEST_LOAD = 1e290
#: Most printed layers, and most characters of a layer's experts.
MOST_LAYERS, MOST_CHARACTERS = 8, 100


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """Loads, and the slots to place their experts in."""

    loads: Annotated[Path, "JSON, CSV, NumPy file, or a run's folder.", "<LOADS>"]
    gpus: Annotated[int, "GPUs; all get equally many slots (EPLB: num_gpus)."]
    replicas: Annotated[
        int | None,
        "Slots in all, or physical experts (EPLB: num_replicas). By default one for each expert: a "
        "permutation.",
    ] = None
    redundant: Annotated[
        int | None,
        "Slots beyond one for each expert, in place of --replicas (vLLM: num_redundant_experts).",
        {"min": 0, "names": ("--redundant", "--num-redundant-experts")},
    ] = None
    nodes: Annotated[int, "Nodes of the GPUs (EPLB: num_nodes)."] = 1
    groups: Annotated[int, "Groups of experts that share a node (EPLB: num_groups)."] = 1
    previous: Annotated[Path | None, "Placement in use: move few replicas.", "FILE"] = None
    tolerance: Annotated[
        float | None,
        "With --previous: distance from the bound that is accepted. [default: 0.05]",
        {"min": 0.0},
    ] = None
    shares: Annotated[
        bool, "Move nothing: split each expert's load over its replicas; with --previous."
    ] = False
    effort: Annotated[str, "fast, quality or seconds."] = "quality"
    policy: Annotated[
        Literal["hierarchical", "global", "published"] | None,
        "published: DeepSeek's EPLB. Default: hierarchical where groups fit nodes.",
    ] = None
    svg: Annotated[Path | None, "Draw the load of each GPU.", "FILE"] = None
    out: Annotated[Path | None, "Write the JSON object there, as --previous reads it.", "FILE"] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Placement: the three `maps` of the balancer, loads per GPU [layers, GPUs] before and after,
    and the bound over the mean. With a previous placement `moved` replicas per layer and their
    `transfers`; `shares` [layers, slots] if no replica is moved."""

    maps: tuple[Any, Any, Any]
    loads_before: Any
    loads_after: Any
    bound: Any
    moved: tuple[int, ...] | None = None
    transfers: tuple[Any, ...] = ()
    shares: Any = None
    #: Redundant experts -> balance of each layer, where no number of slots was given.
    by_redundant: Mapping[int, Any] = field(default_factory=dict[int, Any])

    @property
    def balance(self) -> tuple[Any, Any]:
        """Load of the most loaded GPU over the mean, per layer, before and after."""
        from moemesh.balance import balance_of

        return balance_of(self.loads_before), balance_of(self.loads_after)

    def to_json(self) -> dict[str, Any]:
        """Object for `--json`, without the loads per GPU, which follow from it and the loads."""
        names = ("physical_to_logical", "logical_to_physical", "replica_count")
        shown: dict[str, Any] = {
            **{name: table.tolist() for name, table in zip(names, self.maps, strict=True)},
            "num_gpus": self.loads_after.shape[1],
            "balance": self.balance[1].tolist(),
            "bound": self.bound.tolist(),
            "balance_before": self.balance[0].tolist(),
        }
        if self.moved is not None:
            shown["moved"] = list(self.moved)
            shown["transfers"] = [
                [[transfer._asdict() for transfer in step] for step in layer]
                for layer in self.transfers
            ]
        if self.shares is not None:
            shown["shares"] = self.shares.tolist()
        if self.by_redundant:
            shown["by_redundant"] = [
                {"redundant": number, "mean": balance.mean(), "worst": balance.max()}
                for number, balance in self.by_redundant.items()
            ]
        return shown


@app.command(short_help="Place replicas of experts on GPUs.")
def balance(settings: BalanceSettings, as_json: AsJson = False) -> None:
    """Place replicas of experts on GPUs for given loads; one row of loads is one layer.

    Examples:

        moemesh balance loads.json --replicas 288 --gpus 32 --nodes 4 --groups 8

        moemesh balance loads.json --redundant 32 --gpus 32 --out placement.json
    """
    from moemesh.balance import BalanceError
    from moemesh.report.heat_maps import balance_heat_maps

    with progress("placing experts", quiet=as_json):
        try:
            placed = place(settings)
        except BalanceError as error:  # its parameter names become options: num_gpus, --gpus
            raise BalanceError(re.sub(r"\bnum_(?=[rng])", "--", str(error))) from None
    answer = strict_json(placed.to_json())
    texts = [] if settings.out is None else [(settings.out, answer)]
    if settings.svg is not None:
        texts.append((settings.svg, balance_heat_maps(placed.loads_before, placed.loads_after)))
    write_texts(texts)
    if settings.policy in (None, "published") and settings.groups % settings.nodes:
        _warn(
            f"nodes ({settings.nodes}) do not divide groups ({settings.groups}), "
            "so the policy is global: experts of a group, and replicas, may be on any node"
        )
    typer.echo(answer if as_json else _text(placed, settings))


def _warn(text: str) -> None:
    print(f"moemesh: warning: {text}", file=sys.stderr)


def place(settings: BalanceSettings) -> Placed:
    """Read the files, place the experts, measure. Raises BalanceError."""
    import numpy as np

    from moemesh import balance
    from moemesh.balance import BalanceError
    from moemesh.balance.compiled import plain_loops
    from moemesh.balance.inputs import check_loads, scaled
    from moemesh.balance.load_files import gpus_of, load_placement, load_table
    from moemesh.config.suggest import nearest_divisors

    if settings.gpus > 0 and settings.nodes > 0 and settings.gpus % settings.nodes:
        # The function, like the published one, ignores nodes under the global policy.
        near = nearest_divisors(settings.gpus, settings.nodes)
        raise BalanceError(
            f"--nodes ({settings.nodes}) must divide --gpus ({settings.gpus}), under every "
            f"policy: take {near} nodes"
        )
    loads = check_loads(load_table(settings.loads, _warn), str(settings.loads))
    # Only ratios are printed: scale, so that sums of loads neither overflow nor vanish.
    top = loads.max(axis=1, keepdims=True)
    loads = np.where((top > LARGEST_LOAD) | (top < 1 / LARGEST_LOAD), scaled(loads), loads)
    previous = load_placement(settings.previous) if settings.previous else None
    if settings.previous and (gpus := gpus_of(settings.previous)) not in (None, settings.gpus):
        _warn(
            f"{settings.previous} places experts on {gpus} GPUs; it is read as one for "
            f"{settings.gpus}, slot by slot, and so are its loads before"
        )
    if previous is None and settings.shares:
        raise BalanceError("--shares needs the placement in use: --previous FILE")
    if settings.tolerance is not None and (previous is None or settings.shares):
        raise BalanceError("--tolerance goes with --previous FILE, without --shares")
    _refuse_without_effect(settings)
    replicas, experts = settings.replicas, loads.shape[1]
    if settings.redundant is not None:
        if replicas is not None:
            raise BalanceError(
                "give --replicas, or --redundant: the slots beyond one for an expert"
            )
        replicas = experts + settings.redundant
        if settings.gpus > 0 and (over := replicas % settings.gpus):
            near = [replicas - over, replicas - over + settings.gpus]
            fixes = " or ".join(str(slots - experts) for slots in near if slots >= experts)
            raise BalanceError(
                f"{experts} experts and --redundant {settings.redundant} make {replicas} slots, "
                f"no multiple of {settings.gpus} GPUs: take --redundant {fixes}"
            )
    if replicas is None:
        replicas = experts if previous is None else previous.shape[-1]
    if previous is not None and previous.shape[-1] != replicas:
        raise BalanceError(
            f"{settings.previous} has {previous.shape[-1]} slots a layer, "
            f"and --replicas is {replicas}"
        )
    small = loads.shape[0] * replicas <= FEW_SLOTS and settings.effort in ("fast", "quality")
    with plain_loops() if small else nullcontext():
        if previous is not None:
            return _from_previous(loads, previous, settings)
        gpus, policy = settings.gpus, settings.policy
        sizes = (replicas, settings.groups, settings.nodes, gpus)
        if policy == "published":
            policy, maps = None, balance.rebalance_published(loads, *sizes)
        else:
            effort: Any = settings.effort  # a name, or seconds
            with suppress(ValueError):
                effort = float(effort)
            maps = balance.rebalance_experts(loads, *sizes, effort=effort, policy=policy)
        mean = np.maximum(loads.mean(axis=1) * experts / gpus, 1e-300)
        bound = balance.lower_bound(loads, *sizes, policy=policy) / mean
        return Placed(
            maps=maps,
            loads_before=balance.loads_in_order(loads, gpus),
            loads_after=balance.gpu_loads(loads, maps[0], gpus),
            bound=np.where(loads.any(axis=1), bound, 1.0),
            by_redundant=_by_redundant(loads, settings),
        )


def _refuse_without_effect(settings: BalanceSettings) -> None:
    """Raise BalanceError for options that change nothing: a search's, where none is run, and with
    `--shares` those of a placement."""
    from moemesh.balance import BalanceError

    searched = {"--effort": settings.effort != "quality"}
    placed = {
        "--nodes": settings.nodes != 1,
        "--groups": settings.groups != 1,
        "--policy": settings.policy is not None,
    }
    for mode, is_on, options in (
        ("--shares", settings.shares, placed | searched),
        ("--previous", settings.previous is not None, searched),
        ("--policy published", settings.policy == "published", searched),
    ):
        unused = ", ".join(option for option, is_given in options.items() if is_given)
        if is_on and unused:
            raise BalanceError(f"with {mode}, {unused} would have no effect: leave it out")


def _by_redundant(loads: Any, settings: BalanceSettings) -> dict[int, Any]:
    """Number of redundant experts -> balance of each layer in the packing that a search starts
    from; empty if the number of slots was given."""
    from moemesh.balance import balance_of, gpu_loads
    from moemesh.balance.compiled import plain_loops
    from moemesh.balance.inputs import check_shape
    from moemesh.balance.search import first_packing

    if settings.replicas is not None or settings.redundant is not None:
        return {}
    experts, gpus = loads.shape[1], settings.gpus
    balances: dict[int, Any] = {}
    for further in (0, 1, 2, 4, 8):
        redundant = -experts % gpus + further * gpus
        if redundant > experts and balances:
            break
        sizes = (experts + redundant, settings.groups, settings.nodes, gpus)
        with plain_loops():  # few milliseconds a layer, where a compiler takes many seconds
            slots = first_packing(loads, check_shape(experts, *sizes, None))
        balances[redundant] = balance_of(gpu_loads(loads, slots, gpus))
    return balances


def _from_previous(loads: Any, previous: Any, settings: BalanceSettings) -> Placed:
    """The placement after few moves from the one in use; with `shares` no replica moves."""
    import numpy as np

    from moemesh import balance
    from moemesh.balance.rebalance import maps_of

    gpus, policy = settings.gpus, settings.policy
    if policy == "published":
        raise balance.BalanceError("the published policy plans from scratch: leave out --previous")
    slots = np.asarray(previous, np.int64)
    if settings.shares:
        split = balance.split_loads(loads, previous, num_gpus=gpus)
        return Placed(
            maps=maps_of(slots, loads.shape[1]),
            loads_before=balance.gpu_loads(loads, slots, gpus),
            loads_after=split.gpu_loads,
            bound=np.array(split.balance),  # the optimum of this placement
            shares=split.shares,
        )
    sizes = {"num_gpus": gpus, "num_groups": settings.groups, "num_nodes": settings.nodes}
    accepted = {} if settings.tolerance is None else {"tolerance": settings.tolerance}
    placement = balance.rebalance_incremental(loads, previous, **accepted, **sizes, policy=policy)
    return Placed(
        maps=maps_of(placement.physical_to_logical, loads.shape[1]),
        loads_before=balance.gpu_loads(loads, slots, gpus),
        loads_after=balance.gpu_loads(loads, placement.physical_to_logical, gpus),
        bound=np.array(placement.bound),
        moved=placement.moved,
        transfers=placement.transfers,
    )


def _text(placed: Placed, settings: BalanceSettings) -> str:
    from moemesh.report.document import plural
    from moemesh.report.svg import clip

    (before, after), bound = placed.balance, placed.bound
    physical, _, counts = placed.maps
    (layers, slots), experts = physical.shape, counts.shape[1]
    shown = range(min(layers, MOST_LAYERS))
    header = ["layer", "before", "after", "bound", "above bound", "most replicas"]
    rows = [
        [
            str(layer),
            *(f"{value[layer]:.3f}" for value in (before, after, bound)),
            f"{max(after[layer] / bound[layer] - 1.0, 0.0):.2%}",
            str(counts[layer].max()),
        ]
        for layer in shown
    ]
    limit = f"(no placement below {bound.mean():.3f})" if placed.shares is None else "by shares"
    lines = [
        f"{plural(layers, 'layer')}: {plural(experts, 'expert')} in {plural(slots, 'slot')} "
        f"({slots - experts:,} redundant) on {plural(settings.gpus, 'GPU')}",
        f"most loaded GPU / mean GPU{', mean over layers' * (layers > 1)}: "
        f"{before.mean():.3f} -> {after.mean():.3f} {limit}",
    ]
    if layers > 1:
        worst = [f"{value.max():.3f} (layer {value.argmax()})" for value in (before, after)]
        lines.append(f"most loaded GPU / mean GPU, worst layer: {' -> '.join(worst)}")
    if placed.moved is not None:
        rounds = max(len(steps) for steps in placed.transfers)
        lines.append(f"{sum(placed.moved)} replicas move, in at most {rounds} rounds a layer")
        header.append("moved")
        for row, moved in zip(rows, placed.moved, strict=False):
            row.append(str(moved))
    lines.append(table(header, rows, left=0))
    if placed.by_redundant:
        head = ("--redundant", "balance, mean", "worst layer")
        cells = [
            (str(number), f"{balance.mean():.3f}", f"{balance.max():.3f}")
            for number, balance in placed.by_redundant.items()
        ]
        lines += ["with redundant experts (a quick packing of each number):"]
        lines += [table(head, cells, left=0)]
    lines.append("experts of each GPU:")
    per_gpu = slots // settings.gpus
    for layer in shown:
        names = [str(expert) for expert in physical[layer]]
        if placed.shares is not None:
            pairs = zip(names, placed.shares[layer], strict=True)
            names = [f"{name} ({share:.0%})" for name, share in pairs]
        gpus = [" ".join(names[start : start + per_gpu]) for start in range(0, slots, per_gpu)]
        lines.append(clip(f"layer {layer}: {' | '.join(gpus)}", MOST_CHARACTERS))
    if layers > MOST_LAYERS or lines[-1].endswith("…"):
        first = f"the first {len(shown)} of {plural(layers, 'layer')}"
        lines.append(f"({first}; --json prints the whole placement, --out FILE writes it)")
    return "\n".join(lines)
