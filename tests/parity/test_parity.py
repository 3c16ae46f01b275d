"""Any plan gives the loss, gradients, norm, loads and updated weights of one device.

Float64 and SGD without momentum: Adam is invariant to a constant factor on the gradient and would
hide exactly the mistakes that hybrid parallelism makes. Clipping is active in every run.
"""

from typing import Any

import pytest

from tests.parity.training import PADDED, Shape, alone, assert_equals_one_device, rows, train

MODEL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 4,
    "intermediate_size": 48,
    "first_dense_layers": 1,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "init_std": 0.3,  # large enough that routing is far from a tie
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": MODEL,
    "grouped": MODEL | {"num_kv_heads": 4, "qk_norm": True, "tied_embeddings": True},
    "sigmoid": MODEL
    | {
        "router_score": "sigmoid",
        "router_selection_bias": True,
        "router_bias_rate": 0.05,
        "router_scale": 1.5,
        "router_groups": 4,
        "router_groups_kept": 2,
        "z_loss_coefficient": 1e-2,
    },
    "no_shared": MODEL | {"num_shared_experts": 0, "first_dense_layers": 0, "num_layers": 2},
    "dense": MODEL | {"num_experts": 0, "num_shared_experts": 0},
}
TRAIN: dict[str, Any] = {
    "steps": 2, "dtype": "float64", "optimizer": "sgd", "lr": 0.2, "warmup_steps": 0,
    "weight_decay": 0.01, "clip": 0.5,
}  # fmt: skip

CASES = rows(
    """
    # Every exit beside every dispatcher.
    *moe | tp=2 ep=2 attention_exit=reduce_scatter
    moe | tp=2 ep=2 attention_exit=all_reduce/all_to_all
    moe | tp=2 ep=2 dispatcher=all_gather
    moe | tp=2 ep=2 attention_exit=all_reduce/all_to_all dispatcher=all_gather
    # Every dispatcher in chunks.
    *moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 dispatch_chunks=3
    *moe | tp=2 dp=2 ep=4 dispatcher=low_latency dispatch_chunks=2
    *moe | tp=2 dp=2 ep=4 dispatcher=auto combine=exact ranks_per_node=2
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
    *moe | tp=2 dp=2 ep=2 etp=2 dispatcher=all_gather
    moe | tp=4 ep=2 etp=2 attention_exit=all_to_all
    *moe | dp=3 microbatches=2
    moe | microbatches=5
    moe | tp=2 dp=4 ep=4
    moe | tp=2 dp=4 ep=2 etp=2 microbatches=2
    moe | tp=8 ep=8 dispatcher=all_gather
    # Other models.
    grouped | tp=4 dp=2 ep=8
    *grouped | tp=2 ep=2 attention_exit=all_to_all
    sigmoid | tp=2 dp=2 ep=4
    sigmoid | dp=4 ep=2 etp=2 dispatcher=all_gather
    *no_shared | tp=2 dp=2 ep=4 attention_exit=all_reduce
    *dense | tp=2 dp=2
    dense | tp=2 dp=2 attention_exit=all_to_all
    # Empty ranks, fewer tokens than ranks, padding.
    moe | dp=4 ep=4 | 1x5
    *moe | tp=8 ep=4 etp=2 | 1x5
    moe | tp=2 dp=2 ep=4 dispatcher=all_gather | 1x5
    *sigmoid | tp=2 dp=2 ep=2 etp=2 | padded
    moe | tp=2 dp=2 ep=4 dispatcher=all_gather | padded
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_plan_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    assert_equals_one_device(MODELS[model], plan, TRAIN, shape)


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
    assert_equals_one_device(MODEL | model, plan, TRAIN, PADDED, plan.get("microbatches", 1))


def test_the_reference_does_something() -> None:
    """Clipping bites, experts differ in load, the auxiliary loss is there: nothing is vacuous."""
    trained = alone(MODELS["moe"], TRAIN)
    assert min(trained.norms) > TRAIN["clip"] and min(trained.aux) > 0
    assert len({count for step in trained.loads for layer in step for count in layer}) > 3
    assert trained.losses[0] != trained.losses[-1]


def test_float32_losses_stay_together_over_ten_steps() -> None:
    keys = TRAIN | {"dtype": "float32", "steps": 10, "lr": 0.05}
    one = alone(MODELS["moe"], keys)
    spread = train(MODELS["moe"], {"tp": 2, "dp": 2, "ep": 4}, keys)
    worst = max(abs(a / b - 1) for a, b in zip(spread.losses, one.losses, strict=True))
    assert worst <= 1e-5, f"relative difference of losses {worst:.2e}"
