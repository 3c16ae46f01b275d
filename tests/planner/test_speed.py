"""MFU, tokens a second, days: formulas against hand arithmetic and a published rate."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from moemesh import cli
from moemesh.cli import options
from moemesh.cli.application import app
from moemesh.config.cluster import load_cluster
from moemesh.config.data import read_tokens
from moemesh.config.errors import ConfigError
from moemesh.planner.estimate import estimate_named
from moemesh.planner.parameters import count_flops, training_flops
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import plan_named
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.speed import (
    Speed,
    device_peak_flops,
    peak_flops,
    read_cache_size,
    without_peak,
)
from moemesh.planner.timing.price import with_headroom
from moemesh.sharding.load_run import load_run


def test_mfu_is_model_flops_over_the_peak_of_all_devices() -> None:
    shape = load_model("llama3-8b").shape
    layout = PlannedLayout(dp=8, seq_len=4096, global_batch=64, recompute=frozenset({"full"}))
    speed = Speed.of(shape, layout, load_cluster("dgx_h100"), 10.0)
    tokens = 4096 * 64
    flops = 3 * count_flops(shape, 4096, "causal").forward * tokens
    assert speed.tokens_per_second == tokens / 10
    assert speed.tokens_per_second_per_gpu == tokens / 80
    assert speed.tflops_per_rank == pytest.approx(flops / 80 / 1e12)
    assert speed.mfu == pytest.approx(
        flops / (10 * 8 * load_cluster("dgx_h100").peak_flops["bfloat16"])
    )


def test_extra_prediction_layers_are_work_of_the_model() -> None:
    shape = load_model("deepseek-v3").shape
    flops = count_flops(shape, 4096, "causal")
    assert training_flops(shape, 4096) == flops.training + 3 * flops.mtp > flops.training


def test_days_and_gpu_hours_of_a_number_of_tokens() -> None:
    speed = Speed(seconds=1, tokens=1_000_000, devices=16, flops_per_token=1e9, peak_flops=1e15)
    assert speed.days(86_400e6) == pytest.approx(1.0)
    assert speed.gpu_hours(86_400e6) == pytest.approx(24 * 16)


def test_money_is_the_price_of_the_device_hours() -> None:
    speed = Speed(
        seconds=2, tokens=4_000, devices=16, flops_per_token=1, peak_flops=1e9, price=2.25
    )
    figures = speed.to_json(86_400 * 2_000)
    assert figures["money_per_step"] == pytest.approx(2.25 * 16 * 2 / 3600)
    assert figures["money_per_billion_tokens"] == pytest.approx(250_000 * figures["money_per_step"])
    assert figures["money"] == pytest.approx(2.25 * 24 * 16) == 2.25 * figures["gpu_hours"]
    assert "money" not in {**Speed(**{**vars(speed), "price": None}).to_json(1e9)}


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_is_above_zero(price: float) -> None:
    with pytest.raises(ConfigError, match="a GPU-hour costs more than 0"):
        with_headroom(load_cluster("dgx_h100"), None, price)


def test_both_verbs_print_money_beside_time() -> None:
    cli.import_verbs()
    words = ["--model", "tiny", "--cluster", "dgx_h100", "--seq-len", "64", "--global-batch", "8"]
    for verb, more in (("plan", ["--tokens", "1T"]), ("estimate", ["--plan", "dp=8"])):
        result = CliRunner().invoke(app, [verb, *words, *more, "--price", "3.5"])
        text = " ".join(result.output.split())
        assert result.exit_code == 0 and "at 3.5 a GPU-hour a step costs" in text


def test_the_published_utilization_of_deepseek_v3_is_in_reach_of_its_published_seconds() -> None:
    """2.664 million H800 hours for 14.8T tokens (arXiv:2412.19437, table 1)."""
    hours, tokens = 2.664e6, 14.8e12
    rate = tokens / (hours * 3600)
    speed = Speed(
        seconds=1 / rate,
        tokens=1,
        devices=1,
        flops_per_token=count_flops(load_model("deepseek-v3").shape, 4096, "causal").training,
        peak_flops=peak_flops(load_cluster("hgx_h800"), "bfloat16"),
    )
    assert speed.gpu_hours(tokens) == pytest.approx(hours)
    assert speed.mfu == pytest.approx(0.39, abs=0.01)


def test_peaks_of_types_that_a_cluster_does_not_name() -> None:
    h800, laptop = load_cluster("hgx_h800"), load_cluster("laptop_cpu")
    assert peak_flops(h800, "float4") == h800.peak_flops["float8"]
    assert peak_flops(h800, "float16") == h800.peak_flops["bfloat16"]
    assert peak_flops(laptop, "float64") == 24e9
    assert device_peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert device_peak_flops("NVIDIA H100 80GB HBM3", "float32") == pytest.approx(66.9e12)
    assert device_peak_flops("NVIDIA H100 80GB HBM3", "float64") is None
    assert device_peak_flops("some processor", "bfloat16") is None


@pytest.mark.parametrize(
    ("name", "precision", "used"),
    [
        ("dgx_a100", "float8", "bfloat16"),
        ("dgx_a100", "float4", "bfloat16"),
        ("dgx_h100", "float4", "float8"),
        ("dgx_h100", "float8", ""),
        ("dgx_a100", "float16", ""),
        ("dgx_b200", "float4", ""),
    ],
)
def test_a_precision_without_a_peak_is_named(name: str, precision: str, used: str) -> None:
    """Both verbs print figures of the next wider type, and a line on it."""
    cluster = load_cluster(name)
    line = f"{name} has no peak_flops.{precision}: seconds and MFU are those of {used}"
    assert without_peak(cluster, precision) == (line if used else "")
    if precision == "float8":
        request = PlanRequest(
            model="llama3-8b", cluster=cluster, seq_len=512, global_batch=8, precision="float8"
        )
        assert plan_named(request).notes == ((line,) if used else ())
        plan = "dp=8,data=zero3,precision=float8"
        notes = estimate_named("llama3-8b", cluster, plan, 512, 8).notes
        assert (line in notes) == bool(used)


@pytest.mark.parametrize(
    ("text", "tokens"), [("14.8T", 14.8e12), ("300b", 3e11), ("1e12", 1e12), ("2_000", 2000)]
)
def test_numbers_of_tokens(text: str, tokens: float) -> None:
    assert read_tokens(text) == pytest.approx(tokens)


LENGTHS = [
    ("4096", 4096),
    ("4k", 4096),
    ("4K", 4096),
    ("1M", 2**20),
    ("0.5k", 512),
    ("2_000", 2000),
]


@pytest.mark.parametrize(("text", "tokens"), LENGTHS)
def test_lengths_are_counted_in_1024(text: str, tokens: int) -> None:
    """The unit of papers and of tables of runs; one parser serves every verb, and its defaults."""
    assert options.tokens(tokens) == options.tokens_of_any_sign(tokens) == tokens
    assert options.tokens(text) == options.tokens_of_any_sign(text) == tokens
    assert read_cache_size(f"32x{text}") == (32, tokens)


def test_the_key_of_a_run_takes_them_too() -> None:
    for text, tokens in LENGTHS:
        assert load_run([], [f"data.seq_len={text}"], {}).config.data.seq_len == tokens
    for text in ("0.0003k", "0.1k", "4q"):
        with pytest.raises(ConfigError, match="seq_len must be an integer"):
            load_run([], [f"data.seq_len={text}"], {})


@pytest.mark.parametrize(
    "verb",
    [
        "plan --model tiny --cluster laptop_cpu --global-batch 8 --top 1 --json --seq-len",
        "estimate --model tiny --cluster laptop_cpu --plan dp=1 --global-batch 8 --json --seq-len",
        "layout --model tiny --plan dp=2 --json --seq-len",
        "partition --model tiny --cluster laptop_cpu --global-batch 8 --stages 1 --json --seq-len",
        "dispatch --json --tokens",
        "evaluate folder --data text.txt --seq-len",
        "generate folder --prompt text --max-tokens",
        "esft scores folder text.txt --seq-len",
    ],
)
def test_every_verb_reads_them(verb: str) -> None:
    cli.import_verbs()
    with pytest.raises(ConfigError, match=r"0\.1k is 102\.4 tokens: a whole number is needed"):
        CliRunner().invoke(app, [*verb.split(), "0.1k"], catch_exceptions=False)
