"""``moemesh plan``: search, and print the best layouts with their reasons and their certificate."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.plan import LARGEST_DEGREE, Plan
from moemesh.config.sources import preset_names
from moemesh.config.trainable import untrained_keys, untrained_model
from moemesh.planner.layout import PlannedLayout, Precision
from moemesh.planner.layout_sources import RECOMPUTED
from moemesh.planner.search.advice import Advice, advise, what_would_fit
from moemesh.planner.search.search import Candidate, Certificate, Found
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load import Model, load_model
from moemesh.trace.memory import format_bytes

_DATA = ("replicate", "zero1", "zero2", "zero3")


class NothingFits(UserError):
    """No layout of the space fits the devices' memory."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The answer to `moemesh plan`."""

    model: str
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    advice: Advice
    certificate: Certificate


def plan(model: Model, cluster: Cluster, space: Space, top: int) -> Planned:
    """The `top` best layouts. Raises ConfigError when no layout is legal, NothingFits when none
    fits in memory."""
    found = Found(model.shape, cluster, space)
    best = found.fitting(found.capacity, top)
    if not best:
        raise NothingFits(
            f"no layout of {model.shape.name} on {space.num_devices} devices of {cluster.name} "
            f"fits in {format_bytes(cluster.memory_bytes)}: {what_would_fit(found)}\n"
            f"fix: more nodes, a shorter data.seq_len, or devices with more memory"
        )
    return Planned(
        model=model.shape.name,
        cluster=cluster,
        candidates=tuple(found.candidate(index) for index in best),
        advice=advise(found, best[0]),
        certificate=found.certificate(found.seconds(best[0])),
    )


def command(
    model: str,
    cluster: str,
    seq_len: int,
    global_batch: int,
    *,
    top: int = 5,
    nodes: int | None = None,
    precision: Precision = "bfloat16",
    anywhere: bool = False,
    trainable: bool = False,
    as_json: bool = False,
) -> str:
    """What ``moemesh plan`` prints. Raises ConfigError with every problem found.

    `anywhere` lets tensor groups cross nodes, `trainable` keeps to what ``moemesh train`` carries
    out.
    """
    problems: list[Problem] = []
    known: dict[str, Any] = {}
    for name, read in (
        ("model", lambda: load_model(model)),
        ("cluster", lambda: load_cluster(cluster)),
    ):
        try:
            known[name] = read()
        except ConfigError as error:
            problems += error.problems
    for name, value in (("seq_len", seq_len), ("global_batch", global_batch), ("top", top)):
        if value < 1:
            problems.append(_too_small(name, value))
    machine: Cluster | None = known.get("cluster")
    if machine is not None and nodes is not None:
        machine = machine.model_copy(update={"nodes": nodes})
    if machine is not None and not 1 <= machine.num_devices <= LARGEST_DEGREE:
        problems.append(
            Problem(
                code="out-of-range",
                key="cluster.nodes",
                value=machine.nodes,
                message=f"{machine.num_devices} devices: a plan needs between 1 and "
                f"{LARGEST_DEGREE}",
                fix=f"nodes = {max(LARGEST_DEGREE // machine.gpus_per_node, 1)}"
                if machine.nodes > 0
                else "nodes = 1",
            )
        )
    if problems or machine is None:
        raise ConfigError(problems)
    space = Space(
        num_devices=machine.num_devices,
        node_size=machine.gpus_per_node,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        tensor_inside_node=not anywhere,
    )
    if trainable:
        space = replace(space, zero=(0,), largest_context=1)
    planned = plan(known["model"], machine, space, top)
    source: dict[str, Any] = {
        "model": model,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "not_trained": _untrained_model(known["model"]),
    }
    if as_json:
        return json.dumps(to_json(planned, source), indent=2)
    return table(planned, source)


def to_json(planned: Planned, source: Mapping[str, Any]) -> dict[str, Any]:
    """The object that ``moemesh plan --json`` prints."""
    certificate, advice = planned.certificate, planned.advice
    return {
        "plans": [
            {
                "plan": plan_keys(found.layout),
                "seconds": found.seconds,
                "memory_bytes": found.memory.needed,
                "breakdown": {k: v for k, v in found.breakdown.items() if k != "total"},
                "memory": {
                    "rank": found.memory.rank,
                    "states": found.memory.states,
                    "activations": found.memory.activations,
                    "logits": found.memory.logits,
                    "working": found.memory.working,
                },
                "command": train_command(found.layout, source),
                "not_trained": not_trained(found.layout, source),
            }
            for found in planned.candidates
        ],
        "lower_bound_seconds": certificate.lower_bound_seconds,
        "compute_floor_seconds": certificate.compute_floor_seconds,
        "examined": certificate.examined,
        "rejected": certificate.rejected,
        "assumptions": list(certificate.assumptions),
        "binding": advice.binding,
        "sensitivity": [{"more_bytes": more, "seconds": then} for more, then in advice.sensitivity],
        "why_not": list(advice.why_not),
    }


def plan_keys(layout: PlannedLayout) -> dict[str, Any]:
    """The keys of [plan] that say this layout."""
    recompute = next(word for word, what in RECOMPUTED.items() if what == layout.recompute)
    return {
        "pp": layout.pp,
        "dp": layout.dp,
        "cp": layout.cp,
        "tp": layout.tp,
        "ep": layout.ep,
        "etp": layout.etp,
        "schedule": layout.schedule,
        "stages_per_rank": layout.stages_per_rank,
        "microbatches": layout.microbatches,
        "data": _DATA[layout.zero],
        "recompute": recompute,
        "attention_exit": layout.attention_exit,
        "dispatcher": layout.dispatcher,
    }


def not_trained(layout: PlannedLayout, source: Mapping[str, Any]) -> list[str]:
    """What of a layout and its model `moemesh train` refuses, as ``key = value``."""
    return [*source["not_trained"], *untrained_keys(plan_keys(layout))]


def _untrained_model(model: Model) -> list[str]:
    if model.config is None:
        return ["a model of another library's file"]
    return untrained_model(model.config)


def train_command(layout: PlannedLayout, source: Mapping[str, Any]) -> str:
    """The `moemesh train` call that carries the layout out; defaults are left out."""
    defaults = Plan()
    name = str(source["model"])
    words = [f"--set model.{'preset' if name in preset_names() else 'path'}={name}"]
    words += [
        f"--set plan.{key}={value}"
        for key, value in plan_keys(layout).items()
        if value != getattr(defaults, key)
    ]
    words += [f"--set data.{key}={source[key]}" for key in ("seq_len", "global_batch")]
    words.append("--set train.dtype=bfloat16")
    return "moemesh train " + " ".join(words)


def table(planned: Planned, source: Mapping[str, Any]) -> str:
    """A readable answer."""
    lines = [
        f"{planned.model} on {planned.cluster.num_devices} devices of {planned.cluster.name} "
        f"({_count(planned.cluster.nodes, 'node')}), "
        f"{source['seq_len']} tokens a sequence, {source['global_batch']} sequences a step",
        "",
    ]
    heads = (
        "pp", "dp", "cp", "tp", "ep", "etp", "schedule", "mb", "data", "recompute", "exit",
        "dispatcher",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [("#", *heads, "seconds", "memory")]
    for number, found in enumerate(planned.candidates, start=1):
        keys = plan_keys(found.layout)
        schedule = keys["schedule"]
        if keys["stages_per_rank"] > 1:
            schedule += f" x{keys['stages_per_rank']}"
        shown = (
            *(keys[name] for name in heads[:6]),
            schedule if keys["pp"] > 1 else "-",
            keys["microbatches"],
            keys["data"],
            keys["recompute"],
            keys["attention_exit"] if keys["tp"] > 1 else "-",
            keys["dispatcher"] if keys["ep"] > 1 else "-",
        )
        memory = format_bytes(round(found.memory.needed))
        rows.append((str(number), *map(str, shown), f"{found.seconds:.3f}", memory))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    best = planned.candidates[0]
    lines += ["", "a step of the first:"]
    for name, seconds in sorted(best.breakdown.items(), key=lambda item: -item[1]):
        if name != "total" and seconds > 0.0005 * best.seconds:
            lines.append(f"  {name:12} {seconds:10.4f} s  {seconds / best.seconds:6.1%}")
    memory = best.memory
    parts = ("states", "activations", "logits", "working")
    held = ", ".join(f"{name} {format_bytes(round(getattr(memory, name)))}" for name in parts)
    lines += ["", f"memory of pipeline rank {memory.rank}: {held}"]
    lines += _wrapped(f"binding: {planned.advice.binding}")
    for line in planned.advice.why_not:
        lines += _wrapped(f"why not {line}")
    certificate = planned.certificate
    gap = best.seconds / certificate.lower_bound_seconds - 1
    lines += [
        "",
        *_wrapped(
            f"certificate: {certificate.examined:,} layouts examined; none of them that fits is "
            f"faster under this model (lower bound {certificate.lower_bound_seconds:.3f} s, gap "
            f"{gap:.1%}); computing alone takes {certificate.compute_floor_seconds:.3f} s"
        ),
        *_wrapped(
            "left out: "
            + "; ".join(f"{name} {count:,}" for name, count in certificate.rejected.items())
        ),
        *_wrapped("assumed: " + "; ".join(certificate.assumptions)),
        "",
        train_command(best.layout, source),
    ]
    if refused := not_trained(best.layout, source):
        lines.append(f"this version plans {', '.join(refused)} and does not train it")
        if untrained_keys(plan_keys(best.layout)):
            lines.append("the best of what it trains: the same call with --trainable")
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    """Lines of at most 100 columns."""
    return textwrap.wrap(line, 100, subsequent_indent="    ", break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


def _too_small(name: str, value: int) -> Problem:
    return Problem(
        code="out-of-range",
        key=name,
        value=value,
        message=f"{name} must be at least 1, not {value}",
        fix=f"{name} = 1",
    )
