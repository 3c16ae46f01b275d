"""Synchronous steps: reduce all gradients, then update all stages, one step after the other."""

from __future__ import annotations

import time

from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import learning_rate
from moemesh.train.session import Report, Session
from moemesh.train.step import FinishedStep, gradients_of_step, update


class SynchronousSteps:
    """Every step ends on all ranks before the next begins."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def advance(self, first: int, report: Report) -> FinishedStep:
        session, train, start = self._session, self._session.config.train, time.perf_counter()
        recorder = TimelineRecorder(session.mesh.rank)
        recorder.step = first
        with recorder.span("data"):
            batches = session.batches(first)
        with session.artifacts.first_step_memory():
            result = gradients_of_step(session.parallel, batches, recorder, refuses=False)
        result = session.guard.judge(first, result)
        lr = learning_rate(train, first)
        with recorder.span("optimizer"):
            update(session.parallel, session.optimizer, result, lr=lr, clip=train.clip)
        seconds = time.perf_counter() - start
        return FinishedStep(number=first, result=result, recorder=recorder, seconds=seconds)

    def is_stopping(self) -> bool:
        return self._session.any_rank(self._session.stop.requested)
