"""Runs in which little trains: estimate, memory, time and the command follow the choice."""

from __future__ import annotations

import shlex
from dataclasses import replace
from math import prod

import pytest

from moemesh.cli.plan_text import risk_of_memory
from moemesh.config.cluster import load_cluster
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.planner.estimate import estimate_run
from moemesh.planner.layout_sources import from_plan, plan_of, trained_shares
from moemesh.planner.machine_memory import TooLargeError, refuse_too_large
from moemesh.planner.memory import rank_memory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, PlannedAnswer, plan_named, train_command
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.timing.price import pricing
from moemesh.planner.traffic.own_memory import predict_states
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.planner.traffic.volumes import step_volumes
from moemesh.sharding.load_run import load_run
from moemesh.sharding.parameters import num_trained, tensors
from moemesh.trace.memory_profile import format_bytes

CHOICES = (
    RunConfig(lora=LoraConfig(rank=8)),
    RunConfig(lora=LoraConfig(rank=8, base="nf4")),
    RunConfig(train=TrainConfig(train_only=("*attention*",))),
    RunConfig(train=TrainConfig(freeze=("layers.*.feed_forward.experts.*",))),
)


@pytest.mark.parametrize("config", CHOICES, ids=["lora", "nf4", "attention", "without experts"])
@pytest.mark.parametrize("plan", [Plan(), Plan(dp=4, ep=4), Plan(dp=4, ep=2, data="zero1")])
def test_states_of_shares_are_those_of_the_tensors(config: RunConfig, plan: Plan) -> None:
    layout = from_plan(plan, config.model, seq_len=64, global_batch=8)
    layout = layout.changed(**trained_shares(config))
    memory = rank_memory(load_model(config.model).shape, layout, 0)
    placement = StagePlacement(config.model, plan, 64, config.tuning)
    exact = predict_states(placement, element=2)
    # Routers are kept in fp32 and shards are padded, which the closed form leaves out.
    assert memory.gradients == pytest.approx(exact.gradients, rel=0.02)
    assert memory.optimizer == pytest.approx(exact.optimizer, rel=0.03)
    weights = exact.dense_weights + exact.expert_weights
    assert memory.dense_weights + memory.expert_weights == pytest.approx(weights, rel=0.02)


def test_shares_count_what_trains() -> None:
    assert trained_shares(RunConfig()) == {}
    for config in CHOICES:
        shares, shape = trained_shares(config), load_model(config.model).shape
        layout = PlannedLayout(seq_len=1, global_batch=1, gradient_bytes=1).changed(**shares)
        trained = num_trained(config.tuning, config.model, Plan())
        assert rank_memory(shape, layout, 0).gradients == pytest.approx(trained, rel=1e-3)
        assert shares["adapters"] == (config.lora.rank > 0)


def test_a_base_in_4_bits_is_among_the_answers() -> None:
    """If nothing fits, if the whole interval of no answer fits, and as a plan of its own."""
    words = ("qwen3-30b-a3b", "one_h100", 4096, 16)
    with pytest.raises(NothingFits) as caught:
        plan_named(PlanRequest(*words))
    lines = str(caught.value).splitlines()
    adapters, packed = (
        next(float(line.split(": ")[1].split()[0]) for line in lines if f"{end} (" in line)
        for end in ("--set lora.rank=16", "--set lora.rank=16 --set lora.base=nf4")
    )
    assert packed < adapters
    tight = plan_named(PlanRequest(*words, settings=["lora.rank=16"]))
    assert not tight.has_safe and tight.safer == (
        "--set lora.base=nf4 (the frozen base in 4 bits)",
    )
    assert "or --set lora.base=nf4" in risk_of_memory(tight)
    roomy = plan_named(PlanRequest(*words, settings=["lora.rank=16", "lora.base=nf4"]))
    assert roomy.has_safe and roomy.candidates[0].seconds == pytest.approx(packed, rel=0.01)
    command = shlex.split(train_command(roomy.candidates[0].layout, roomy.model))
    assert "lora.base=nf4" in command
    # 29.9 of 30.5 billion parameters take 36 bytes for 64 of them.
    first, other = (
        rank_memory(one.model.shape, one.candidates[0].layout, 0) for one in (roomy, tight)
    )
    saved = other.dense_weights + other.expert_weights - first.dense_weights - first.expert_weights
    assert saved == pytest.approx(29.9e9 * (2 - 36 / 64), rel=0.003)


@pytest.mark.parametrize(("recompute", "passes"), [((), 2), (("full",), 3)])
def test_each_pass_of_a_microbatch_unpacks_the_base(
    recompute: tuple[str, ...], passes: int
) -> None:
    """36 bytes are read and 128 written for 64 numbers of the 32 layers of Llama 3 8B: each has
    4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) of them."""
    shape, cluster = load_model("llama3-8b").shape, load_cluster("one_h100")
    layout = PlannedLayout(
        seq_len=4096, global_batch=4, microbatch=2, recompute=frozenset(recompute)
    )
    layout = layout.changed(adapters=True)
    wide, packed = (
        pricing(cluster).seconds(shape, layout.changed(base=base)) for base in ("same", "nf4")
    )
    numbers = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    bandwidth = cluster.memory_bandwidth * pricing(cluster).constants.memory_efficiency
    expected = 2 * passes * numbers * (36 + 128) / 64 / bandwidth
    assert packed["total"] - wide["total"] == pytest.approx(expected, rel=1e-9)
    assert packed["elementwise"] - wide["elementwise"] == pytest.approx(expected, rel=1e-9)


LITE = PlanRequest("deepseek-v2-lite", "dgx_h100", 4096, 64, top=2, trainable=True)


@pytest.fixture(scope="module")
def adapted() -> PlannedAnswer:
    return plan_named(replace(LITE, settings=["lora.rank=8"]))


def test_adapters_need_less_memory_and_time(adapted: PlannedAnswer) -> None:
    first, other = adapted.candidates[0], plan_named(LITE).candidates[0]
    assert first.seconds < 0.9 * other.seconds
    same = first.layout.changed(adapters=False, trained_dense=1.0, trained_experts=1.0)
    everything = rank_memory(adapted.model.shape, same, 0)
    tuned = rank_memory(adapted.model.shape, first.layout, 0)
    assert tuned.gradients + tuned.optimizer < 0.1 * (everything.gradients + everything.optimizer)


def test_the_command_trains_what_was_planned(adapted: PlannedAnswer) -> None:
    layout = adapted.candidates[0].layout
    words = shlex.split(train_command(layout, adapted.model))
    config = load_run([], words[3::2], environ={}).config
    assert config.lora.rank == 8
    assert config.plan == plan_of(layout)
    estimated = estimate_run(config, load_cluster("dgx_h100"))
    assert estimated.seconds["total"] == pytest.approx(adapted.candidates[0].seconds, rel=1e-6)
    needed = adapted.candidates[0].memory.needed
    assert estimated.peak.needed == pytest.approx(needed, rel=0.02)


def test_gradients_on_the_wire_are_those_of_what_trains() -> None:
    shape = load_model("deepseek-v2-lite").shape
    layout = PlannedLayout(dp=8, ep=2, seq_len=64, global_batch=8)

    def sent(layout: PlannedLayout) -> dict[str, float]:
        volumes = step_volumes(shape, layout)
        return {
            one.axis: one.events * one.wire_bytes for one in volumes if one.caller == "gradients"
        }

    full, half = sent(layout), sent(layout.changed(trained_dense=0.5, trained_experts=0.0))
    assert half == {"dp_cp": pytest.approx(full["dp_cp"] / 2)}


ADAPTED = RunConfig(lora=LoraConfig(rank=4), train=TrainConfig(dtype="float32"))


def test_states_and_traffic_are_those_of_what_trains() -> None:
    every = estimate_run(RunConfig(train=TrainConfig(dtype="float32")), "laptop_cpu")
    estimated = estimate_run(ADAPTED, "laptop_cpu")
    trained = num_trained(ADAPTED.tuning, ADAPTED.model, ADAPTED.plan)
    memory, before = estimated.memory.worst, every.memory.worst
    assert memory.gradients == 4 * trained and memory.optimizer == 8 * trained
    weights = [one.dense_weights + one.expert_weights for one in (memory, before)]
    assert weights[0] == weights[1] + 4 * trained
    # Inputs that only gradients of frozen weights would read are not kept.
    assert memory.activations < before.activations and memory.logits == before.logits
    less = before.states - memory.states
    assert estimated.peak.needed == pytest.approx(every.peak.needed - less)
    assert any(f"{trained:,} parameters train" in note for note in estimated.notes)


def test_bytes_in_words_are_those_of_what_trains() -> None:
    """The note on a server, and rows that cross nodes, which are the cluster's without a key."""
    server = RunConfig(plan=Plan(dp=4, data="parameter_server"), lora=LoraConfig(rank=4))
    estimated = estimate_run(server, "laptop_cpu")
    sums = (estimated.traffic.total(caller=name) for name in ("gradients", "weights"))
    size = format_bytes(sum(one.wire_bytes for one in sums))
    assert f"with gradients {size} are sent by it" in "".join(estimated.notes)

    def sent(**keys: int) -> int:
        plan = Plan(dp=16, ep=8, tp=2, etp=2, dispatcher="hierarchical", **keys)
        run = RunConfig(plan=plan, lora=LoraConfig(rank=4))
        return estimate_run(run, load_cluster("dgx_h100")).traffic.total().wire_bytes

    assert sent() == sent(ranks_per_node=8)


def test_the_estimate_of_a_packed_base_is_that_of_its_tensors() -> None:
    packed = RunConfig(lora=LoraConfig(rank=4, base="nf4"), train=ADAPTED.train)
    before, after = (estimate_run(one, "laptop_cpu").memory.worst for one in (ADAPTED, packed))
    numbers = sum(prod(one.shape) for one in tensors(packed.model, Plan()) if one.is_packed)
    saved = before.dense_weights + before.expert_weights
    saved -= after.dense_weights + after.expert_weights
    assert saved == numbers * 4 - numbers * 36 // 64
    assert numbers * 36 / 64 <= 0.16 * numbers * 4


def test_traffic_is_that_of_adapters() -> None:
    def sent(config: RunConfig) -> float:
        rows = estimate_run(config, "laptop_cpu").traffic.rows()
        return sum(row["wire_bytes"] for row in rows if row["caller"] == "gradients")

    plan = Plan(dp=2, ep=2)
    full = sent(RunConfig(plan=plan))
    alone = sent(RunConfig(plan=plan, lora=LoraConfig(rank=4)))
    assert 0 < alone < 0.2 * full


def test_a_run_that_fits_because_little_trains_is_not_refused() -> None:
    model = ModelConfig()
    full = RunConfig(model=model, train=TrainConfig(dtype="float32"))
    with pytest.raises(TooLargeError):
        refuse_too_large(full, memory_bytes=30_000_000)
    refuse_too_large(ADAPTED, memory_bytes=30_000_000)
