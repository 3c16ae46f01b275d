"""Text of `moemesh train --dry-run` for a run that could start."""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.data import DataConfig
from moemesh.data.input_files import find
from moemesh.data.sources import name_of, token_files, validation_source
from moemesh.train.preparation import (
    MOST_RANKS,
    Preparation,
    predicted_memory,
    warnings_before_ranks,
)


def preparation_text(prepared: Preparation) -> str:
    """The plan, what is found and what would be written, one fact a line."""
    from moemesh.trace.memory_profile import format_bytes
    from moemesh.train.preparation import disk_warning

    config, folder, need = prepared.request.config, prepared.folder, prepared.disk
    plan, train, data = config.plan, config.train, config.data
    disk_note = disk_warning(config, folder.checkpoints)
    resume = "nothing there: a new run"
    if steps := prepared.steps:
        more = f", the newest of {len(steps)}" if len(steps) > 1 else ""
        resume = f"from {folder.checkpoints / f'step-{steps[0]}'}{more}"
    elif folder.has_run:
        resume = f"{folder.path} holds a run without a checkpoint: from the first step"
    degrees = "  ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp"))
    ends = f"{train.steps:,} steps" if train.epochs is None else f"{train.epochs:g} epoch(s)"
    lines = [
        f"plan     {plan.world_size} rank(s)  {degrees}  ep={plan.ep}  etp={plan.etp}  "
        f"edp={plan.edp}",
        f"steps    {ends} of {data.global_batch:,} sequences of {data.seq_len:,} tokens",
        f"memory   {_memory(prepared)}",
        f"disk     {format_bytes(need.checkpoint)} a checkpoint, {format_bytes(need.most)} with "
        f"{train.checkpoints_kept} kept and one being written; {format_bytes(need.free)} free",
        *_data(data),
        *_samples(prepared),
        f"tokens   by {data.tokenizer}",
        *([f"weights  {config.model_path}"] if config.model_path is not None else []),
        *([f"adapters {config.lora.path}"] if config.lora.path is not None else []),
        f"resume   {resume}",
        *(f"         changed since the last call: {change}" for change in prepared.changes),
        f"writes   {folder.path}: {', '.join(_files(prepared))}",
        *(
            f"note: {warning}"
            for warning in warnings_before_ranks(prepared.request.readable.config)
        ),
        *(f"note: {warning}" for warning in (disk_note,) if warning),
        "Nothing was written or started. Leave out --dry-run to train.",
    ]
    return "\n".join(lines)


def _memory(prepared: Preparation) -> str:
    from moemesh.trace.memory_profile import PREDICTED_HELD, format_bytes

    plan, kept = prepared.request.config.plan, prepared.request.readable.config
    per_stage = plan.world_size // plan.pp
    few = plan.world_size <= MOST_RANKS
    ranks = range(0, plan.world_size, 1 if few else per_stage)
    worst = max((predicted_memory(kept, rank) for rank in ranks), key=lambda p: p.peak)
    states = worst.peak - worst.activations
    whose = "the only rank" if plan.world_size == 1 else f"rank {worst.rank}, the fullest rank"
    return (
        f"{format_bytes(worst.peak)} {PREDICTED_HELD}, of {whose}: {format_bytes(states)} of "
        f"weights, gradients and optimizer, {format_bytes(worst.activations)} of activations"
    )


def _data(data: DataConfig) -> Iterator[str]:
    """Each source with its files."""
    every = [("data    ", source) for source in data.all_sources]
    if data.validation is not None:
        every.append(("validate", validation_source(data)))
    for title, source in every:
        prefixes = token_files(source)
        if prefixes is not None:
            yield f"{title} {name_of(source)}: {len(prefixes)} pair(s) of token files"
            continue
        files = find(source.path, source.format)
        if any(file.is_on_hub for file in files):
            yield f"{title} {name_of(source)}: a dataset of the Hugging Face Hub, not looked at"
            continue
        size = sum(file.num_bytes for file in files)
        yield f"{title} {name_of(source)}: {len(files):,} file(s), {size / 1e6:,.1f} MB"


def _samples(prepared: Preparation) -> Iterator[str]:
    """How many samples the data makes, where it was read."""
    samples, config = prepared.samples, prepared.request.config
    if samples is None:
        return
    drawn = config.train.steps * config.data.global_batch
    times = max(samples.epochs(drawn)) if config.train.epochs is None else config.train.epochs
    text = f"samples  {samples.num_training:,} for training, read {times:.3g} times"
    yield f"{text}; {samples.num_validation:,} for validation"
    if (learned := samples.num_learned) is not None:
        yield f"chat     conversations by the template of {config.data.tokenizer}"
        yield f"         {learned:,} tokens bear loss"
    yield from prepared.notes


def _files(prepared: Preparation) -> Iterator[str]:
    from moemesh.train.records.kept_schedules import has_name

    config = prepared.request.config
    yield from FILES
    if not has_name(config.plan):
        yield "schedule.txt"
    if config.train.epochs is None:
        every, last = config.train.checkpoint_every, config.train.steps
        saved = last if not every else min(every, last)
        yield f"checkpoints/step-{saved}" + (
            f" and further ones, {config.train.checkpoints_kept} kept" if saved < last else ""
        )
    else:
        yield f"checkpoints/step-N, {config.train.checkpoints_kept} kept"


#: Of every run; docs/run-folder.md says what is in them.
FILES = (
    "config.toml",
    "plan.json",
    "data.json",
    "metrics.jsonl",
    "events.jsonl",
    "loads.jsonl",
    "ledger.json",
    "ledger_predicted.json",
    "timeline.json",
    "memory.json",
    "summary.json",
    "report.html",
)
