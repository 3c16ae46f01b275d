"""Experts of transformers' models over ranks, in other people's loops."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import moemesh as mm
from moemesh.model.hub.precision import exactly
from moemesh.parallel.expert.spread import LayerError
from tests.hub.families import random_model
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")

RANKS, MOST = 2, 1e-9
#: SwiGLU; clamped, interleaved, transposed and with biases; relu squared without a gate.
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h")
_IDS = torch.randint(1, 200, (4, 12), generator=torch.Generator().manual_seed(0))


def model_of(name: str) -> Any:
    model = random_model(name).double().train()
    model.set_experts_implementation("eager")  # the default has no float64
    return model


def backward(model: nn.Module, ids: Tensor, times: int = 1) -> float:
    """Gradients of the mean loss; of several backwards their sum."""
    loss = torch.zeros(())
    with exactly(torch.float64):
        for _ in range(times):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: one.grad.as_subclass(Tensor)
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def assert_all_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=MOST, msg=key)


def on_ranks(rank: int, name: str, folder: str) -> Any:
    model = model_of(name)
    mm.use_experts(model)
    spread = mm.expert_parameters(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss = backward(wrapped, _IDS.chunk(RANKS)[rank], times=2)
    norm = mm.clip_grad_norm_(model, 1e9)
    state = mm.full_state_dict(model)
    if rank == 0:
        with pytest.raises(LayerError, match=r"mm\.full_state_dict"):
            model.save_pretrained(folder)
        model.save_pretrained(folder, state_dict={**state})  # it empties what it is given
    return loss, float(norm), gradients(model), {*spread}, state


@pytest.mark.representative("gpt_oss")
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_of_ddp_train_as_one_device(name: str, tmp_path: Path) -> None:
    one = model_of(name)
    loss = backward(one, _IDS, times=2)
    norm = nn.utils.clip_grad_norm_(one.parameters(), 1e9).item()
    expected = gradients(one)
    results = run_on_ranks(RANKS, on_ranks, name, str(tmp_path / "saved"))
    assert sum(result[0] for result in results) / RANKS == pytest.approx(loss, abs=MOST)
    for rank, (_, norm_of_all, found, spread, state) in enumerate(results):
        assert norm_of_all == pytest.approx(norm, abs=1e-8)
        assert found.keys() == expected.keys()
        assert spread
        for key, gradient in expected.items():
            part = gradient.chunk(RANKS)[rank] if key in spread else gradient
            torch.testing.assert_close(found[key], part, rtol=0, atol=MOST, msg=key)
        for key, value in one.state_dict().items():
            assert torch.equal(state[key], value), key
    saved = type(one).from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for key, value in one.state_dict().items():
        assert torch.equal(saved.state_dict()[key], value), key


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process(name: str) -> None:
    one = model_of(name)
    model = copy.deepcopy(one)
    mm.use_experts(model)
    assert backward(model, _IDS) == pytest.approx(backward(one, _IDS), abs=1e-12)
    assert_all_near(gradients(model), gradients(one))
    with pytest.raises(LayerError, match="computes these experts already"):
        mm.use_experts(model)


def test_the_name_is_registered_for_from_pretrained(tmp_path: Path) -> None:
    one = random_model("olmoe")
    one.save_pretrained(tmp_path)
    mm.use_experts()
    model = type(one).from_pretrained(tmp_path, experts_implementation="moemesh")
    mm.use_experts(model)
    with torch.no_grad():
        torch.testing.assert_close(model(_IDS).logits, one(_IDS).logits)


def test_autocast() -> None:
    one = random_model("qwen3_moe")
    model = copy.deepcopy(one)
    mm.use_experts(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, ours = one(_IDS).logits, model(_IDS).logits
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(LayerError, match="Linear has no experts"):
        mm.use_experts(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a Module"):
        mm.use_experts(3)  # type: ignore[arg-type]


def with_replicas(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    model = model_of("qwen3_moe")
    # An optimizer that has the parameters already.
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mm.use_experts(model, mesh)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with wrapped.no_sync():
        backward(wrapped, _IDS.chunk(4)[rank])
    backward(wrapped, _IDS.chunk(4)[rank])
    norm = float(mm.clip_grad_norm_(model, 1e9))
    optimizer.step()
    return norm, mm.full_state_dict(model)


@pytest.mark.slow
def test_replicas_of_experts_train_as_one_device() -> None:
    one = model_of("qwen3_moe")
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    backward(one, _IDS, times=2)
    norm = nn.utils.clip_grad_norm_(one.parameters(), 1e9).item()
    optimizer.step()
    for norm_of_all, state in run_on_ranks(4, with_replicas):
        assert norm_of_all == pytest.approx(norm, abs=MOST)
        assert_all_near(state, one.state_dict())


def compiled(rank: int) -> float:
    one, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    mm.use_experts(model)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    with torch.no_grad():
        return float(
            (model(_IDS[rank : rank + 1]).logits - one(_IDS[rank : rank + 1]).logits).abs().max()
        )


@pytest.mark.slow
def test_a_compiled_model_computes_its_experts_between_graphs() -> None:
    assert max(run_on_ranks(RANKS, compiled)) < MOST


def in_a_wrong_order(rank: int) -> None:
    model = model_of("qwen3_moe")
    wrapped = DistributedDataParallel(model)
    with pytest.raises(LayerError, match="DistributedDataParallel is not the model of transform"):
        mm.use_experts(wrapped)
    with pytest.raises(LayerError, match="of Qwen3MoeExperts belongs to DDP"):
        mm.use_experts(model)
    model = model_of("qwen3_moe")
    fully_shard(model)
    with pytest.raises(LayerError, match=r"gate_up_proj is sharded already: .* before fully_shard"):
        mm.use_experts(model)
    model = model_of("qwen3_moe")
    mm.use_experts(model)
    experts = model.model.layers[0].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(LayerError, match="adapters of PEFT change experts that are"):
        model(_IDS)


def logits_of(model: Any) -> Tensor:
    with exactly(torch.float64):
        return model(_IDS, use_cache=False).logits


def whole_models(rank: int) -> None:
    """Copies, pickles and adapters of a model, and other code for its experts."""
    wanted = logits_of(model_of("qwen3_moe"))
    model = model_of("qwen3_moe")
    mm.use_experts(model)
    torch.testing.assert_close(logits_of(copy.deepcopy(model)), wanted, rtol=0, atol=MOST)
    # An average of weights begins after a step, as a copy of a model that has run.
    backward(model, _IDS.chunk(RANKS)[rank])
    copied = copy.deepcopy(model)
    backward(copied, _IDS.chunk(RANKS)[rank])
    assert_all_near(gradients(copied), gradients(model))
    with pytest.raises(LayerError, match=r"only experts \d to \d: save mm.full_state_dict"):
        pickle.dumps(model)
    model.set_experts_implementation("eager")
    with pytest.raises(LayerError, match="cannot be computed by eager"):
        model(_IDS)
    model.set_experts_implementation("moemesh")
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=MOST)
    lora = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    adapted = peft.get_peft_model(model_of("qwen3_moe"), lora)
    with pytest.raises(LayerError, match=r"base_layer: parametrizations and adapters of PEFT"):
        mm.use_experts(adapted.get_base_model())


def test_models_are_copied_and_what_would_lose_experts_is_refused() -> None:
    run_on_ranks(RANKS, whole_models)


def under_a_larger_ddp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    model = model_of("qwen3_moe")
    mm.use_experts(model, mesh["experts"])
    with pytest.raises(
        LayerError, match=r"DDP reduces gradients over 4 ranks, and the experts .* 2:"
    ):
        DistributedDataParallel(model)(_IDS)
    model = model_of("qwen3_moe")
    mm.use_experts(model, mesh["experts"])
    fully_shard(model)
    with pytest.raises(LayerError, match=r"FSDP2 reduces gradients over 4 ranks, and the exp.* 2:"):
        model(_IDS)


def optimized(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)


def states_of(model: Any, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optimizer"), states, strict=True))


def in_checkpoints_of_torch(rank: int, folder: str, flat: bool, begun: bool) -> dict[str, Tensor]:
    """The first step, which is saved, or the second one, after loading the first."""
    model, optimizer = optimized(model_of("qwen3_moe"))
    mm.use_experts(model)
    wrapped = DistributedDataParallel(model)
    if begun:
        states = states_of(model, optimizer, flat=flat)
        checkpoint.load(states, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
    backward(wrapped, _IDS.chunk(RANKS)[rank])
    optimizer.step()
    if not begun:
        checkpoint.save(states_of(model, optimizer, flat=flat), checkpoint_id=folder)
    return mm.full_state_dict(model)


@pytest.mark.representative("True")
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_of_torch_have_the_moments_of_all_experts(flat: bool, tmp_path: Path) -> None:
    """Written by two ranks, read by two, and by one that has all experts."""
    one, steps = optimized(model_of("qwen3_moe"))
    run_on_ranks(RANKS, in_checkpoints_of_torch, str(tmp_path), flat, False)
    backward(one, _IDS)
    steps.step()
    states = states_of(*optimized(model_of("qwen3_moe")), flat=flat)
    checkpoint.load(states, checkpoint_id=tmp_path, no_dist=True)
    found, expected = tree_leaves(states), tree_leaves(states_of(one, steps, flat=flat))
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=MOST)
    steps.zero_grad()
    backward(one, _IDS)
    steps.step()
    words = (in_checkpoints_of_torch, str(tmp_path), flat, True)
    for state in run_on_ranks(RANKS, *words):
        assert_all_near(state, one.state_dict())


def by_kernels_of_several_tensors(rank: int) -> dict[str, Tensor]:
    """A step with FSDP2; torch has no kernel for its DTensors beside plain tensors."""
    model = model_of("qwen3_moe")
    mm.use_experts(model)
    fully_shard(model)
    spread = list(mm.expert_parameters(model).values())
    others = [one for one in model.parameters() if all(one is not expert for expert in spread)]
    for kernel in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(model.parameters(), **{kernel: True})
        backward(model, _IDS.chunk(RANKS)[rank])
        with pytest.raises(LayerError, match=rf"{kernel}=True takes no DTensors .* of their own"):
            optimizer.step()
        model.zero_grad()
    optimizer = torch.optim.SGD([{"params": others}, {"params": spread}], 0.1, foreach=True)
    backward(model, _IDS.chunk(RANKS)[rank])
    optimizer.step()
    return mm.full_state_dict(model)


def test_experts_have_a_group_of_their_own_beside_dtensors() -> None:
    one = model_of("qwen3_moe")
    backward(one, _IDS)
    torch.optim.SGD(one.parameters(), 0.1).step()
    for state in run_on_ranks(RANKS, by_kernels_of_several_tensors):
        assert_all_near(state, one.state_dict())


def test_other_programs_are_refused() -> None:
    run_on_ranks(RANKS, in_a_wrong_order)
    run_on_ranks(4, under_a_larger_ddp)


def refused(rank: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, moe_intermediate_size=8, num_experts=5, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(LayerError, match=r"num_experts \(5\) must be a multiple of the 2 ranks"):
        mm.use_experts(Qwen3MoeForCausalLM(config))


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    run_on_ranks(RANKS, refused)
