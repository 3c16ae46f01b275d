"""Every knob of the router against the loop, and against numbers worked out by hand."""

import itertools
from typing import Any

import pytest
import torch

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch, Context, make_context
from moemesh.model.initialization import initialize
from moemesh.model.router import Router, route
from moemesh.model.transformer import Transformer
from tests.model.reference import route_reference

KNOBS: list[dict[str, Any]] = [
    {"router_score": score, "router_when": when, "router_normalize": normalize}
    for score, when, normalize in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), ("before", "after"), (False, True)
    )
] + [
    {"router_score": "sigmoid", "router_normalize_eps": 0.5},
    {"router_normalize_min": 0.9},
    {"router_score": "sigmoid", "router_normalize_min": 0.9},
    {"router_scale": 2.5},
    {"router_scale": 2.5, "router_scale_on": "output"},
    {"router_groups": 4, "router_groups_kept": 2},
    {"router_groups": 4, "router_groups_kept": 2, "router_group_score": "max"},
    {"router_groups": 2, "router_groups_kept": 1, "router_score": "sigmoid"},
    {"experts_per_token": 8},
    {"experts_per_token": 1, "router_normalize": False},
]


def config_of(**knobs: Any) -> ModelConfig:
    config = ModelConfig(**({"num_experts": 8, "experts_per_token": 3, "hidden_size": 4} | knobs))
    assert config.check() == []
    return config


def context_of(
    seq_len: int, num_sequences: int = 1, padded: list[int] | None = None, **details: Any
) -> Context:
    """A microbatch whose first sequence is number 10 of the step; `padded`: rows of padding."""
    tokens = torch.zeros(num_sequences, seq_len, dtype=torch.int64)
    valid = torch.ones(num_sequences * seq_len, dtype=torch.bool)
    valid[padded or []] = False
    batch = Batch(
        tokens_BS=tokens,
        targets_BS=tokens,
        sequences_B=10 + torch.arange(num_sequences),
        valid_BS=None if padded is None else valid.view_as(tokens),
        **details,
    )
    return make_context(batch, range(num_sequences * seq_len), ModelConfig())


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())))
@pytest.mark.parametrize("biased", [False, True])
def test_route_is_the_loop(knobs: dict[str, Any], biased: bool) -> None:
    config = config_of(**knobs)
    generator = torch.Generator().manual_seed(0)
    logits_TE = 3 * torch.randn(50, 8, generator=generator, dtype=torch.float64)
    logits_TE[40:] = logits_TE[40:].round()  # ties
    bias = torch.linspace(-0.3, 0.3, 8, dtype=torch.float64).roll(3) if biased else None
    routing = route(logits_TE, config, bias, None)
    for token, logits in enumerate(logits_TE.tolist()):
        weights, experts = route_reference(logits, config, None if bias is None else bias.tolist())
        assert routing.experts_TK[token].tolist() == experts
        assert routing.weights_TK[token].tolist() == pytest.approx(weights, rel=1e-12)


def test_groups_with_negative_scores() -> None:
    """Filling left-out groups with 0 would choose expert 0: all kept scores are below it."""
    config = config_of(num_experts=4, experts_per_token=2, router_groups=2, router_score="sigmoid")
    bias = torch.tensor([-3.0, -3.0, -2.0, -2.0])
    routing = route(torch.zeros(1, 4), config, bias, None)
    assert routing.experts_TK.tolist() == [[2, 3]]


def test_padding_is_never_routed() -> None:
    config = config_of(z_loss_coefficient=0.1)
    valid_T = torch.tensor([True, False, True])
    logits_TE = torch.randn(3, 8, requires_grad=True)
    routing = route(logits_TE, config, torch.zeros(8), valid_T)
    assert routing.experts_TK[1].tolist() == [-1] * 3 == routing.preferred_TK[1].tolist()
    assert not routing.weights_TK[1].any() and not routing.probabilities_TE[1].any()
    (routing.weights_TK.sum() + routing.probabilities_TE.square().sum()).backward()
    gradient = logits_TE.grad
    assert gradient is not None and not gradient[1].any() and gradient[0].any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_extreme_logits_have_finite_gradients(score: str) -> None:
    config = config_of(router_score=score, router_normalize_eps=1e-20)
    logits_TE = torch.tensor([[-300.0, 300.0, 0.0, -110, 1, 2, 3, 90]], requires_grad=True)
    routing = route(logits_TE, config, None, None)
    (routing.weights_TK.square().sum() + routing.probabilities_TE.square().sum()).backward()
    assert torch.isfinite(routing.weights_TK).all()
    assert logits_TE.grad is not None and torch.isfinite(logits_TE.grad).all()


def test_a_chosen_expert_stays_chosen_when_its_weight_underflows() -> None:
    config = config_of(router_normalize=False)
    routing = route(torch.tensor([[500.0, 1, 0, -1, -2, -3, -4, -5]]), config, None, None)
    assert routing.experts_TK.tolist() == [[0, 1, 2]]
    assert routing.weights_TK.tolist() == [[1.0, 0.0, 0.0]]


def test_the_balance_loss_counts_plain_preferences() -> None:
    """Not what the bias made of them (DeepSeek-V3, eq. 18)."""
    config = config_of(router_selection_bias=True, router_score="sigmoid")
    bias = torch.zeros(8)
    bias[7] = 5.0
    logits_TE = torch.arange(8, 0, -1.0)[None]
    routing = route(logits_TE, config, bias, None)
    assert routing.experts_TK.tolist() == [[7, 0, 1]]
    assert routing.preferred_TK.tolist() == [[0, 1, 2]]


def router_of(config: ModelConfig, layer: int = 0) -> Router:
    router = Router(config, layer)
    generator = torch.Generator().manual_seed(3)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return router


def test_logit_bias_and_dtype() -> None:
    x_TH = torch.randn(5, 4)
    router = router_of(config_of(router_logit_bias=True))
    assert router.bias is not None
    torch.testing.assert_close(router.logits(x_TH), x_TH @ router.weight.t() + router.bias)
    narrow = router_of(config_of(router_dtype="model")).logits(x_TH.bfloat16())
    wide = router_of(config_of()).logits(x_TH.bfloat16())
    assert narrow.dtype == wide.dtype == torch.float32
    assert torch.equal(narrow, narrow.bfloat16().float()) and not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow, wide, rtol=2e-2, atol=2e-2)


def test_jitter_depends_on_logical_coordinates_only() -> None:
    config = config_of(router_jitter=0.2)
    router, x_TH = router_of(config, layer=2), torch.randn(6, 4)

    def logits(step: int = 1, layer: int = 2, seed: int = 0, training: bool = True) -> torch.Tensor:
        router.layer = layer
        context = context_of(6, seed=seed, step=step, training=training)
        return router(x_TH, context).logits_TE

    plain, noisy = router.logits(x_TH), logits()
    factor = noisy / plain
    assert 0.8 <= factor.min() < 0.85 and 1.15 < factor.max() <= 1.2
    assert torch.equal(logits(), noisy)  # a recomputation
    for other in (logits(step=2), logits(layer=3), logits(seed=1), logits(training=False)):
        assert not torch.equal(other, noisy)
    assert torch.equal(logits(training=False), plain)
    # The second half of the tokens alone gets the same noise: ids count, not rows.
    router.layer = 2
    whole = context_of(6, seed=0, step=1)
    half = make_context(
        Batch(
            tokens_BS=torch.zeros(1, 6, dtype=torch.int64),
            targets_BS=torch.zeros(1, 6, dtype=torch.int64),
            sequences_B=torch.tensor([10]),
            step=1,
        ),
        range(3, 6),
        ModelConfig(),
    )
    assert torch.equal(half.token_ids_T, whole.token_ids_T[3:])
    torch.testing.assert_close(router(x_TH[3:], half).logits_TE, noisy[3:], rtol=1e-6, atol=1e-6)


def test_bias_update_moves_against_the_load() -> None:
    router = router_of(config_of(num_experts=4, experts_per_token=2, router_selection_bias=True))
    router.update_selection_bias(torch.tensor([10, 0, 2, 4]))  # mean 4
    assert router.selection_bias is not None
    rate = 1e-3
    expected = torch.tensor([-rate, rate, rate, 0.0]) - rate / 4
    torch.testing.assert_close(router.selection_bias, expected)


@pytest.mark.parametrize("rows", [[], [1]])
def test_replayed_experts_get_weights_from_the_logits(rows: list[int]) -> None:
    config = config_of(router_normalize=False, capacity_factor=0.1)
    given_TK = torch.tensor([[5, 1], [0, -1], [2, 3]])
    router = router_of(config, layer=4)
    context = context_of(3, padded=rows, experts={4: given_TK})
    routing = router(torch.randn(3, 4), context)
    probabilities_TE = routing.logits_TE.softmax(1)
    assert routing.experts_TK[0].tolist() == [5, 1] and routing.num_dropped is None
    torch.testing.assert_close(routing.weights_TK[0], probabilities_TE[0, [5, 1]])
    assert routing.experts_TK[1].tolist() == ([-1, -1] if rows else [0, -1])


def test_a_logit_bias_starts_at_zero_and_norms_at_one() -> None:
    config = config_of(router_logit_bias=True, num_layers=2)
    model = Transformer(config)
    initialize(model, seed=0, dtype=torch.float32)
    (moe,) = model.moe_layers().values()
    assert moe.router.bias is not None and not moe.router.bias.any()
    assert moe.router.weight.any() and bool((model.norm.weight == 1).all())
