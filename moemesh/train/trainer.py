"""Train one rank: from an opened run folder to the exit code."""

from __future__ import annotations

import time

from moemesh.comm.mesh import Mesh
from moemesh.config.run import RunConfig
from moemesh.data.samples import Samples
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.asynchronous import StreamedSteps
from moemesh.train.console import Console, banner
from moemesh.train.numerics.vote import what_is_compared
from moemesh.train.opening import schedule_of_run
from moemesh.train.optimizer import learning_rate
from moemesh.train.post_validated import ValidatedSteps
from moemesh.train.preflight import disk_warning, preflight_warnings
from moemesh.train.preparation import already_trained
from moemesh.train.records import provenance
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.session import Report, Session, Steps
from moemesh.train.step import FinishedStep, gradients_of_step, update
from moemesh.watch import progress_words
from moemesh.watch.signals import StopRequest
from moemesh.watch.word_file import FINISH

# Synchronous steps: reduce all gradients, then update all stages, one step after the other.


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
        return bool(self._session.largest(self._session.stop.requested))


def train(
    *,
    config: RunConfig,
    mesh: Mesh,
    folder: RunFolder,
    samples: Samples,
    console: Console,
    stop: StopRequest,
    profile_steps: int | None = None,
) -> int:
    """Train to the last step, or until asked to stop. Returns the process's exit code.

    `profile_steps`: so many steps behind a warm-up are profiled on every rank, and the run ends.
    """
    console.say(banner(config, folder.path, samples, mesh.device), "start")
    if config.plan.world_size > 1:
        console.keep(what_is_compared(config), "note")
    schedule = schedule_of_run(config, folder, mesh)
    ranks_here = mesh.layout.ranks_per_node or mesh.world_size
    on_cpu = ranks_here if mesh.device.type == "cpu" else 0
    for warning in preflight_warnings(config, on_cpu, schedule):
        console.say(f"note: {warning}", "note")
    if mesh.rank == 0 and (warning := disk_warning(config, folder.checkpoints)):
        console.say(f"note: {warning}", "note")
    session = Session(
        config=config,
        mesh=mesh,
        folder=folder,
        samples=samples,
        console=console,
        stop=stop,
        schedule=schedule,
    )
    done, last = session.done, config.train.steps
    if done >= last:
        console.say(already_trained(folder.path, done, last))
        return 0
    if stop.after is not None and done >= stop.after:
        console.say(f"already trained to step {done}; --stop-after {stop.after} is behind it")
        return 0
    session.artifacts.begin(done, samples)
    provenance.record_start(folder, config, mesh, samples, done + 1)
    for note in session.parallel.notes:
        console.say(note)
    if warning := config.model.layout_warning:
        console.say(f"warning: {warning}", "warning")
    if done:
        console.say(f"resumed from step {done}; {last - done} steps to go", "resumed")
    with console.training(done, last):
        if profile_steps is not None:
            return _profile(session, profile_steps)
        saved = session.train(_steps(session))
    progress_words.phase(FINISH)
    session.artifacts.finish()
    if mesh.rank == 0:
        provenance.record_end(folder, saved)
    session.parallel.close()
    if saved < last:
        text = f"stopped at step {saved}, saved; the same command goes on from there"
        console.say(text, "stopped")
        return 0 if saved == stop.after else session.exit_code()
    console.say(session.artifacts.summary(), "finished")
    return 0


def _profile(session: Session, num_steps: int) -> int:
    """Profile some steps and end, without a checkpoint. Returns the process's exit code."""
    from moemesh.train.profiling import ProfiledSteps, ProfileTaken

    try:
        session.train(ProfiledSteps(session, _steps(session), num_steps))
    except ProfileTaken:
        session.artifacts.finish()
        session.parallel.close()
        return 0
    session.parallel.close()
    session.console.warn(f"the run ended before {num_steps} steps were profiled")
    return 1


def _steps(session: Session) -> Steps:
    if session.parallel.pipeline.schedule.update is not None:
        return StreamedSteps(session)
    if session.config.plan.optimizer_validation == "after":
        return ValidatedSteps(session)
    return SynchronousSteps(session)
