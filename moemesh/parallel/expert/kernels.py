"""The kernel of a run's experts: checked and timed on the device when the run starts.

Legend: T tokens, K slots per token, H hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.model.dispatcher import LocalDispatcher, LocalRows
from moemesh.model.experts import Experts
from moemesh.model.transformer import Transformer
from moemesh.ops.expert_kernels import KERNELS, ExpertKernel, computes
from moemesh.ops.expert_weights import ExpertWeights

#: Name of our own operations in ``train.experts``.
PLAIN_PATH = "grouped_mm"
#: Largest difference of a kernel from our own operations that counts as rounding of bfloat16,
#: relative to the largest number.
TOLERANCE = 0.03
#: Untimed calls (kernels compile and tune themselves in these), and timed calls.
WARM_UP, ROUNDS = 2, 5


def set_kernel(
    model: Transformer, wanted: str, mesh: Mesh, *, tokens_per_rank: int, defers: bool
) -> list[str]:
    """Set the kernel `wanted` (``train.experts``) of all experts, on every rank or on none; returns
    a line on the choice, none if nothing was tried. All ranks must call it. `defers`: the schedule
    defers weight gradients."""
    is_measured = mesh.device.type == "cuda" and bool(model.config.routed_layers)
    if wanted == PLAIN_PATH or (wanted == "auto" and not is_measured):
        return []
    layers = [moe.experts for moe in model.moe_layers().values()]
    num_slots = model.config.experts_per_token
    if not all(isinstance(moe.dispatcher, LocalDispatcher) for moe in model.moe_layers().values()):
        # After an exchange a row has one expert.
        tokens_per_rank, num_slots = tokens_per_rank * num_slots, 1
    seconds, reasons, kernels = dict[str, float](), dict[str, str](), dict[str, ExpertKernel]()
    for name in KERNELS if wanted == "auto" else [wanted]:
        package = KERNELS[name]
        if reason := package.missing(mesh.device):
            reasons[name] = reason
        elif defers:
            reasons[name] = "plan.schedule defers weight gradients, which it cannot"
        elif layers and not computes(layers[0].weights):
            reasons[name] = "it computes plain SwiGLU without biases, adapters and frozen experts"
        elif layers:
            inputs = inputs_of(layers[0], tokens_per_rank, num_slots)
            if PLAIN_PATH not in seconds:
                seconds[PLAIN_PATH] = measured_seconds(plain_path, inputs)
            try:
                kernels[name] = kernel = package.load()
                seconds[name] = checked_seconds(kernel, inputs)
            except Exception as error:
                # Other versions of a package may raise any exception: the plain path replaces it.
                line = next(iter(str(error).splitlines()), "")
                reasons[name] = f"{package.package} {package.version}: {line or repr(error)}"
    # A kernel is as fast as on its slowest rank.
    ranks = gather_json([seconds, reasons], mesh.control)
    reasons = {name: reason for _, of_rank in ranks for name, reason in of_rank.items()}
    seconds = {
        name: max(of_rank[name] for of_rank, _ in ranks if name in of_rank)
        for name in {name: None for of_rank, _ in ranks for name in of_rank}
        if name not in reasons
    }
    chosen = min(seconds, key=lambda name: seconds[name], default=PLAIN_PATH)
    if wanted != "auto":
        chosen = PLAIN_PATH if wanted in reasons else wanted
    for experts in layers:
        experts.kernel = kernels.get(chosen)
    version = f" {KERNELS[chosen].version}" if chosen in KERNELS else ""
    parts = [f"{name} {1e3 * value:.2f} ms a layer" for name, value in seconds.items()]
    parts += [f"{name}: {reason}" for name, reason in reasons.items()]
    return [f"experts {wanted}: {chosen}{version} ({'; '.join(parts)})"]


def inputs_of(experts: Experts, num_tokens: int, num_slots: int) -> list[Tensor]:
    """Random tokens [T, H], random weights [T, K], experts [T, K] that get equal numbers of tokens,
    and random matrices of a layer: gate and up, and down."""
    like = experts.gate_up
    device, dtype, num_experts = like.device, like.dtype, like.shape[0]
    num_slots = min(num_slots, num_experts)
    x_TH = torch.randn(num_tokens, like.shape[-1], device=device, dtype=dtype)
    weights_TK = torch.rand(num_tokens, num_slots, device=device)
    places_TK = torch.arange(num_tokens * num_slots, device=device).view(num_tokens, num_slots)
    weights = [
        torch.randn(weight.shape, device=device, dtype=dtype).mul_(weight.shape[-1] ** -0.5)
        for weight in (experts.gate_up, experts.down)
    ]
    for leaf in (x_TH, weights_TK, *weights):
        leaf.requires_grad_()
    return [x_TH, weights_TK, places_TK % num_experts, *weights]


def plain_path(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Our own operations as an :data:`~moemesh.ops.expert_kernels.ExpertKernel`."""
    slots = LocalDispatcher(gate_up.shape[0]).plan_complete(experts_TK)
    rows = LocalRows(x_TH, slots.tokens, weights_TK, slots)
    return rows.compute(ExpertWeights(gate_up, down))


def checked_seconds(kernel: ExpertKernel, inputs: list[Tensor]) -> float:
    """:func:`measured_seconds` of a kernel. Raises ValueError with the difference if its output or
    gradients are not those of the plain path."""
    expected = forward_and_backward(plain_path, inputs)
    for ours, theirs in zip(expected, forward_and_backward(kernel, inputs), strict=True):
        difference = float((ours - theirs).abs().max() / ours.abs().max())
        if not difference <= TOLERANCE:
            raise ValueError(
                f"its numbers differ by {difference:.2g} of the largest from those of "
                f"{PLAIN_PATH}, at most {TOLERANCE} is rounding"
            )
    return measured_seconds(kernel, inputs)


def measured_seconds(kernel: ExpertKernel, inputs: list[Tensor]) -> float:
    """Median seconds of a forward and backward."""
    wait: Callable[[], None] = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    times: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        wait()
        start = time.perf_counter()
        forward_and_backward(kernel, inputs)
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def forward_and_backward(kernel: ExpertKernel, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of tokens, router's weights, gate and up, and down."""
    y_TH = kernel(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return [y_TH.detach(), *torch.autograd.grad(y_TH, leaves, torch.ones_like(y_TH))]
