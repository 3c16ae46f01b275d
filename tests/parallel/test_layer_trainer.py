"""MoELayer in the Trainer of transformers, whose clipping and saving are its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moemesh.parallel.expert.layer import MoELayer
from moemesh.parallel.expert.spread import LayerError, expert_parameters, full_state_dict
from tests.huggingface.tiny import make
from tests.parallel.test_layer_transformers import holders
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANKS, STEPS, ROWS = 2, 8, 8
_ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64 * 16).view(-1, 16) % 61]


def model_of(replaced: bool) -> Any:
    model = make("qwen3_moe").double()
    if replaced:
        for holder, name in holders(model):
            setattr(holder, name, MoELayer.from_transformers(getattr(holder, name)))
        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))
    return model


def trained(model: Any, folder: str, batch: int, **options: Any) -> Any:
    """The weights, and the gradient norms, after a training with the defaults of the Trainer."""
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        **quiet,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=_ROWS)
    trainer.train()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def on_ranks(rank: int, folder: str) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group is running
    with pytest.raises(LayerError, match='save_strategy = "steps" saves the weights of one rank'):
        trained(model_of(True), folder, ROWS // RANKS)
    model = model_of(True)
    norms = trained(model, folder, ROWS // RANKS, save_strategy="no")
    state = full_state_dict(model)
    if rank == 0:  # nothing waits for the other rank
        with pytest.raises(LayerError, match="save_pretrained is called by one rank"):
            model.save_pretrained(folder)
    dist.barrier()
    return state, norms


def test_the_trainer_clips_by_the_norm_of_all_experts(tmp_path: Any) -> None:
    one = model_of(False)
    norms = trained(one, str(tmp_path), ROWS, save_strategy="no")
    assert max(norms) > 1.0  # max_grad_norm of the Trainer
    for holder, name in holders(one):
        setattr(holder, name, MoELayer.from_transformers(getattr(holder, name)))
    expected = one.state_dict()
    results = run_on_ranks(RANKS, on_ranks, str(tmp_path), timeout=300)
    for state, own_norms in results:
        assert own_norms == pytest.approx(norms, rel=1e-6)  # logged in float32
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            # transformers takes norms and the loss in float32.
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)
            assert torch.equal(state[name], results[0][0][name]), name
