"""FLOPs in both conventions: published rates, closed forms, and the mistakes about them."""

from __future__ import annotations

import pytest

from moemesh.planner.parameters import (
    attended_tokens,
    core_flops,
    count_flops,
    hardware_flops,
)
from moemesh.planner.shapes.load_shape import gpt, load_model
from tests.planner.closed_forms import gpt_iteration

#: GFLOP per token of training, as printed.
RATES = [
    ("deepseek-v3", "causal", "250.45"),
    ("deepseek-v3", "full", "281.15"),
    ("qwen3-235b-a22b", "causal", "148.3"),
]


@pytest.mark.parametrize(("name", "convention", "printed"), RATES)
def test_published_rates(name: str, convention: str, printed: str) -> None:
    found = count_flops(load_model(name).shape, 4096, convention)  # type: ignore[arg-type]
    digits = len(printed.partition(".")[2])
    assert f"{found.training / 1e9:.{digits}f}" == printed


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96)])
def test_gpt_closed_form(layers: int, hidden: int, heads: int, recompute: bool) -> None:
    """72 B s L h^2 (1 + s/(6h) + V/(12Lh)); 96 and V/(16Lh) when everything is computed again."""
    seq, batch, vocab = 2048, 7, 51200
    flops = count_flops(gpt(layers, hidden, heads, vocab), seq, "full")
    parts = frozenset({"full"}) if recompute else frozenset[str]()
    per_token = hardware_flops(flops, parts, flash=False)
    closed = gpt_iteration(batch, seq, layers, hidden, vocab, recompute=recompute)
    assert per_token * batch * seq == pytest.approx(closed, rel=1e-12)


def test_selective_recomputation_adds_one_core() -> None:
    flops = count_flops(gpt(4, 64, 4), 128, "full")
    again = hardware_flops(flops, frozenset({"attention"}), flash=False)
    assert again == flops.training + flops.attention


def test_flash_attention_computes_half_a_core_more() -> None:
    """3.5 forwards of the core in all, of which model FLOPs count 3."""
    flops = count_flops(gpt(4, 64, 4), 128, "full")
    assert hardware_flops(flops) - flops.training == flops.attention / 2


def test_windows() -> None:
    assert attended_tokens(1000, 0, "full") == 1000
    assert attended_tokens(1000, 0, "causal") == 500
    assert attended_tokens(1000, 128, "full") == 128
    # 128 queries see 64 keys on average, 872 see 128.
    assert attended_tokens(1000, 128, "causal") == pytest.approx((128 * 64 + 872 * 128) / 1000)
    assert attended_tokens(100, 128, "causal") == 50


def test_latent_attention_multiplies_its_whole_heads_in_training() -> None:
    shape = load_model("deepseek-v3").shape
    assert core_flops(shape, 4096, 0, "full") == 2 * 4096 * 128 * (192 + 128)


def test_only_chosen_experts_count() -> None:
    shape = load_model("qwen3-30b-a3b").shape
    forward = count_flops(shape, 1, "full").forward
    assert forward < 2.1 * 3.36e9  # two FLOPs per active parameter, not per parameter


class TestMistakes:
    def test_l_24bsh2_plus_4bs2h_plus_2bshV_is_one_forward(self) -> None:
        """Printed as the FLOPs of an iteration, and with an h where the b belongs."""
        layers, hidden, batch, seq, vocab = 4, 64, 2, 128, 1000
        printed = layers * (24 * batch * seq * hidden**2 + 4 * batch * seq**2 * hidden)
        printed += 2 * batch * seq * hidden * vocab
        flops = count_flops(gpt(layers, hidden, 4, vocab), seq, "full")
        assert flops.forward * batch * seq == printed
        assert flops.training * batch * seq == 3 * printed

    def test_six_times_parameters_needs_the_tokens(self) -> None:
        """6 x 1750 x 10^9 is no amount of FLOPs of GPT-3: 175, and per token."""
        flops = count_flops(load_model("gpt3-175b").shape, 2048, "full")
        assert flops.training == pytest.approx(6 * 175e9, rel=0.05)

    def test_conventions_differ_by_an_eighth(self) -> None:
        shape = load_model("deepseek-v3").shape
        full, causal = (count_flops(shape, 4096, name).training for name in ("full", "causal"))
        assert full / causal == pytest.approx(1.1226, abs=1e-4)
