"""What a person sees while a run trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moemesh.trace.run import MetricsRow


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
        if row.validation_loss is not None:
            self.say(f"step {row.step}/{total}  validation loss {row.validation_loss:.4f}")
