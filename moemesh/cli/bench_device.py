"""The verb `bench device`: what a MoE layer asks of GPUs, counted without one."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.settings import DeviceSettings
from moemesh.cli.application import AsJson, bench_app
from moemesh.cli.options import options_from
from moemesh.cli.table import table
from moemesh.trace.strict_json import strict_json


@bench_app.command("device", short_help="Kernels, waits, exposed exchanges of a MoE layer on GPUs.")
@options_from(DeviceSettings)
def bench_device(
    settings: DeviceSettings,
    as_json: AsJson = False,
    found: Annotated[Path | None, typer.Option("--found", hidden=True)] = None,
) -> None:
    """Count kernels, bytes, waits and exposed exchanges of a MoE layer on simulated CUDA devices.

    Runs anywhere, no GPU needed. The roofline is the sum over kernels of the larger of operations
    over peak and bytes over bandwidth, and 4 us for each launch; the planner's time of the layer
    comes from its sizes alone. Exposed is what of an exchange no kernel runs beside.
    """

    result = kernels.run(settings, found)
    if result is None:
        return
    if as_json:
        typer.echo(strict_json(result, indent=2))
        return
    typer.echo(_device_text(result))


def _device_text(found: dict[str, Any]) -> str:
    planned = found["planned"]
    rows = [
        (
            row["name"],
            " + ".join(map(str, row["kernels"])),
            f"{sum(row['bytes']) / 1e9:.2f}",
            " + ".join(map(str, row["waits"])),
            _ms(row["roofline_seconds"]),
            f"{row['roofline_seconds'] / planned['device']:.2f}",
        )
        for row in found["rows"]
    ]
    header = ("", "kernels", "GB", "waits", "roofline ms", "/ planner")
    text = (
        f"shape {found['shape']}, bfloat16, one simulated device; data sheet: {found['cluster']}\n"
        f"{table(header, rows, left=1)}\n"
        f"planner: {_ms(planned['device'])} ms on the device, {_ms(planned['with_host'])} with the "
        "host of the stack that it is calibrated on"
    )
    if not found["exposed"]:
        return text
    rows = [
        (
            f"{row['dispatcher']}, {row['chunks']} chunk{'s' * (row['chunks'] > 1)}",
            *(_ms(row[key]) for key in ("seconds", "kernels", "exchanges", "exposed", "late")),
            f"{row['exposed'] / row['exchanges']:.0%}",
        )
        for row in found["exposed"]
    ]
    header = ("", "ms", "kernels", "exchanges", "exposed", "late", "share")
    return (
        f"{text}\n\nexperts over {found['ranks']} simulated devices, behind the router, "
        f"milliseconds\n{table(header, rows, left=1)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
