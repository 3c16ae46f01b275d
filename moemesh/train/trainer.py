"""The training loop of one rank: resume, step, validate, save, stop when asked, write the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from moemesh.checkpoint.store import Checkpoint
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.run import RunConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import ParallelModel, parallelize
from moemesh.trace.run import MetricsRow
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train import asynchronous, post_validated, saving
from moemesh.train.artifacts import Artifacts
from moemesh.train.console import Console, banner
from moemesh.train.data import Samples
from moemesh.train.folder import RunFolder
from moemesh.train.optimizer import Optimizer, learning_rate
from moemesh.train.rehoming import Rehoming
from moemesh.train.remarks import remarks
from moemesh.train.run_schedule import schedule_of_run
from moemesh.train.signals import StopRequest
from moemesh.train.step import StepResult, evaluate, gradients_of_step, update
from moemesh.train.stream import KEPT_STEPS


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to train."""

    config: RunConfig
    mesh: Mesh
    folder: RunFolder
    samples: Samples
    console: Console
    stop: StopRequest


def train(job: Job) -> int:
    """Train to the last step, or until asked to stop. Returns the process's exit code."""
    config, mesh, console = job.config, job.mesh, job.console
    console.say(banner(config, job.folder.path, job.samples, mesh.device))
    ranks_here = mesh.layout.ranks_per_node or mesh.world_size
    schedule = schedule_of_run(config, job.folder, mesh)
    for remark in remarks(config, schedule, ranks_here if mesh.device.type == "cpu" else 0):
        console.say(f"note: {remark}")
    parallel = parallelize(
        config.model,
        config.plan,
        mesh,
        seed=config.train.seed,
        dtype=getattr(torch, config.train.dtype),
        tokens_per_rank=config.plan.tokens_per_rank(config.data.seq_len, config.data.global_batch),
        schedule=schedule,
    )
    optimizer = Optimizer(dict(parallel.model.named_parameters()), config.train)
    artifacts = Artifacts(job.folder, config, parallel, optimizer, console.say)
    checkpoint = saving.newest(
        job.folder, parallel, lambda step, why: console.warn(f"checkpoint {step} skipped: {why}")
    )
    rehoming = Rehoming(parallel, optimizer, config.train.rebalance_every)
    done, position = _resume(job, parallel, optimizer, rehoming, checkpoint)
    if done >= config.train.steps:
        report = job.folder.path / "report.html"
        console.say(
            f"report   {report}\nto train longer: --set train.steps={2 * config.train.steps}; to "
            "start anew: another folder, --out\n"
            f"already trained to step {done} of {config.train.steps}"
        )
        return 0
    artifacts.begin(done, unigram_loss=job.samples.unigram_loss())
    for note in parallel.notes:
        console.say(note)
    if warning := config.model.layout_warning:
        console.say(f"warning: {warning}")
    if done:
        console.say(f"resumed from step {done}; {config.train.steps - done} steps to go")

    with console.training(done, config.train.steps):
        hooks = _hooks(job, parallel, optimizer, done, position)
        if parallel.pipeline.schedule.update is not None:
            steps = min(config.train.steps - done, KEPT_STEPS)
            artifacts.drawn = asynchronous.stream_schedule(config, steps)
            saved = asynchronous.train(
                config, parallel, optimizer, artifacts, job.folder, hooks, done
            )
        elif config.plan.optimizer_validation == "after":
            saved = post_validated.train(config, parallel, optimizer, artifacts, hooks, done)
        else:
            saved = _synchronously(job, parallel, optimizer, artifacts, rehoming, done, position)
    artifacts.finish()
    parallel.close()
    if saved < config.train.steps:
        console.say(f"stopped at step {saved}, saved; the same command goes on from there")
        return job.stop.exit_code
    console.say(artifacts.summary())
    return 0


def _synchronously(
    job: Job,
    parallel: ParallelModel,
    optimizer: Optimizer,
    artifacts: Artifacts,
    rehoming: Rehoming,
    done: int,
    position: int,
) -> int:
    """Step by step from step `done` on; the last step saved."""
    config, saved = job.config, done
    for step in range(done + 1, config.train.steps + 1):
        row, result = _step(job, parallel, optimizer, artifacts, step, position)
        if num_moved := rehoming.after(step, result.counts_LE):
            job.console.say(f"step {step}: {num_moved} experts of all layers moved")
        position += config.data.global_batch
        job.console.step(row, config.train.steps)
        stopping = _anyone(job.mesh, job.stop.requested)
        every = config.train.checkpoint_every
        if stopping or step == config.train.steps or (every and step % every == 0):
            _save(job, parallel, optimizer, step, position, rehoming.state())
            saved = step
        if stopping:
            break
    return saved


def _hooks(
    job: Job, parallel: ParallelModel, optimizer: Optimizer, done: int, position: int
) -> asynchronous.Hooks:
    """What the other two loops ask of this one; `position`: samples consumed by `done` steps."""
    config, size = job.config, job.config.data.global_batch

    def after(step: int) -> int:
        return position + (step - done) * size

    def batches(step: int) -> list[Batch]:
        ids = job.samples.ids_at(after(step - 1), size)
        return own_batches(job, ids, config.plan.microbatches, step)

    return asynchronous.Hooks(
        batches=batches,
        stop_requested=lambda: job.stop.requested,
        validate=lambda: validate(job, parallel),
        save=lambda step: _save(job, parallel, optimizer, step, after(step)),
        finished=lambda row: job.console.step(row, config.train.steps),
        say=job.console.say,
    )


def _save(
    job: Job,
    parallel: ParallelModel,
    optimizer: Optimizer,
    step: int,
    position: int,
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    state = {"step": step, "position": position, **more}
    keep = job.config.train.checkpoints_kept
    saving.save(job.folder, step, parallel, optimizer, state, keep=keep)


def _resume(
    job: Job,
    parallel: ParallelModel,
    optimizer: Optimizer,
    rehoming: Rehoming,
    checkpoint: Checkpoint | None,
) -> tuple[int, int]:
    """Steps done and samples consumed so far; both 0 for a fresh start."""
    if checkpoint is None:
        return 0, 0
    rehoming.load_state(checkpoint.state)
    saving.load(checkpoint, parallel, optimizer)
    return checkpoint.step, int(checkpoint.state["position"])


def _step(
    job: Job,
    parallel: ParallelModel,
    optimizer: Optimizer,
    artifacts: Artifacts,
    step: int,
    position: int,
) -> tuple[MetricsRow, StepResult]:
    """One optimizer step with its metrics; validation when it is due."""
    train, start = job.config.train, time.perf_counter()
    recorder = TimelineRecorder(job.mesh.rank)
    recorder.step = step
    with recorder.span("data"):
        ids = job.samples.ids_at(position, job.config.data.global_batch)
        batches = own_batches(job, ids, job.config.plan.microbatches, step)
    with artifacts.first_step_memory(step):
        result = gradients_of_step(parallel, batches, recorder)
    if result.skipped:
        job.console.say(f"step {step}: a gradient is not finite; no rank updates its weights")
    lr = learning_rate(train, step)
    with recorder.span("optimizer"):
        update(parallel, optimizer, result, lr=lr, clip=train.clip)
    seconds = time.perf_counter() - start
    validation = None
    if step == train.steps or (train.validate_every and step % train.validate_every == 0):
        validation = validate(job, parallel)
    row = MetricsRow(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        aux_loss=result.aux_loss,
        tokens=result.num_tokens,
        tokens_per_second=result.num_tokens / seconds,
        lr=lr,
        seconds=seconds,
        validation_loss=validation,
    )
    artifacts.record(row, result, recorder)
    return row, result


def own_batches(job: Job, ids: object, num_parts: int, step: int = 0) -> list[Batch]:
    """This data-parallel rank's share of the samples `ids` [global batch], cut in `num_parts`.

    `step` (from 1; 0 = none) keys the random numbers of a training forward.

    Shares may differ by one sequence and may be empty. Sequences are numbered over all of `ids`.
    """
    dp, found = job.mesh["dp"], []
    own = shard_range(len(ids), dp.size, dp.index)
    for index in range(num_parts):
        part = shard_range(len(own), num_parts, index)
        rows = slice(own.start + part.start, own.start + part.stop)
        tokens, targets = (t.to(job.mesh.device) for t in job.samples.batch(ids[rows]))
        sequences = torch.arange(rows.start, rows.stop, device=job.mesh.device)
        found.append(
            Batch(
                tokens_BS=tokens,
                targets_BS=targets,
                sequences_B=sequences,
                seed=job.config.train.seed,
                step=step,
            )
        )
    return found


def validate(job: Job, parallel: ParallelModel) -> float:
    """Loss on the held-out split: up to `validation_batches` global batches of it."""
    size = job.config.data.global_batch
    ids = job.samples.validation_ids(job.config.train.validation_batches * size)
    batches = []
    for start in range(0, len(ids), size):
        batches += own_batches(job, ids[start : start + size], 1)
    return evaluate(parallel, batches)


def _anyone(mesh: Mesh, flag: bool) -> bool:
    """Whether the flag is set on any rank: all ranks decide alike."""
    flags = torch.tensor([int(flag)])
    all_reduce_(flags, mesh.control, op="max", caller="stop", phase="control")
    return bool(flags.item())
