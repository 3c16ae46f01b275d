"""Who holds what: the worked examples of the seed texts, and shares that cover model and batch."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.errors import ConfigError, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan
from moemesh.config.suggest import divisors
from moemesh.planner.holdings import Holdings
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.sharding import parameters
from moemesh.sharding.parameters import ParameterTensor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/seed_examples.json").read_text())


def groups(held: Holdings, axis: str) -> list[list[int]]:
    return [
        list(group)
        for axis_groups in held.axes
        if axis_groups.axis == axis
        for group in axis_groups.groups()
    ]


def test_groups_of_eight_ranks() -> None:
    example = GOLDEN["expert_groups"]
    held = Holdings.named(f"dp={example['world']},ep={example['ep']}")
    assert groups(held, "ep") == example["ep_groups"]
    assert groups(held, "edp") == example["edp_groups"]


def test_interleaved_stages() -> None:
    example = GOLDEN["interleaved_stages"]
    plan = Plan(
        pp=example["ranks"],
        stages_per_rank=example["chunks_per_rank"],
        schedule="interleaved_1f1b",
        microbatches=8,
        layers_per_stage=(2,) * 8,
    )
    held = Holdings(plan, ModelConfig(num_layers=example["layers"]), seq_len=8, global_batch=8)
    for rank, wanted in enumerate(example["layers_of_rank_1_based"]):
        layers = held.share(rank).layers
        assert [[layer + 1 for layer in chunk] for chunk in layers] == wanted


@given(
    pp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
    seq_len=st.integers(4, 33),
    global_batch=st.integers(1, 7),
)
@settings(max_examples=40, deadline=None)
def test_shares_cover_model_and_batch(
    pp: int, dp: int, cp: int, tp: int, ep: int, etp: int, seq_len: int, global_batch: int
) -> None:
    plan = Plan(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    model = ModelConfig()
    if plan.check(model, seq_len=seq_len, global_batch=global_batch):
        return
    held = Holdings(plan, model, seq_len=seq_len, global_batch=global_batch)
    shares = [held.share(rank) for rank in range(held.world_size)]
    for stage in range(pp):
        ranks = [one for one in shares if one.at["pp"] == stage]
        columns = [(expert, column) for one in ranks for expert in one.experts
                   for column in one.expert_columns]  # fmt: skip
        assert len(columns) == len(set(columns)) * held.layout.edp
        assert len(set(columns)) == model.num_experts * model.expert_intermediate_size
        # Of one rank of every tp group the sequences and positions make up the batch.
        tokens = [(sequence, position) for one in ranks if one.at["tp"] == 0
                  for sequence in one.sequences for run in one.positions
                  for position in run]  # fmt: skip
        assert sorted(tokens) == [(s, p) for s in range(global_batch) for p in range(seq_len)]
        assert sum(one.tokens for one in ranks) == global_batch * seq_len
        heads = [head for one in ranks if one.at["dp"] == one.at["cp"] == 0 for head in one.heads]
        assert heads == list(range(model.num_heads))
    layers = [layer for one in shares if one.rank % (held.world_size // pp) == 0
              for chunk in one.layers for layer in chunk]  # fmt: skip
    assert sorted(layers) == list(range(model.num_layers))


def test_a_group_that_spans_nodes() -> None:
    held = Holdings.named("dp=4,tp=4,ranks_per_node=8")
    assert held.num_nodes == 2
    assert {axis.axis: axis.nodes for axis in held.axes}["dp"] == 2
    assert {axis.axis: axis.nodes for axis in held.axes}["tp"] == 1
    assert [held.node_of(rank) for rank in (7, 8)] == [0, 1]


@given(
    degrees=st.fixed_dictionaries(
        {axis: st.sampled_from([1, 2, 3, 4]) for axis in ("pp", "dp", "cp", "tp")}
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_groups_are_those_of_the_mesh(degrees: dict[str, int], seed: int) -> None:
    """Also the most nodes of a group, which are counted without a list of the groups."""
    ranks = prod(degrees.values())
    layouts = [
        (ep, etp, node)
        for ep, etp in product(divisors(ranks // degrees["pp"]), repeat=2)
        for node in divisors(ranks)
        if ranks // degrees["pp"] % (ep * etp) == 0
    ]
    ep, etp, node = layouts[seed % len(layouts)]
    plan = Plan(**degrees, ep=ep, etp=etp, ranks_per_node=node, microbatches=degrees["pp"])
    held = Holdings(plan, None, seq_len=1, global_batch=1)
    for axis in held.axes:
        listed = plan.layout.groups(axis.axis)
        assert tuple(map(tuple, axis.groups())) == listed
        assert (axis.count, axis.size) == (len(listed), len(listed[0]))
        assert axis.nodes == max(len({held.node_of(rank) for rank in group}) for group in listed)


def test_a_million_ranks_are_described_at_once() -> None:
    held = Holdings.named("dp=1048576,tp=8,ep=64,ranks_per_node=8")
    begin = process_time()
    axes = {axis.axis: axis for axis in held.axes}
    assert axes["edp"].groups(2) == [range(0, 2**23, 64), range(1, 2**23, 64)]
    assert [axes[name].nodes for name in ("dp", "tp", "ep")] == [2**20, 1, 8]
    assert process_time() - begin < 0.1
    with pytest.raises(UserError, match="8388608 ranks are too many to list"):
        held.to_json([0])


@pytest.mark.parametrize("key", [*DEGREES, "microbatches"])
@pytest.mark.parametrize("number", [0, -1, -2])
def test_numbers_below_one_are_refused(key: str, number: int) -> None:
    plan, message = Plan(**{key: number}), f"{key} must be at least 1, not {number}"
    with pytest.raises(ConfigError, match=message):
        Holdings(plan, None, seq_len=8, global_batch=4)
    with pytest.raises(ConfigError, match=message):
        from_plan(plan, seq_len=8, global_batch=4)
    if key in DEGREES:
        with pytest.raises(ValueError, match=message):
            _ = plan.layout


def test_what_ranks_have_in_common_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer for 100,000 ranks takes seconds: work is done for each place that differs."""
    held = Holdings.named("pp=2,dp=64,tp=2,ep=4,etp=2,microbatch=1", "tiny")
    calls: list[str] = []
    count, find = ParameterTensor.local_elements, StagePlacement.held
    monkeypatch.setattr(
        ParameterTensor, "local_elements", lambda *given: calls.append("tensor") or count(*given)
    )
    monkeypatch.setattr(
        StagePlacement, "held", lambda *given: calls.append("stage") or find(*given)
    )
    rows = held.to_json()["ranks"]
    places = {tuple(row["at"][axis] for axis in ("pp", "tp", "ep", "etp")) for row in rows}
    tensors = len(list(parameters.tensors(ModelConfig(), held.plan)))
    assert len(rows) == 256 and calls.count("stage") == 2
    assert calls.count("tensor") <= tensors * len(places) / 2
    for rank in (0, 77, 255):
        exact = sum(
            one.local_elements(held.layout, held.layout.coordinates(rank))
            for one in find(held._placement, rank // 128)
        )
        assert rows[rank]["parameters"] == exact


# Where the parameters of our own model live: the schedule that a plan names, slices and all.


def test_the_schedule_has_the_slices_of_the_plan() -> None:
    """Not TeraPipe's own default, one slice a rank."""
    for slices in (3, 5):
        plan = Plan(pp=2, schedule="terapipe", slices=slices, microbatches=2)
        assert StagePlacement(ModelConfig(), plan).schedule.num_slices == slices
    assert StagePlacement(ModelConfig(), Plan(pp=2, schedule="terapipe")).schedule.num_slices == 2
