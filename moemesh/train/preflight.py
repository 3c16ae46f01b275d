"""Known before a process starts: settings of the contract that cannot be trained yet."""

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
    for name, values in TRAINABLE.items():
        value = getattr(config.plan, name)
        if value not in values:
            names = " or ".join(str(known) for known in values)
            yield Problem(
                code="not-available",
                key=f"plan.{name}",
                value=value,
                origin=origins.get(f"plan.{name}", ""),
                message=f"{name} = {value} cannot be trained by this version",
                fix=f"{name} = {names}",
            )
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
    yield from balancing_problems(config, origins)
    if config.plan.num_slices > 1:
        yield from _slice_problems(config, origins)
    if config.plan.dispatcher == "deepep":
        yield from _deepep_problems(config, origins)
    if config.model_path is not None:
        yield Problem(
            code="not-available",
            key="model.path",
            value=config.model_path,
            origin=origins.get("model.path", ""),
            message="weights cannot be read from a folder by this version",
            fix="model.preset, or the sizes of the model one by one",
        )
    if config.model.attention != "gqa":
        yield Problem(
            code="not-available",
            key="model.attention",
            value=config.model.attention,
            origin=origins.get("model.attention", ""),
            message="latent attention can be planned but not trained by this version",
            fix='attention = "gqa"',
        )
    if config.model.num_mtp_layers:
        yield Problem(
            code="not-available",
            key="model.num_mtp_layers",
            value=config.model.num_mtp_layers,
            origin=origins.get("model.num_mtp_layers", ""),
            message="multi-token prediction can be planned but not trained by this version",
            fix="num_mtp_layers = 0",
        )


def _slice_problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    """A choice that compares all tokens of a sequence cannot be made while slices are to come."""
    model = config.model
    if not model.num_experts:
        return
    compares = "compares all tokens of a sequence, but schedule = terapipe routes slices one by one"
    if model.router_selection != "token_choice":
        name, message = (
            "router_selection",
            f"router_selection = {model.router_selection} {compares}",
        )
        fix = "router_selection = token_choice"
        value: object = model.router_selection
    elif model.capacity_factor:
        name, message = "capacity_factor", f"capacity_factor ({model.capacity_factor}) {compares}"
        fix, value = "capacity_factor = 0", model.capacity_factor
    else:
        return
    yield Problem(
        code="conflict",
        key=f"model.{name}",
        value=value,
        origin=origins.get(f"model.{name}", ""),
        message=message,
        fix=f"{fix}, or another schedule such as 1f1b",
        related=("plan.schedule", "plan.slices"),
    )


def _deepep_problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    """The package, its hardware, and what it cannot do."""
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
    for reason in reasons:
        yield Problem(
            code="not-available",
            key="plan.dispatcher",
            value="deepep",
            origin=origins.get("plan.dispatcher", ""),
            message=reason,
            fix="dispatcher = all_to_all, all_gather, hierarchical, low_latency or auto",
        )
