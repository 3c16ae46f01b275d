"""The verb balance."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, app


class BalancePolicy(StrEnum):
    """Where replicas of an expert may live."""

    HIERARCHICAL = "hierarchical"
    GLOBAL = "global"


@app.command(short_help="Place replicas of experts on GPUs.")
def balance(
    loads: Annotated[
        Path, typer.Argument(metavar="LOADS", help="JSON, CSV, NumPy file, or a run's folder.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs; all get equally many slots.")],
    replicas: Annotated[
        int | None,
        typer.Option(help="Slots in all; one per expert (only a permutation) if not given."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the GPUs.")] = 1,
    groups: Annotated[int, typer.Option(help="Groups of experts that share a node.")] = 1,
    previous: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Placement in use: move few replicas.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --previous: how far from the bound is near enough.")
    ] = 0.05,
    effort: Annotated[str, typer.Option(help="fast, quality or seconds.")] = "quality",
    policy: Annotated[
        BalancePolicy | None, typer.Option(help="Default: hierarchical where groups fit nodes.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the load of each GPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Place replicas of experts on GPUs for given loads; one row of loads is one layer. Example:

    moemesh balance loads.json --replicas 288 --gpus 32 --nodes 4 --groups 8
    """
    from moemesh.balance import command
    from moemesh.report.balance import balance_heat_maps

    settings = command.Settings(
        loads=loads,
        replicas=replicas,
        gpus=gpus,
        nodes=nodes,
        groups=groups,
        previous=previous,
        tolerance=tolerance,
        effort=effort,
        policy=None if policy is None else policy.value,
    )
    raise typer.Exit(command.command(settings, balance_heat_maps, as_json=as_json, svg=svg))
