"""Memory of a run on this machine: refusals and warnings before its ranks start."""

from __future__ import annotations

from dataclasses import replace

from moemesh.config.errors import UserError
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.config.trainable import refusals
from moemesh.monitor.devices import signs_of_gpus
from moemesh.planner.traffic.own_memory import predicted_memory
from moemesh.trace.machine import physical_bytes
from moemesh.trace.memory_profile import format_bytes

#: Largest number of ranks for which :func:`memory_warning` predicts memory: more are meant for
#: several machines.
MOST_RANKS = 8
#: Length of the shortest proposed sequences, in tokens.
_SHORTEST = 64


class TooLargeError(UserError):
    """The states of a run, without activations, exceed the memory of the machine."""


def refuse_too_large(
    config: RunConfig, memory_bytes: int | None = None, *, on_cpu: bool = True
) -> None:
    """Raise TooLargeError if the states of a run exceed `memory_bytes` (None: those of this
    machine). `on_cpu` these are weights, gradients, optimizer, buffers and snapshots of all ranks,
    else what the ranks of one node offload to its host."""
    available = physical_bytes() if memory_bytes is None else memory_bytes
    plan = config.plan
    if not on_cpu and plan.offload == "none":
        return
    states = "weights, gradients and optimizer" if on_cpu else "gradients and optimizer on the host"
    needed = 0
    for rank in range(plan.world_size if on_cpu else plan.ranks_per_node or plan.world_size):
        profile = predicted_memory(config, rank, on_cpu=on_cpu)
        needed += profile.peak - profile.activations if on_cpu else profile.host
        if needed <= available:
            continue
        ranks = f"{plan.world_size} rank(s)"
        if rank + 1 < plan.world_size:
            ranks = f"the first {rank + 1} of {ranks} alone"
        setting = "" if on_cpu else "plan.offload = none, "
        raise TooLargeError(
            f"{format_bytes(needed)} for {states} of {ranks}, this machine has "
            f"{format_bytes(available)}: take {setting}a smaller model (model.preset, "
            "model.num_layers), or more machines; `moemesh estimate` and `moemesh plan` find them"
        )


def predicted_peaks(config: RunConfig) -> int:
    """Predicted bytes: the sum of the peaks of all ranks."""
    return sum(predicted_memory(config, rank).peak for rank in range(config.plan.world_size))


def check_room(config: RunConfig) -> None:
    """Raises TooLargeError if a run on CPUs has states that exceed the memory of this machine.
    A run on GPUs is not checked."""
    if config.train.device == "cpu" or not signs_of_gpus():
        refuse_too_large(config)


def memory_warning(config: RunConfig, memory_bytes: int | None = None) -> str | None:
    """A warning if all ranks of a run on this machine's CPU will probably need more memory than it
    has: both numbers, and the first of some changes that fits. None if they fit, and for more
    than `MOST_RANKS` ranks, which are meant for other machines."""
    if config.plan.world_size > MOST_RANKS:
        return None
    available = physical_bytes() if memory_bytes is None else memory_bytes
    ranks, first = config.plan.world_size, predicted_memory(config, 0)
    # If the states alone exceed the machine, no batch is small enough, and large models take long
    # to predict.
    is_hopeless = ranks * (first.peak - first.activations) > available
    needed = ranks * first.peak if is_hopeless else predicted_peaks(config)
    if needed <= available:
        return None
    text = (
        f"{ranks} rank(s) need {format_bytes(needed)} by prediction, this machine has "
        f"{format_bytes(available)}"
    )
    # Candidates that need less: first those with the same losses, then another batch, then shorter
    # sequences.
    plan, data = config.plan, config.data
    smaller: list[dict[str, dict[str, object]]] = []
    most, least = plan.microbatches, plan.dp * plan.microbatches
    while data.global_batch // plan.dp >= 2 * most:
        most *= 2
        smaller.append({"plan": {"microbatches": most}})
    smaller.append({"plan": {"recompute": "full"}})
    smaller.append({"plan": {"microbatches": most, "recompute": "full"}})
    batch = data.global_batch // 2
    while batch >= least:
        smaller.append({"data": {"global_batch": batch}})
        batch //= 2
    length = data.seq_len // 2
    while length >= _SHORTEST:
        shorter: dict[str, object] = {"global_batch": least, "seq_len": length}
        smaller.append({"plan": {"recompute": "full"}, "data": shorter})
        length //= 2
    for changes in [] if is_hopeless else smaller:
        sections = {
            name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()
        }
        changed = replace(config, **sections)
        is_legal = not (changed.check() or refusals(changed))
        if is_legal and (peaks := predicted_peaks(changed)) <= available:
            keys = (
                f"{section}.{key} = {format_value(value)}"
                for section in changes
                for key, value in changes[section].items()
            )
            return f"{text}: {', '.join(keys)} needs {format_bytes(peaks)}"
    return f"{text}: take a smaller model, or plan it for other machines with `moemesh plan`"
