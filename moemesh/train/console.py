"""Console output of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moemesh.config.run import RunConfig
from moemesh.config.tuning import FULL, num_trained
from moemesh.data.samples import Samples
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.shape import from_model_config
from moemesh.trace.run import MetricsRow

#: Plan keys of the first line of a plan; what else differs from its default fills a second one.
DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")


def banner(config: RunConfig, folder: Path, samples: Samples, device: torch.device) -> str:
    """The first lines of a run: model, plan, data and run folder."""
    plan, model = config.plan, config.model
    size = count_parameters(from_model_config(model)).total
    degrees = "  ".join(f"{name}={getattr(plan, name)}" for name in DEGREES)
    kind = f"{model.num_experts} experts, top {model.experts_per_token}"
    chosen = [
        f"{name}={value}"
        for name, value in plan
        if name not in DEGREES and value != type(plan).model_fields[name].default
    ]
    return "\n".join(
        [
            f"model    {size:,} parameters, {model.num_layers} layers, "
            f"{kind if model.num_experts else 'dense'}",
            *_tuned(config),
            f"plan     {plan.world_size} rank(s)  {degrees}  edp={plan.edp}",
            *(["         " + "  ".join(chosen)] if chosen else []),
            *_data_lines(config, samples),
            f"run      {folder}  {config.train.dtype}  {config.train.optimizer}  on {device.type}",
        ]
    )


def _data_lines(config: RunConfig, samples: Samples) -> list[str]:
    """Each source with its tokens, and how often the run reads its training samples."""
    data, train = config.data, config.train
    batch = f"{data.global_batch} x {data.seq_len} a step"
    epochs = samples.epochs(train.steps * data.global_batch)
    shares = samples.interleaving.counts / samples.interleaving.period
    lines: list[str] = []
    for split, share, times in zip(samples.splits, shares, epochs, strict=True):
        name, read = split.source.name, f"{times:.3g} epochs"
        if split.without_loss:
            read += f", {split.without_loss:,} windows without loss left out"
        if len(samples.splits) == 1:
            lines.append(f"data     {name}: {split.num_tokens:,} tokens, {batch}, {read}")
        else:
            lines.append(f"         {share:6.2%}  {name}: {split.num_tokens:,} tokens, {read}")
    if len(samples.splits) > 1:
        lines.insert(0, f"data     {len(samples.splits)} sources, {batch}")
    if data.validation is not None:
        lines.append(
            f"         validation {data.validation}: {len(samples.held_out_ids):,} samples"
        )
    return lines


def _tuned(config: RunConfig) -> list[str]:
    """A line on what trains, where that is not everything."""
    if config.tuning.is_full:
        return []
    trained = num_trained(config.tuning, config.model, config.plan)
    total = num_trained(FULL, config.model, config.plan)
    return [f"trains   {trained:,} of {total:,} parameters ({trained / total:.1%})"]


class Console:
    """Prints for one rank; a silent one prints nothing, so that no caller asks who it is."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._terminal = not silent and sys.stdout.isatty()
        self._rich = RichConsole(highlight=False)
        self._progress: Progress | None = None
        self._task = None

    def say(self, text: str) -> None:
        if self._silent:
            return
        if self._terminal:
            (self._progress.console if self._progress else self._rich).print(text, markup=False)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """To stderr; also from a silent console, since a warning of one rank concerns the run."""
        print(f"moemesh: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def training(self, done: int, total: int) -> Iterator[None]:
        """Show progress from step `done` of `total` while inside."""
        if not self._terminal:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
        )
        with Progress(*columns, console=self._rich) as self._progress:
            self._task = self._progress.add_task("training", total=total, completed=done, state="")
            yield
        self._progress = None

    def step(self, row: MetricsRow, total: int) -> None:
        """One finished step: moves the bar, or prints every twentieth of the run."""
        text = (
            f"loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}  "
            f"{row.tokens_per_second:,.0f} tokens/s"
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=row.step, state=text)
        elif row.step in (1, total) or row.step % max(total // 20, 1) == 0:
            self.say(f"step {row.step}/{total}  {text}  lr {row.lr:.2e}")
        if row.validation_loss is not None and row.step < total:  # the summary tells the last
            self.say(f"step {row.step}/{total}  validation loss {row.validation_loss:.4f}")
