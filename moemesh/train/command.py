"""`moemesh train`: run all checks, then start ranks or be one."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from moemesh.checkpoint.retention import disk_warning, refuse_full_disk
from moemesh.checkpoint.store import CheckpointError
from moemesh.comm import cuda, launch
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.comm.slurm import RankError
from moemesh.config.errors import ConfigError, UserError, is_user_error
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.data import sources
from moemesh.data.samples import Samples
from moemesh.data.tokenizing import cache_beside
from moemesh.monitor import progress
from moemesh.monitor.detector import FLOOR_SECONDS, Limits, Verdict
from moemesh.monitor.lease import LeaseLost
from moemesh.monitor.progress import FINISH, SETUP
from moemesh.monitor.supervisor import STOPPING, StopRequest, describe
from moemesh.report.document import plural
from moemesh.trace.machine import keep_freed_memory
from moemesh.train import preparation
from moemesh.train.asynchronous import StreamedSteps
from moemesh.train.console import Console, banner
from moemesh.train.numerics.replica_checksums import what_is_compared
from moemesh.train.opening import schedule_of_run
from moemesh.train.post_validated import ValidatedSteps
from moemesh.train.preparation import Preparation, RunRequest, prepare
from moemesh.train.records import failure, provenance
from moemesh.train.records.kept_schedules import update_schedule
from moemesh.train.records.run_folder import (
    DATA_CHANGE,
    LOGS,
    Events,
    RunFolder,
    RunFolderError,
    changes_samples,
    refuse_other_data,
)
from moemesh.train.session import Session, Steps, SynchronousSteps
from moemesh.train.watcher import watcher_command

#: Smallest limit in seconds of a step on GPUs: any step may compile a kernel, on shared cores.
_CUDA_FLOOR_SECONDS = 180.0
#: Seconds in which the checkpoint store must return the newest step after the end of the ranks.
_STORE_SECONDS = 60.0

#: User errors that count as a failure of the run: reported in failure.json, with exit code 1.
BROKE = (CheckpointError, LeaseLost)

#: Reason of a refused restart after which the advice is to remove the cause first.
CAME_TWICE = "it came twice at the same place"


class Budget:
    """The number of restarts that ranks have left; progress renews it."""

    def __init__(self, restarts: int) -> None:
        """`restarts`: largest number of restarts without any progress in between."""
        self.restarts = self.left = restarts
        #: Step of the checkpoint of the last restart; -1: the beginning.
        self._from = -1
        #: The verdict before the last restart.
        self._before: Verdict | None = None

    def refuses(self, verdict: Verdict, step: int | None) -> str | None:
        """None if the ranks may restart after `verdict`, from the checkpoint of `step` (None: from
        the beginning), which consumes a restart; else the reason for the refusal."""
        reported, start = verdict.status.error, -1 if step is None else step
        before, self._before = self._before, verdict
        if reported is not None and reported.is_final:
            return "a restart would fail in the same way"
        if before is not None and start > self._from:
            self.left = self.restarts
        elif before is not None and (place := _place(verdict)) and _place(before) == place:
            return CAME_TWICE
        self._from = start
        if not self.left:
            return "no progress between restarts" if self.restarts else "train.restarts is 0"
        self.left -= 1
        return None


def _place(verdict: Verdict) -> tuple[object, ...] | None:
    """The place of an exception, an exit or a mismatch: a restart that fails at the same place
    would fail a third time. None for other kinds. The exit code counts for exits only: a rank that
    reported an exception may or may not have ended by then."""
    if verdict.kind not in ("exception", "exited", "mismatch"):
        return None
    record = verdict.status.record
    step = record.step if record is not None else None
    code = verdict.status.exit_code if verdict.kind == "exited" else None
    return failure.kind_of(verdict), verdict.rank, step, code


def limits_of(config: RunConfig) -> Limits:
    """The limits, in seconds without progress, for ranks of a run."""
    on_cpu = _on_cpu(config)
    floor = FLOOR_SECONDS if on_cpu else _CUDA_FLOOR_SECONDS
    patience = config.train.timeout_seconds
    return Limits(patience=patience, floor=floor, aborts_follow=not on_cpu)


def train_supervised(
    config: RunConfig,
    folder: RunFolder,
    arguments: Sequence[str],
    *,
    is_last: bool = False,
) -> int:
    """Run the ranks of `config` until they have finished, were stopped, or failed finally; returns
    the exit code. `arguments`: those of ``moemesh`` for every rank; `is_last`: see
    :class:`~moemesh.monitor.supervisor.Supervisor`."""
    path, logs = folder.path, folder.path / LOGS
    budget, events = Budget(config.train.restarts), Events(folder)
    command = ["moemesh", *arguments]
    failure.keep_failure(path, have_ended=True)  # that of an earlier command
    while True:
        ended = launch.run_ranks(
            config.plan.world_size,
            arguments,
            logs=logs,
            limits=limits_of(config),
            answer=STOPPING,
            check=folder.check_lease,
            notice=lambda slow: failure.report_straggler(slow, events),
            is_last=is_last,
            config=resolved_toml(config),
        )
        verdict = ended.verdict
        if verdict is None:
            return ended.code
        # Ranks of a run that has lost its folder are not restarted.
        if (reason := folder.why_lost()) is not None:
            lost = folder.lease_lost(reason)
            advice = str(lost.facts["advice"])
            if (place := folder.present_path()) is not None:
                action = "ended the run"
                failure.write_verdict(
                    place, ended, epoch=folder.epoch, action=action, advice=advice
                )
                failure.write_page(place)
            failure.log(f"moemesh: {lost}\n{advice}")
            return 1
        step = failure.newest_step(path, seconds=_STORE_SECONDS)
        refused = budget.refuses(verdict, step)
        # A restart moves the logs; the message has their later place.
        kept = failure.kept_in(path, folder.epoch) if refused is None else logs
        failure.log(describe(ended, logs, kept=kept))
        since = f"step {step}" if step is not None else "the beginning, without a checkpoint"
        record = verdict.status.record
        failed_step = record.step if record is not None else None
        events.add("failed", verdict.message, failed_step)
        if refused is not None:
            advice = failure.advice_on(verdict, path, command, came_twice=refused == CAME_TWICE)
            action = f"ended the run: {refused}"
            failure.write_verdict(path, ended, epoch=folder.epoch, action=action, advice=advice)
            failure.log(f"{failure.details(path)}; not restarted: {refused}\n{advice}")
            failure.write_page(path)
            return ended.code
        text = f"restart {budget.restarts - budget.left} of {budget.restarts}, from {since}"
        hint = failure.hint_on(verdict)
        failure.write_verdict(path, ended, epoch=folder.epoch, action=text, advice=hint)
        events.add("restart", text, failed_step)
        moved_to = failure.keep_failure(path, have_ended=True)
        where = failure.details(path) if moved_to is None else f"details in {moved_to}"
        failure.log("\n".join([f"moemesh: {text}; {where}", *([hint] if hint else [])]))
        try:
            folder.raise_epoch()
        except RunFolderError as error:
            failure.log(f"moemesh: not restarted: {error}\n{failure.go_on(path, command)}")
            failure.write_page(path)
            return ended.code


def _on_cpu(config: RunConfig) -> bool:
    return config.train.device == "cpu" or not torch.cuda.is_available()


class WorldSizeError(UserError):
    """The number of started ranks differs from the number that the plan needs."""


def train(
    request: RunRequest, prepared: Preparation | None = None, *, in_this_process: bool = True
) -> int:
    """Train the run; returns the exit code. `prepared`: results of the checks, made before torch
    was imported; `in_this_process`: a single rank is this process itself.

    Three kinds of processes call: that of the user (it checks, locks the folder and starts the
    ranks, or is the only rank), a rank that such a process has started (the folder is locked
    already), and a rank of torchrun (rank 0 locks the folder).
    """
    launch.attach()
    config, path = request.config, request.path
    if config.plan.world_size > 1 and _on_cpu(config):
        launch.refuse_interfaces()
    # A rank: of a command that has made all checks, or of torchrun.
    if launch.joined():
        if launch.launched():
            folder = RunFolder.inspect(path, None, config.train.checkpoint_folder)
            return _rank(request, config, folder, is_last=in_this_process)
        if problems := preparation.untrainable(request.readable, path):
            raise ConfigError(problems)
        launch.watch(partial(watcher_command, path=path, limits=limits_of(config)))
        return _rank(request, config, is_last=in_this_process)
    # The process of the user.
    prepared = prepared or prepare(request, _say_once)
    shares, ranks = launch.shares_devices(), config.plan.world_size
    cuda.check(config.train.device, ranks, config.train.dtype, shares=shares)
    from moemesh.planner.machine_memory import refuse_too_large  # late: no rank needs it

    # Even a machine with a driver may have no GPU.
    refuse_too_large(request.readable.config, on_cpu=not torch.cuda.is_available())
    for note in prepared.notes:
        _say_once(note)
    # Errors in the data are raised before any process starts; `prepare` has checked the weights.
    samples = prepared.samples or open_samples(config, path)
    config = with_steps(config, samples)
    folder = _open_folder(request, config, samples)
    try:
        if config.plan.world_size == 1 and in_this_process:
            keep_freed_memory()
            return _rank(request, config, folder, samples, is_last=True)
        return train_supervised(config, folder, request.arguments(), is_last=in_this_process)
    finally:
        folder.release()


def open_samples(config: RunConfig, path: Path) -> Samples:
    """The samples of the run in `path`. Raises DataError for faults of the data."""
    return sources.open_samples(
        config.data,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        cache=cache_beside(path),
        log=_say_once,
        log_progress=lambda text: _say_once(text, rank=0),  # of one process, which has any rank
    )


def with_steps(config: RunConfig, samples: Samples) -> RunConfig:
    """`config` with the number of steps that its epochs need."""
    if (epochs := config.train.epochs) is None:
        return config
    batch = config.data.global_batch
    steps = samples.steps(epochs, batch)
    _say_once(
        f"steps    {steps}: {epochs:g} epoch(s) of {samples.num_training:,} samples, {batch} a step"
    )
    return config.with_following(steps=steps, epochs=None)


def _say_once(text: str, rank: int | None = None) -> None:
    """Print a line before the run starts, if `rank` (default: that of this process) is 0 and no
    launcher has printed it."""
    if not launch.launched() and (launch.own_rank() if rank is None else rank) == 0:
        with suppress(OSError, ValueError):
            print(text, flush=True)


def _open_folder(request: RunRequest, config: RunConfig, samples: Samples) -> RunFolder:
    """Open and lock the run folder; refuse to resume with another model or other data."""
    allowed = request.allowed_changes
    folder = RunFolder.open(request.path, config.train.resume, config.train.checkpoint_folder)
    folder.lock(takeover=request.takeover, log=lambda text: print(text, flush=True))
    changes = folder.changes(resolved_toml(config), allowed)
    if folder.has_run and not any(changes_samples(change.key) for change in changes):
        refuse_other_data(folder, samples, allowed=DATA_CHANGE in allowed)
    old = {change.key.removeprefix("train."): change.old for change in changes}
    for change in changes:
        print(f"changed since the last call: {change}", flush=True)
        # With another number of steps the learning rate may jump where the run continues.
        moves_decay = change.key == "train.steps" and "lr_schedule" not in old
        if moves_decay and isinstance(change.old, int):
            done = max(folder.saved_steps(), default=0)
            past = config.train.model_copy(
                update={key: old[key] for key in type(config.train).model_fields if key in old}
            )
            before = past.learning_rate(done)
            after = config.train.learning_rate(done + 1)
            if done and not math.isclose(before, after, rel_tol=0.05):
                print(
                    f"note: the learning rate of step {done} was {before:.2e}, that of step "
                    f"{done + 1} is {after:.2e}: its decay ends at step {config.train.steps} now, "
                    f"not at {change.old}",
                    flush=True,
                )
    if config.train.esft is not None:
        from moemesh.train.inference.esft import keep_table  # late: few runs need it

        keep_table(config.train.esft, folder)
    for note in update_schedule(config, folder, changes):
        print(note, flush=True)
    return folder


def _rank(
    request: RunRequest,
    config: RunConfig,
    folder: RunFolder | None = None,
    samples: Samples | None = None,
    *,
    is_last: bool,
) -> int:
    """Run one rank, from the process group to the exit code; `is_last`: the process ends then."""
    path, rank = request.path, launch.own_rank()
    stop = StopRequest(alone=not launch.joined(), after=request.stop_after)
    progress.phase(SETUP)
    try:
        ranks = launch.start(
            config.train.device,
            config.train.timeout_seconds,
            config.train.dtype,
            lambda: stop.exit_code if stop.requested else None,
        )
        check_world_size(config, ranks.world_size)
        alone = ranks.world_size == 1
        layout = config.plan.layout
        if config.plan.ranks_per_node is None:
            layout = replace(layout, ranks_per_node=ranks.ranks_per_node)
        mesh = Mesh.single(ranks.device) if alone else Mesh.create(layout, ranks.device)
        samples = samples or open_samples(config, path)
        config = with_steps(config, samples)
        if folder is None:
            # Rank 0 opens and locks the folder; all ranks raise its refusal.
            problem = None
            if mesh.rank == 0:
                try:
                    folder = _open_folder(request, config, samples)
                    refuse_full_disk(config, folder.checkpoints)
                except UserError as error:
                    problem = str(error)
            problem = gather_json(problem, mesh.control)[0]
            if problem is not None:
                launch.stop(2)
                raise _Refused(problem)
            folder = folder or RunFolder.open(path, None, config.train.checkpoint_folder)
        if folder.epoch is None:
            folder.join()
        events = Events(folder if rank == 0 else None)
        code = train_rank(
            config=config,
            mesh=mesh,
            folder=folder,
            samples=samples,
            console=Console(silent=rank > 0, events=events, log_every=config.train.log_every),
            stop=stop,
            profile_steps=request.profile_steps,
        )
        if is_last and not code:
            stop.ignore()  # there is nothing left to stop
        # Rank 0 writes the report alone; a caller on another rank may read the folder next.
        barrier(mesh.control)
        launch.stop(code)
        folder.release()  # held by rank 0 of torchrun or a rank alone, not by others
        return code
    except RankError:  # raised before the process group exists: no failure of the run
        launch.stop(2)
        raise
    except Exception as error:
        # The caller prints a user's mistake, unless a launcher, a watcher or failure.json needs it.
        is_reported = isinstance(error, BROKE) or launch.launched() or launch.watched()
        if isinstance(error, _Refused) or (isinstance(error, UserError) and not is_reported):
            raise
        return _fail(error, rank, path, folder)


class _Refused(RunFolderError):
    """The folder, or its disk, is refused on all ranks. Not a failure of this run: the report could
    be written into the folder of another run."""


def _fail(error: Exception, rank: int, path: Path, folder: RunFolder | None) -> int:
    """Report a run that broke: one message and failure.json; returns the exit code. For ranks with
    a launcher or a watcher, that reports, since it sees which rank failed first."""
    is_final = is_user_error(error) or getattr(error, "is_final", False)
    launch.report_failure(error, is_final=is_final)
    if launch.launched() or launch.watched():
        launch.await_verdict()
        if launch.launched() and rank > 0:
            traceback.print_exception(error)
        return 1 if isinstance(error, BROKE) or not is_user_error(error) else 2
    advice = str((getattr(error, "facts", None) or {}).get("advice", ""))
    if not advice and not is_final:
        advice = failure.go_on(path, ["moemesh", *sys.argv[1:]])
    advice = advice or "checkpoints are untouched; the same command would fail in the same way"
    lines = [f"moemesh: rank {rank} failed: {type(error).__name__}: {error}"]
    place = path if folder is None else folder.present_path()
    if place is not None:
        if place.is_dir():
            epoch = folder.epoch if folder is not None else None
            failure.write_failure(place, error, rank, advice=advice, epoch=epoch)
        lines.append(failure.details(place))
    print("\n".join([*lines, advice]), file=sys.stderr, flush=True)
    if place is not None and place.is_dir():
        failure.write_page(place)
    return 1


def train_rank(
    *,
    config: RunConfig,
    mesh: Mesh,
    folder: RunFolder,
    samples: Samples,
    console: Console,
    stop: StopRequest,
    profile_steps: int | None = None,
) -> int:
    """Train to the last step, or until a stop request. Returns the exit code of the process.

    `profile_steps`: number of steps that are profiled on every rank after a warm-up, before the run
    ends.
    """
    console.log(banner(config, folder.path, samples, mesh.device), "start")
    if config.plan.world_size > 1:
        console.keep(what_is_compared(config), "note")
    schedule = schedule_of_run(config, folder, mesh)
    ranks_per_node = mesh.layout.ranks_per_node or mesh.world_size
    ranks_on_cpu = ranks_per_node if mesh.device.type == "cpu" else 0
    for warning in preparation.preflight_warnings(config, ranks_on_cpu, schedule):
        console.log(f"note: {warning}", "note")
    if mesh.rank == 0 and (warning := disk_warning(config, folder.checkpoints)):
        console.log(f"note: {warning}", "note")
    session = Session(config, mesh, folder, samples, console, stop, schedule)
    # The run may be at its end already, or past --stop-after.
    done, last, reason = session.done, config.train.steps, session.early_stop.reason
    if done >= last or reason is not None:
        text = preparation.already_trained(folder.path, done, last, reason)
        console.log(text, "finished")
        return 0
    if stop.after is not None and done >= stop.after:
        text = f"already trained to step {done}; --stop-after {stop.after} is before it"
        console.log(text, "stopped")
        return 0
    session.artifacts.begin(done, samples)
    provenance.record_start(folder, config, mesh, samples, done + 1)
    for note in session.parallel.notes:
        console.log(note)
    if warning := config.model.layout_warning:
        console.log(f"warning: {warning}", "warning")
    if done:
        console.log(f"resumed from step {done}; {plural(last - done, 'step')} to go", "resumed")
    steps: Steps = SynchronousSteps(session)
    if schedule.update is not None:
        steps = StreamedSteps(session)
    elif config.plan.optimizer_validation == "after":
        steps = ValidatedSteps(session)
    with console.training(done, last):
        if profile_steps is not None:
            # Late: few runs need it.
            from moemesh.train.profiling import ProfiledSteps, ProfileTaken

            try:
                session.train(ProfiledSteps(session, steps, profile_steps))
            except ProfileTaken:
                session.artifacts.finish(session.early_stop)
                session.parallel.close()
                return 0
            session.parallel.close()
            console.warn(f"the run ended before {profile_steps} steps were profiled")
            return 1
        saved = session.train(steps)
    progress.phase(FINISH)
    session.artifacts.finish(session.early_stop)
    if mesh.rank == 0:
        provenance.record_end(folder, saved)
    session.parallel.close()
    if saved < session.last:
        text = f"stopped at step {saved}, saved; the same command resumes from there"
        console.log(text, "stopped")
        return 0 if saved == stop.after else session.exit_code()
    console.log(session.artifacts.summary(session.early_stop), "finished")
    return 0


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Raise WorldSizeError, with layouts of `world_size` ranks, if the plan needs more or fewer."""
    needed = config.plan.world_size
    if world_size == needed:
        return
    from moemesh.train.auto_layout import Fitted, nearest  # late: with the planner's search

    plan = config.plan
    fitted = (
        Fitted(before=plan, plan=layout, ranks=world_size, how="")
        for layout in islice(nearest(config, world_size), 3)
    )
    texts = [" ".join(layout.overrides()) for layout in fitted]
    layouts = "; ".join(texts) or "none that can be trained"
    raise WorldSizeError(
        f"{world_size} ranks were started, the plan needs pp*dp*cp*tp = "
        f"{plan.pp}*{plan.dp}*{plan.cp}*{plan.tp} = {needed}: start {needed} ranks, give "
        f"--auto-layout, or set one of the nearest layouts of {world_size} ranks: {layouts}"
    )
