"""Refusals before a run: legal settings that `moemesh train` cannot carry out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moemesh.config.errors import Problem
from moemesh.config.load import Resolved
from moemesh.config.run import RunConfig
from moemesh.config.trainable import refusals
from moemesh.parallel.expert import deepep_probe
from moemesh.schedule.plan_schedule import step_problems
from moemesh.train.sinks import missing_package


def untrainable(resolved: Resolved, folder: Path | None = None) -> list[Problem]:
    """Legal settings that `moemesh train` would have to ignore, or from which nothing can come; it
    refuses them instead. `folder`: of the run, which may go on with what it has."""
    config, origins = resolved.config, resolved.origins
    found = [
        *refusals(config),
        *step_problems(config.plan, config.model, config.data.seq_len),
        *_deepep_problems(config),
        *_sink_problems(config),
        *_idle_ranks(config),
        *([] if folder and (folder / "plan.json").exists() else _adapters_alone(config)),
    ]
    return [replace(problem, origin=origins.get(problem.key, "")) for problem in found]


def _idle_ranks(config: RunConfig) -> Iterator[Problem]:
    """Replicas that would never get a sequence."""
    dp, batch = config.plan.dp, config.data.global_batch
    if dp > batch:
        message = (
            f"dp ({dp}) exceeds the {batch} sequences of a step (data.global_batch): "
            f"{dp - batch} of the {dp} replicas would have nothing to do"
        )
        fix = f"dp = {batch}, or data.global_batch = {dp}"
        yield config.plan.problem("too-large", "dp", message, fix)


def _adapters_alone(config: RunConfig) -> Iterator[Problem]:
    """Adapters beside random weights that never change."""
    if config.lora.rank and config.model_path is None and not config.train.train_only:
        message = (
            f"adapters of rank {config.lora.rank} would train beside random weights that stay as "
            "they are: no model.path says which weights they adapt"
        )
        fix = "model.path = FOLDER, or rank = 0 to train all weights"
        yield config.lora.problem("missing", "rank", message, fix)


def _sink_problems(config: RunConfig) -> Iterator[Problem]:
    """Packages of sinks that are not there."""
    for name in config.train.sinks:
        if (package := missing_package(name)) is not None:
            yield Problem(
                code="not-available",
                key="train.sinks",
                value=list(config.train.sinks),
                message=f'the sink "{name}" needs the package {package}',
                fix=f"pip install {package}, or train.sinks without it",
            )


def _deepep_problems(config: RunConfig) -> Iterator[Problem]:
    """The package, its hardware, and what it cannot do."""
    if config.plan.dispatcher != "deepep":
        return
    reasons = deepep_probe.refusals(
        etp=config.plan.etp,
        exact=config.plan.combine == "exact",
        coded=config.plan.payload != "same",
        dtype=config.train.dtype,
        hidden=config.model.hidden_size,
    )
    if config.plan.recompute == "full":
        reasons.append(
            "deepep does not dispatch twice in one order, as recompute = full would need"
        )
    if not (probe := deepep_probe.available()).usable:
        reasons.insert(0, str(probe))
    for reason in reasons:
        yield Problem(
            code="not-available",
            key="plan.dispatcher",
            value="deepep",
            message=reason,
            fix="dispatcher = all_to_all, all_gather, hierarchical, low_latency or auto",
        )
