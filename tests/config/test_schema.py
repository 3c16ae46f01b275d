"""Names, ranges and rules of the sections, without files."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from moemesh.config.data import DataConfig
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan
from moemesh.config.run import RunConfig
from moemesh.config.schema import SECTIONS, keys_of
from moemesh.config.section import Range, divisors, nearest_divisors
from moemesh.config.suggest import aliases, choices_of
from moemesh.config.train import TrainConfig

# The public contract: first value of each row is the default.
CONTRACT = {
    "attention_exit": ("reduce_scatter", "all_reduce", "all_to_all"),
    "context": ("ring", "all_gather", "all_to_all"),
    "dispatcher": (
        "all_to_all",
        "all_gather",
        "hierarchical",
        "low_latency",
        "deepep",
        "auto",
    ),
    "combine": ("fast", "exact"),
    "payload": ("same", "fp8"),
    "schedule": (
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "terapipe",
        "chimera",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "dualpipe",
        "dualpipe_v",
        "pipedream",
        "pipedream_2bw",
        "ampnet",
        "search",
    ),
    "data": ("replicate", "zero1", "zero2", "zero3", "parameter_server"),
    "recompute": ("none", "selective", "full"),
}
NUMBERS = dict.fromkeys((*DEGREES, "dispatch_chunks", "stages_per_rank", "microbatches"), 1)
NUMBERS["spare_slots"] = 0


def edits(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def messages(problems: list) -> str:
    return "\n".join(str(problem) for problem in problems)


def test_plan_keeps_the_public_contract() -> None:
    assert set(Plan.model_fields) >= {*CONTRACT, *NUMBERS, "ranks_per_node"}
    for name, choices in CONTRACT.items():
        assert choices_of(Plan.model_fields[name].annotation) == choices
        assert getattr(Plan(), name) == choices[0]
    for name, default in NUMBERS.items():
        assert getattr(Plan(), name) == default
    assert Plan().ranks_per_node is None


def test_train_choices_of_the_public_contract() -> None:
    fields = TrainConfig.model_fields
    assert choices_of(fields["dtype"].annotation) == ("float32", "bfloat16", "float64")
    assert choices_of(fields["optimizer"].annotation) == ("adamw", "sgd")
    assert choices_of(fields["resume"].annotation) == ("auto", "never", "must")


@pytest.mark.parametrize("section", SECTIONS)
def test_sibling_keys_differ_by_two_edits(section: str) -> None:
    close = {
        pair
        for pair in combinations(keys_of(section), 2)
        if edits(*pair) < 2 and not set(pair) <= set(DEGREES)
    }
    assert close == set()


def test_names_of_other_trainers_point_to_keys_and_are_none_themselves() -> None:
    for name, key in aliases().items():
        section, leaf = key.split(".")
        assert leaf in keys_of(section), key
        assert name not in keys_of(section), name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_number_has_a_range_that_holds_its_default(section: str) -> None:
    kind = SECTIONS[section]
    for name, field in kind.model_fields.items():
        default = field.default
        if isinstance(default, bool | str) or (default is None and "int" not in str(field)):
            continue
        is_list = "tuple[str" in str(field) or "Patterns" in str(field) or name == "sources"
        if choices_of(field.annotation) or is_list:  # of names, of tables
            continue
        assert name in kind.ranges, name
        for number in default if isinstance(default, tuple) else [default]:
            assert number is None or kind.ranges[name].holds(number)


def test_sections_are_frozen_strict_and_closed() -> None:
    with pytest.raises(ValidationError):
        Plan(tpp=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Plan(tp="2")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Plan(tp=True)
    with pytest.raises(ValidationError):
        Plan(tp=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TrainConfig(lr=float("nan"))
    with pytest.raises(ValidationError):
        Plan().tp = 2  # type: ignore[misc]
    assert TrainConfig(lr=1).lr == 1.0


def test_defaults_are_legal() -> None:
    assert RunConfig().check() == []


def test_plan_world_and_layout() -> None:
    plan = Plan(pp=2, dp=2, cp=1, tp=2, ep=2)
    assert plan.check(ModelConfig()) == []
    assert plan.world_size == 8
    assert plan.edp == 2
    assert plan.layout == Layout(pp=2, dp=2, tp=2, ep=2)
    with pytest.raises(ValueError, match=r"must divide"):
        _ = Plan(ep=3).layout


def test_legal_plan_needs_no_division_of_batch_vocabulary_or_sequence() -> None:
    model = ModelConfig(vocab_size=257)
    plan = Plan(dp=3, cp=2, tp=4, microbatches=5)
    assert plan.check(model, seq_len=7, global_batch=11) == []


# plan, model, exact sentence, text of the fix
BROKEN_PLANS = [
    ({"dp": 8, "ep": 6}, {}, "ep*etp (6) must divide dp*cp*tp (8)", "ep = 4 or 8"),
    (
        {"dp": 8, "ep": 6},
        {"num_experts": 6},
        "ep*etp (6) must divide dp*cp*tp (8)",
        "ep = 2, or dp = 12",
    ),
    ({"dp": 4, "etp": 3}, {}, "ep*etp (3) must divide dp*cp*tp (4)", "etp = 2 or 4"),
    ({"dp": 8, "ep": 3, "etp": 3}, {}, "ep*etp (9) must divide dp*cp*tp (8)", "ep*etp = 8"),
    ({"tp": 3}, {}, "tp (3) must divide num_heads (8)", "tp = 2 or 4"),
    ({"tp": 3}, {}, "tp (3) must divide num_kv_heads (4)", "tp = 2 or 4"),
    ({"tp": 8}, {}, "tp (8) must divide num_kv_heads (4)", "tp = 4"),
    (
        {"tp": 4},
        {"intermediate_size": 90},
        "tp (4) must divide intermediate_size (90)",
        "tp = 2",
    ),
    (
        {"tp": 4},
        {"shared_intermediate_size": 6},
        "tp (4) must divide shared width (6)",
        "tp = 2",
    ),
    ({"dp": 3, "ep": 3}, {}, "ep (3) must divide num_experts (8)", "ep = 1"),
    (
        {"dp": 4, "etp": 4},
        {"expert_intermediate_size": 6, "shared_intermediate_size": 8},
        "etp (4) must divide expert_intermediate_size (6)",
        "etp = 2",
    ),
    ({"dp": 2, "ep": 2}, {"num_experts": 0}, "num_experts is 0", "ep = 1"),
    ({"dp": 2, "etp": 2}, {"num_experts": 0}, "num_experts is 0", "etp = 1"),
    ({"dp": 2, "ep": 2}, {"first_dense_layers": 8}, "all layers are dense", "ep = 1"),
    ({"pp": 9}, {}, "num_layers is 8", "pp = 8"),
    ({"pp": 2, "stages_per_rank": 5}, {}, "(2*5 = 10)", "stages_per_rank = 4"),
    ({"pp": 8, "stages_per_rank": 2}, {}, "(8*2 = 16)", "stages_per_rank = 1"),
    (
        {"dp": 8, "ranks_per_node": 3},
        {},
        "ranks_per_node (3) must divide the number of ranks pp*dp*cp*tp (8)",
        "ranks_per_node = 2 or 4",
    ),
    (
        {"cp": 3, "context": "all_to_all"},
        {},
        "cp*tp (3) must divide num_heads (8)",
        "cp = 2 or 4",
    ),
    (
        {"data": "parameter_server", "dp": 2, "cp": 2, "servers": 5},
        {},
        "servers (5) must be fewer than the data-parallel ranks dp*cp (4)",
        "servers = 3, or data = zero1",
    ),
    ({"data": "parameter_server", "tp": 2}, {}, "dp*cp is 1", "dp = 2, or data = replicate"),
    ({"servers": 0}, {}, "servers must be at least 1", "servers = 1"),
    ({"tp": 0}, {}, "tp must be at least 1, not 0", "tp = 1"),
    ({"ep": -2}, {}, "ep must be at least 1, not -2", "ep = 1"),
    ({"dp": 2**30}, {}, "dp must be at most 1048576", "dp = 1048576"),
    ({"spare_slots": -1}, {}, "spare_slots must be at least 0", "spare_slots = 0"),
    ({"dispatch_chunks": 0}, {}, "dispatch_chunks must be at least 1", "dispatch_chunks = 1"),
    ({"ranks_per_node": 0}, {}, "ranks_per_node must be at least 1", "ranks_per_node = 1"),
]


@pytest.mark.parametrize(("plan", "model", "sentence", "fix"), BROKEN_PLANS)
def test_broken_plan_names_numbers_and_nearest(
    plan: dict, model: dict, sentence: str, fix: str
) -> None:
    found = Plan(**plan).check(ModelConfig(**model))
    assert [problem for problem in found if sentence in problem.message], messages(found)
    assert any(fix in problem.fix for problem in found if sentence in problem.message)


def test_empty_microbatches_and_context_ranks_are_refused() -> None:
    found = Plan(microbatches=9, cp=8).check(ModelConfig(), seq_len=4, global_batch=8)
    assert {problem.key for problem in found} == {"plan.microbatches", "plan.cp"}


def test_suggested_degrees_are_legal() -> None:
    """Every `name = a or b` of a divisibility problem gives a plan without that problem."""
    for degrees in [
        {"dp": 8, "ep": 6},
        {"tp": 3, "dp": 4},
        {"dp": 12, "ep": 5},
        {"dp": 8, "etp": 3},
    ]:
        for problem in Plan(**degrees).check(ModelConfig()):
            for name, values in re.findall(r"(\w+) = ([\d or]+)", problem.fix):
                for value in re.findall(r"\d+", values):
                    again = Plan(**{**degrees, name: int(value)}).check(ModelConfig())
                    assert problem.message.split("(")[0] not in messages(again), (name, value)


def test_a_dense_or_latent_model_drops_the_rules_it_does_not_need() -> None:
    latent = ModelConfig(
        attention="mla",
        num_kv_heads=3,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rotary_head_dim=4,
        v_head_dim=8,
    )
    assert latent.check() == []
    assert Plan(tp=8).check(latent) == []
    no_dense = ModelConfig(first_dense_layers=0, intermediate_size=3)
    assert Plan(tp=4).check(no_dense) == []


BROKEN_MODELS = [
    ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
    ({"num_layers": -3}, "num_layers must be at least 1, not -3"),
    ({"num_heads": 6}, "num_kv_heads (4) must divide num_heads (6)"),
    ({"head_dim": 15}, "head_dim (15) must be even"),
    ({"experts_per_token": 9}, "experts_per_token (9) exceeds num_experts (8)"),
    ({"experts_per_token": 0}, "experts_per_token must be at least 1"),
    ({"router_groups": 3}, "router_groups (3) must divide num_experts (8)"),
    (
        {"router_groups": 2, "router_groups_kept": 3},
        "router_groups_kept (3) exceeds router_groups (2)",
    ),
    (
        {"router_groups": 4, "experts_per_token": 3},
        "experts_per_token (3) exceeds the 2 experts of the kept groups (1 of 4 groups of 2)",
    ),
    (
        {"router_groups": 8, "router_groups_kept": 2},
        'router_group_score = "top2" needs groups of at least 2 experts',
    ),
    ({"first_dense_layers": 9}, "first_dense_layers (9) exceeds num_layers (8)"),
    ({"attention": "mla"}, 'attention = "mla" needs kv_lora_rank'),
    (
        {"num_shared_experts": 0, "shared_intermediate_size": 64},
        "shared_intermediate_size (64) has no use",
    ),
    ({"rope_theta": 0.0}, "rope_theta must be above 0, not 0.0"),
    ({"norm_eps": -1.0}, "norm_eps must be above 0"),
    ({"router_scale": 0.0}, "router_scale must be above 0"),
    ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647"),
    ({"capacity_factor": -0.5}, "capacity_factor must be at least 0, not -0.5"),
    ({"router_jitter": 1.0}, "router_jitter must be below 1, not 1.0"),
    (
        {"router_normalize": False, "router_normalize_min": 0.1},
        "router_normalize_min has no use: router_normalize is false",
    ),
    (
        {"router_normalize_eps": 1e-9, "router_normalize_min": 0.1},
        "router_normalize_min and router_normalize_eps are two ways to one end",
    ),
    (
        {"router_selection": "sinkhorn", "router_selection_bias": True},
        'router_selection = "sinkhorn" does not go with router_selection_bias = true',
    ),
    (
        {"router_selection": "expert_choice", "router_groups": 2},
        'router_selection = "expert_choice" does not go with router_groups = 2',
    ),
    (
        {"router_selection": "expert_choice", "router_when": "after"},
        'router_selection = "expert_choice" does not go with router_when = "after"',
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), BROKEN_MODELS)
def test_broken_model(fields: dict, sentence: str) -> None:
    found = ModelConfig(**fields).check()
    assert sentence in messages(found)
    assert all(problem.fix for problem in found)


def test_group_routing_of_a_good_model() -> None:
    fields = {
        "num_experts": 16,
        "router_groups": 4,
        "router_groups_kept": 2,
        "experts_per_token": 8,
    }
    assert ModelConfig(**fields).check() == []


def test_a_loss_that_depends_on_the_layout_is_told() -> None:
    assert ModelConfig().layout_warning == ""
    warning = ModelConfig(aux_loss_scope="microbatch").layout_warning
    assert 'aux_loss_scope = "microbatch"' in warning and "plan.dp" in warning
    assert "plan.microbatches" in ModelConfig(aux_loss_scope="global").layout_warning
    assert ModelConfig(aux_loss_scope="global", aux_loss_coefficient=0.0).layout_warning == ""
    assert ModelConfig(aux_loss_scope="global", num_experts=0).layout_warning == ""


def test_layers_and_shared_width() -> None:
    model = ModelConfig(first_dense_layers=2, num_layers=4, num_shared_experts=2)
    assert [model.is_moe_layer(index) for index in range(4)] == [False, False, True, True]
    assert (model.num_moe_layers, model.num_dense_layers) == (2, 2)
    assert model.shared_width == 256
    assert ModelConfig(shared_intermediate_size=40).shared_width == 40
    assert ModelConfig(num_shared_experts=0).shared_width == 0
    dense = ModelConfig(num_experts=0)
    assert dense.num_moe_layers == 0
    assert not dense.is_moe_layer(3)


def test_a_rule_over_a_broken_number_is_not_reported_twice() -> None:
    run = RunConfig(model=ModelConfig(num_layers=0), plan=Plan(pp=2))
    assert [problem.key for problem in run.check()] == ["model.num_layers"]


def test_vocabulary_must_hold_the_bytes() -> None:
    run = RunConfig(model=ModelConfig(vocab_size=200))
    assert [problem.key for problem in run.check()] == ["model.vocab_size"]
    other = RunConfig(model=ModelConfig(vocab_size=200), data=DataConfig(tokenizer="folder"))
    assert other.check() == []


def test_ranges_and_divisors() -> None:
    share = Range(0.0, 1.0, open_high=True)
    assert share.holds(0.0)
    assert not share.holds(1.0)
    assert Range(0.0, open_low=True).holds(1e-300)
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert nearest_divisors(36, 5) == "4 or 6"
    assert nearest_divisors(8, 100) == "8"
    assert TrainConfig(adam_betas=(0.9, 1.0)).check()[0].key == "train.adam_betas"


def test_layers_with_experts_by_pattern() -> None:
    model = ModelConfig(num_layers=6, moe_layers=(1, 3, 5), num_mtp_layers=2)
    assert model.check() == []
    assert model.routed_layers == (1, 3, 5, 6, 7)  # extra layers are as the last one
    assert (model.num_moe_layers, model.num_dense_layers) == (3, 3)
    dense_end = ModelConfig(num_layers=6, moe_layers=(0, 2), num_mtp_layers=2)
    assert dense_end.routed_layers == (0, 2)
    assert not dense_end.is_moe_layer(6)
    windows = ModelConfig(
        num_layers=4,
        num_mtp_layers=1,
        sliding_window=8,
        layer_types=("full_attention", "sliding_attention"),
    )
    assert windows.window(4) == windows.window(3) == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe_layers": (0, 8)}, "from 0 to num_layers - 1 (7)"),
        ({"moe_layers": (3, 1)}, "ascending"),
        ({"moe_layers": ()}, "different layers"),
        ({"moe_layers": (1, 2), "first_dense_layers": 2}, "both say which layers have experts"),
        ({"shared_gate": True, "num_shared_experts": 0}, "nothing to multiply"),
    ],
    ids=str,
)
def test_mistakes_of_layers_and_experts(keys: dict[str, Any], words: str) -> None:
    (problem,) = ModelConfig(**keys).check()
    assert words in problem.message and problem.fix
