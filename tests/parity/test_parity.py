"""Any plan gives the loss, gradients, norm, loads and updated weights of one device.

Float64 and SGD without momentum: Adam is invariant to a constant factor on the gradient and would
hide exactly the mistakes that hybrid parallelism makes. Clipping is active in every run, and what
every rank sends and holds is what the planner predicts. The models are those of
:mod:`tests.parity.models`.
"""

from typing import Any

import pytest

from tests.parity.models import ALL, KINDS, KNOBS, MODEL, MODELS, TRAIN
from tests.parity.training import PADDED, Shape, alone, assert_equals_one_device, rows

COMBINED = rows(
    """
    *windows_oss | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 dispatch_chunks=3 | padded
    *no_shared | tp=2 dp=2 ep=4 dispatcher=low_latency dispatch_chunks=2 attention_exit=all_reduce
    *multiplied_position | tp=2 dp=2 ep=2 etp=2 attention_exit=all_to_all | padded
    *over_choice | tp=2 ep=2 recompute=full microbatches=2 dispatch_chunks=2 | padded
    *latent_gate | cp=2 tp=2 ep=2 context=ring recompute=selective
    *noisy_sinkhorn | tp=2 ep=2 dispatcher=all_gather | padded
    *windows_ahead | cp=2 ep=2 recompute=full context=ring | 3x13 padded packed
    *windows_ahead | pp=2 schedule=terapipe slices=3 microbatches=2 recompute=selective | 4x5
    *ahead_tied | pp=2 microbatches=2 | padded
    *probability | tp=2 etp=2 | padded
    """
)
CASES = rows(
    """
    # Every exit beside every dispatcher.
    moe | tp=2 ep=2 attention_exit=reduce_scatter
    moe | tp=2 ep=2 attention_exit=all_reduce/all_to_all
    moe | tp=2 ep=2 dispatcher=all_gather
    moe | tp=2 ep=2 attention_exit=all_reduce/all_to_all dispatcher=all_gather
    # Every dispatcher in chunks.
    moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 dispatch_chunks=3
    moe | tp=2 dp=2 ep=4 dispatcher=low_latency dispatch_chunks=2
    moe | tp=2 dp=2 ep=4 dispatcher=auto combine=exact ranks_per_node=2
    moe | tp=2 dp=2 ep=2 etp=2 dispatcher=all_gather combine=exact dispatch_chunks=2
    moe | tp=2 dp=2 ep=2 etp=2 dispatcher=low_latency dispatch_chunks=3 | padded
    # One axis at a time, then mixtures.
    moe | dp=2
    moe | tp=2
    moe | dp=2 ep=2
    moe | tp=2 etp=2
    moe | dp=2 etp=2 dispatcher=all_gather
    moe | tp=2 dp=2 ep=4/2
    moe | tp=2 dp=2 ep=2 etp=2
    moe | tp=2 dp=2 ep=2 etp=2 dispatcher=all_gather
    moe | tp=4 ep=2 etp=2 attention_exit=all_to_all
    moe | dp=3 microbatches=2
    moe | microbatches=5
    moe | tp=2 dp=4 ep=4
    moe | tp=2 dp=4 ep=2 etp=2 microbatches=2
    moe | tp=8 ep=8 dispatcher=all_gather
    # Other models.
    grouped | tp=4 dp=2 ep=8
    grouped | tp=2 ep=2 attention_exit=all_to_all
    sigmoid | tp=2 dp=2 ep=4
    sigmoid | dp=4 ep=2 etp=2 dispatcher=all_gather
    no_shared | tp=2 dp=2 ep=4 attention_exit=all_reduce
    *dense | tp=2 dp=2
    dense | tp=2 dp=2 attention_exit=all_to_all
    # Empty ranks, fewer tokens than ranks, padding.
    moe | dp=4 ep=4 | 1x5
    moe | tp=8 ep=4 etp=2 | 1x5
    moe | tp=2 dp=2 ep=4 dispatcher=all_gather | 1x5
    sigmoid | tp=2 dp=2 ep=2 etp=2 | padded
    moe | tp=2 dp=2 ep=4 dispatcher=all_gather | padded
    """
)
#: Latent attention with and without compressed queries, and each knob of grouped-query attention.
ATTENTION = rows(
    """
    # Every kind under every exit.
    latent ... | tp=2 ep=2 attention_exit=reduce_scatter
    latent_plain ... | tp=2 ep=2 attention_exit=all_to_all
    ... | tp=2 ep=2 attention_exit=all_reduce
    # Recomputation, padding, several microbatches.
    over_projection | tp=2 ep=2 recompute=full microbatches=2 | padded
    over_projection ... | tp=2 ep=2 dp=2 recompute=full microbatches=2 | padded
    ... | tp=2 ep=2 dp=2 recompute=selective | padded
    # Pipelines whose weight gradients are deferred; slices of sequences.
    latent ... | pp=2 microbatches=3 schedule=zb_h1 tp=2
    windows ... | pp=2 schedule=terapipe slices=3 tp=2 | 4x7
    latent | pp=2 microbatches=4 schedule=dualpipe ep=2 dp=2
    over_projection | pp=2 microbatches=3 schedule=zb_h2 tp=2 recompute=full
    # Context parallelism.
    latent_plain ... | cp=2 tp=2 ep=2 context=ring
    ... | cp=2 tp=2 context=all_gather | padded
    ... | cp=4 ep=2 context=all_to_all
    latent | cp=2 pp=2 schedule=zb_h1 microbatches=2 tp=2
    over_projection | cp=2 tp=2 dp=2 ep=8 recompute=full | padded
    # Sharded states.
    latent | tp=2 dp=2 ep=4 data=zero3 microbatches=2 | padded
    over_projection | dp=4 ep=2 data=zero2
    windows | tp=2 dp=2 data=zero3 recompute=selective
    deepseek | pp=2 microbatches=3 dp=2 tp=2 ep=4 data=zero1 | padded
    deepseek | tp=2 cp=2 ep=4 data=zero3 context=ring
    # More ranks than tokens, and mixtures of axes.
    multiplied ... | tp=4 ep=2 etp=2 | 1x5
    latent | tp=2 dp=4 ep=8 dispatcher=all_gather | padded
    latent_plain | tp=8 ep=4 attention_exit=all_to_all | 1x5
    windows | dp=4 ep=4 combine=exact | padded
    """,
    KINDS,
)
#: Options of the router: scopes of the losses, balanced choices, jitter, capacity.
ROUTERS = rows(
    """
    # A microbatch is cut by dp; tp and ep leave it whole.
    microbatch | tp=4 ep=2 etp=2
    microbatch | tp=2 ep=2 | padded
    global | tp=2 dp=2 ep=4
    global | dp=3 | padded
    global | dp=4 ep=4 microbatches=2 | 1x5  # the second microbatch is empty
    together | tp=2 dp=2 ep=4
    together | tp=2 cp=2 ep=4 | padded
    together | dp=2 ep=2 pp=2
    together | dp=4 ep=4 | 1x5
    together_microbatch | tp=2 etp=2 pp=2 schedule=zb_h1
    *together_sequence | pp=2 microbatches=3 | padded
    together_sequence | dp=2 pp=2 microbatches=3 ep=2 | padded
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
    expert_choice | tp=2 dp=2 ep=4 dispatch_chunks=2
    expert_choice | tp=2 ep=2 dispatch_chunks=2
    sinkhorn | tp=2 ep=2
    sinkhorn | tp=2 dp=2 ep=4
    sinkhorn | tp=4 dp=2 ep=2 etp=2 | padded
    jitter | tp=2 dp=2 ep=4 microbatches=2
    jitter | tp=2 ep=2 dispatcher=all_gather | padded
    jitter | tp=4 ep=4 dispatcher=all_gather | padded
    probability | tp=2 dp=2 ep=4
    probability | tp=4 etp=4 | padded
    position | tp=2 dp=2 ep=4 microbatches=2
    position | tp=2 ep=2 microbatches=2
    position | tp=8 ep=8 | 1x5
    """
)
#: Every knob of experts and MLPs that published models have, under plans that cut what it adds.
EXPERTS = rows(
    """
    bias | tp=2 dp=2 ep=2 etp=2 | padded
    bias | dp=3 etp=3 dispatcher=all_gather | padded
    bias | tp=2 ep=2 dispatch_chunks=2 | padded
    bias | tp=2 dp=2 ep=2 etp=2 combine=exact | padded
    *bias | dp=2 ep=2 spare_slots=2 | padded
    bias | dp=4 ep=2 etp=2 spare_slots=2 recompute=full | padded
    bias | pp=2 etp=2 dp=2 schedule=zb_h1 microbatches=3 | padded
    bias | dp=2 etp=2 data=zero3 | padded
    oss | tp=2 dp=2 ep=4 recompute=selective | padded
    oss | tp=2 ep=2 dispatcher=hierarchical | padded
    gate | tp=2 ep=2 | padded
    gate | tp=2 ep=2 recompute=selective | padded
    gate | tp=2 dp=2 ep=2 recompute=selective | padded
    gate | tp=2 ep=2 recompute=full attention_exit=all_to_all | padded
    gate | pp=2 cp=2 ep=2 microbatches=2 | padded
    granite | tp=2 pp=2 ep=2 microbatches=2 | padded
    pattern | pp=4 microbatches=4 | padded
    pattern | pp=2 dp=2 ep=2 schedule=dualpipe_v microbatches=4 | padded
    """
)
#: Extra prediction layers. Two slices of 4x4 have a border among the tokens that the last positions
#: look ahead to.
CUT = "pp=2 layers_per_stage=(1,1,1,1) microbatches=4"
PREDICTION = rows(
    f"""
    ahead_one | tp=2 ep=2
    ahead_two | dp=2 ep=2 microbatches=2 | padded
    ahead_two | tp=2 dp=2 ep=2 etp=2 | padded
    ahead_tied | tp=2 dp=2 ep=4 attention_exit=all_to_all | padded
    ahead_biased | tp=2 ep=2 dispatcher=all_gather | padded
    ahead_two | tp=2 ep=2 recompute=full | padded
    ahead_one | tp=2 ep=2 recompute=selective dispatch_chunks=2
    ahead_one | dp=2 ep=2 spare_slots=2
    ahead_two | dp=2 ep=2 combine=exact | padded
    ahead_two | pp=2 microbatches=4 | padded
    ahead_tied | pp=2 tp=2 ep=2 microbatches=2 | padded
    ahead_one | pp=2 schedule=gpipe microbatches=4
    ahead_dense | pp=3 microbatches=4 | padded
    ahead_one | pp=2 schedule=zb_h1 recompute=full microbatches=4
    ahead_tied | pp=3 schedule=zb_h2 microbatches=4 | padded
    ahead_two | pp=2 dp=2 ep=2 schedule=chimera microbatches=4 | padded
    ahead_one | pp=2 schedule=terapipe slices=2 microbatches=2
    ahead_pattern | pp=2 schedule=terapipe slices=3 microbatches=2 | 4x4
    ahead_pattern ahead_granite | tp=2 pp=2 ep=2 microbatches=4 | padded
    ahead_two | cp=2 ep=2 | padded
    ahead_tied | cp=2 tp=2 ep=2 context=all_gather recompute=full | padded
    ahead_biased | cp=2 pp=2 ep=2 context=all_to_all microbatches=4 | padded
    ahead_two | dp=2 ep=2 data=zero1 | padded
    ahead_tied | pp=2 dp=2 data=zero2 microbatches=4 | padded
    ahead_two | dp=2 ep=2 data=zero3 microbatches=2 | padded
    ahead_tied | pp=2 dp=2 data=zero3 microbatches=4 | padded
    ahead_tied | dp=2 tp=2 data=zero3 recompute=full | padded
    ahead_pattern | pp=2 dp=2 data=zero3 reshard=step microbatches=4 | padded
    # Two stages a rank.
    deep_ahead_two | {CUT} schedule=interleaved_1f1b stages_per_rank=2 | padded
    deep_ahead_two | {CUT} schedule=zb_v | padded
    # Blocks of these run a forward and a backward in turns, whose graphs are cut at exchanges.
    deep_ahead_tied *ahead_pattern | {CUT} schedule=dualpipe_v dp=2 ep=2 | padded
    deep_ahead_two | {CUT} schedule=dualpipe_v dp=2 ep=2
    deep_ahead_tied | {CUT} schedule=dualpipe_v dp=2 ep=2 recompute=full
    deep_ahead_tied | pp=2 schedule=dualpipe dp=2 ep=2 microbatches=4 | padded
    """
)
#: Context parallelism: 13 positions cannot be cut evenly; of 5, some ranks hold none. One of four
#: microbatches of 3 sequences is empty.
CONTEXT = rows(
    """
    # Every way of the keys, on every number of ranks, with every scope of the losses.
    deep | cp=2/4 context=ring/all_gather/all_to_all | 3x13
    deep_microbatch | cp=2/4 context=ring/all_gather/all_to_all | 3x13 padded packed
    *deep_global | cp=2 context=all_gather | 3x13 packed
    deep_global | cp=2/4 context=ring/all_gather/all_to_all | 3x13 packed
    # Fewer positions than chunks, a number of ranks that is no power of two.
    dense | cp=3 context=ring/all_gather | 3x5
    deep_microbatch | cp=4 context=ring/all_gather/all_to_all ep=4 | 3x5
    across | cp=3 context=all_to_all | 3x13 packed
    # Groups of heads.
    grouped | cp=4 context=ring/all_gather/all_to_all | 3x13 packed
    one_kv_head *across | cp=4 context=all_to_all | 3x13
    # Choices that compare the tokens of a sequence.
    expert_choice sinkhorn_capacity probability | cp=2 tp=1 ep=2 context=ring | 3x13 padded
    expert_choice sinkhorn_capacity probability | cp=2 tp=2 ep=2 context=all_gather | 3x13 padded
    # With tensor parallelism: heads are cut twice.
    deep | cp=2 tp=2 ep=4 attention_exit=reduce_scatter context=ring | 3x13 padded packed
    deep | cp=2 tp=2 ep=4 attention_exit=all_reduce context=all_gather | 3x13 padded packed
    deep | cp=2 tp=2 ep=4 attention_exit=all_to_all context=all_to_all | 3x13 padded packed
    grouped | cp=2 tp=4 ep=8 context=all_to_all | 3x13
    deep_global | cp=4 tp=2 ep=2 etp=2 context=ring | 3x5
    # Experts over dp, cp and tp; every dispatcher; experts that are summed in one order.
    sigmoid | dp=2 cp=2 ep=4 context=ring | 3x13 padded
    deep | dp=2 cp=2 tp=2 ep=8 dispatcher=all_gather context=all_to_all | 3x13
    deep_global | dp=2 cp=2 ep=4 dispatcher=hierarchical ranks_per_node=2 context=all_gather | 3x13
    deep | cp=4 ep=4 dispatcher=low_latency context=ring | 3x13 padded
    deep_microbatch | cp=4 ep=2 combine=exact context=ring | 3x13 padded
    deep | cp=4 ep=4 spare_slots=1 context=all_to_all | 3x13 packed
    deep | dp=2 cp=2 ep=4 dispatch_chunks=2 context=all_gather | 1x11 packed
    sigmoid | dp=3 cp=2 ep=2 microbatches=2 context=ring | 3x13
    # Latent attention, windows, sinks, norms over all heads.
    latent | cp=2 tp=2 ep=4 context=ring | 3x13 padded packed
    latent | cp=2 tp=2 ep=4 context=all_gather/all_to_all | 3x13 padded packed
    latent_plain | cp=4 context=ring/all_gather/all_to_all recompute=full | 3x13
    windows | cp=4 ep=2 context=ring/all_gather/all_to_all | 3x13 packed
    windows | pp=2 cp=2 microbatches=2 schedule=zb_h1 context=ring | 3x13 padded packed
    over_projection | cp=2 tp=2 recompute=selective context=all_to_all | 3x13
    # States that are sharded over the ranks of dp and cp.
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero1 context=all_to_all | 3x13 padded packed
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero2/zero3 context=all_gather | 3x13 padded packed
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero3 context=ring | 3x13 padded packed
    latent | cp=4 ep=4 data=zero3 reshard=step context=ring | 3x13 packed
    deep | pp=2 cp=2 microbatches=3 data=zero1 context=all_gather | 3x13
    # Extra prediction layers look beyond the positions of a rank.
    ahead_two | cp=4 ep=2 context=ring | 3x13 padded packed
    ahead_two | cp=4 ep=2 context=all_gather/all_to_all | 3x13 padded packed
    ahead_two | pp=2 cp=2 tp=2 microbatches=2 schedule=zb_h1 context=ring | 3x13 packed
    # Activations computed again.
    deep | cp=2 ep=2 recompute=selective/full context=ring/all_gather/all_to_all | 3x13 packed
    # Every pipeline.
    deep | pp=2 cp=2 microbatches=4 schedule=1f1b/zb_h2 context=ring ep=2 | 3x13 padded packed
    deep | pp=2 cp=2 microbatches=4 schedule=gpipe context=all_gather ep=2 | 3x13 padded packed
    *deep | pp=2 cp=2 microbatches=4 schedule=zb_h1 context=all_to_all ep=2 | 3x13 padded packed
    deep | pp=2 cp=2 microbatches=4 schedule=dualpipe_v context=all_gather ep=2 | 3x13 packed
    deep | pp=2 cp=2 microbatches=4 schedule=zb_v context=all_to_all ep=2 | 3x13 padded packed
    deep_global | pp=2 cp=2 microbatches=4 schedule=interleaved_1f1b stages_per_rank=2 | 3x13
    deep_global | pp=2 cp=2 microbatches=4 schedule=dualpipe ep=2 context=ring | 3x13
    deep_microbatch | pp=2 cp=2 microbatches=4 schedule=chimera context=all_to_all | 3x13
    grouped | pp=2 cp=2 microbatches=4 recompute=full schedule=zb_h1 context=ring | 3x13 packed
    deep | pp=2 cp=2 tp=2 ep=4 microbatches=2 context=all_gather | 3x13 padded packed
    """
)
#: Slices of sequences through a pipeline, which share keys and values, counts and the scopes of
#: losses. 11 tokens cannot be cut evenly, 5 sequences neither.
TERAPIPE = "schedule=terapipe"
SLICES = rows(
    f"""
    deep | pp=2 {TERAPIPE} | 5x11
    deep | pp=4 slices=3 {TERAPIPE} | 5x11 padded
    deep | pp=2 slices=11 recompute=full {TERAPIPE} | 5x11
    deep_microbatch | pp=2 slices=3 microbatches=2 recompute=selective {TERAPIPE} | 5x11 padded
    deep_global | pp=4 microbatches=3 {TERAPIPE} | 5x11
    deep_tied | pp=2 slices=4 microbatches=3 {TERAPIPE} | 5x11 padded
    deep_tied | pp=2 slices=3 {TERAPIPE} | 5x11 packed
    deep_dense | pp=2 slices=5 recompute=full {TERAPIPE} | 5x11
    # With the other axes.
    deep | pp=2 tp=2 ep=2 recompute=full dispatch_chunks=2 {TERAPIPE} | 5x11 padded
    deep_global | pp=2 dp=2 ep=2 slices=3 {TERAPIPE} | 5x11
    deep_sigmoid | pp=2 tp=2 dp=2 ep=4 dispatcher=all_gather {TERAPIPE} | 5x11 padded
    """
)
EVERY = COMBINED + CASES + ATTENTION + ROUTERS + EXPERTS + PREDICTION + CONTEXT + SLICES


@pytest.mark.parametrize(("model", "plan", "shape"), EVERY)
def test_plan_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    expected = assert_equals_one_device(ALL[model], plan, TRAIN, shape)
    if model in KNOBS:
        for leaf, weight in expected.weights.items():
            assert not leaf.endswith("_bias") or bool((weight != 0).any()), f"{leaf} never moved"
    assert not ALL[model].get("num_mtp_layers") or None not in expected.mtp


@pytest.mark.representative("{'vocab_size': 3, 'tied_embeddings': True}-{'tp': 4, 'ep': 2}")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({"vocab_size": 2}, {"tp": 4, "ep": 4}),
        ({"vocab_size": 3, "tied_embeddings": True}, {"tp": 4, "ep": 2}),
        ({"vocab_size": 5}, {"pp": 2, "tp": 4, "schedule": "zb_h1", "microbatches": 2}),
    ],
    ids=str,
)
def test_a_vocabulary_smaller_than_tp_leaves_ranks_without_rows(
    model: dict[str, Any], plan: dict[str, Any]
) -> None:
    assert_equals_one_device(MODEL | model, plan, TRAIN, PADDED)


def test_the_reference_does_something() -> None:
    """Clipping bites, experts differ in load, the auxiliary loss is not 0: nothing is vacuous."""
    trained = alone(MODELS["moe"], TRAIN)
    assert min(trained.norms) > TRAIN["clip"] and min(trained.aux) > 0
    assert len({count for step in trained.loads for layer in step for count in layer}) > 3
    assert trained.losses[0] != trained.losses[-1]
