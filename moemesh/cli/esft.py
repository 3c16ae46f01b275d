"""The verb of ESFT: esft scores."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from moemesh.cli.application import AsJson, Overrides, esft_app
from moemesh.cli.options import options_from


@dataclass(frozen=True, kw_only=True)
class ScoresRequest:
    """A model, data of a task, and how experts are chosen by them."""

    source: Annotated[Path, "A run, or a folder of transformers.", "<MODEL>"]
    data: Annotated[str, "Data of the task, as data.path.", "<DATA>"]
    out: Annotated[Path, "The table to write.", "TABLE.json"]
    threshold: Annotated[
        float | None,
        "Choose the most relevant experts of a layer that together reach this share.",
        {"metavar": "P", "show_default": "0.2"},
    ] = None
    experts_per_layer: Annotated[int | None, "Or: so many of every layer.", {"min": 1}] = None
    score: Annotated[
        Literal["gate", "token"], "Relevance: mean gate score, or share of the tokens' choices."
    ] = "gate"
    seq_len: Annotated[
        int | None,
        "Tokens of a window, at most the positions of the model.",
        {
            "tokens": True,
            "metavar": "S",
            "show_default": "4096, or the positions of the model where they are fewer",
        },
    ] = None
    samples: Annotated[int, "Most windows to read.", {"metavar": "N", "min": 1}] = 32
    svg: Annotated[Path | None, "Draw the scores.", "FILE"] = None
    overrides: Overrides = None
    as_json: AsJson = False


@esft_app.command(short_help="Write a table of the experts that the data of a task uses.")
@options_from(ScoresRequest)
def scores(given: ScoresRequest) -> None:
    """Score every expert on the data of a task, and choose those to train (ESFT, arXiv:2407.01906).

    Windows are read in order, in any plan (--set plan.ep=4). Example:

        moemesh esft scores models/Qwen3-30B-A3B law.jsonl --threshold 0.2 --out law.json

        moemesh train sft.toml --set train.esft=law.json
    """
    from moemesh.report.files import check_target
    from moemesh.train.inference.esft_request import EsftRequest
    from moemesh.train.weights.weight_sources import check_weights, config_of

    source, overrides = given.source, given.overrides or []
    own = {field.name: getattr(given, field.name) for field in fields(EsftRequest)}
    request = EsftRequest(**own)
    # Before torch, which takes seconds, is imported, and before any work.
    for path, kind in ((given.out, '{\n "model"'), (given.svg, "<svg")):
        if path is not None and path.exists():
            check_target(path, kind)
    request = request.checked(config_of(source, overrides))
    check_weights(source)
    from moemesh.train.inference.esft import write_scores

    raise typer.Exit(write_scores(source, request, overrides))
