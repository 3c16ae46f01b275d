"""Profiling of some steps on every rank: torch's traces, and the offsets of their clocks."""

from __future__ import annotations

import json
import socket
import time
from contextlib import nullcontext
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from moemesh.comm.collectives import barrier, gather_json
from moemesh.monitor import progress
from moemesh.report.verdict import MARK
from moemesh.trace.machine import boot_name
from moemesh.trace.profile import FOLDER, PLAIN, WARM_UP
from moemesh.train.asynchronous import KEPT_STEPS
from moemesh.train.session import Session, Steps
from moemesh.train.step import FinishedStep

#: Number of exchanges between all ranks that bound the offsets of their clocks.
_HANDSHAKES = 8


class ProfileTaken(Exception):
    """The steps are profiled and their traces written; raised on all ranks after the same step."""


class ProfiledSteps:
    """Profiles `num_steps` steps, after :data:`WARM_UP` steps and :data:`PLAIN` ones, whose time is
    measured without a profiler; every rank then writes its trace to the folder `profile` of the
    run, with clock readings for the alignment, and raises ProfileTaken. Where a pipeline runs
    several steps before it drains, it drains after each of the three kinds, and after
    :data:`KEPT_STEPS` steps."""

    def __init__(self, session: Session, steps: Steps, num_steps: int) -> None:
        self._session, self._steps, self._num_steps = session, steps, num_steps
        #: Number of steps so far, of all three kinds.
        self._taken = 0
        self._profile: Any = None
        #: Timeline records of the profiled and of the plain steps.
        self._phases: list[dict[str, Any]] = []
        self._plain: list[dict[str, Any]] = []
        #: Seconds of the plain steps, and those in which this rank waited for others.
        self._seconds = self._waited = 0.0

    def advance(self, first: int) -> FinishedStep:
        """See :class:`Steps`."""
        mesh, num_unprofiled = self._session.mesh, WARM_UP + PLAIN
        ends = (WARM_UP, num_unprofiled, num_unprofiled + self._num_steps)
        left = next(end for end in ends if end > self._taken) - self._taken
        self._session.drains_after = first - 1 + min(left, KEPT_STEPS)
        if self._taken >= num_unprofiled and self._profile is None:
            kinds = [ProfilerActivity.CPU]
            if mesh.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            # In the trace, a mark at each entry of the ledger shows where its collective begins.
            ledger, enter = mesh.ledger, mesh.ledger.record

            def record(**entry: Any) -> None:
                mark = f"{MARK}{entry['op']} over {entry['axis']} ({entry['caller']})"
                with record_function(mark):
                    enter(**entry)

            ledger.record = record  # type: ignore[method-assign]  # until the profile ends
            barrier(mesh.control)
            self._profile = profile(activities=kinds)
            self._profile.start()
        is_profiled, waited = self._profile is not None, progress.waited_in_steps() or 0.0
        steps: list[FinishedStep] = []
        self._session.on_report = steps.append
        with record_function(f"step {first}") if is_profiled else nullcontext():
            finished = self._steps.advance(first)
        steps.append(finished)
        # The steps of a stream have one recorder.
        recorders = {id(step.recorder): step.recorder for step in steps}.values()
        phases = [entry for r in recorders for entry in r.timeline().to_json()["records"]]
        if is_profiled:
            self._phases += phases
        elif self._taken >= WARM_UP:
            self._plain += phases
            self._seconds += sum(step.seconds for step in steps)
            self._waited += (progress.waited_in_steps() or 0.0) - waited
        self._taken += len(steps)
        if self._taken < ends[-1]:
            return finished
        self._write()
        raise ProfileTaken

    def _write(self) -> None:
        """Stop the profiler, and write the trace of this rank and its notes; all ranks call."""
        mesh = self._session.mesh
        del mesh.ledger.record  # which hid the method of the class
        self._profile.stop()
        rank, folder = mesh.rank, self._session.folder.path / FOLDER
        folder.mkdir(exist_ok=True)
        file = folder / f"rank-{rank:05d}.json"
        self._profile.export_chrome_trace(str(file))
        self._profile = None
        # Calendar seconds before and after an exchange of all ranks. No rank returns from it before
        # every rank has begun it, which bounds the offset of two clocks.
        readings: list[tuple[float, float]] = []
        for _ in range(_HANDSHAKES):
            before = time.time()
            gather_json(0, mesh.control)
            readings.append((before, time.time()))
        on_cpu = mesh.device.type == "cpu"
        notes = {
            "rank": rank,
            "host": socket.gethostname(),
            "boot": boot_name(),
            "trace": file.name,
            "num_steps": self._taken - WARM_UP - PLAIN,
            "readings": readings,
            # The recorder's clock is monotonic, the profiler's is the calendar.
            "epoch_minus_monotonic": time.time() - time.monotonic(),
            "phases": self._phases,
            "plain": self._plain,
            # On a GPU the host continues at once, and the device waits.
            "waited": None if not on_cpu else min(self._waited / self._seconds, 1.0),
        }
        file.with_suffix(".notes.json").write_text(json.dumps(notes), encoding="utf-8")

    def is_stopping(self) -> bool:
        """See :class:`Steps`."""
        return self._steps.is_stopping()
