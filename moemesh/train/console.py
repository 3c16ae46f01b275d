"""Console output of a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.live import Live

from moemesh.config.limits import drawn_on, visible
from moemesh.config.plan import DEGREES
from moemesh.config.run import RunConfig
from moemesh.config.tuning import FULL
from moemesh.data.samples import Samples
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.counted import shape_of
from moemesh.report.document import plural
from moemesh.report.watch import View, facts
from moemesh.sharding.parameters import num_trained
from moemesh.trace.run import MetricsRow
from moemesh.trace.step_seconds import duration
from moemesh.train.records.run_folder import Events

#: Seconds after a line when the next one is due at the latest.
LINE_SECONDS = 60.0
#: Steps after a line when the next one is due: the smaller of a number and a share of all steps.
LINE_STEPS, LINE_SHARE = 50, 0.25
#: Weight of the newest step in the moving average of the time of a step.
_NEWEST = 0.1


class Progress:
    """Progress through `total` steps; a resumed run begins after step `done`.

    `log_every`: steps between lines; 0: by the constants above. The time of a step is that between
    two calls of :meth:`finished`, so it includes validation and saving.
    """

    def __init__(
        self, done: int, total: int, log_every: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._log_every, self._clock = total, log_every, clock
        self._finished_at: float | None = None
        self._mean: float | None = None  # moving average of the seconds of a step
        self._first = done + 1
        self._line_step, self._line_at = done, clock()  # step and time of the last line
        self.step = done

    def finished(self, step: int) -> bool:
        """Step `step` is over; returns whether a line is due."""
        now = self._clock()
        if self._finished_at is not None:
            seconds = (now - self._finished_at) / max(step - self.step, 1)
            mean = seconds if self._mean is None else self._mean
            self._mean = mean + _NEWEST * (seconds - mean)
        self._finished_at, self.step = now, step
        if self._log_every:
            is_due = step % self._log_every == 0
        else:
            steps = min(LINE_STEPS, LINE_SHARE * self._total)
            is_due = step - self._line_step >= steps or now - self._line_at >= LINE_SECONDS
        is_due = is_due or step in (self._first, self._total)
        if is_due:
            self._line_step, self._line_at = step, now
        return is_due

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds to the last step; None before the second step."""
        return None if self._mean is None else self._mean * (self._total - self.step)


#: Least seconds between two drawings of the panel.
_DRAW_SECONDS = 0.5


def banner(config: RunConfig, folder: Path, samples: Samples, device: torch.device) -> str:
    """The first lines of a run: model, plan, data and run folder."""
    plan, model, data, train = config.plan, config.model, config.data, config.train
    size = count_parameters(shape_of(model)).total
    degrees = "  ".join(f"{name}={getattr(plan, name)}" for name in DEGREES)
    kind = f"{model.num_experts} experts, top {model.experts_per_token}"
    chosen = [  # keys of the plan on a second line
        f"{name}={value}"
        for name, value in plan
        if name not in DEGREES and value != type(plan).model_fields[name].default
    ]
    tuned: list[str] = []  # a line on what trains, unless all parameters do
    if not config.tuning.is_full:
        trained = num_trained(config.tuning, model, plan)
        total = num_trained(FULL, model, plan)
        tuned = [f"trains   {trained:,} of {total:,} parameters ({trained / total:.1%})"]
    lines = samples.reading(train.steps, data.global_batch)
    lines += samples.loss_lines(data.tokenizer)
    if data.validation is not None:
        lines.append(f"         validation {data.validation}: {samples.num_validation:,} samples")
    return "\n".join(
        [
            f"model    {size:,} parameters, {plural(model.num_layers, 'layer')}, "
            f"{kind if model.num_experts else 'dense'}",
            *tuned,
            *([f"weights  from {config.model_path}"] if config.model_path is not None else []),
            f"plan     {plan.world_size} rank(s)  {degrees}  edp={plan.edp}",
            *(["         " + "  ".join(chosen)] if chosen else []),
            *lines,
            f"run      {folder}  {train.dtype}  {train.optimizer}  on {device.type}",
        ]
    )


class Console:
    """Prints for one rank; a silent one prints only warnings, so callers need not check the rank.

    A lost console (a closed pipe, a full disk) stops no run: after the first failure only warnings
    are printed, on stderr, which ``events.jsonl`` records.
    """

    def __init__(self, *, silent: bool, events: Events | None = None, log_every: int = 0) -> None:
        """`events`: where events are recorded (None: nowhere). `log_every`: see
        :class:`Progress`."""
        self._silent, self._log_every = silent, log_every
        self._events = events or Events(None)
        self._terminal = not silent and sys.stdout.isatty()
        # `drawn_on` flushes, which would fail for a pipe whose reader has ended.
        file = drawn_on(sys.stdout) if self._terminal else sys.stdout
        self._rich = RichConsole(highlight=False, file=file)
        self._live: Live | None = None
        self._view = View("")
        self._drawn_at = 0.0
        self._progress = Progress(0, 0)

    def log(self, text: str, kind: str = "note") -> None:
        """Print `text` and record it as an event of this `kind`."""
        self.keep(text, kind)
        self._print(text)

    def keep(self, text: str, kind: str) -> None:
        """Record `text` as an event only, for readers of `events.jsonl`."""
        self._events.add(kind, text, self._progress.step)

    def warn(self, text: str) -> None:
        """Print to stderr, also from a silent console: a warning of a rank concerns the run."""
        self._events.add("warning", text, self._progress.step)
        with suppress(OSError, ValueError):
            print(f"moemesh: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def training(self, done: int, total: int) -> Iterator[None]:
        """Context that shows progress from step `done` to `total`."""
        self._progress = Progress(done, total, self._log_every)
        if not self._terminal:
            yield
            return
        self._view = View("training", total)
        live = Live(console=self._rich, auto_refresh=False)
        self._live = live
        self._safely(live.start)
        try:
            yield
        finally:
            self._draw(is_due=True)
            self._live = None
            self._safely(live.stop)

    def step(self, row: MetricsRow, total: int) -> None:
        """Show a finished step in the panel, or print it as a line if one is due."""
        losses = f"loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}"
        text = f"{losses}  {row.tokens_per_second:,.0f} tokens/s"
        is_due = self._progress.finished(row.step)
        seconds = self._progress.seconds_left
        left = "" if seconds is None or row.step == total else f"{duration(seconds)} left"
        if self._live is not None:
            self._view.add_row(row)
            self._draw()
        elif is_due:
            more = [f"lr {row.lr:.2e}", *facts(row), *filter(None, [left])]
            self._print("  ".join([f"step {row.step}/{total}", text, *more]))
        if row.validation_loss is not None and row.step < total:  # the summary prints the last one
            self._print(f"step {row.step}/{total}  validation loss {row.validation_loss:.4f}")

    def _draw(self, *, is_due: bool = False) -> None:
        """Draw the panel, at most every `_DRAW_SECONDS`: drawing takes milliseconds."""
        live, now = self._live, time.monotonic()
        if live is None or not (is_due or now - self._drawn_at >= _DRAW_SECONDS):
            return
        self._drawn_at = now
        panel = self._view.panel(self._rich.width)
        self._safely(lambda: live.update(panel, refresh=True))

    def _print(self, text: str) -> None:
        if self._terminal:
            self._safely(lambda: self._rich.print(visible(text), markup=False))
        else:
            self._safely(lambda: print(text, flush=True))

    def _safely(self, show: Callable[[], object]) -> None:
        """Call `show`; if the console is lost, stay silent from now on."""
        if self._silent:
            return
        try:
            show()
        except (OSError, ValueError) as error:  # ValueError: a stream that was closed
            self._silent, self._terminal, self._live = True, False, None
            # Redirect stdout to the null device: its buffer would cause an error at the end.
            with suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, sys.stdout.fileno())
                os.close(nothing)
            why = f"{type(error).__name__}: {error}"
            self._events.add("console", f"the console is lost ({why})")
