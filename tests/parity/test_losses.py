"""Router options in any plan: scopes of the losses, balanced choices, jitter, capacity, faults."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.faults import RoutingError
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.test_parity import MODEL, TRAIN
from tests.parity.training import Shape, Trained, assert_same, microbatches, rows, train
from tests.ranks import mesh_on_ranks

#: Stages with experts and one without, extra prediction layers among those with.
TOGETHER: dict[str, Any] = MODEL | {"aux_loss_layers": "together", "num_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "microbatch": MODEL | {"aux_loss_scope": "microbatch", "z_loss_coefficient": 1e-2},
    "sequence": MODEL | {"aux_loss_scope": "sequence", "z_loss_coefficient": 1e-2},
    "global": MODEL | {"aux_loss_scope": "global", "z_loss_coefficient": 1e-2},
    # One loss over the choices of all layers.
    "together": TOGETHER | {"aux_loss_scope": "global"},
    "together_microbatch": TOGETHER | {"aux_loss_scope": "microbatch"},
    "together_sequence": TOGETHER | {"aux_loss_scope": "sequence", "z_loss_coefficient": 1e-2},
    "expert_choice": MODEL | {"router_selection": "expert_choice", "capacity_factor": 1.25},
    "sinkhorn": MODEL | {"router_selection": "sinkhorn"},
    "jitter": MODEL | {"router_jitter": 0.3, "router_logit_bias": True},
    "probability": MODEL | {"capacity_factor": 0.8, "capacity_renormalize": True},
    "position": MODEL
    | {
        "capacity_factor": 0.8,
        "capacity_policy": "position",
        "router_score": "sqrtsoftplus",
        "router_scale": 1.5,
        "router_scale_on": "output",
        "shared_combine": "average",
    },
}
WIDE = {"tp": 2, "dp": 2, "ep": 4}
CASES = rows(
    """
    # A microbatch is cut by dp; tp and ep leave it whole.
    microbatch | tp=4 ep=2 etp=2
    *microbatch | tp=2 ep=2 | padded
    global | tp=2 dp=2 ep=4
    global | dp=3 | padded
    *global | dp=4 ep=4 microbatches=2 | 1x5  # the second microbatch is empty
    together | tp=2 dp=2 ep=4
    *together | tp=2 cp=2 ep=4 | padded
    together | dp=2 ep=2 pp=2
    together | dp=4 ep=4 | 1x5
    together_microbatch | tp=2 etp=2 pp=2 schedule=zb_h1
    *together_sequence | dp=2 pp=2 microbatches=3 ep=2 | padded
    together_sequence | pp=4 microbatches=3 schedule=1f1b | padded
    together_sequence | pp=2 tp=2 cp=2 ep=4 microbatches=2 | padded
    together_sequence | pp=2 microbatches=4 schedule=dualpipe dp=2 ep=2 | 10x7
    together_sequence | pp=2 microbatches=2 schedule=zb_v tp=2
    together_sequence | pp=2 schedule=terapipe slices=3 tp=2 | padded
    together_sequence | recompute=full pp=2 tp=2 data=replicate | padded
    together_sequence | data=zero3 dp=2 ep=2 recompute=selective | padded
    expert_choice | tp=2 ep=2
    expert_choice | tp=2 dp=2 ep=4 dispatcher=all_gather
    expert_choice | dp=3 tp=2 ep=2 microbatches=2 | padded
    expert_choice | tp=8 ep=8 dispatcher=all_gather | 1x5
    expert_choice | tp=2 dp=2 ep=4 combine=exact
    expert_choice | tp=2 dp=2 ep=4 dispatcher=low_latency
    expert_choice | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2
    *expert_choice | tp=2 dp=2 ep=4 dispatch_chunks=2
    *sinkhorn | tp=2 dp=2 ep=4
    sinkhorn | tp=4 dp=2 ep=2 etp=2 | padded
    jitter | tp=2 dp=2 ep=4 microbatches=2
    *jitter | tp=4 ep=4 dispatcher=all_gather | padded
    probability | tp=2 dp=2 ep=4
    *probability | tp=4 etp=4 | padded
    *position | tp=2 dp=2 ep=4 microbatches=2
    position | tp=8 ep=8 | 1x5
    """
)


@cache
def one_device(model: str, shape: Shape) -> Trained:
    return train(MODELS[model], {}, TRAIN, shape)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_plan_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    assert_same(train(MODELS[model], plan, TRAIN, shape), one_device(model, shape))


@pytest.mark.representative("{'dp': 2, 'microbatches': 3}")
@pytest.mark.parametrize(
    "plan", [{"dp": 5}, {"microbatches": 5}, {"dp": 2, "microbatches": 3}], ids=str
)
def test_microbatches_of_one_sequence_are_sequences(plan: dict[str, Any]) -> None:
    """Every scope is counted once, however microbatches and ranks share them out."""
    found = train(MODELS["microbatch"], plan, TRAIN)
    assert_same(found, one_device("sequence", Shape()))


def test_scopes_differ() -> None:
    aux = {scope: one_device(scope, Shape()).aux[0] for scope in ("sequence", "microbatch")}
    cut = train(MODELS["microbatch"], {"dp": 2}, TRAIN | {"steps": 1}).aux[0]
    assert len({round(value, 6) for value in (*aux.values(), cut)}) == 3
    assert one_device("global", Shape()).aux == pytest.approx(
        one_device("microbatch", Shape()).aux, rel=1e-12
    )


def test_options_do_something() -> None:
    """Nothing above is vacuous: the first losses differ from the plain router's."""
    plain = one_device("sequence", Shape()).losses[0]
    for model in ("expert_choice", "sinkhorn", "jitter", "probability", "position"):
        assert abs(one_device(model, Shape()).losses[0] / plain - 1) > 1e-6
    total = 5 * 7 * 2
    for model in ("probability", "position"):
        assert all(sum(layer) < total for layer in one_device(model, Shape()).loads[0])


def model_on_rank(mesh: Mesh, plan: Plan, config: ModelConfig) -> RankModel:
    tokens = plan.tokens_per_rank(7, 5)
    return parallelize(config, plan, mesh, seed=0, dtype=torch.float64, tokens_per_rank=tokens)


def drops_on_rank(mesh: Mesh, plan_keys: dict[str, Any]) -> list[int]:
    plan, config = Plan(**plan_keys), ModelConfig(**MODELS["probability"])
    parallel = model_on_rank(mesh, plan, config)
    batches = microbatches(config, plan, Shape(), 1, mesh)
    return gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank)).dropped_L.tolist()


def test_drops_are_counted_once() -> None:
    expected = drops_on_rank(Mesh.single("cpu"), {})
    assert min(expected) > 0
    plan = {"tp": 2, "dp": 2, "ep": 4}
    assert mesh_on_ranks(Plan(**plan).layout, drops_on_rank, plan) == [expected] * 4


def fault_on_rank(mesh: Mesh, plan_keys: dict[str, Any], culprit: int) -> str:
    """A NaN in one rank's copy of one router's row: only that rank sees it."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL)
    parallel = model_on_rank(mesh, plan, config)
    if mesh.rank == culprit:
        parallel.model.moe_layers()[2].router.weight.data[5] = torch.nan
    batches = microbatches(config, plan, Shape(), 1, mesh)
    try:
        gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    except RoutingError as error:
        return str(error)
    return "no error"


@pytest.mark.representative("3")
@pytest.mark.parametrize("culprit", [0, 3])
def test_nan_logits_stop_all_ranks_with_one_message(culprit: int) -> None:
    plan = {"tp": 2, "dp": 2, "ep": 4}
    messages = mesh_on_ranks(Plan(**plan).layout, fault_on_rank, plan, culprit)
    # dp 0 has sequences 0 to 2: rank 0 the first 11 of 21 tokens; rank 3 the last 7 of 14.
    token = {0: "token 0 (sequence 0, position 0)", 3: "token 28 (sequence 4, position 0)"}
    expected = f"layer 2, {token[culprit]}, expert 5: the router's logit is not finite"
    assert messages == [expected] * 4


def replay_on_rank(mesh: Mesh, plan_keys: dict[str, Any], mistake: str) -> Any:
    """One step with given experts for layer 1; `mistake` is made by the last data rank."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL)
    parallel = model_on_rank(mesh, plan, config)
    generator = torch.Generator().manual_seed(9)
    table = torch.rand(5 * 7, 8, generator=generator).argsort(1)[:, :2]
    table[3] = -1
    is_culprit = mistake and mesh["dp"].index == plan.dp - 1
    batches = []
    for batch in microbatches(config, plan, Shape(), 1, mesh):
        given = table.view(5, 7, 2)[batch.sequences_B].view(-1, 2).clone()
        layer = 1
        if is_culprit and mistake == "expert":
            given[1, 0] = 8
        elif is_culprit and mistake == "layer":
            layer = 0
        elif is_culprit and mistake == "rows":
            given = given[1:]
        elif is_culprit and mistake == "width":
            given = given[:, :1].contiguous()
        batches.append(replace(batch, experts={layer: given}))
    try:
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    except RoutingError as error:
        return str(error)
    assert result.counts_LE[0].tolist() == table[table >= 0].bincount(minlength=8).tolist()
    return result.loss, result.grad_norm


def test_a_routing_is_replayed_in_any_plan() -> None:
    loss, norm = replay_on_rank(Mesh.single("cpu"), {}, "")
    for found in mesh_on_ranks(Plan(**WIDE).layout, replay_on_rank, WIDE, ""):
        assert found == pytest.approx((loss, norm), rel=1e-10)


@pytest.mark.representative("expert", "width")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("expert", "rank 2: layer 1, token 22: expert 8 is not one of the experts 0 to 7"),
        ("layer", "rank 2: layer 0 has no experts: layers [1, 2] have"),
        ("rows", "rank 2: layer 1: a routing of 13 tokens for a microbatch of 14"),
        ("width", "replayed routings of one layer differ in experts per token between ranks"),
    ],
    ids=["expert", "layer", "rows", "width"],
)
def test_a_bad_replay_stops_all_ranks_with_one_message(mistake: str, words: str) -> None:
    messages = mesh_on_ranks(Plan(**WIDE).layout, replay_on_rank, WIDE, mistake)
    assert words in messages[0] and messages == [messages[0]] * 4
