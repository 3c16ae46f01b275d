"""The verb `bench device`: what a MoE layer asks of a GPU, counted without one."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import json
from enum import StrEnum
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, bench_app
from moemesh.cli.table import table


class Shape(StrEnum):
    """The layers of `bench layer`."""

    A = "A"
    B = "B"
    TINY = "tiny"


@bench_app.command("device", short_help="Kernels, bytes and waits of a MoE layer on a GPU.")
def bench_device(
    shape: Annotated[Shape, typer.Option(help="As of `bench layer`.")] = Shape.B,
    cluster: Annotated[
        str, typer.Option(help="Preset or file with the device's data sheet.")
    ] = "dgx_h100",
    as_json: AsJson = False,
) -> None:
    """Count kernels, bytes and waits of a MoE layer on a simulated CUDA device.

    Runs anywhere, no GPU needed. The roofline is the sum over kernels of the larger of operations
    over peak and bytes over bandwidth, and 4 us for each launch.
    """
    from moemesh.bench import kernels

    found = kernels.run(shape.value, cluster)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    rows = [
        (
            row["name"],
            " + ".join(map(str, row["kernels"])),
            f"{sum(row['bytes']) / 1e9:.2f}",
            " + ".join(map(str, row["waits"])),
            f"{row['roofline_seconds'] * 1e3:.2f}",
        )
        for row in found["rows"]
    ]
    header = ("", "kernels", "GB", "waits", "roofline ms")
    typer.echo(
        f"shape {found['shape']}, bfloat16, one simulated device; data sheet: {found['cluster']}\n"
        f"{table(header, rows, left=1)}"
    )
