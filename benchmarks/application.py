"""The verbs of the benchmarks: layer, dispatch, pipeline, balance, replicas, memory, and so on."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.routing_shape import WORKLOADS
from benchmarks.settings import (
    BalancersSettings,
    CheckpointSettings,
    DeviceSettings,
    DispatchSettings,
    LayerSettings,
    LoadSettings,
    MemorySettings,
    PipelineSettings,
    ReplicasSettings,
    StepSettings,
    TokenizeSettings,
)
from benchmarks.shapes import SHAPES
from moemesh.bench.settings import BenchError, described
from moemesh.cli.application import AsJson, Verbs, run
from moemesh.trace.strict_json import strict_json

app = Verbs(
    help="Measure the library's own claims, against bounds and peers of the same run.",
    add_completion=False,
)

#: Below the help of a verb; click keeps the lines of a block that begins with a backspace.
_LOADS = f"\b\nLoads, as routed tokens per expert:\n{described(WORKLOADS)}"
_SHAPES = "\b\nShapes:\n" + described({name: str(shape) for name, shape in SHAPES.items()})

OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
]
#: Where a rank that the verb itself started leaves the result.
FoundFile = Annotated[Path | None, typer.Option("--found", hidden=True)]


def main(*verb: str) -> None:
    """Run the benchmark of this name, or the one that the command line names."""
    run(app, "python -m benchmarks", [*verb, *sys.argv[1:]])


def _print(result: Any, text: Callable[[Any], str], as_json: bool, out: Path | None = None) -> None:
    """The result for a person or a program; None: another process prints it."""
    if result is None:
        return
    if out is not None:
        try:
            out.write_text(strict_json(result, indent=2))
        except OSError as error:
            raise BenchError(f"--out {out}: {error.strerror or error}") from error
    typer.echo(strict_json(result, indent=2) if as_json else text(result))


@app.command("layer", short_help="One MoE layer against its bounds.", epilog=_LOADS)
def bench_layer(
    settings: LayerSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Time one MoE layer against its bare matrix products and exchanges."""
    from benchmarks import layer
    from benchmarks.text import layer_text

    _print(layer.run(settings, found), layer_text, as_json, out)


bench_layer.__doc__ = f"{bench_layer.__doc__}\n\n{_SHAPES}"
app.command("layers", hidden=True)(bench_layer)


@app.command("step", short_help="A whole training step beside transformers.")
def bench_step(
    settings: StepSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Time a whole training step beside a plain loop over transformers.

    Each runs in processes of its own, with the environment that its users have; both take turns.
    Example:

        python -m benchmarks.step --plan dp=2,ep=2 --dtype bfloat16
    """
    from benchmarks import step
    from benchmarks.text import step_text

    _print(step.run(settings, found), step_text, as_json, out)


@app.command("dispatch", short_help="All dispatchers under a load.", epilog=_LOADS)
def bench_dispatch(
    settings: DispatchSettings, as_json: AsJson = False, found: FoundFile = None
) -> None:
    """Time every dispatcher under a given load, against the bare all-to-all.

    All take turns; a step takes as long as its slowest rank. Example:

        python -m benchmarks.dispatch --workload W3 --hosts 2 --link 1gbit
    """
    from benchmarks import dispatch
    from benchmarks.text import dispatch_text

    _print(dispatch.run(settings, found), dispatch_text, as_json)


@app.command("pipeline", short_help="The executor of pipelines.")
def bench_pipeline(
    settings: PipelineSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Time the executor of pipelines, with empty stages or with stages that sleep."""
    from benchmarks import pipeline
    from benchmarks.text import pipeline_text

    _print(pipeline.run(settings, found), pipeline_text, as_json, out)


@app.command("balance", short_help="Balancers of experts, side by side.")
def bench_balance(settings: BalancersSettings, as_json: AsJson = False) -> None:
    """Compare expert balancers with the published one, on loads of every shape."""
    from benchmarks import balance
    from benchmarks.text import balancers_text

    _print(balance.run(settings), balancers_text, as_json)


@app.command("replicas", short_help="Steps with spare slots and without.", epilog=_LOADS)
def bench_replicas(
    settings: ReplicasSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Time training steps with spare slots and without, in turns, under skewed routing."""
    from benchmarks import replicas
    from benchmarks.text import replicas_text

    _print(replicas.run(settings, found), replicas_text, as_json, out)


@app.command("memory", short_help="Every plan.data: memory, traffic, time.")
def bench_memory(
    settings: MemorySettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Compare replicate, ZeRO 1 to 3 and a parameter server, in turns in one run.

    Peak and state bytes of a rank stand beside the predicted ones. Example:

        python -m benchmarks.memory --rounds 15
    """
    from benchmarks import memory
    from benchmarks.text import memory_text

    _print(memory.run(settings, found), memory_text, as_json, out)


@app.command("tokenize", short_help="Text into tokens.")
def bench_tokenize(
    settings: TokenizeSettings, out: OutFile = None, as_json: AsJson = False
) -> None:
    """Compare `moemesh tokenize` with the package tokenizers by itself, in turns on one text."""
    from benchmarks import tokenize
    from benchmarks.text import tokenize_text

    _print(tokenize.run(settings), tokenize_text, as_json, out)


@app.command("checkpoint", short_help="Seconds that a step waits for a save.")
def bench_checkpoint(
    settings: CheckpointSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Save the same state while the steps wait and behind them, in turns in one run.

    Example:

        python -m benchmarks.checkpoint --megabytes 1024 --folder /shared/runs
    """
    from benchmarks import checkpoint
    from benchmarks.text import checkpoint_text

    _print(checkpoint.run(settings, found), checkpoint_text, as_json, out)


@app.command("load", short_help="Weights of transformers onto ranks, against a plain read.")
def bench_load(
    settings: LoadSettings,
    out: OutFile = None,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Write a folder of weights, and load the slices of every rank, in turns with a plain read.

    Bytes read beside those needed, and memory beside the model's, of the rank with the most.
    Example:

        python -m benchmarks.load --megabytes 8192
    """
    from benchmarks import load
    from benchmarks.text import load_text

    _print(load.run(settings, found), load_text, as_json, out)


@app.command("device", short_help="Kernels, waits, exposed exchanges of a MoE layer on GPUs.")
def bench_device(
    settings: DeviceSettings,
    as_json: AsJson = False,
    found: FoundFile = None,
) -> None:
    """Count kernels, bytes, waits and exposed exchanges of a MoE layer on simulated CUDA devices.

    Runs anywhere, no GPU needed. The roofline is the sum over kernels of the larger of operations
    over peak and bytes over bandwidth, and 4 us for each launch; the planner's time of the layer
    comes from its sizes alone. Exposed is what of an exchange no kernel runs beside.
    """
    if settings.calls:
        from benchmarks import calls
        from benchmarks.text import calls_text

        return _print(calls.run(settings), calls_text, as_json)
    from benchmarks import device
    from benchmarks.text import device_text

    return _print(device.run(settings, found), device_text, as_json)
