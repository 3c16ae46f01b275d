"""``moemesh plan``: search, and print the best layouts with their reasons and their certificate."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, LARGEST_DEGREE, Plan
from moemesh.config.section import Section
from moemesh.config.sources import preset_names
from moemesh.config.toml import format_value
from moemesh.planner.layout import PlannedLayout, Precision
from moemesh.planner.layout_sources import plan_of, untrained
from moemesh.planner.search.advice import Advice, advise, what_would_fit
from moemesh.planner.search.search import Candidate, Certificate, Found
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load import Model, load_model
from moemesh.trace.memory import format_bytes

#: Keys of [plan] that every answer names, with their defaults, too.
_ALWAYS = (
    *DEGREES, "schedule", "stages_per_rank", "microbatches", "data", "recompute", "attention_exit",
    "dispatcher",
)  # fmt: skip


class NothingFits(UserError):
    """No layout of the space fits the devices' memory."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The answer to `moemesh plan`."""

    model: Model
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
            f"fix: more --nodes, a shorter --seq-len, devices with more memory"
            + (", or all layouts, without --trainable" if space.trainable else "")
        )
    return Planned(
        model=model,
        cluster=cluster,
        candidates=tuple(found.candidate(index) for index in best),
        advice=advise(found, best[0]),
        certificate=found.certificate(found.seconds(best[0])),
    )


def plan_named(
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    seq_len: int,
    global_batch: int,
    *,
    top: int = 5,
    nodes: int | None = None,
    precision: Precision = "bfloat16",
    anywhere: bool = False,
    trainable: bool = False,
) -> Planned:
    """Search for the best layouts. Raises ConfigError with every problem found.

    `nodes` replaces those of the cluster, `anywhere` lets tensor groups cross nodes, `trainable`
    keeps to what ``moemesh train`` carries out.
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
        trainable=trainable,
    )
    if trainable:
        _refuse_untrainable(known["model"], space)
    return plan(known["model"], machine, space, top)


def command(
    model: str,
    cluster: str,
    seq_len: int,
    global_batch: int,
    *,
    as_json: bool = False,
    **options: Any,
) -> str:
    """The text that ``moemesh plan`` prints; `options` are those of :func:`plan_named`."""
    planned = plan_named(model, cluster, seq_len, global_batch, **options)
    if as_json:
        return json.dumps(to_json(planned), indent=2)
    asked = ["--model", model, "--cluster", cluster, "--seq-len", seq_len]
    return table(planned, shlex.join(map(str, [*asked, "--global-batch", global_batch])))


def _refuse_untrainable(model: Model, space: Space) -> None:
    """Raise ConfigError where no layout of the model could be trained, with all reasons."""
    smallest = PlannedLayout(seq_len=space.seq_len, global_batch=1, precision=space.precision)
    if problems := untrained(smallest, model):
        fix = "leave --trainable out to plan what other trainers would run"
        raise ConfigError(replace(problem, fix=problem.fix or fix) for problem in problems)


def to_json(planned: Planned) -> dict[str, Any]:
    """The object that ``moemesh plan --json`` prints; `command` is null for what is not trained."""
    certificate, advice = planned.certificate, planned.advice
    return {
        "plans": [candidate_json(found, planned.model) for found in planned.candidates],
        "lower_bound_seconds": certificate.lower_bound_seconds,
        "compute_floor_seconds": certificate.compute_floor_seconds,
        "examined": certificate.examined,
        "rejected": certificate.rejected,
        "assumptions": list(certificate.assumptions),
        "binding": advice.binding,
        "sensitivity": [{"more_bytes": more, "seconds": then} for more, then in advice.sensitivity],
        "why_not": list(advice.why_not),
    }


def candidate_json(found: Candidate, model: Model) -> dict[str, Any]:
    """One of the ``plans`` of :func:`to_json`."""
    refused = not_trained(found.layout, model)
    return {
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
        "command": None if refused else train_command(found.layout, model),
        "not_trained": refused,
    }


def plan_keys(layout: PlannedLayout) -> dict[str, Any]:
    """The keys of [plan] that say this layout: those of every answer, and others that are set."""
    plan, defaults = plan_of(layout), Plan()
    return {
        name: value
        for name in Plan.model_fields
        if (value := getattr(plan, name)) != getattr(defaults, name) or name in _ALWAYS
    }


def not_trained(layout: PlannedLayout, model: Model) -> list[str]:
    """What of a layout and its model `moemesh train` refuses, as ``key = value``, with a reason
    where the value alone does not say it."""
    found: list[str] = []
    for problem in untrained(layout, model):
        key = problem.key.removeprefix("plan.").removeprefix("model.")
        setting = f"{key} = {problem.value}" if problem.value is not None else problem.message
        is_value = problem.code == "not-available" or problem.value is None
        found.append(setting if is_value else f"{setting} ({problem.message})")
    return found


def train_command(layout: PlannedLayout, model: Model) -> str:
    """The `moemesh train` call that carries the layout out; defaults are left out. Of a layout
    without :func:`not_trained` only."""
    assert model.config is not None, "only a model with a configuration is trained"
    plan, defaults = plan_of(layout), Plan()
    name = model.shape.name
    if name in preset_names() and load_model(name).config == model.config:
        words = [f"model.preset={name}"]
    else:
        words = _set("model", model.config, ModelConfig())
    words += _set("plan", plan, defaults)
    words += [f"data.{key}={getattr(layout, key)}" for key in ("seq_len", "global_batch")]
    words.append("train.dtype=bfloat16")
    return "moemesh train " + " ".join(f"--set {shlex.quote(word)}" for word in words)


def _set(section: str, values: Section, defaults: Section) -> list[str]:
    """``section.key=value`` of everything that is not its default."""
    return [
        f"{section}.{name}={value if isinstance(value, str) else format_value(value)}"
        for name in type(values).model_fields
        if (value := getattr(values, name)) != getattr(defaults, name)
    ]


def table(planned: Planned, asked: str) -> str:
    """A readable answer to the options `asked`, which `moemesh estimate` takes, too."""
    best, cluster = planned.candidates[0], planned.cluster
    lines = [
        f"{planned.model.shape.name} on {cluster.num_devices} devices of {cluster.name} "
        f"({_count(cluster.nodes, 'node')}), {best.layout.seq_len} tokens a sequence, "
        f"{best.layout.global_batch} sequences a step",
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
    ]
    if not (refused := not_trained(best.layout, planned.model)):
        return "\n".join([*lines, train_command(best.layout, planned.model)])
    lines += [
        f"moemesh estimate {asked} --plan {best.layout.text}",
        *_wrapped(f"this version plans {', '.join(refused)} and does not train it"),
    ]
    if not untrained(PlannedLayout(seq_len=1, global_batch=1), planned.model):
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
