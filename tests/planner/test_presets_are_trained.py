"""The first answer of `moemesh plan` for every preset on two nodes is one that `moemesh train`
accepts, and a small copy of the model trains under a small copy of it to one device's losses.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moemesh as mm
from moemesh.config.load import resolved_toml
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.sources import preset_names
from moemesh.sharding.load_run import load_run
from tests.train import runs

#: Two nodes of this hold the states of every preset; smaller ones take the first.
NODES = ("dgx_h100", "gb200_nvl72")


def first_answer(preset: str) -> RunConfig:
    """The configuration of the printed command of the best layout on two nodes."""
    for cluster in NODES:
        try:
            sizes = {"seq_len": 512 if preset == "tiny" else 4096, "global_batch": 256}
            best = mm.plan(model=preset, cluster=cluster, nodes=2, top=1, **sizes)[0]
        except ValueError:
            continue
        assert best.command is not None, f"the first answer for {preset} is not trained"
        words = shlex.split(best.command)
        assert words[:2] == ["moemesh", "train"]
        return load_run([], [word for word in words[2:] if word != "--set"]).config
    raise AssertionError(f"{preset} fits on no two nodes")


def small_model(model: ModelConfig) -> ModelConfig:
    """The same kinds of layers, routers and attention, in sizes that a CPU trains in seconds."""
    heads = 8
    changed: dict[str, Any] = {
        "num_layers": 4,
        "first_dense_layers": min(model.first_dense_layers, 1),
        "hidden_size": 32,
        "vocab_size": 300,
        "intermediate_size": 48,
        "num_heads": heads,
        "num_kv_heads": heads if model.num_kv_heads == model.num_heads else heads // 2,
        "head_dim": 8,
        "expert_intermediate_size": 16,
        "init_std": 0.1,
        "max_position_embeddings": 0,
        "num_mtp_layers": min(model.num_mtp_layers, 1),
    }
    if model.shared_intermediate_size is not None:
        changed["shared_intermediate_size"] = 24
    if model.num_experts:
        changed |= {
            "num_experts": 16,
            "experts_per_token": min(model.experts_per_token, 4),
            "router_groups": min(model.router_groups, 4),
            "router_groups_kept": min(model.router_groups_kept, 2),
        }
    if model.attention == "mla":
        changed |= {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rotary_head_dim": 4}
        changed |= {"v_head_dim": 8, "q_lora_rank": 16 if model.q_lora_rank else 0}
    if model.sliding_window:
        changed["sliding_window"] = 20
    if model.original_max_position_embeddings:
        changed["original_max_position_embeddings"] = 32
    return ModelConfig.model_validate({**model.model_dump(), **changed})


def small_plan(plan: Plan) -> Plan:
    """The same strategies on at most eight ranks."""
    degrees = {axis: min(getattr(plan, axis), 2) for axis in ("pp", "dp", "cp", "tp", "ep", "etp")}
    if degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"] > 8:
        degrees["dp"] = 1
    stage = degrees["dp"] * degrees["cp"] * degrees["tp"]
    while stage % (degrees["ep"] * degrees["etp"]):
        degrees["etp" if degrees["etp"] > 1 else "ep"] = 1
    changed = {
        **degrees,
        "microbatches": 4 if plan.microbatches > 1 else 1,
        "layers_per_stage": None,
        "ranks_per_node": None,
        "shard_group": None,
    }
    return Plan.model_validate({**plan.model_dump(), **changed})


def losses(config: RunConfig, out: Path) -> list[float]:
    file = out.with_suffix(".toml")
    file.write_text(resolved_toml(config))
    runs.said("train", file, "--out", out)
    return runs.losses(runs.metrics(out))


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names())
def test_the_first_answer_of_every_preset_is_trained(preset: str, tmp_path: Path) -> None:
    answer = first_answer(preset)
    small = replace(
        answer,
        model=small_model(answer.model),
        plan=small_plan(answer.plan),
        data=answer.data.model_copy(update={"seq_len": 48, "global_batch": 8}),
        train=answer.train.model_copy(
            update={"dtype": "float64", "steps": 2, "validation_batches": 1, "optimizer": "sgd"}
        ),
    )
    alone = replace(small, plan=Plan(microbatches=small.plan.microbatches))
    assert losses(small, tmp_path / "spread") == pytest.approx(
        losses(alone, tmp_path / "alone"), rel=1e-9
    )
