"""Figures of a run that its page, its explanation and a comparison share."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from moemesh.report.bars import sent_in_training
from moemesh.trace.run import MetricsRow, Run, State, median_of, state_of

#: Fields of a row of metrics whose medians are kept.
_MEDIANS = (
    *("seconds", "tokens_per_second", "mfu", "tflops_per_rank"),
    *("data_seconds", "communication_seconds"),
)
#: Note on a run without a finished step, by state.
NO_STEP: dict[State, str] = {
    "finished": "The run finished without a step.",
    "running": "The run is still running and has not finished a step yet.",
    "stopped": "The run was stopped before its first step was finished.",
    "interrupted": "The run ended before its first step was finished, without a record: it was "
    "killed, or the machine went down; logs/ holds the output of its ranks.",
    "failed": "The run failed before its first step was finished.",
}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Figures of a run; unknown ones are None, "" or absent.

    `last`: row of the newest step; `progress`: "30 of 160" steps. `validation` and `lowest`: (step,
    loss) of the newest and of the lowest validation loss. `end_loss`: mean training loss of the
    last tenth of the steps, at most 100 (the loss of one step is noisy).
    `medians`: field of a row -> median over the steps of the current plan without the first,
    unless it is the only one;
    `totals`: field -> sum over all steps. `peak_bytes`: memory of the fullest rank; `sent_bytes`:
    bytes that all ranks send in a step of training. `command`: command line of the newest start.
    `shared_cores`: (ranks, cores) of the first host, if its CPU ranks outnumber its cores.
    """

    state: State
    last: MetricsRow | None
    progress: str
    validation: tuple[int, float] | None
    lowest: tuple[int, float] | None
    end_loss: float | None
    medians: Mapping[str, float]
    totals: Mapping[str, float]
    peak_bytes: int | None
    sent_bytes: float | None
    command: str
    shared_cores: tuple[int, int] | None

    @classmethod
    def of(cls, run: Run) -> RunFacts:
        rows, argv = run.metrics, run.starts[-1].get("argv") if run.starts else None
        of_total = f" of {run.num_steps:,}" if run.num_steps is not None else ""
        validated = [(r.step, r.validation_loss) for r in rows if r.validation_loss is not None]
        medians = {name: median_of(run.current, name) for name in _MEDIANS}
        totals = {name: sum(getattr(row, name) for row in rows) for name in ("tokens", "seconds")}
        last_losses = [row.loss for row in rows[-max(1, min(len(rows) // 10, 100)) :]]
        words = cast("list[object]", argv) if isinstance(argv, list) else []
        shared_cores = None
        with suppress(KeyError, TypeError, IndexError):
            start = run.starts[-1]
            cores, ranks = int(start["hardware"]["usable_cores"]), start["hosts"][0]["ranks"]
            num_ranks = sum(start["devices"][rank] == "cpu" for rank in ranks)
            shared_cores = (num_ranks, cores) if num_ranks > cores else None
        return cls(
            state=state_of(run),
            last=rows[-1] if rows else None,
            progress=f"{rows[-1].step:,}{of_total}" if rows else "",
            validation=validated[-1] if validated else None,
            lowest=min(validated, key=lambda pair: pair[1], default=None),
            end_loss=statistics.fmean(last_losses) if last_losses else None,
            medians={name: value for name, value in medians.items() if value is not None},
            totals=totals if rows else {},
            peak_bytes=run.memory.peak if run.memory is not None and run.memory.ranks else None,
            sent_bytes=sum(sent_in_training(run).values()) if run.ledgers else None,
            command=shlex.join(map(str, words)),
            shared_cores=shared_cores,
        )
