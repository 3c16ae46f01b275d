"""Layouts from plans of our own: the planner's key for each key of [plan]."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.errors import ConfigError
from moemesh.config.plan import RECOMPUTED, Plan
from moemesh.planner.accuracy.published import recompute_from_words
from moemesh.planner.estimate import estimate_named
from moemesh.planner.holdings import Holdings
from moemesh.planner.kept_tensors import layer_kept
from moemesh.planner.layout_sources import from_plan, plan_of, plan_table, read_plan
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.command import plan_keys
from moemesh.planner.search.rival import rival_table
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.shapes.shape import LayerKind

BATCH: dict[str, Any] = {"seq_len": 512, "global_batch": 8}


def layout(**keys: Any) -> PlannedLayout:
    return from_plan(Plan(**keys), **BATCH)


def test_selective_recomputes_the_core_and_the_product_of_a_swiglu() -> None:
    """The product silu(gate) * up is not kept, the same as in `moemesh.parallel.recompute`."""
    shape = load_model("llama3-8b").shape
    kind = LayerKind(window=0, moe=False)
    none, selective = (layer_kept(shape, kind, layout(recompute=r)) for r in ("none", "selective"))
    assert none.width - selective.width == 2 * shape.intermediate_size
    assert none.tokens == selective.tokens and none.routed == selective.routed


def test_selective_keeps_of_experts_what_its_switch_says() -> None:
    shape = load_model("qwen3-30b-a3b").shape
    kind = LayerKind(window=0, moe=True)
    none, selective, attention = (
        layer_kept(shape, kind, layout(**keys))
        for keys in (
            {},
            {"recompute": "selective"},
            {"recompute": "selective", "recompute_experts": False},
        )
    )
    width = shape.experts_per_token * shape.expert_intermediate_size
    assert attention.routed - selective.routed == 2 * 2 * width  # gate and up, bfloat16
    assert none.routed - attention.routed == 2 * width


@pytest.mark.parametrize("part", ["attention", "experts"])
def test_a_switch_comes_back(part: str) -> None:
    plan = Plan(recompute="selective", **{f"recompute_{part}": False})
    assert plan_of(from_plan(plan, **BATCH)) == plan


def test_a_published_selective_is_the_attention_core_alone() -> None:
    assert recompute_from_words("selective") == {"attention"}
    assert recompute_from_words("selective") != RECOMPUTED["selective"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_word_comes_back(recompute: str) -> None:
    assert plan_keys(layout(recompute=recompute))["recompute"] == recompute


# Texts for ``--plan``: text -> layout -> text -> layout, and the keys of ``plan --json``.


SHARES = {
    "dp": [1, 2, 4], "tp": [1, 2], "cp": [1, 2], "ep": [1, 2], "microbatch": [1, 2, 4],
    "data": ["replicate", "zero1", "zero2", "zero3", "parameter_server"],
    "recompute": ["none", "selective", "full", "norm+moe", "attention"],
    "attention_exit": ["reduce_scatter", "all_reduce", "all_to_all"],
    "context": ["ring", "all_gather"], "payload": ["same", "fp8"], "combine": ["fast", "exact"],
    "dispatcher": ["all_to_all", "hierarchical", "auto"], "dispatch_chunks": [1, 3],
    "spare_slots": [0, 2], "overlap_blocks": [True, False], "spare_policy": ["quota", "shadow"],
    "dtype": ["bfloat16", "float32"], "sequence_parallel": [True, False], "imbalance": [1.0, 1.5],
    "shard_messages": [True, False], "recompute_layers": [3], "zero_group": [0, 2],
}  # fmt: skip
PIPELINES = st.sampled_from([
    {}, {"pp": 2, "layers_per_stage": "5-3"}, {"pp": 4, "schedule": "zb_h1"},
    {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "layers_per_stage": "1-2-3-2"},
    {"pp": 2, "schedule": "terapipe", "slices": 4}, {"pp": 2, "schedule": "ampnet"},
    {"pp": 2, "optimizer_validation": "after"}, {"ranks_per_node": 1},
])  # fmt: skip
TABLES = st.fixed_dictionaries(
    {}, optional={key: st.sampled_from(values) for key, values in SHARES.items()}
)


def written(table: dict[str, Any]) -> str:
    words = {True: "true", False: "false"}
    cells = ((k, words[v] if isinstance(v, bool) else v) for k, v in table.items())
    return ",".join(f"{key}={value}" for key, value in cells) or "dp=1"


@settings(deadline=None, max_examples=100)
@given(TABLES, PIPELINES)
def test_a_text_comes_back_through_the_layout(table: dict[str, Any], pipe: dict[str, Any]) -> None:
    try:
        first = read_plan(written(table | pipe), seq_len=64, global_batch=64)
    except ConfigError:
        return
    assert shlex.split(f"--plan {first.text}") == ["--plan", first.text]
    again = read_plan(first.text)
    assert (again.layout, again.unread, again.text) == (first.layout, first.unread, first.text)


@settings(deadline=None, max_examples=100)
@given(
    st.fixed_dictionaries(
        {}, optional={k: st.sampled_from(v) for k, v in SHARES.items() if k in Plan.model_fields}
    ),
    st.sampled_from([{}, {"pp": 2, "layers_per_stage": (5, 3)}]),
)
def test_the_keys_of_json_are_the_layout(table: dict[str, Any], pipe: dict[str, Any]) -> None:
    keys = {key: value for key, value in (table | pipe).items() if "+" not in str(value)}
    try:
        layout = from_plan(Plan(**keys, microbatches=2), seq_len=64, global_batch=64)
    except ValueError:
        return
    printed = json.loads(json.dumps(plan_keys(layout)))
    assert read_plan(printed, seq_len=64, global_batch=64).layout == layout
    assert plan_of(layout).data == keys.get("data", "replicate")


def test_what_no_formula_reads_is_echoed() -> None:
    text = "pp=2,microbatches=4,overlap_blocks=false,optimizer_validation=after"
    document = estimate_named("tiny", "laptop_cpu", text, 32, 8).to_json()
    assert "overlap_blocks=false" in document["plan"] and "validation=after" in document["plan"]


def test_a_parameter_server_is_priced_and_echoed() -> None:
    """Ranks push gradients and pull weights; the server's link carries those of all others."""
    estimates: dict[str, Any] = {}
    for dp in (2, 4, 8):
        plan = f"dp={dp},microbatch=2,data=parameter_server"
        estimates[dp] = estimate_named("tiny", "laptop_cpu", plan, 64, 16).to_json()
    assert "data=parameter_server" in estimates[4]["plan"]
    seconds = {dp: one["seconds"]["data"] for dp, one in estimates.items()}
    assert seconds[4] == pytest.approx(3 * seconds[2], rel=0.05)
    assert seconds[8] == pytest.approx(7 * seconds[2], rel=0.05)
    ring = estimate_named("tiny", "laptop_cpu", "dp=4,microbatch=2", 64, 16).to_json()
    assert seconds[4] > 2 * ring["seconds"]["data"]


@pytest.mark.parametrize(
    ("key", "kind"), [("recompute_layers", "int"), ("dropout", "bool"), ("imbalance", "float")]
)
def test_a_field_of_another_type_is_named(key: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is a {kind}"):
        read_plan(f"pp=2,{key}=few", seq_len=64, global_batch=8)
    assert read_plan("pp=2,recompute_layers=3,dropout=true", **BATCH).layout.recompute_layers == 3


def test_a_plan_from_a_json_file(tmp_path):
    """A file of keys, alone or under "plan"; broken and foreign content is named."""
    path, wanted = tmp_path / "plan.json", read_plan("tp=2,dp=4", seq_len=64, global_batch=8)
    for table in ({"tp": 2, "dp": 4}, {"plan": {"tp": 2, "dp": 4}}):
        path.write_text(json.dumps(table))
        assert read_plan(str(path), seq_len=64, global_batch=8) == wanted
    for text, message in (("{", "not valid JSON"), ("[1]", "must hold a table of keys")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_plan(str(path), seq_len=64, global_batch=8)


@pytest.mark.parametrize(
    ("text", "key", "other"),
    [
        ("dp=2,seq_len=64", "seq_len", "--seq-len is 512"),
        ("dp=2,global_batch=4", "global_batch", "--global-batch is 8"),
        ("dp=2,data=zero1,zero=3", "zero", "data = zero1 is zero = 1"),
        ("dp=2,data=zero1,parameter_server=true", "parameter_server", "data = zero1"),
        ("dp=4,data=zero1,shard_group=2,zero_group=4", "zero_group", "shard_group = 2"),
        ("dp=2,recompute=norm+moe,recompute_experts=false", "recompute_experts", "norm\\+moe"),
    ],
)
def test_two_sources_of_one_fact_agree(text: str, key: str, other: str, tmp_path) -> None:
    """Also in a layout to compare with, and in files."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plan": plan_table(text)}))
    for read in (
        lambda: read_plan(text, **BATCH),
        lambda: read_plan(str(path), **BATCH),
        lambda: rival_table(text, None, *BATCH.values()),
        lambda: Holdings.named(text, None, **BATCH),
    ):
        with pytest.raises(ConfigError, match=other) as caught:
            read()
        assert [problem.key for problem in caught.value.problems] == [f"plan.{key}"]
    agreeing = "dp=4,seq_len=512,global_batch=8,data=zero1,zero=1,shard_group=2,zero_group=2"
    assert read_plan(agreeing, **BATCH).layout.zero_group == 2
    assert "seq_len" not in rival_table(agreeing, None, *BATCH.values())


def test_sizes_of_a_plan_hold_without_options(tmp_path) -> None:
    """The sizes of a text, and of a run's file with its number type."""
    held = Holdings.named("dp=2,seq_len=4,global_batch=6", "tiny")
    assert (held.seq_len, held.global_batch, held.share(1).sequences) == (4, 6, range(3, 6))
    path = tmp_path / "run.toml"
    path.write_text('[plan]\ndp=2\n[data]\nseq_len=32\nglobal_batch=4\n[train]\ndtype="float32"')
    layout = read_plan(str(path)).layout
    assert (layout.seq_len, layout.global_batch, layout.dtype) == (32, 4, "float32")
    # Options replace the sizes of a run's data, which lie outside of its plan.
    assert read_plan(str(path), seq_len=64).layout.seq_len == 64
    held = Holdings.named(str(path), "tiny", seq_len=64, global_batch=2)
    assert (held.seq_len, held.global_batch) == (64, 2)
    assert "seq_len" not in rival_table(str(path), None, 64, 8)
    path.write_text("plan=3")
    with pytest.raises(ConfigError, match="table of keys"):
        read_plan(str(path), **BATCH)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("tp=4 pp=6", {"tp": 4, "pp": 6}),
        ("pp=3 cp=2,  tp = 4\n   data=zero1", {"pp": 3, "cp": 2, "tp": 4, "data": "zero1"}),
        ("pp=2 layers_per_stage=[3, 4] tp=1", {"pp": 2, "layers_per_stage": [3, 4], "tp": 1}),
        ("schedule=my file.txt", {"schedule": "my file.txt"}),
    ],
)
def test_pairs_as_answers_print_them(text: str, table: dict[str, Any]) -> None:
    assert plan_table(text) == table
