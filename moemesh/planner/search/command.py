"""``moemesh plan``: the best layouts with reasons and a certificate, and their train commands."""

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
from moemesh.config.plan import DEGREES, LARGEST_DEGREE
from moemesh.config.run import projections
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.sources import parse_value, preset_names, read_preset_table
from moemesh.config.toml import format_value
from moemesh.config.train import TrainConfig, usual_rate
from moemesh.planner.intervals import Interval
from moemesh.planner.layout_sources import plan_of, read_plan, trained_shares, untrained
from moemesh.planner.planned_layout import PlannedLayout, Precision
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.remedies import Tunings, remedies
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
from moemesh.planner.speed import Speed, accelerator_of_cluster, without_peak
from moemesh.planner.timing.price import Pricing, pricing, with_headroom
from moemesh.report.document import plural
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import format_bytes

# Published runs of a model on a kind of device, with predictions for their layouts.


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """Measured and `predicted` seconds of a step of `layout` in the precision of the run; `here`
    are the predicted seconds in the requested precision. `speed` is measured."""

    source: str
    device: str
    layout: PlannedLayout
    seconds: float
    predicted: float
    here: float
    speed: Speed


def known_runs(model: Model, cluster: Cluster, precision: Precision) -> Iterator[KnownRun]:
    """Published runs of the same sizes on any number of the same kind of device."""
    table: dict[str, Any] = read_preset_table("layouts", "calibration")
    prices = pricing(cluster)
    for run in table["run"]:
        if run["device"] != accelerator_of_cluster(cluster).name:
            continue
        published = load_model(run["model"])
        if model.shape.model_copy(update={"name": published.shape.name}) != published.shape:
            continue
        layout = read_plan(run["plan"], model=published).layout
        layout = layout.changed(precision=cast("Precision", run["precision"]))
        requested = layout.changed(precision=precision)
        yield KnownRun(
            **{key: run[key] for key in ("source", "device", "seconds")},
            layout=layout,
            predicted=prices.seconds(model.shape, layout)["total"],
            here=prices.seconds(model.shape, requested)["total"],
            speed=Speed.of(model.shape, layout, cluster, run["seconds"]),
        )


#: Tokens of a very short sequence that all context degrees divide.
_SHORT = 64
#: Beginnings of keys that `--set` takes: the weights that train, and offload.
_TUNED = ("lora.", "train.freeze", "train.train_only", "train.esft", "plan.offload")
#: First words of a file that `plan --write` may overwrite.
PLAN_FILE = "# Written by `moemesh plan`"
#: Keys of [plan] that every answer contains, even with default values.
_ALWAYS = (
    *DEGREES, "schedule", "stages_per_rank", "microbatches", "data", "recompute", "attention_exit",
    "dispatcher",
)  # fmt: skip


class NothingFits(UserError):
    """Error of a search space without a layout that fits the devices' memory."""


@dataclass(frozen=True, kw_only=True)
class PlannedAnswer:
    """The answer to `moemesh plan`: the recommended candidate, then the others by seconds."""

    model: Model
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    advice: Advice
    certificate: Certificate
    #: Calibrated constants, links and runs of the cluster.
    pricing: Pricing
    #: Comparisons of the user's layouts with the recommended one.
    rivals: tuple[Rival, ...] = ()
    #: Tokens of a training, for its days.
    tokens: float | None = None
    #: Requested number of layouts.
    top: int = 5
    #: Whether the whole memory interval of any layout fits the device.
    has_safe: bool = True
    #: Options with which the whole memory interval of some layout fits; () if `has_safe`.
    safer: tuple[str, ...] = ()
    #: Published measurements of the model on such devices.
    published: tuple[KnownRun, ...] = ()
    #: Lines on a precision without a peak, and on the correction of the first candidate by the
    #: cluster's own runs.
    notes: tuple[str, ...] = ()
    #: Best layout on fewer nodes if it takes the fewest GPU-hours; only with `tokens`.
    cheapest: Candidate | None = None

    def speed(self, candidate: Candidate) -> Speed:
        return Speed.of(self.model.shape, candidate.layout, self.cluster, candidate.seconds)

    def seconds_interval(self, candidate: Candidate) -> Interval:
        """80 % interval of a candidate's seconds per step."""
        return self.pricing.seconds_interval(candidate.seconds)

    def memory_interval(self, candidate: Candidate) -> Interval:
        """80 % interval of the bytes that a candidate needs."""
        return self.pricing.memory_interval(candidate.memory.needed)

    @property
    def fastest_first(self) -> list[Candidate]:
        """The recommended and the next candidates, `top` in all, by seconds."""
        return sorted(self.candidates[: self.top], key=lambda candidate: candidate.seconds)

    def is_safe(self, candidate: Candidate) -> bool:
        """Whether the candidate's whole memory interval fits the device, headroom included."""
        return self.memory_interval(candidate).high <= self.cluster.memory_bytes


def plan(
    model: Model,
    cluster: Cluster,
    space: Space,
    top: int,
    *,
    rivals: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> PlannedAnswer:
    """The `top` best layouts (:func:`choose`), and comparisons of `rivals` ("tp=8,ep=64") with the
    recommended one. Raises ConfigError if no layout is legal, NothingFits if none fits in
    memory."""
    search = SearchSpace(model.shape, cluster, space, progress)
    safe = cluster.memory_bytes / search.pricing.memory_interval(1.0).high
    if not (chosen := choose(search, top, safe)):
        # A shorter sequence is suggested only if some layout would fit with it.
        fixes, short = ["more --nodes", "devices with more memory"], min(_SHORT, space.seq_len)
        with suppress(ConfigError):
            shorter = SearchSpace(model.shape, cluster, replace(space, seq_len=short))
            if short < space.seq_len and (shorter.needed <= shorter.capacity).any():
                fixes.append("a shorter --seq-len")
        if space.trainable:
            fixes.append("all layouts, without --trainable")
        if cluster.usable_share is not None:
            fixes.append("less --headroom")
        fix = f"fix: {', '.join(fixes[:-1])} or {fixes[-1]}"
        if fitting := [*remedies(model.shape, cluster, space, _tunings(model, space), progress)]:
            fix = "\n  ".join(["fix: one of", *fitting, *fixes[2:]])
        raise NothingFits(
            f"no layout of {model.shape.name} on {plural(space.num_devices, 'device')} of "
            f"{cluster.name} fits in {format_bytes(cluster.memory_bytes)}: "
            f"{what_would_fit(search)}\n{fix}"
        )
    has_safe = bool((search.needed <= min(safe, search.capacity)).any())
    safer: list[str] = []
    for group in () if has_safe else _tunings(model, space):
        for options, shares in group.items():
            trained = replace(space, trained=dict(shares))
            tuned = SearchSpace(model.shape, cluster, trained, progress)
            if tuned.fitting(min(safe, tuned.capacity), 1):
                safer.append(options)
                break
    best, candidates = next(iter(chosen)), tuple(chosen.values())
    fastest = search.fitting(search.capacity, 1)[0]
    own_runs = search.pricing.own_runs(model.shape, candidates[0].layout)
    notes = without_peak(cluster, space.precision), own_runs
    return PlannedAnswer(
        model=model,
        cluster=cluster,
        candidates=candidates,
        top=top,
        advice=advise(search, best, fastest),
        certificate=search.certificate(search.seconds(fastest)),
        pricing=search.pricing,
        notes=tuple(filter(None, notes)),
        has_safe=has_safe,
        safer=tuple(safer),
        published=() if model.run else tuple(known_runs(model, cluster, space.precision)),
        rivals=tuple(why_not(search, model, candidates[0], asked) for asked in rivals),
    )


def _tunings(model: Model, space: Space) -> list[Tunings]:
    """The options of a run that needs less memory for its states, and the fields of its layouts:
    adapters instead of all weights, adapters beside a base in 4 bits, the optimizer on the host.
    A group of adapters has those of the usual projections first, then those of attention alone."""
    given: Mapping[str, Any] = space.trained
    base, bits = "--set lora.base=nf4", "(the frozen base in 4 bits)"
    host = "--set plan.offload=optimizer (its states in host memory)"
    offloaded: list[Tunings] = [] if given else [{host: {"offload": "optimizer"}}]
    config = model.config or model.sizes
    if config is None or (given and not given.get("adapters")):
        return offloaded
    settings = model.settings if given else ("lora.rank=16",)
    words = [*_words(_model_settings(model._replace(config=config))), *settings]
    kinds = projections(config)
    # A target's name may be in several blocks.
    elsewhere = {kind.target for kind in kinds if kind.block != "attention"}
    targets = dict.fromkeys(kind.target for kind in kinds if kind.target not in elsewhere)
    narrow, of_attention = f"lora.targets={','.join(targets)}", "(adapters of attention alone)"
    with suppress(ConfigError):
        whole = given or trained_shares(load_run([], words, environ={}).config)
        narrower = trained_shares(load_run([], [*words, narrow], environ={}).config)
        if given:
            packed = {} if given["base"] == "nf4" else {f"{base} {bits}": {**given, "base": "nf4"}}
            if narrower["trained_experts"] < given["trained_experts"]:
                also = f"{base} --set {narrow}" if packed else f"--set {narrow}"
                packed[f"{also} {of_attention}"] = {**narrower, "base": "nf4"}
            return [packed]
        rank = "--set lora.rank=16"
        return [
            {
                f"{rank} (adapters instead of all weights)": whole,
                f"{rank} --set {narrow} {of_attention}": narrower,
            },
            {
                f"{rank} {base} {bits}": {**whole, "base": "nf4"},
                f"{rank} {base} --set {narrow} {of_attention}": {**narrower, "base": "nf4"},
            },
            *offloaded,
        ]
    return offloaded


def cheapest(
    planned: PlannedAnswer, space: Space, progress: Callable[[str], None]
) -> Candidate | None:
    """The fastest layout on half, a quarter, ... of the nodes, as long as every halving takes fewer
    GPU-hours, the first by over one percent; None if half of the nodes save less."""
    best, best_smaller = planned.candidates[0], None
    #: Device-seconds of a step that a layout on fewer nodes must save.
    limit = 0.99 * best.seconds * space.num_devices
    nodes = planned.cluster.nodes // 2
    while nodes:
        cluster = planned.cluster.model_copy(update={"nodes": nodes})
        smaller = replace(space, num_devices=cluster.num_devices)
        try:
            searched = SearchSpace(planned.model.shape, cluster, smaller, progress)
        except ConfigError:  # no layout of this number of devices is legal
            break
        fastest = searched.fitting(searched.capacity, 1)
        if not fastest or searched.seconds(fastest[0]) * cluster.num_devices >= limit:
            break
        best_smaller = searched.candidate(fastest[0])
        limit, nodes = best_smaller.seconds * cluster.num_devices, nodes // 2
    return best_smaller


def plan_named(
    request: PlanRequest, progress: Callable[[str], None] = lambda _: None
) -> PlannedAnswer:
    """Search for the best layouts; `progress` is called with status texts. Raises ConfigError
    with every problem of the request, else with those of its settings or of the search."""
    seq_len, global_batch, nodes = request.seq_len, request.global_batch, request.nodes
    top, why = 5 if request.top is None else request.top, request.why or ()
    problems: list[Problem] = []
    loaded, machine = load_both(request.model, request.cluster, problems)
    for name, value in (("seq_len", seq_len), ("global_batch", global_batch), ("top", top)):
        if not 1 <= value <= LARGEST_SIZE:
            bound = f"at least 1, not {value}" if value < 1 else f"at most {LARGEST_SIZE}"
            message, fix = f"{name} must be {bound}", f"{name} = {_legal_size(value)}"
            problems.append(Problem.of("out-of-range", name, value, message, fix))
    tokens = None
    try:
        tokens = None if request.tokens is None else read_tokens(str(request.tokens))
        machine = (
            None if machine is None else with_headroom(machine, request.headroom, request.price)
        )
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
            rival_table(asked, loaded, _legal_size(seq_len), _legal_size(global_batch))
        except ConfigError as error:
            problems += error.problems
    if problems or loaded is None or machine is None:
        raise ConfigError(problems)
    if request.settings:
        if (config := loaded.config or loaded.sizes) is None:
            raise ConfigError([Problem(code="not-available", key="model", message=loaded.why_not)])
        for setting in request.settings:
            key = setting.partition("=")[0].strip()
            if not key.startswith(_TUNED):
                message = "a search takes from --set what trains, and chooses the rest itself"
                fix = "keys such as lora.rank, train.freeze or train.train_only"
                raise ConfigError([Problem.of("conflict", key, None, message, fix)])
        words = [*_words(_model_settings(loaded._replace(config=config))), *request.settings]
        run = load_run([], words, environ={}).config
        # Commands take [plan] from the layout.
        settings = (setting for setting in request.settings if not setting.startswith("plan."))
        loaded = loaded._replace(settings=tuple(settings), run=run)
    # Fields of every layout: what trains, and where the optimizer is.
    trained = {} if loaded.run is None else trained_shares(loaded.run)
    if loaded.run is not None and (host := loaded.run.plan.offload) != "none":
        trained["offload"] = host
    space = Space(
        trained=trained,
        num_devices=machine.num_devices,
        node_size=machine.gpus_per_node,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=request.precision,
        tensor_inside_node=not request.anywhere,
        trainable=request.trainable,
    )
    if request.trainable:
        # All reasons, if no layout of the model can be trained.
        smallest = PlannedLayout(seq_len=seq_len, global_batch=1, precision=request.precision)
        if problems := untrained(smallest, loaded):
            fix = "leave --trainable out to plan what other trainers would run"
            raise ConfigError(replace(problem, fix=problem.fix or fix) for problem in problems)
    planned = plan(loaded, machine, space, top, rivals=why, progress=progress)
    if tokens is None:
        return planned
    return replace(planned, tokens=tokens, cheapest=cheapest(planned, space, progress))


def to_json(planned: PlannedAnswer) -> dict[str, Any]:
    """The object that ``moemesh plan --json`` prints; `command` is null for a layout that
    `moemesh train` does not support."""
    certificate, advice = planned.certificate, planned.advice
    return {
        "plans": [candidate_json(planned, candidate) for candidate in planned.fastest_first],
        "recommended": plan_keys(planned.candidates[0].layout),
        "device_bytes": planned.cluster.memory_bytes,
        "usable_share": planned.pricing.usable_share,
        **vars(certificate),
        "binding": advice.binding,
        "sensitivity": [{"more_bytes": more, "seconds": then} for more, then in advice.sensitivity],
        "notes": list(planned.notes),
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


def candidate_json(planned: PlannedAnswer, candidate: Candidate) -> dict[str, Any]:
    """One of the ``plans`` of :func:`to_json`."""
    model = planned.model
    refused = not_trained(candidate.layout, model)
    return {
        "plan": plan_keys(candidate.layout),
        "roles": list(candidate.roles),
        "alike": candidate.alike,
        "seconds": candidate.seconds,
        "seconds_interval": list(planned.seconds_interval(candidate)),
        "memory_bytes": candidate.memory.needed,
        "memory_interval_bytes": list(planned.memory_interval(candidate)),
        "speed": planned.speed(candidate).to_json(planned.tokens),
        "breakdown": {k: v for k, v in candidate.breakdown.items() if k != "total"},
        "memory": {name: getattr(candidate.memory, name) for name in ("rank", *MEMORY_PARTS)},
        "command": None if refused else train_command(candidate.layout, model),
        "not_trained": refused,
    }


def plan_keys(layout: PlannedLayout) -> dict[str, Any]:
    """The keys of [plan] for this layout: those of every answer, and those that differ from their
    defaults."""
    plan = plan_of(layout)
    listed = {*_ALWAYS, *plan.model_dump(exclude_defaults=True)}
    return {name: value for name, value in plan if name in listed}


def not_trained(layout: PlannedLayout, model: Model) -> list[str]:
    """Parts of a layout and its model that `moemesh train` refuses, as ``key = value``, with a
    reason if the value alone does not explain it."""
    refused: list[str] = []
    for problem in untrained(layout, model):
        key = problem.key.removeprefix("plan.").removeprefix("model.")
        setting = f"{key} = {problem.value}" if problem.value is not None else problem.message
        is_value = problem.code == "not-available" or problem.value is None
        refused.append(setting if is_value else f"{setting} ({problem.message})")
    return refused


def train_command(layout: PlannedLayout, model: Model) -> str:
    """The `moemesh train` command for a layout, without defaults. :func:`not_trained` must be empty
    for it."""
    words = [*_words(_settings(layout, model)), *model.settings]
    return "moemesh train " + " ".join(f"--set {shlex.quote(word)}" for word in words)


def plan_file(planned: PlannedAnswer) -> str:
    """The configuration file for `moemesh train`, with the prediction in comments.
    :func:`not_trained` must be empty for the answer."""
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
        f"{PLAN_FILE}: {model.shape.name} on {plural(cluster.num_devices, 'device')} of "
        f"{cluster.name}.",
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
    """Keys that an answer leaves at defaults for a first run, as text."""
    model, steps = planned.model, ""
    if planned.tokens is None:  # else the steps follow from the tokens
        steps = f"train.steps (now {TrainConfig().steps}), "
    rank = 0 if model.run is None else model.run.lora.rank
    data = "data.path, data.tokenizer" if model.path is None else "data.path"
    if model.path is None and rank:
        data += ", model.path in place of model.preset (adapters need trained weights)"
    rate = usual_rate(loads_weights=model.path is not None, lora_rank=rank)
    return f"{steps}train.lr (now {rate:g}), {data}"


def _settings(layout: PlannedLayout, model: Model) -> dict[str, Any]:
    """Keys of the configuration for the model, the layout and its batch."""
    plan = plan_of(layout).model_dump(exclude_defaults=True)
    settings = _model_settings(model) | {f"plan.{key}": value for key, value in plan.items()}
    settings |= {f"data.{key}": getattr(layout, key) for key in ("seq_len", "global_batch")}
    return settings | {"train.dtype": "bfloat16"}


def _model_settings(model: Model) -> dict[str, Any]:
    """Keys of the configuration for the model."""
    name = model.shape.name
    if model.path is not None:
        return {"model.path": str(model.path)}
    if name in preset_names() and load_model(name).config == model.config:
        return {"model.preset": name}
    assert model.config is not None, "only a model with a configuration is trained"
    changed = model.config.model_dump(exclude_defaults=True)
    return {f"model.{key}": value for key, value in changed.items()}


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of ``--set``."""
    return [
        f"{key}={value if isinstance(value, str) else format_value(value)}"
        for key, value in settings.items()
    ]


def _legal_size(value: int) -> int:
    """The nearest legal number of sequences or tokens."""
    return min(max(value, 1), LARGEST_SIZE)
