"""`moemesh train`: check everything that can be checked, then start ranks or be one."""

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
from typing import NamedTuple

import torch

from moemesh.checkpoint.store import CheckpointError
from moemesh.comm import cuda, launch
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, UserError, is_user_error
from moemesh.config.load import load_run, resolved_toml, with_recorded
from moemesh.config.run import RunConfig
from moemesh.data import sources
from moemesh.data.samples import Samples
from moemesh.data.tokenizing import cache_beside
from moemesh.trace.machine import keep_freed_memory
from moemesh.train.console import Console
from moemesh.train.preflight import refuse_full_disk, refuse_too_large, untrainable
from moemesh.train.preparation import Preparation, folder_of, prepare
from moemesh.train.records.failure import details, go_on, write_failure
from moemesh.train.records.kept_schedules import readable, settle
from moemesh.train.records.run_folder import (
    DATA_CHANGE,
    Events,
    RunFolder,
    RunFolderError,
    changes_samples,
    refuse_other_data,
)
from moemesh.train.restarts import limits_of, train_supervised
from moemesh.train.trainer import train as train_rank
from moemesh.train.watcher import watcher_command
from moemesh.watch import progress_words
from moemesh.watch.signals import StopRequest
from moemesh.watch.word_file import SETUP


class WorldSizeError(UserError):
    """The number of ranks that were started is not the number that the plan needs."""


class RunRequest(NamedTuple):
    """A run as it was asked for: its configuration and folder, resolved once in each process, and
    what the command says besides; see :func:`train`."""

    config: RunConfig
    path: Path
    allowed_changes: Sequence[str] = ()
    takeover: bool = False
    stop_after: int | None = None
    profile_steps: int | None = None


def train(
    config_file: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    allowed_changes: Sequence[str] = (),
    *,
    in_this_process: bool = True,
    prepared: Preparation | None = None,
    stop_after: int | None = None,
    takeover: bool = False,
    profile_steps: int | None = None,
) -> int:
    """Train the configured run; returns the exit code. `in_this_process`: a single rank is this
    process itself; `prepared`: what was checked already, before torch was imported; `stop_after`: a
    step behind which it is saved and ends, with exit code 0; `takeover`: also in a folder in which
    a run is at work; `profile_steps`: so many steps behind a warm-up are profiled on every rank,
    and the run ends.

    Called in three situations that differ only in who does what: by a user (checks, locks the
    folder and starts the ranks, or is the only rank), as a rank of ours (the folder is locked
    already), and as a rank of torchrun (rank 0 locks it).
    """
    launch.attach()
    if launch.joined():
        resolved = load_run([config_file] if config_file else [], overrides)
        path = folder_of(config_file, resolved.config, out)
        config = with_recorded(resolved.config, path)
        kept = replace(config, plan=readable(config.plan, path))
        if problems := untrainable(replace(resolved, config=kept), path):
            raise ConfigError(problems)
        request = RunRequest(config, path, allowed_changes, takeover, stop_after, profile_steps)
        if launch.launched():
            folder = RunFolder.open(path, None, config.train.checkpoint_folder)
            return _rank(request, folder)
        launch.watch(partial(watcher_command, path=path, limits=limits_of(config)))
        return _rank(request)
    if prepared is None:
        resolved = load_run([config_file] if config_file else [], overrides)
        prepared = prepare(
            resolved, config_file, out, allowed_changes, takeover=takeover, say=_say_once
        )
    config, path = prepared.config, prepared.folder.path
    cuda.check(config.train.device, config.plan.world_size, config.train.dtype)
    if not torch.cuda.is_available():  # though the machine may have a driver
        refuse_too_large(prepared.readable)
    # Errors in the data and in the weights before any process starts.
    if prepared.opened is None:
        samples = open_samples(config, path)
    else:
        samples = prepared.opened.samples
        for note in prepared.opened.notes:
            _say_once(note)
    config = with_steps(config, samples)
    if config.model_path is not None or config.lora.path is not None:
        from moemesh.train.weights.conversion import (  # late: few runs need it
            open_adapters,
            open_weights,
        )

        if config.model_path is not None:
            open_weights(config)
        open_adapters(config)
    request = RunRequest(config, path, allowed_changes, takeover, stop_after, profile_steps)
    folder = _open_folder(request, samples)
    try:
        if config.plan.world_size == 1 and in_this_process:
            keep_freed_memory()
            return _rank(request, folder, samples)
        arguments = ["train", *([str(config_file)] if config_file else [])]
        arguments += [word for override in overrides for word in ("--set", override)]
        arguments += ["--out", str(path)]
        arguments += [word for key in allowed_changes for word in ("--allow-change", key)]
        if stop_after is not None:
            arguments += ["--stop-after", str(stop_after)]
        if profile_steps is not None:
            arguments += ["--profile", str(profile_steps)]
        return train_supervised(config, folder, arguments)
    finally:
        folder.release()


def open_samples(config: RunConfig, path: Path) -> Samples:
    """The samples of the run in `path`; DataError says what is wrong with the data."""
    return sources.open_samples(
        config.data,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        cache=cache_beside(path),
        say=_say_once,
        say_progress=_say,
    )


def with_steps(config: RunConfig, samples: Samples) -> RunConfig:
    """`config` with the steps that its epochs make of the data."""
    if (epochs := config.train.epochs) is None:
        return config
    batch = config.data.global_batch
    steps = math.ceil(epochs * samples.num_training / batch)
    _say_once(
        f"steps    {steps}: {epochs:g} epoch(s) of {samples.num_training:,} samples, {batch} a step"
    )
    return config.with_following(steps=steps, epochs=None)


def _say_once(text: str) -> None:
    """Print before there is a run, for all ranks once."""
    if launch.own_rank() == 0:
        _say(text)


def _say(text: str) -> None:
    """Print before there is a run, unless the launcher has said it already."""
    if not launch.launched():
        with suppress(OSError, ValueError):
            print(text, flush=True)


def _open_folder(request: RunRequest, samples: Samples) -> RunFolder:
    """Open and lock the run folder; refuse to go on with another model or other data in it."""
    config, allowed = request.config, request.allowed_changes
    folder = RunFolder.open(request.path, config.train.resume, config.train.checkpoint_folder)
    folder.lock(takeover=request.takeover, say=lambda text: print(text, flush=True))
    changes = folder.changes(resolved_toml(config), allowed)
    if folder.has_run and not any(changes_samples(change.key) for change in changes):
        refuse_other_data(folder, samples, allowed=DATA_CHANGE in allowed)
    for change in changes:
        print(f"changed since the last call: {change}", flush=True)
    if config.train.esft is not None:
        from moemesh.train.inference.esft import keep_table  # late: few runs need it

        keep_table(config, folder)
    for note in settle(config, folder, changes):
        print(note, flush=True)
    return folder


def _rank(
    request: RunRequest, folder: RunFolder | None = None, samples: Samples | None = None
) -> int:
    """Be one rank, from the process group to the exit code."""
    config, path, rank = request.config, request.path, launch.own_rank()
    stop = StopRequest(alone=not launch.joined(), after=request.stop_after)
    progress_words.phase(SETUP)
    try:
        ranks = launch.start(config.train.device, config.train.timeout_seconds, config.train.dtype)
        check_world_size(config, ranks.world_size)
        alone = ranks.world_size == 1
        layout = config.plan.layout
        if config.plan.ranks_per_node is None:
            layout = replace(layout, ranks_per_node=ranks.ranks_per_node)
        mesh = Mesh.single(ranks.device) if alone else Mesh.create(layout, ranks.device)
        samples = samples or open_samples(config, path)
        config = with_steps(config, samples)
        if folder is None:
            folder = _open_together(mesh, request._replace(config=config), samples)
        if folder.epoch is None:
            folder.join()
        code = train_rank(
            config=config,
            mesh=mesh,
            folder=folder,
            samples=samples,
            console=Console(
                silent=rank > 0,
                events=Events(folder if rank == 0 else None),
                log_every=config.train.log_every,
            ),
            stop=stop,
            profile_steps=request.profile_steps,
        )
        # Rank 0 writes the report alone; whoever called this on another rank may read the folder.
        barrier(mesh.control)
        launch.stop(code)
        folder.release()  # of a rank of torchrun; ours have it from their launcher
        return code
    except _Refused:
        raise
    except UserError as error:
        if not (isinstance(error, CheckpointError) or launch.launched() or launch.watched()):
            raise
        return _fail(error, rank, path, folder)
    except Exception as error:
        return _fail(error, rank, path, folder)


class _Refused(RunFolderError):
    """No rank may use the folder. No failure of this run: its report would be written into it."""


def _open_together(mesh: Mesh, request: RunRequest, samples: Samples) -> RunFolder:
    """Rank 0 opens and locks the folder; what it refuses, every rank refuses."""
    folder, problem = None, None
    if mesh.rank == 0:
        try:
            folder = _open_folder(request, samples)
            refuse_full_disk(request.config, folder.checkpoints)
        except UserError as error:
            problem = str(error)
    problem = gather_json(problem, mesh.control)[0]
    if problem is not None:
        launch.stop(2)
        raise _Refused(problem)
    return folder or RunFolder.open(request.path, None, request.config.train.checkpoint_folder)


def _fail(error: Exception, rank: int, path: Path, folder: RunFolder | None) -> int:
    """A run that broke: one message and failure.json; returns the exit code. The launcher does both
    for its ranks, since it knows which of them failed first."""
    is_final = is_user_error(error) or getattr(error, "is_final", False)
    launch.report_failure(error, is_final=is_final)
    if launch.launched() or launch.watched():
        launch.await_verdict()
        if launch.launched() and rank > 0:
            traceback.print_exception(error)
        return 1 if isinstance(error, CheckpointError) or not is_user_error(error) else 2
    advice = str((getattr(error, "facts", None) or {}).get("advice", ""))
    if not advice and not is_final:
        advice = go_on(path, ["moemesh", *sys.argv[1:]])
    advice = advice or "checkpoints are untouched; the same command would fail again"
    if path.is_dir():
        epoch = folder.epoch if folder is not None else None
        write_failure(path, error, rank, advice=advice, epoch=epoch)
    text = f"moemesh: rank {rank} failed: {type(error).__name__}: {error}"
    print(f"{text}\n{details(path)}\n{advice}", file=sys.stderr, flush=True)
    return 1


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Raise WorldSizeError, with layouts of as many ranks, unless the plan needs `world_size`."""
    needed = config.plan.world_size
    if world_size == needed:
        return
    from moemesh.train.auto_layout import Fitted, nearest  # late: with the planner's search

    plan = config.plan
    fitted = (
        Fitted(before=plan, plan=one, ranks=world_size, how="")
        for one in islice(nearest(config, world_size), 3)
    )
    texts = [" ".join(one.overrides()) for one in fitted]
    layouts = "; ".join(texts) or "none that can be trained"
    raise WorldSizeError(
        f"{world_size} ranks were started, the plan needs pp*dp*cp*tp = "
        f"{plan.pp}*{plan.dp}*{plan.cp}*{plan.tp} = {needed}: start {needed} ranks, give "
        f"--auto-layout, or set one of the nearest layouts of {world_size} ranks: {layouts}"
    )
