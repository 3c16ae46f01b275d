"""A row of each kind that a program can add to the package, and the code that the rows name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from moemesh.bench.examination import CHECKS, Diagnosis
from moemesh.config import learning_rate
from moemesh.config.dispatcher_table import DISPATCHERS, ROW_HOPS, DispatcherRow
from moemesh.config.optimizer_table import OPTIMIZERS, OptimizerRow
from moemesh.config.schedule_table import SCHEDULES, ScheduleRow
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher, AllToAllPlan
from moemesh.schedule.action import Op, Schedule, linear, one_pipe, single
from tests.parity.training import train_on_rank


class ChunkByChunk(AllToAllDispatcher):
    """An all-to-all that exchanges the counts of each chunk by themselves."""

    def plan_chunks(
        self, chunks: Sequence[Tensor], *, is_complete: bool = False
    ) -> list[AllToAllPlan]:
        return [super(ChunkByChunk, self).plan_chunks([chunk])[0] for chunk in chunks]


def one_by_one(num_ranks: int, num_microbatches: int) -> Schedule:
    """A microbatch starts when the one before it is complete."""
    numbers = range(num_microbatches)
    orders = tuple(
        single(*(Op(kind, rank, number) for number in numbers for kind in ("F", "B")))
        for rank in range(num_ranks)
    )
    return one_pipe("toy", linear(num_ranks), orders, num_microbatches)


def examined(folder: Path, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    yield Diagnosis("toy", "pass", "the toys are in their box")


#: Folder from which the toys are imported.
ROOT = Path(__file__).parent.parent

ROWS: list[tuple[dict[str, Any], Any]] = [
    (
        DISPATCHERS,
        DispatcherRow(
            make="tests.toys:ChunkByChunk.of",
            hops=ROW_HOPS,
            copied=lambda numbers: 3.0 * numbers.chosen * numbers.tokens,
        ),
    ),
    (
        SCHEDULES,
        ScheduleRow(
            make="tests.toys:one_by_one",
            holds_form_peak=True,
            bubble="m (p-1)(tF+tB)",
            peak="1",
        ),
    ),
    (
        OPTIMIZERS,
        OptimizerRow(make="torch.optim:RMSprop", states=("square_avg",), counts_steps=True),
    ),
    (learning_rate.SCHEDULES, lambda at: (1 - at.progress) ** 2),
    (CHECKS, examined),
]


@contextlib.contextmanager
def added() -> Iterator[None]:
    """The package with a row "toy" in each table."""
    for table, row in ROWS:
        table["toy"] = row
    try:
        yield
    finally:
        for table, _ in ROWS:
            del table["toy"]


def train_with_toys(*arguments: Any) -> dict[str, Any]:
    """:func:`train_on_rank` in a process that has the rows."""
    with added():
        return train_on_rank(*arguments)
