"""Training by transformers and torch.optim: a plain loop, to compare ours with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moemesh.config.train import TrainConfig


class Step(NamedTuple):
    """The inputs of one step, its targets with -100 where there is no loss, and which tokens are no
    padding: all [B, S]."""

    tokens_BS: Tensor
    targets_BS: Tensor
    valid_BS: Tensor | None = None


class InDouble(TorchFunctionMode):
    """transformers computes norms, rotary positions, gates and losses in float32 whatever the dtype
    of a model. Here, what asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        keywords = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **keywords)


def arithmetic(dtype: torch.dtype) -> Any:
    """The context in which a model of this dtype is made and run."""
    return InDouble() if dtype == torch.float64 else nullcontext()


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder, as it is trained."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    ).train()


def groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Norms, biases and sinks do not decay."""
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_vector = parameter.ndim < 2 or name.endswith("_bias")
        (others if is_vector else decaying).append(parameter)
    return [
        {"params": decaying, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


def schedule(train: TrainConfig) -> Callable[[int], float]:
    """For torch's LambdaLR, which counts from 0."""

    def factor(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        progress = (step + 1 - train.warmup_steps) / (train.steps - train.warmup_steps)
        low = train.final_lr_ratio
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def train_plainly(
    folder: Path, steps: Iterable[Step], train: TrainConfig, **options: Any
) -> tuple[list[float], Any]:
    """The loss of every step, auxiliary loss included, and the trained model."""
    dtype = getattr(torch, train.dtype)
    losses: list[float] = []
    with arithmetic(dtype):
        model = load(folder, dtype)
        parameters = groups(model, train.weight_decay)
        optimizer: torch.optim.Optimizer
        if train.optimizer == "adamw":
            optimizer = torch.optim.AdamW(
                parameters, lr=train.lr, betas=train.adam_betas, eps=train.epsilon
            )
        else:
            optimizer = torch.optim.SGD(parameters, lr=train.lr, momentum=train.momentum)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(train))
        for tokens_BS, targets_BS, valid_BS in steps:
            loss = model(
                tokens_BS,
                attention_mask=None if valid_BS is None else valid_BS.long(),
                labels=targets_BS,
                shift_labels=targets_BS.contiguous(),
                use_cache=False,
                **options,
            ).loss
            optimizer.zero_grad()
            loss.backward()
            if train.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            rates.step()
            losses.append(loss.item())
    return losses, model
