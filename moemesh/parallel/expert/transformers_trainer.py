"""Checkpoints of transformers' Trainer with the experts of all ranks.

The Trainer writes weights and the state of the optimizer on one rank, by methods that all ranks
call, and loads both on every rank. These methods of a trainer that runs a layer are wrapped: all
ranks gather the tensors that one rank writes, and each keeps its share of those that it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moemesh.comm import transfers
from moemesh.parallel.expert.layer_block import TransformersBlock
from moemesh.parallel.expert.spread import LayerError, Spread, own_part


def caller(function: str, module: str) -> FrameType | None:
    """The innermost frame of a running `function` of `module`, None if it does not run."""
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_name != function or frame.f_globals.get("__name__") != module):
        frame = frame.f_back
    return frame


def follow() -> None:
    """Wrap the methods of the running Trainer, if there is one. Raises LayerError if it saves by
    FSDP or DeepSpeed, whose files cannot hold experts over ranks."""
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__") != "transformers.trainer":
        frame = frame.f_back
    trainer = frame.f_locals.get("self") if frame else None
    if trainer is None or "_save" in vars(trainer):
        return
    strategy = trainer.args.save_strategy.value
    if strategy != "no" and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise LayerError(
            f'save_strategy = "{strategy}" with FSDP or DeepSpeed of the Trainer cannot save '
            'experts that are spread over ranks: TrainingArguments(save_strategy="no"), and after '
            "the training mm.full_state_dict(model) on all ranks"
        )
    for name, wrapper in (
        ("_save", _save),
        ("_load_from_checkpoint", _load),
        ("_load_best_model", _load_best),
        ("_save_optimizer_and_scheduler", _save_optimizer),
        ("_load_optimizer_and_scheduler", _load_optimizer),
    ):
        setattr(trainer, name, partial(wrapper, trainer, getattr(trainer, name)))


def _save(
    trainer: Any,
    inner: Callable[..., None],
    output_dir: str | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """`Trainer._save` with the weights of all ranks."""
    if state_dict is None:
        state: dict[str, Any] = {}
        for name, tensor in trainer.model.state_dict().items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if trainer.args.should_save:
                state[name] = full
        for name, module in trainer.model.named_modules():
            origin = getattr(module, "origin", None)
            if isinstance(origin, TransformersBlock) and state:
                origin.store_into(state, f"{name}.")
        state_dict = state
    inner(output_dir, state_dict=state_dict)


def _load(trainer: Any, inner: Callable[..., None], folder: str, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint` by `from_pretrained`, which converts names: the Trainer would
    skip tensors of the folder with other names than the parameters."""
    from transformers import PreTrainedModel

    model = trainer.model if model is None else model
    if not isinstance(model, PreTrainedModel):
        inner(folder, model)
        return
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = reduce(torch.promote_types, dtypes)
    model.load_state_dict(type(model).from_pretrained(folder, dtype=dtype).state_dict())


def _load_best(trainer: Any, inner: Callable[[], None]) -> None:
    """`Trainer._load_best_model`, as :func:`_load` does it."""
    _load(trainer, lambda *_: inner(), trainer.state.best_model_checkpoint)


def _save_optimizer(trainer: Any, inner: Callable[[str], None], output_dir: str) -> None:
    """`Trainer._save_optimizer_and_scheduler` with the optimizer's state of all ranks."""
    optimizer = _optimizer(trainer)

    def gathered(experts: Spread, name: str, value: Tensor) -> Tensor:
        if len(value) != len(experts.held):
            raise LayerError(
                f"{type(optimizer).__name__} keeps {name} {list(value.shape)} for the "
                f"{len(experts.held)} experts of a rank, with no part of each expert's: "
                "TrainingArguments(save_only_model=True)"
            )
        full = transfers.all_gather(value, experts.ranks, phase="control", caller="moe.save")
        return full if trainer.args.should_save else value

    state = with_experts(trainer.model, optimizer, optimizer.state_dict(), gathered)
    with optimizer.register_state_dict_post_hook(lambda *_: state):
        inner(output_dir)


def _load_optimizer(
    trainer: Any, inner: Callable[[str | None], None], checkpoint: str | None
) -> None:
    """`Trainer._load_optimizer_and_scheduler`; each rank keeps the states of its experts."""

    def take_own(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return with_experts(
            trainer.model, optimizer, state, lambda experts, _, x: own_part(experts, x).clone()
        )

    with _optimizer(trainer).register_load_state_dict_pre_hook(take_own):
        inner(checkpoint)


def _optimizer(trainer: Any) -> torch.optim.Optimizer:
    """torch's optimizer, which accelerate may have wrapped."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def with_experts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    change: Callable[[Spread, str, Tensor], Tensor],
) -> dict[str, Any]:
    """The `state` of an optimizer with ``change(module, name, value)`` of each tensor that it keeps
    for spread experts. Keys of the state, numbers or names, are in the order of the groups."""
    modules = {
        id(parameter): module
        for module in model.modules()
        if isinstance(module, Spread)
        for parameter in module.parameters()
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    entries = dict(state["state"])
    for key, parameter in zip(keys, parameters, strict=True):
        experts = modules.get(id(parameter))
        if experts is not None and key in entries:
            entries[key] = {
                name: change(experts, name, x) if isinstance(x, Tensor) and x.ndim else x
                for name, x in entries[key].items()
            }
    return {**state, "state": entries}
