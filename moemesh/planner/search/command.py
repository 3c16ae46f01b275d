"""``moemesh plan``: the best layouts with reasons and a certificate, and calls that train them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, cast

from moemesh.config.cluster import Cluster
from moemesh.config.data import read_tokens
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, LARGEST_DEGREE, Plan
from moemesh.config.section import LARGEST_SIZE, Section
from moemesh.config.sources import parse_value, preset_names, read_preset_table
from moemesh.config.toml import format_value
from moemesh.config.train import TrainConfig
from moemesh.planner.intervals import Interval, shipped_intervals
from moemesh.planner.layout_sources import plan_of, read_plan, trained_shares, untrained
from moemesh.planner.planned_layout import PlannedLayout, Precision
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.rival import MEMORY_PARTS, Rival, rival_table, why_not
from moemesh.planner.search.search import (
    Advice,
    Candidate,
    Certificate,
    SearchSpace,
    advise,
    choose,
    what_would_fit,
)
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load_shape import Model, load_both, load_model
from moemesh.planner.speed import Speed
from moemesh.planner.timing.hardware import accelerator_of_cluster
from moemesh.planner.timing.price import Pricing, pricing, with_headroom
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import format_bytes

# Published runs of a model on a kind of device, beside what is predicted for their layouts.


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """Measured `seconds` of a step of `layout`, whose precision is that of the run, and the
    `predicted` ones; `here` in the precision that was asked for. `speed` is the measured one."""

    source: str
    device: str
    layout: PlannedLayout
    seconds: float
    predicted: float
    here: float
    speed: Speed


def known_runs(model: Model, cluster: Cluster, precision: Precision) -> Iterator[KnownRun]:
    """Runs of the same sizes on the same kind of device, on however many of them."""
    table: dict[str, Any] = read_preset_table("layouts", "calibration")
    price = pricing(cluster)
    for run in table["run"]:
        if run["device"] != accelerator_of_cluster(cluster).name:
            continue
        known = load_model(run["model"])
        if model.shape.model_copy(update={"name": known.shape.name}) != known.shape:
            continue
        layout = read_plan(run["plan"], model=known).layout
        layout = layout.changed(precision=cast("Precision", run["precision"]))
        asked = layout.changed(precision=precision)
        yield KnownRun(
            **{key: run[key] for key in ("source", "device", "seconds")},
            layout=layout,
            predicted=price.seconds(model.shape, layout)["total"],
            here=price.seconds(model.shape, asked)["total"],
            speed=Speed.of(model.shape, layout, cluster, run["seconds"]),
        )


#: Tokens of a sequence that is short for every purpose, and that all context degrees divide.
_SHORT = 64
#: What may be set beside a plan: what trains.
_TUNED = ("lora.", "train.freeze", "train.train_only", "train.esft")
#: The beginning of a file that `plan --write` may write anew.
PLAN_FILE = "# Written by `moemesh plan`"
#: Keys of [plan] that every answer names, with their defaults, too.
_ALWAYS = (
    *DEGREES, "schedule", "stages_per_rank", "microbatches", "data", "recompute", "attention_exit",
    "dispatcher",
)  # fmt: skip


class NothingFits(UserError):
    """No layout of the space fits the devices' memory."""


@dataclass(frozen=True, kw_only=True)
class PlannedAnswer:
    """The answer to `moemesh plan`: the recommended candidate, then the others by seconds."""

    model: Model
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    advice: Advice
    certificate: Certificate
    #: What is known of the cluster.
    pricing: Pricing
    #: What the user named, judged.
    rivals: tuple[Rival, ...] = ()
    #: Tokens of a training, for its days.
    tokens: float | None = None
    #: How many layouts were asked for.
    top: int = 5
    #: Whether the whole memory interval of any layout fits the device.
    has_safe: bool = True
    #: What others measured of the model on such devices.
    published: tuple[KnownRun, ...] = ()
    #: What the cluster's own runs say of the first candidate.
    own_runs: str = ""
    #: The best layout of fewer nodes, where its GPU-hours are the fewest; only with `tokens`.
    cheapest: Candidate | None = None

    def speed(self, found: Candidate) -> Speed:
        """Tokens a second, MFU and days of a candidate."""
        return Speed.of(self.model.shape, found.layout, self.cluster, found.seconds)

    def seconds_interval(self, found: Candidate) -> Interval:
        """80 % interval of a candidate's step."""
        own = tuple(one.left_out for one in self.cluster.own_runs)
        generation = self.pricing.device.generation
        return shipped_intervals().of_seconds(found.seconds, generation, own)

    def memory_interval(self, found: Candidate) -> Interval:
        """80 % interval of the bytes that it needs."""
        known = bool(self.pricing.device.generation)
        return shipped_intervals().of_memory(found.memory.needed, known=known)

    @property
    def fastest_first(self) -> list[Candidate]:
        """The candidates by seconds, as many as were asked for."""
        return sorted(self.candidates, key=lambda one: one.seconds)[: self.top]

    def is_safe(self, found: Candidate) -> bool:
        """Whether the device holds that whole interval, whatever `headroom` leaves free of it."""
        return self.memory_interval(found).high <= self.cluster.memory_bytes


def plan(
    model: Model,
    cluster: Cluster,
    space: Space,
    top: int,
    *,
    rivals: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> PlannedAnswer:
    """The `top` best layouts (:func:`choose`), and what is wrong with `rivals` ("tp=8,ep=64").
    Raises ConfigError when no layout is legal, NothingFits when none fits in memory."""
    found = SearchSpace(model.shape, cluster, space, tell)
    known = bool(found.pricing.device.generation)
    safe = cluster.memory_bytes / shipped_intervals().of_memory(1.0, known=known).high
    if not (chosen := choose(found, top, safe)):
        # A shorter sequence helps only where something would fit then.
        fixes, short = ["more --nodes", "devices with more memory"], min(_SHORT, space.seq_len)
        with suppress(ConfigError):
            shorter = SearchSpace(model.shape, cluster, replace(space, seq_len=short))
            if short < space.seq_len and (shorter.needed <= shorter.capacity).any():
                fixes.insert(1, "a shorter --seq-len")
        if space.trainable:
            fixes.append("all layouts, without --trainable")
        if cluster.usable_share is not None:
            fixes.append("less --headroom")
        raise NothingFits(
            f"no layout of {model.shape.name} on {space.num_devices} devices of {cluster.name} "
            f"fits in {format_bytes(cluster.memory_bytes)}: {what_would_fit(found)}\n"
            f"fix: {', '.join(fixes[:-1])} or {fixes[-1]}"
        )
    best, candidates = next(iter(chosen)), tuple(chosen.values())
    fastest = found.fitting(found.capacity, 1)[0]
    return PlannedAnswer(
        model=model,
        cluster=cluster,
        candidates=candidates,
        top=top,
        advice=advise(found, best, fastest),
        certificate=found.certificate(found.seconds(fastest)),
        pricing=found.pricing,
        own_runs=found.pricing.own_runs(model.shape, candidates[0].layout),
        has_safe=bool((found.needed <= min(safe, found.capacity)).any()),
        published=() if model.run else tuple(known_runs(model, cluster, space.precision)),
        rivals=tuple(why_not(found, model, candidates[0], asked) for asked in rivals),
    )


def cheapest(planned: PlannedAnswer, space: Space, tell: Callable[[str], None]) -> Candidate | None:
    """The fastest layout of half, a quarter, ... of the nodes, if its GPU-hours are fewer than the
    first answer's by more than one percent; None where fewer devices save nothing."""
    best, found = planned.candidates[0], None
    least = 0.99 * best.seconds * space.num_devices
    nodes = planned.cluster.nodes // 2
    while nodes:
        cluster = planned.cluster.model_copy(update={"nodes": nodes})
        smaller = replace(space, num_devices=cluster.num_devices)
        try:
            searched = SearchSpace(planned.model.shape, cluster, smaller, tell)
        except ConfigError:  # no layout of so many devices is legal
            break
        numbers = searched.fitting(searched.capacity, 1)
        if not numbers or searched.seconds(numbers[0]) * cluster.num_devices >= least:
            break
        found = searched.candidate(numbers[0])
        least, nodes = found.seconds * cluster.num_devices, nodes // 2
    return found


def plan_named(request: PlanRequest, tell: Callable[[str], None] = lambda _: None) -> PlannedAnswer:
    """Search for the best layouts; `tell` is called with how far the search is. Raises ConfigError
    with every problem found."""
    seq_len, global_batch, nodes = request.seq_len, request.global_batch, request.nodes
    top, why = 5 if request.top is None else request.top, request.why or ()
    problems: list[Problem] = []
    known, machine = load_both(request.model, request.cluster, problems)
    for name, value in (("seq_len", seq_len), ("global_batch", global_batch), ("top", top)):
        if not 1 <= value <= LARGEST_SIZE:
            bound = f"at least 1, not {value}" if value < 1 else f"at most {LARGEST_SIZE}"
            message, fix = f"{name} must be {bound}", f"{name} = {_legal_size(value)}"
            problems.append(Problem.of("out-of-range", name, value, message, fix))
    wanted = None
    try:
        wanted = None if request.tokens is None else read_tokens(str(request.tokens))
        machine = None if machine is None else with_headroom(machine, request.headroom)
    except ConfigError as error:
        problems += error.problems
    if machine is not None and nodes is not None:
        machine = machine.model_copy(update={"nodes": nodes})
    if machine is not None and not 1 <= machine.num_devices <= LARGEST_DEGREE:
        most = max(LARGEST_DEGREE // machine.gpus_per_node, 1) if machine.nodes > 0 else 1
        message = f"{machine.num_devices} devices: a plan needs between 1 and {LARGEST_DEGREE}"
        key, fix = "cluster.nodes", f"nodes = {most}"
        problems.append(Problem.of("out-of-range", key, machine.nodes, message, fix))
    for asked in why:
        try:
            rival_table(asked, known, _legal_size(seq_len), _legal_size(global_batch))
        except ConfigError as error:
            problems += error.problems
    if problems or known is None or machine is None:
        raise ConfigError(problems)
    if request.settings:
        if (config := known.config or known.sizes) is None:
            raise ConfigError([Problem(code="not-available", key="model", message=known.why_not)])
        for setting in request.settings:
            key = setting.partition("=")[0].strip()
            if not key.startswith(_TUNED):
                message = "a search takes from --set what trains, and chooses the rest itself"
                fix = "keys such as lora.rank, train.freeze or train.train_only"
                raise ConfigError([Problem.of("conflict", key, None, message, fix)])
        words = [*_words(_model_settings(known._replace(config=config))), *request.settings]
        run = load_run([], words, environ={}).config
        known = known._replace(settings=tuple(request.settings), run=run)
    space = Space(
        trained={} if known.run is None else trained_shares(known.run),
        num_devices=machine.num_devices,
        node_size=machine.gpus_per_node,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=request.precision,
        tensor_inside_node=not request.anywhere,
        trainable=request.trainable,
    )
    if request.trainable:
        # All reasons, where no layout of the model could be trained.
        smallest = PlannedLayout(seq_len=seq_len, global_batch=1, precision=request.precision)
        if problems := untrained(smallest, known):
            fix = "leave --trainable out to plan what other trainers would run"
            raise ConfigError(replace(problem, fix=problem.fix or fix) for problem in problems)
    planned = plan(known, machine, space, top, rivals=why, tell=tell)
    if wanted is None:
        return planned
    return replace(planned, tokens=wanted, cheapest=cheapest(planned, space, tell))


def to_json(planned: PlannedAnswer) -> dict[str, Any]:
    """The object that ``moemesh plan --json`` prints; `command` is null for what is not trained."""
    certificate, advice = planned.certificate, planned.advice
    return {
        "plans": [candidate_json(planned, found) for found in planned.fastest_first],
        "recommended": plan_keys(planned.candidates[0].layout),
        "device_bytes": planned.cluster.memory_bytes,
        "usable_share": planned.pricing.usable_share,
        **vars(certificate),
        "binding": advice.binding,
        "sensitivity": [{"more_bytes": more, "seconds": then} for more, then in advice.sensitivity],
        "why_not": list(advice.why_not),
        "why": [rival.to_json() for rival in planned.rivals],
        "published": [
            {
                **{name: getattr(run, name) for name in ("source", "device", "seconds")},
                "predicted_seconds": run.predicted,
                "predicted_seconds_here": run.here,
                "devices": run.layout.world_size,
                "precision": run.layout.precision,
                "plan": run.layout.key,
                "speed": run.speed.to_json(planned.tokens),
            }
            for run in planned.published
        ],
        "cheapest": planned.cheapest and candidate_json(planned, planned.cheapest),
    }


def candidate_json(planned: PlannedAnswer, found: Candidate) -> dict[str, Any]:
    """One of the ``plans`` of :func:`to_json`."""
    model = planned.model
    refused = not_trained(found.layout, model)
    return {
        "plan": plan_keys(found.layout),
        "roles": list(found.roles),
        "alike": found.alike,
        "seconds": found.seconds,
        "seconds_interval": list(planned.seconds_interval(found)),
        "memory_bytes": found.memory.needed,
        "memory_interval_bytes": list(planned.memory_interval(found)),
        "speed": planned.speed(found).to_json(planned.tokens),
        "breakdown": {k: v for k, v in found.breakdown.items() if k != "total"},
        "memory": {name: getattr(found.memory, name) for name in ("rank", *MEMORY_PARTS)},
        "command": None if refused else train_command(found.layout, model),
        "not_trained": refused,
    }


def plan_keys(layout: PlannedLayout) -> dict[str, Any]:
    """The keys of [plan] that say this layout: those of every answer, and others that are set."""
    return _changed(plan_of(layout), Plan(), _ALWAYS)


def not_trained(layout: PlannedLayout, model: Model) -> list[str]:
    """Parts of a layout and its model that `moemesh train` refuses, as ``key = value``, with a
    reason where the value alone does not say it."""
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
    words = [*_words(_settings(layout, model)), *model.settings]
    return "moemesh train " + " ".join(f"--set {shlex.quote(word)}" for word in words)


def plan_file(planned: PlannedAnswer) -> str:
    """The configuration that `moemesh train` takes, with the prediction in comments. Of an answer
    without :func:`not_trained` only."""
    best, model, cluster = planned.candidates[0], planned.model, planned.cluster
    settings = _settings(best.layout, model)
    for setting in model.settings:
        key, _, text = setting.partition("=")
        settings[key.strip()] = parse_value(text.strip(), key, "--set")
    if planned.tokens is not None:
        tokens_a_step = best.layout.seq_len * best.layout.global_batch
        settings["train.steps"] = ceil(planned.tokens / tokens_a_step)
    seconds, memory = planned.seconds_interval(best), planned.memory_interval(best)
    sizes = [format_bytes(round(size)) for size in (best.memory.needed, *memory)]
    lines = [
        f"{PLAN_FILE}: {model.shape.name} on {cluster.num_devices} devices of {cluster.name}.",
        f"# Predicted: {best.seconds:.4g} s a step (80 %: {seconds.low:.4g} to {seconds.high:.4g}),"
        f" MFU {planned.speed(best).mfu:.1%}.",
        f"# Memory of the fullest device: {sizes[0]} (80 %: {sizes[1]} to {sizes[2]}) of "
        f"{format_bytes(cluster.memory_bytes)}.",
        f"# Still to choose: {still_to_choose(planned, best)}.",
    ]
    for section in dict.fromkeys(key.partition(".")[0] for key in settings):
        lines += ["", f"[{section}]"]
        for key, value in settings.items():
            if key.startswith(f"{section}."):
                lines.append(f"{key.removeprefix(f'{section}.')} = {format_value(value)}")
    return "\n".join(lines) + "\n"


def still_to_choose(planned: PlannedAnswer, best: Candidate) -> str:
    """Keys that an answer leaves at defaults which are made for a first run."""
    train, tokens = TrainConfig(), planned.tokens
    steps = f"train.steps (now {train.steps}), "
    if tokens is not None:
        steps = ""  # those of the tokens are set
    model = planned.model
    data = "data.path, data.tokenizer" if model.path is None else "data.path"
    if model.path is None and model.run is not None and model.run.lora.rank:
        data += ", model.path in place of model.preset (adapters need trained weights)"
    return f"{steps}train.lr (now {train.lr:g}), {data}"


def _settings(layout: PlannedLayout, model: Model) -> dict[str, Any]:
    """Keys of the configuration that say the model, the layout and its batch."""
    plan = _changed(plan_of(layout), Plan())
    found = _model_settings(model) | {f"plan.{key}": value for key, value in plan.items()}
    found |= {f"data.{key}": getattr(layout, key) for key in ("seq_len", "global_batch")}
    return found | {"train.dtype": "bfloat16"}


def _model_settings(model: Model) -> dict[str, Any]:
    """Those that say the model to `moemesh train`."""
    name = model.shape.name
    if model.path is not None:
        return {"model.path": str(model.path)}
    if name in preset_names() and load_model(name).config == model.config:
        return {"model.preset": name}
    assert model.config is not None, "only a model with a configuration is trained"
    changed = _changed(model.config, ModelConfig())
    return {f"model.{key}": value for key, value in changed.items()}


def _changed(values: Section, defaults: Section, always: Sequence[str] = ()) -> dict[str, Any]:
    """Key and value of everything that is not its default, or that is `always` named."""
    return {
        name: value
        for name in type(values).model_fields
        if (value := getattr(values, name)) != getattr(defaults, name) or name in always
    }


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as ``--set`` takes them."""
    return [
        f"{key}={value if isinstance(value, str) else format_value(value)}"
        for key, value in settings.items()
    ]


def _legal_size(value: int) -> int:
    """The nearest number of sequences or tokens that is one."""
    return min(max(value, 1), LARGEST_SIZE)
