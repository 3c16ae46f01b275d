"""The verbs of the benchmarks: layer, dispatch, pipeline, balance, replicas, memory, and so on."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
from moemesh.bench.settings import BenchError, Settings, described
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


class Benchmark(NamedTuple):
    """A verb: its settings, help and epilog. `has_ranks`: it may start ranks, one of which leaves
    the result in the file ``--found``."""

    settings: type[Settings]
    short: str
    help: str
    epilog: str | None = None
    has_ranks: bool = True


#: Verbs by their name, which is that of a module with `run` and of a function of `benchmarks.text`.
BENCHMARKS = {
    "layer": Benchmark(
        LayerSettings,
        "One MoE layer against its bounds.",
        f"Time one MoE layer against its bare matrix products and exchanges.\n\n{_SHAPES}",
        _LOADS,
    ),
    "step": Benchmark(
        StepSettings,
        "A whole training step beside transformers.",
        """Time a whole training step beside a plain loop over transformers.

        Each runs in processes of its own, with the environment that its users have; both take
        turns. Example:

            python -m benchmarks.step --plan dp=2,ep=2 --dtype bfloat16
        """,
    ),
    "dispatch": Benchmark(
        DispatchSettings,
        "All dispatchers under a load.",
        """Time every dispatcher under a given load, against the bare all-to-all.

        All take turns; a step takes as long as its slowest rank. Example:

            python -m benchmarks.dispatch --workload W3 --hosts 2 --link 1gbit
        """,
        _LOADS,
    ),
    "pipeline": Benchmark(
        PipelineSettings,
        "The executor of pipelines.",
        "Time the executor of pipelines, with empty stages or with stages that sleep.",
    ),
    "balance": Benchmark(
        BalancersSettings,
        "Balancers of experts, side by side.",
        "Compare expert balancers with the published one, on loads of every shape.",
        has_ranks=False,
    ),
    "replicas": Benchmark(
        ReplicasSettings,
        "Steps with spare slots and without.",
        "Time training steps with spare slots and without, in turns, under skewed routing.",
        _LOADS,
    ),
    "memory": Benchmark(
        MemorySettings,
        "Every plan.data: memory, traffic, time.",
        """Compare replicate, ZeRO 1 to 3 and a parameter server, in turns in one run.

        Peak and state bytes of a rank stand beside the predicted ones. Example:

            python -m benchmarks.memory --rounds 15
        """,
    ),
    "tokenize": Benchmark(
        TokenizeSettings,
        "Text into tokens.",
        "Compare `moemesh tokenize` with the package tokenizers by itself, in turns on one text.",
        has_ranks=False,
    ),
    "checkpoint": Benchmark(
        CheckpointSettings,
        "Seconds that a step waits for a save.",
        """Save the same state while the steps wait and behind them, in turns in one run.

        Example:

            python -m benchmarks.checkpoint --megabytes 1024 --folder /shared/runs
        """,
    ),
    "load": Benchmark(
        LoadSettings,
        "Weights of transformers onto ranks, against a plain read.",
        """Write a folder of weights, and load the slices of every rank, in turns with a plain read.

        Bytes read beside those needed, and memory beside the model's, of the rank with the most.
        Example:

            python -m benchmarks.load --megabytes 8192
        """,
    ),
}


def _add(verb: str, row: Benchmark) -> Callable[..., None]:
    def bench(
        settings: row.settings,  # type: ignore[name-defined]
        out: OutFile = None,
        as_json: AsJson = False,
        found: FoundFile = None,
    ) -> None:
        given = (settings, found) if row.has_ranks else (settings,)
        text = getattr(import_module("benchmarks.text"), f"{verb}_text")
        _print(import_module(f"benchmarks.{verb}").run(*given), text, as_json, out)

    bench.__doc__ = cleandoc(row.help)
    return app.command(verb, short_help=row.short, epilog=row.epilog)(bench)


for _verb, _row in BENCHMARKS.items():
    _command = _add(_verb, _row)
    if _verb == "layer":
        app.command("layers", hidden=True)(_command)


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
