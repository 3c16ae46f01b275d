"""``backward`` and ``grad`` of autograd, that keep the overrides of a tensor's class on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **given: Any,
) -> None:
    """``Tensor.backward`` and ``torch.autograd.backward``, which would run the backward with
    :meth:`DeviceTensor.__torch_function__` off."""
    roots, chosen = sequence(tensors), () if inputs is None else sequence(inputs)
    grads = sequence(given.get("gradient", grad_tensors))
    grads = grads if len(grads) == len(roots) else (None,) * len(roots)
    torch.autograd.Variable._execution_engine.run_backward(  # pyright: ignore
        roots,
        torch.autograd._make_grads(roots, grads, is_grads_batched=False),  # pyright: ignore
        bool(retain_graph or create_graph),
        create_graph,
        chosen,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def sequence(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (list, tuple)) else (x,)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, as :func:`backward`."""
    roots, grads = sequence(outputs), sequence(grad_outputs)
    grads = grads if len(grads) == len(roots) else (None,) * len(roots)
    return torch.autograd.Variable._execution_engine.run_backward(  # pyright: ignore
        roots,
        torch.autograd._make_grads(roots, grads, is_grads_batched=False),  # pyright: ignore
        bool(retain_graph or create_graph),
        create_graph,
        sequence(inputs),
        bool(allow_unused),
        accumulate_grad=False,
    )
