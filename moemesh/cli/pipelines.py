"""The verb schedule."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, app


@app.command("schedule", short_help="Simulate, draw and check a pipeline.")
def show_schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A schedule, 'search', or a text or CSV file.")
    ],
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Of a step, all pipes together.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="Chunks of layers per rank.")] = None,
    forward: Annotated[
        str, typer.Option(help="Time of a microbatch on a rank's layers, or a list per stage.")
    ] = "1",
    dgrad: Annotated[str, typer.Option(help="Likewise, input-gradient half.")] = "1",
    wgrad: Annotated[str, typer.Option(help="Likewise, weight-gradient half.")] = "1",
    block: Annotated[str | None, typer.Option(help="Of a forward with a backward.")] = None,
    comm: Annotated[str, typer.Option(help="Of a message between two ranks.")] = "0",
    costs: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Times that a run has measured.")
    ] = None,
    weight_memory: Annotated[
        str, typer.Option(help="Share of the activations that weight gradients need.")
    ] = "1",
    slices: Annotated[int | None, typer.Option(help="terapipe: slices of a sequence.")] = None,
    window: Annotated[int | None, typer.Option(help="Backwards per update.")] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="ampnet: most microbatches under way.")
    ] = None,
    memory_cap: Annotated[
        str | None, typer.Option(help="search: most activation per rank.")
    ] = None,
    relaxed: Annotated[
        bool, typer.Option("--relaxed", help="Leave out wrap-around waits, as some papers do.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace for Perfetto.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="As text, or .csv.")] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print only the picture.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a pipeline schedule, draw it, and compare it with its formulas.

    Activation counts microbatches on one rank's layers. Example:

        moemesh schedule zb_h2 --ranks 4 --microbatches 8 --svg zb_h2.svg
    """
    from moemesh.schedule import command

    request = command.Request(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        num_slices=slices,
        window=window,
        max_in_flight=in_flight,
        forward=forward,
        dgrad=dgrad,
        wgrad=wgrad,
        block=block,
        comm=comm,
        run=costs,
        weight_memory=weight_memory,
        memory_cap=memory_cap,
        relaxed=relaxed,
    )
    found = command.answer(request)
    if svg is not None or trace is not None:
        from moemesh.report import timeline_files

        drawn = found.simulation.timeline
        timeline_files.write(drawn, svg=svg, trace=trace, title=found.title, held=found.held)
    if save is not None:
        from moemesh.schedule import files

        files.save(found.schedule, save)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_json()))
        return
    from moemesh.report import timeline_text

    picture = timeline_text.draw(found.simulation.timeline)
    typer.echo(picture if as_text else command.table(found, picture))
    if save is not None and not as_text:
        typer.echo(command.saved(found.schedule, save))
