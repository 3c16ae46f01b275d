"""The verb of ESFT: esft scores."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated, Literal

import typer

from moemesh.cli.application import AsJson, Overrides, esft_app
from moemesh.cli.options import tokens


@esft_app.command(short_help="Write a table of the experts that the data of a task uses.")
def scores(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, or a folder of transformers.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Data of the task, as data.path.")],
    out: Annotated[Path, typer.Option("--out", metavar="TABLE.json", help="The table to write.")],
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="P",
            help="Choose the most relevant experts of a layer that together reach this share.",
            show_default="0.2",
        ),
    ] = None,
    experts_per_layer: Annotated[
        int | None, typer.Option("--experts-per-layer", min=1, help="Or: so many of every layer.")
    ] = None,
    score: Annotated[
        Literal["gate", "token"],
        typer.Option(
            "--score", help="Relevance: mean gate score, or share of the tokens' choices."
        ),
    ] = "gate",
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="S",
            parser=tokens,
            help="Tokens of a window, at most the positions of the model.",
            show_default="4096, or the positions of the model where they are fewer",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Most windows to read.")
    ] = 32,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the scores.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score every expert on the data of a task, and choose those to train (ESFT, arXiv:2407.01906).

    Windows are read in order, in any plan (--set plan.ep=4). Example:

        moemesh esft scores models/Qwen3-30B-A3B law.jsonl --threshold 0.2 --out law.json

        moemesh train sft.toml --set train.esft=law.json
    """
    from moemesh.report.files import check_target
    from moemesh.train.inference.esft_request import EsftRequest
    from moemesh.train.weights.weight_sources import check_weights, config_of

    request = EsftRequest(
        data=data,
        out=out,
        threshold=threshold,
        experts_per_layer=experts_per_layer,
        score=score,
        seq_len=seq_len,
        samples=samples,
        svg=svg,
        as_json=as_json,
    )
    # Before torch, which takes seconds, is imported, and before any work.
    for path, kind in ((out, '{\n "model"'), (svg, "<svg")):
        if path is not None and path.exists():
            check_target(path, kind)
    request = request.checked(config_of(source, overrides or []))
    check_weights(source)
    from moemesh.train.inference.esft import write_scores

    raise typer.Exit(write_scores(source, request, overrides or []))
