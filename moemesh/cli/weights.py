"""Verbs of trained weights: convert, evaluate, generate."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from moemesh.cli.application import AsJson, Overrides, app
from moemesh.cli.options import tokens


@app.command(short_help="Write a run's weights for transformers, or start a run from such.")
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A run, one of its checkpoints, or a folder of transformers."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[
        Literal["huggingface", "moemesh"] | None,
        typer.Option("--to", help="The format to write; by default the one that IN is not in."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        typer.Option("--dtype", help="Type of weights; by default that of the run or the folder."),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="DIR",
            help="A folder of transformers whose config.json and tokenizer the result takes; by "
            "default the one that the run started from.",
        ),
    ] = None,
    expert_layout: Annotated[
        Literal["per-expert", "fused"] | None,
        typer.Option(
            "--expert-layout",
            help="One tensor for each expert, or one for all experts of a layer (transformers 5); "
            "by default as transformers writes the family.",
        ),
    ] = None,
    upcycle: Annotated[
        str | None,
        typer.Option(
            "--upcycle",
            metavar="RECIPE",
            help="Make a mixture of experts of a dense folder: experts=8,k=2, and every=2, "
            "noise=0.01, drop=0.5, seed=0 where wanted.",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Write the adapters of a run with [lora] alone, in PEFT's format; without it they "
            "are merged into the weights.",
        ),
    ] = False,
    delta: Annotated[
        bool, typer.Option("--delta", help="Write only the tensors that a run has trained.")
    ] = False,
    apply: Annotated[
        Path | None,
        typer.Option("--apply", metavar="DELTA", help="Put such tensors onto the folder IN."),
    ] = None,
) -> None:
    """Convert between runs of moemesh and folders of transformers.

    One tensor is in memory at a time, and a conversion that was interrupted goes on where it
    stopped. Example:

        moemesh convert runs/first exported

    From one folder of transformers to another: --to huggingface with --dtype, or --expert-layout.
    """

    def say(done: int, total: int) -> None:
        typer.echo(f"wrote file {done} of {total}", err=True)

    # All that is looked at here is told before torch, which takes seconds, is imported.
    from moemesh.train.weights import weight_sources

    parts = {"--adapter": adapter, "--delta": delta, "--apply": apply is not None}
    if chosen := [flag for flag, given in parts.items() if given]:
        others = {"--to": to, "--like": like, "--expert-layout": expert_layout}
        others |= {"--upcycle": upcycle, "--dtype": dtype if apply is not None else None}
        clash = [*chosen[1:], *(flag for flag, given in others.items() if given is not None)]
        if clash:
            raise typer.BadParameter(f"does not go with {chosen[0]}", param_hint=clash[0])
        weight_sources.check_weights(source)
        if apply is not None:
            weight_sources.check_folder(apply)
        kind = "adapter" if adapter else "delta" if delta else "folder"
    elif upcycle is not None:
        from moemesh.train.weights.weight_sources import read_recipe

        for flag, given in (("--like", like), ("--expert-layout", expert_layout)):
            if given is not None:
                raise typer.BadParameter(f"{flag} does not go with --upcycle", param_hint=flag)
        recipe = read_recipe(upcycle)
        weight_sources.check_weights(source)
        kind = "run" if to == "moemesh" else "folder"
    else:
        target = weight_sources.target_of(source, to, dtype, expert_layout)
        kind = "run" if target == "moemesh" else "folder"
    weight_sources.refuse_occupied(source, out, kind)
    from moemesh.train.weights import conversion

    if adapter:
        conversion.write_adapter(source, out, dtype=dtype)
    elif delta:
        conversion.write_trained(source, out, dtype=dtype)
    elif apply is not None:
        conversion.apply_delta(source, out, apply, on_file=say)
    elif upcycle is not None:
        from moemesh.train.weights.conversion import upcycle as make

        make(source, out, recipe, to or "huggingface", dtype=dtype, on_file=say)
    else:
        conversion.convert(
            source, out, to, dtype=dtype, like=like, expert_layout=expert_layout, on_file=say
        )
    typer.echo(weight_sources.written_text(out, kind), err=True)
    start = f"a run to go on with: moemesh train {out / 'config.toml'} --out {out}"
    typer.echo(start if kind == "run" else str(out))


@app.command(short_help="Compute the loss of a run or of a folder of transformers on a text.")
def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run, or a folder of transformers.")
    ],
    data: Annotated[
        str, typer.Option("--data", metavar="PATH", help="The text: as data.path, in order.")
    ],
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="S",
            parser=tokens,
            help="Tokens of a window; of a run: its data.seq_len.",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Mean loss (nats a token or byte) and perplexity over windows of a text, in any plan.

    Window i reads the tokens from i times S on, and its targets are one further; what is left at
    the end is not read. One device by default; --set plan.ep=4 and the like start more ranks.
    Example:

        moemesh evaluate runs/first --data book.txt --seq-len 128
    """
    if seq_len is None:
        from moemesh.config.errors import UserError
        from moemesh.config.huggingface.folder import CONFIG
        from moemesh.train.weights.weight_sources import config_of

        config = config_of(source, overrides or [])
        if (source / CONFIG).exists():
            longest = config.model.max_position_embeddings
            most = f", at most {longest}" if longest else ""
            raise UserError(
                f"{source} is a folder of transformers, which names no length of windows: choose "
                f"one{most}, such as --seq-len {min(2048, longest or 2048)}"
            )
        seq_len = config.data.seq_len  # that of the run
    _check(source, [f"data.seq_len={seq_len}", *(overrides or [])])
    from moemesh.train.inference.evaluation import evaluate as run

    raise typer.Exit(run(source, data, seq_len, overrides or [], as_json=as_json))


@app.command(short_help="Continue a text with a run or a folder of transformers.")
def generate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run, or a folder of transformers.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer --prompt by the chat template; without it, the lines of stdin."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="With --chat: a system turn.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", parser=tokens, help="Most tokens to add.")
    ] = 100,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0.0, help="0, the default, takes the likeliest token; 1 draws."
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option("--top-p", min=0.0, max=1.0, help="Draw from tokens of this probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Random seed.")] = 0,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, token by token, with kept keys and values: to try a model out, no server.

    One device by default; --set plan.tp=4 --set plan.ep=4 spread the weights over more. Example:

        moemesh generate runs/first --prompt "def main(" --max-tokens 50
        moemesh generate runs/tuned --chat --prompt "What is 3 + 4?"
    """
    from moemesh.comm.slurm import rank_of

    if prompt is None and not chat:
        need = 'is missing; fix: --prompt "What is 3 + 4?"'
        raise typer.BadParameter(need, param_hint="--prompt")
    if prompt is None and as_json:
        need = 'answers one --prompt; fix: --prompt "What is 3 + 4?"'
        raise typer.BadParameter(need, param_hint="--json")
    if system is not None and not chat:
        message = "is a turn of a conversation; fix: add --chat"
        raise typer.BadParameter(message, param_hint="--system")
    _check(source, overrides or [])
    if temperature is None and rank_of(os.environ) == 0:
        note = "takes the likeliest token each time; --temperature 0.8 --top-p 0.95 draw from more"
        typer.echo(f"moemesh: note: {note}", err=True)
    from moemesh.train.inference.generation import generate as run

    code = run(
        source,
        prompt,
        overrides or [],
        chat=chat,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature or 0.0,
        top_p=top_p,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(code)


def _check(source: Path, given: list[str]) -> None:
    """Tell a mistake before torch, which takes seconds, is imported."""
    from moemesh.train.weights.weight_sources import check_weights, config_of

    config_of(source, given)
    check_weights(source)
