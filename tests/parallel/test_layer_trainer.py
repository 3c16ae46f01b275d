"""Experts over ranks in the Trainer of transformers, which clips, saves and loads by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.parallel.expert.hub_layer import use_experts
from moemesh.parallel.expert.layer import MoELayer
from moemesh.parallel.expert.spread import LayerError, expert_parameters, full_state_dict
from tests.hub.families import random_model
from tests.huggingface.tiny import make
from tests.parallel.test_layer_transformers import holders
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANKS, STEPS, ROWS = 2, 8, 8
_ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64 * 16).view(-1, 16) % 61]
_QUIET: dict[str, Any] = {
    "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "optim": "sgd",
    "learning_rate": 0.1, "gradient_accumulation_steps": 2,
}  # fmt: skip


def model_of(replaced: bool) -> Any:
    model = make("qwen3_moe").double()
    if replaced:
        for holder, name in holders(model):
            setattr(holder, name, MoELayer.from_transformers(getattr(holder, name)))
        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))
    return model


def trained(
    model: Any, folder: str, batch: int, *callbacks: Any, resume: str | None = None, **options: Any
) -> list[float]:
    """Gradient norms of a training with the defaults of the Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        **{"max_steps": STEPS, **_QUIET, **options},
    )
    trainer = Trainer(
        model, arguments, train_dataset=_ROWS, eval_dataset=_ROWS[:4], callbacks=[*callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def join_trainer(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group is running


def on_ranks(rank: int, folder: str) -> Any:
    join_trainer(rank)
    model = model_of(True)
    norms = trained(model, folder, ROWS // RANKS, save_strategy="no")
    state = full_state_dict(model)
    if rank == 0:  # nothing waits for the other rank
        with pytest.raises(LayerError, match="save_pretrained is called by one rank"):
            model.save_pretrained(folder)
    dist.barrier()
    return state, norms


@pytest.mark.slow
def test_the_trainer_clips_by_the_norm_of_all_experts(tmp_path: Any) -> None:
    one = model_of(False)
    norms = trained(one, str(tmp_path), ROWS, save_strategy="no")
    assert max(norms) > 1.0  # max_grad_norm of the Trainer
    for holder, name in holders(one):
        setattr(holder, name, MoELayer.from_transformers(getattr(holder, name)))
    expected = one.state_dict()
    results = run_on_ranks(RANKS, on_ranks, str(tmp_path))
    for state, own_norms in results:
        assert own_norms == pytest.approx(norms, rel=1e-6)  # logged in float32
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            # transformers takes norms and the loss in float32.
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)
            assert torch.equal(state[name], results[0][0][name]), name


def blocks_of(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """A whole state dict under the names of transformers."""
    for prefix, module in model.named_modules():
        if isinstance(module, MoELayer) and module.origin:
            module.origin.store_into(state, f"{prefix}.")
    return state


def spread_model(name: str, *, is_whole: bool = False) -> Any:
    """A model of the family with a layer in place of every block, or with its own experts."""
    if name == "layers":
        return model_of(not is_whole)
    model = random_model(name, torch.float64)
    if is_whole:
        return model
    use_experts(model)
    return model


def saved_and_resumed(rank: int, name: str, folder: str) -> Any:
    """Weights at the first step and at the end, and those of a run resumed from the first."""
    from transformers import TrainerCallback

    join_trainer(rank)
    states: list[dict[str, Tensor]] = []

    class Keep(TrainerCallback):
        def on_save(self, *_: Any, model: Any, **__: Any) -> None:
            states.append({key: x.clone() for key, x in full_state_dict(model).items()})

    options: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options |= {"gradient_accumulation_steps": 1, "save_steps": 1}
    model = spread_model(name)
    trained(model, folder, ROWS // RANKS, Keep(), **options)
    best = full_state_dict(model)
    model = spread_model(name)
    resume = f"{folder}/checkpoint-1"
    trained(model, folder, ROWS // RANKS, Keep(), resume=resume, **options)
    assert len(states) == 3
    return [blocks_of(state, model) for state in (*states, best)]


@pytest.mark.representative("qwen3_moe")
@pytest.mark.parametrize("name", ["layers", "qwen3_moe", "gpt_oss"])
def test_checkpoints_of_the_trainer_hold_all_experts(name: str, tmp_path: Path) -> None:
    results = run_on_ranks(RANKS, saved_and_resumed, name, str(tmp_path))
    whole = spread_model(name, is_whole=True)
    for half_way, at_end, resumed, best in results:
        for step, state in ((1, half_way), (2, at_end)):
            folder = tmp_path / f"checkpoint-{step}"
            saved = type(whole).from_pretrained(folder, dtype=torch.float64).state_dict()
            assert saved.keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(saved[key], value), (step, key)
        for key, value in at_end.items():
            assert torch.equal(resumed[key], value), key
            assert torch.equal(results[0][1][key], value), key
            assert torch.equal(best[key], value) or torch.equal(best[key], half_way[key])
        changed = [key for key, value in at_end.items() if not torch.equal(value, half_way[key])]
        assert [key for key in changed if "experts" in key]
