"""`benchmarks.device`: one MoE layer on simulated CUDA devices, by its kernels and exchanges.

Forward and backward in bfloat16, counted in the second call, beside transformers' layer of the same
sizes. The roofline is that of the implementation, kernel by kernel, on the data sheet of a cluster:
the larger of operations over peak and bytes over bandwidth, and a launch each. Beside it stands the
planner's time of the same layer, a prediction from the sizes alone.
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.exposure import exposed_exchanges
from benchmarks.layer_rank import INIT_STD, single_sequence
from benchmarks.ranks import on_ranks
from benchmarks.settings import DeviceSettings
from benchmarks.shapes import SHAPES, LayerShape
from benchmarks.simulated_device import CUDA, Kernel, SimulatedDevice
from benchmarks.simulated_device.timeline import kernel_seconds
from moemesh.bench.settings import BenchError
from moemesh.config.cluster import Cluster, load_cluster
from moemesh.model.moe import MoE
from moemesh.ops.expert_kernels import KERNELS
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import from_model_config
from moemesh.planner.timing.columns import hardware_row, layout_row, model_row
from moemesh.planner.timing.compute import PricedStep, expert_block, longer
from moemesh.planner.timing.price import pricing, software_of


def run(settings: DeviceSettings, found: Path | None = None) -> dict[str, Any] | None:
    """The tables; None where another rank has them. ConfigError for a cluster that cannot be read,
    or whose file has unknown constants."""
    machine, whole = load_cluster(settings.cluster), SHAPES[settings.shape]
    size = whole.counted
    planned = planned_seconds(size, machine)
    exposed: list[dict[str, Any]] | None = []
    if settings.ranks > 1:
        measure = partial(exposed_exchanges, size, machine)
        ranks = settings.ranks
        exposed = on_ranks("device", settings, measure, num_ranks=ranks, found=found)
        if exposed is None:
            return None
    rows: list[dict[str, Any]] = []
    for name, contender in CONTENDERS.items():
        measured = contender.measured(whole)
        counted = contender.counted(size, machine)
        if counted is None and measured["seconds"] is None:
            continue
        rows.append({"name": name, **(counted or {}), "measured": measured})
        if settings.out:  # a run that is cut off has the rows so far
            with Path(settings.out).open("a", encoding="utf-8") as file:
                print(json.dumps({"shape": settings.shape, **rows[-1]}), file=file)
    return {
        "shape": settings.shape,
        "counted": str(size),
        "cluster": machine.name,
        "torch": torch.__version__,
        "rows": rows,
        "planned": planned._asdict(),
        "ranks": settings.ranks,
        "exposed": exposed,
    }


class PlannedLayer(NamedTuple):
    """The planner's seconds of a MoE layer, forward and backward: of its device alone, and with
    what the calibrated software stack's host adds."""

    device: float
    with_host: float


def planned_seconds(shape: LayerShape, machine: Cluster) -> PlannedLayer:
    """From the sizes, by the time model of `moemesh plan`."""
    priced = pricing(machine)
    model = from_model_config(shape.config)
    layout = PlannedLayout(seq_len=shape.tokens, global_batch=1)
    work = PricedStep(
        model=model_row(model),
        layout=layout_row(model, layout, software_of(layout)),
        hardware=hardware_row(priced.device),
        constants=priced.constants,
    )
    block = expert_block(work)
    # The backward computes both gradients of every product.
    forward = float(block.products + block.elementwise)
    host = float(block.overhead)
    return PlannedLayer(
        3 * forward, float(longer(forward, host)) + float(longer(2 * forward, 2 * host))
    )


Layer = tuple[nn.Module, Callable[[Tensor], Tensor]]


def count_layer(
    shape: LayerShape,
    machine: Cluster,
    make: Callable[[LayerShape], Layer | None],
    *,
    fuses: bool = True,
) -> dict[str, Any] | None:
    """Counts of forward and backward; None where the layer is not installed."""
    with SimulatedDevice(fuses=fuses) as device:
        made = make(shape)
        if made is None:
            return None
        module, forward = made
        for turn in ("warm-up ", ""):
            module.zero_grad(set_to_none=True)
            x_TH = torch.randn(shape.tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
            x_TH.requires_grad_()
            with device.region(f"{turn}forward"):
                y_TH = forward(x_TH)
            upstream_TH = torch.ones_like(y_TH)
            with device.region(f"{turn}backward"):
                y_TH.backward(upstream_TH)
        parts = [device.totals("forward"), device.totals("backward")]
        launched = [kernel for part in parts for kernel in part.launched]
        return {
            "kernels": [part.kernels for part in parts],
            "bytes": [part.bytes for part in parts],
            "waits": [part.waits for part in parts],
            "lines": sorted({wait.line for part in parts for wait in part.waited}),
            "roofline_seconds": roofline_seconds(launched, machine),
        }


def measured_seconds(shape: LayerShape, layer: Layer, *, rounds: int = 30) -> float:
    """Forward and backward on this machine's GPU, by events, a median."""
    module, forward = layer
    size = (shape.tokens, shape.hidden)
    upstream_TH = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    taken: list[float] = []
    for _ in range(rounds + 5):
        module.zero_grad(set_to_none=True)
        x_TH = torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        forward(x_TH).backward(upstream_TH)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken[5:])  # the first ones compile


def roofline_seconds(kernels: Iterable[Kernel], machine: Cluster) -> float:
    """The least time of these kernels, one after the other, on a device of `machine`."""
    return sum(kernel_seconds(kernel, machine) for kernel in kernels)


def _own_layer(shape: LayerShape, kernel: str | None = None) -> Layer:
    layer = MoE(shape.config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=INIT_STD)
    layer.experts.to(torch.bfloat16)
    layer.to("cuda")
    if kernel is not None:
        if reason := KERNELS[kernel].missing(CUDA):
            raise BenchError(reason)
        layer.experts.kernel = KERNELS[kernel].load()
    context = single_sequence(shape.tokens)
    moved = {
        name: value.to(CUDA) for name, value in vars(context).items() if isinstance(value, Tensor)
    }
    context = replace(context, **moved)
    return layer, lambda x_TH: layer(x_TH, context).y_TH


def _transformers_layer(shape: LayerShape) -> Layer | None:
    try:
        configuration: Any = importlib.import_module("transformers.models.qwen3_moe")
        modeling: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        make: Callable[[Any], nn.Module] = modeling.Qwen3MoeSparseMoeBlock
    except (ImportError, AttributeError):
        return None
    config = configuration.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    block = make(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=INIT_STD)
    block = block.to(torch.bfloat16).to("cuda")

    def forward(x_TH: Tensor) -> Tensor:
        found = block(x_TH[None])
        return (found[0] if isinstance(found, tuple) else found).view(x_TH.shape)

    return block, forward


class Contender(NamedTuple):
    """A way to compute the layer. `fuses`: pointwise functions are compiled; `is_counted`: it runs
    on a simulated device."""

    make: Callable[[LayerShape], Layer | None]
    fuses: bool = True
    is_counted: bool = True
    is_ours: bool = True

    def counted(self, shape: LayerShape, machine: Cluster) -> dict[str, Any] | None:
        """Counts on a simulated device; None where the layer is not installed."""
        if not self.is_counted:
            return None
        return count_layer(shape, machine, self.make, fuses=self.fuses)

    def measured(self, shape: LayerShape) -> dict[str, Any]:
        """Seconds, operations a second and peak bytes on this machine's GPU, or why there are
        none."""
        if not torch.cuda.is_available() or not self.fuses:
            return {"seconds": None, "reason": "no GPU"}
        torch.cuda.reset_peak_memory_stats()
        try:
            if (layer := self.make(shape)) is None:
                return {"seconds": None, "reason": "not installed"}
            seconds = measured_seconds(shape, layer)
        except Exception as error:  # a kernel of another package: the next contender runs
            return {"seconds": None, "reason": next(iter(str(error).splitlines()), repr(error))}
        return {
            "seconds": seconds,
            "flops_per_second": shape.flops / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }


CONTENDERS = {
    "moemesh": Contender(_own_layer),
    "moemesh, nothing compiled": Contender(_own_layer, fuses=False),
    "transformers, grouped_mm": Contender(_transformers_layer, is_ours=False),
} | {
    f"moemesh, {name}": Contender(partial(_own_layer, kernel=name), is_counted=False)
    for name in KERNELS
}


if __name__ == "__main__":
    from benchmarks.application import main

    main("device")
