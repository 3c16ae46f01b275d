"""Verbs of trained weights: `convert`, `evaluate`, `generate`, `esft scores`."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from moemesh.cli.application import AsJson, Overrides, app, esft_app
from moemesh.cli.options import given
from moemesh.config.errors import UserError
from moemesh.report.files import check_target
from moemesh.train.inference.esft_request import EsftRequest

_Source = Annotated[
    Path, "A run, a folder of transformers or PEFT, or a name on the hub.", "<RUN_OR_FOLDER>"
]
_Best = Annotated[
    bool, "Read the checkpoint of a run with the lowest validation loss, not the newest."
]


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """Weights to convert: source, target and format."""

    source: Annotated[
        Path, "A run, one of its checkpoints, or a folder of transformers or PEFT.", "<IN>"
    ]
    out: Annotated[Path, "A new folder.", "<OUT>"]
    to: Annotated[
        Literal["huggingface", "moemesh"] | None,
        "The format to write; by default the one that IN is not in.",
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        "Type of weights; by default that of the run or the folder.",
    ] = None
    like: Annotated[
        Path | None,
        "A folder of transformers whose config.json and tokenizer the result takes; by "
        "default the one that the run started from.",
        "DIR",
    ] = None
    expert_layout: Annotated[
        Literal["per-expert", "fused"] | None,
        "One tensor for each expert, or one for all experts of a layer (transformers 5); "
        "by default as transformers writes the family.",
    ] = None
    upcycle: Annotated[
        str | None,
        "Make a mixture of experts of a dense folder: experts=8,k=2, and every=2, "
        "noise=0.01, drop=0.5, seed=0 where wanted.",
        "RECIPE",
    ] = None
    adapter: Annotated[
        bool,
        "Write the adapters of a run with [lora] alone, in PEFT's format; without it they "
        "are merged into the weights.",
    ] = False
    delta: Annotated[bool, "Write only the tensors that a run has trained."] = False
    apply: Annotated[Path | None, "Put such tensors onto the folder IN.", "DELTA"] = None
    best: _Best = False


@app.command(short_help="Write a run's weights for transformers, or start a run from such.")
def convert(request: ConvertRequest) -> None:
    """Convert between runs of moemesh and folders of transformers.

    One tensor is in memory at a time, and an interrupted conversion can be resumed. Example:

        moemesh convert runs/first exported

    From one folder of transformers to another: --to huggingface with --dtype, or --expert-layout.
    A folder of PEFT is merged into its base.
    """

    def log(done: int, total: int) -> None:
        typer.echo(f"wrote file {done} of {total}", err=True)

    # Mistakes are reported before torch, which takes seconds, is imported.
    from moemesh.train.weights import weight_sources

    source, out = weight_sources.local_source(request.source), request.out
    to, dtype = request.to, request.dtype
    recipe, best = None, request.best
    weight_sources.check_best(source, best)
    parts = [name for name in ("adapter", "delta", "apply") if getattr(request, name)]
    if parts:
        others = (*parts[1:], "to", "like", "expert_layout", "upcycle")
        others += ("dtype",) if request.apply is not None else ()
        for flag in given(request, *others):
            raise typer.BadParameter(f"does not go with --{parts[0]}", param_hint=flag)
        weight_sources.check_weights(source)
        if request.apply is not None:
            weight_sources.check_folder(request.apply)
        kind = "adapter" if request.adapter else "delta" if request.delta else "folder"
    elif request.upcycle is not None:
        for flag in given(request, "like", "expert_layout"):
            raise typer.BadParameter(f"{flag} does not go with --upcycle", param_hint=flag)
        recipe = weight_sources.read_recipe(request.upcycle)
        weight_sources.check_weights(source)
        kind = "run" if to == "moemesh" else "folder"
    else:
        target = weight_sources.target_of(source, to, dtype, request.expert_layout)
        kind = "run" if target == "moemesh" else "folder"
    weight_sources.refuse_occupied(source, out, kind)
    from moemesh.train.weights import conversion

    if request.adapter:
        conversion.write_adapter(source, out, dtype=dtype, best=best)
    elif request.delta:
        conversion.write_trained(source, out, dtype=dtype, best=best)
    elif request.apply is not None:
        conversion.apply_delta(source, out, request.apply, on_file=log)
    elif recipe is not None:
        conversion.upcycle(source, out, recipe, to or "huggingface", dtype=dtype, on_file=log)
    else:
        conversion.convert(
            source,
            out,
            to,
            dtype=dtype,
            like=request.like,
            expert_layout=request.expert_layout,
            best=best,
            on_file=log,
        )
    typer.echo(weight_sources.written_text(source, out, kind), err=True)
    typer.echo(str(out))


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """Weights, and the text to compute their loss on."""

    source: _Source
    data: Annotated[str, "The text: as data.path, in order.", "PATH"]
    seq_len: Annotated[
        int | None,
        "Tokens of a window; of a run: its data.seq_len.",
        {"tokens": True, "metavar": "S"},
    ] = None
    best: _Best = False
    overrides: Overrides = None
    as_json: AsJson = False


@app.command(short_help="Compute the loss of a run or of a folder of transformers on a text.")
def evaluate(request: EvaluateRequest) -> None:
    """Mean loss (nats a token or byte) and perplexity over windows of a text, in any plan.

    Window i reads the tokens from i times S on, and its targets are one further; what is left at
    the end is not read. One device by default; --set plan.ep=4 and the like start more ranks.
    Example:

        moemesh evaluate runs/first --data book.txt --seq-len 128
    """
    from moemesh.train.weights.weight_sources import config_of, local_source

    source, seq_len, overrides = request.source, request.seq_len, request.overrides or []
    source = local_source(source)
    if seq_len is None:
        from moemesh.config.huggingface.folder import CONFIG

        config = config_of(source, overrides)
        if (source / CONFIG).exists():
            longest = config.model.max_position_embeddings
            most = f", at most {longest}" if longest else ""
            raise UserError(
                f"{source} is a folder of transformers, which names no length of windows: choose "
                f"one{most}, such as --seq-len {min(2048, longest or 2048)}"
            )
        seq_len = config.data.seq_len  # that of the run
    _check(source, [f"data.seq_len={seq_len}", *overrides], request.best)
    from moemesh.train.inference.evaluation import evaluate as run

    shown = {"best": request.best, "as_json": request.as_json}
    raise typer.Exit(run(source, request.data, seq_len, overrides, **shown))


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Weights, the text to continue, and the choice of tokens."""

    source: _Source
    prompt: Annotated[str | None, "The text to continue.", "TEXT"] = None
    prompts: Annotated[
        Path | None, 'Or a file of them: a text of lines, or JSON lines with "prompt".', "FILE"
    ] = None
    batch: Annotated[int, "Prompts of a file that are answered together.", {"min": 1}] = 16
    chat: Annotated[
        bool, "Answer --prompt by the chat template; without it, the lines of stdin."
    ] = False
    system: Annotated[str | None, "With --chat: a system turn.", "TEXT"] = None
    max_tokens: Annotated[int, "Most tokens to add.", {"tokens": True}] = 100
    temperature: Annotated[
        float | None, "0, the default, takes the likeliest token; 1 draws.", {"min": 0.0}
    ] = None
    top_p: Annotated[float, "Draw from tokens of this probability.", {"min": 0.0, "max": 1.0}] = 1.0
    seed: Annotated[int, "Random seed.", {"min": 0, "max": 2**63 - 1}] = 0
    best: _Best = False
    overrides: Overrides = None
    as_json: AsJson = False


@app.command(short_help="Continue a text with a run or a folder of transformers.")
def generate(request: GenerateRequest) -> None:
    """Continue a text, token by token, with kept keys and values: to try a model out, no server.

    One device by default; --set plan.tp=4 --set plan.ep=4 spread the weights over more. Example:

        moemesh generate runs/first --prompt "def main(" --max-tokens 50
        moemesh generate runs/tuned --chat --prompt "What is 3 + 4?"
        moemesh generate runs/tuned --chat --prompts questions.txt --json > answers.jsonl
    """
    from moemesh.train.weights.weight_sources import local_source

    with_fix = '; fix: --prompt "What is 3 + 4?"'
    texts = [text for text in (request.prompt, request.prompts) if text is not None]
    lacks_chat = request.system is not None and not request.chat
    for is_wrong, option, message in (
        (len(texts) > 1, "--prompts", "conflicts with --prompt; fix: give one of them"),
        (not texts and not request.chat, "--prompt", f"is missing{with_fix}"),
        (not texts and request.as_json, "--json", f"answers one --prompt{with_fix}"),
        (lacks_chat, "--system", "is a turn of a conversation; fix: add --chat"),
    ):
        if is_wrong:
            raise typer.BadParameter(message, param_hint=option)
    arguments = vars(request) | {
        "overrides": request.overrides or [],
        "source": local_source(request.source),
    }
    _check(arguments["source"], arguments["overrides"], request.best)
    from moemesh.train.inference.generation import generate as run

    raise typer.Exit(run(**arguments))


@dataclass(frozen=True, kw_only=True)
class ScoresRequest(EsftRequest):
    """Request of the scores, with the plan to compute them in."""

    overrides: Overrides = None
    as_json: AsJson = False


@esft_app.command(short_help="Write a table of the experts that the data of a task uses.")
def scores(request: ScoresRequest) -> None:
    """Score every expert on the data of a task, and choose those to train (ESFT, arXiv:2407.01906).

    Windows are read in order, in any plan (--set plan.ep=4). Example:

        moemesh esft scores models/Qwen3-30B-A3B law.jsonl --threshold 0.2 --out law.json

        moemesh train sft.toml --set train.esft=law.json
    """
    from moemesh.train.weights.weight_sources import (
        check_best,
        check_weights,
        config_of,
        local_source,
    )

    request = replace(request, source=local_source(request.source))
    # Report mistakes before torch, which takes seconds, is imported.
    for path, kind in ((request.out, '{\n "model"'), (request.svg, "<svg")):
        if path is not None and path.exists():
            check_target(path, kind)
    overrides = request.overrides or []
    request = request.checked(config_of(request.source, overrides, prints_notes=True))
    check_weights(request.source, takes_adapters=True)
    check_best(request.source, request.best)
    from moemesh.train.inference.esft import write_scores

    raise typer.Exit(write_scores(request, overrides, as_json=request.as_json))


def _check(source: Path, given: list[str], best: bool) -> None:
    """Report mistakes before torch, which takes seconds, is imported."""
    from moemesh.train.weights.weight_sources import check_best, check_weights, config_of

    config_of(source, given, prints_notes=True)
    check_weights(source, takes_adapters=True)
    check_best(source, best)
