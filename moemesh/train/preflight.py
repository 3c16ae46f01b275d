"""Refusals before a run: legal settings that `moemesh train` cannot carry out."""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.errors import Problem, UserError
from moemesh.config.load import Resolved
from moemesh.config.run import RunConfig
from moemesh.config.trainable import TRAINABLE
from moemesh.schedule.build import build_step
from moemesh.train.balancing_rules import balancing_problems


def untrainable(resolved: Resolved) -> list[Problem]:
    """Legal settings that `moemesh train` would have to ignore; it refuses them instead."""
    return list(_problems(resolved.config, resolved.origins))


def _problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    def missing(key: str, value: object, message: str, fix: str) -> Problem:
        origin = origins.get(key, "")
        return Problem(
            code="not-available", key=key, value=value, origin=origin, message=message, fix=fix
        )

    model = config.model
    for name, values in TRAINABLE.items():
        value = getattr(config.plan, name)
        if value not in values:
            names = " or ".join(str(known) for known in values)
            message = f"{name} = {value} cannot be trained by this version"
            yield missing(f"plan.{name}", value, message, f"{name} = {names}")
    yield from _schedule_problems(config, origins)
    yield from balancing_problems(config, origins)
    if config.plan.num_slices > 1:
        yield from _slice_problems(config, origins)
    if config.plan.dispatcher == "deepep":
        fix = "dispatcher = all_to_all, all_gather, hierarchical, low_latency or auto"
        for reason in _deepep_reasons(config):
            yield missing("plan.dispatcher", "deepep", reason, fix)
    if config.model_path is not None:
        message = "weights cannot be read from a folder by this version"
        fix = "model.preset, or the sizes of the model one by one"
        yield missing("model.path", config.model_path, message, fix)
    if model.attention != "gqa":
        message = "latent attention can be planned but not trained by this version"
        yield missing("model.attention", model.attention, message, 'attention = "gqa"')
    if model.num_mtp_layers:
        message = "multi-token prediction can be planned but not trained by this version"
        yield missing("model.num_mtp_layers", model.num_mtp_layers, message, "num_mtp_layers = 0")


def _schedule_problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    """A schedule that does not exist for the plan's numbers, or a file that does not fit them."""
    try:
        build_step(config.plan, config.model, config.data.seq_len)
    except UserError as error:
        yield Problem(
            code="schedule",
            key="plan.schedule",
            value=config.plan.schedule,
            origin=origins.get("plan.schedule", ""),
            message=str(error),
            related=("plan.pp", "plan.microbatches", "plan.stages_per_rank"),
        )


def _slice_problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    """A choice that compares all tokens of a sequence cannot be made while slices are to come."""
    model, value = config.model, config.model.router_selection
    if not model.num_experts:
        return
    if value != "token_choice":
        name, shown, fix = "router_selection", f"router_selection = {value}", "token_choice"
    elif model.capacity_factor:
        name, fix = "capacity_factor", "0"
        shown = f"capacity_factor ({model.capacity_factor})"
    else:
        return
    yield Problem(
        code="conflict",
        key=f"model.{name}",
        value=getattr(model, name),
        origin=origins.get(f"model.{name}", ""),
        message=f"{shown} compares all tokens of a sequence, but schedule = "
        f"{config.plan.schedule} routes slices one by one",
        fix=f"{name} = {fix}, or another schedule such as 1f1b",
        related=("plan.schedule", "plan.slices"),
    )


def _deepep_reasons(config: RunConfig) -> list[str]:
    """Why deepep cannot be used: its package, its hardware, or what it does not implement."""
    import torch  # only here: a configuration is checked without it

    from moemesh.parallel.expert.deepep import available, refusals

    reasons = refusals(
        etp=config.plan.etp,
        exact=config.plan.combine == "exact",
        coded=config.plan.payload != "same",
        dtype=getattr(torch, config.train.dtype),
        hidden=config.model.hidden_size,
    )
    if config.plan.recompute == "full":
        reasons.append(
            "deepep does not dispatch twice in one order, as recompute = full would need"
        )
    if not (probe := available()).usable:
        reasons.insert(0, str(probe))
    return reasons
