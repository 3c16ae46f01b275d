"""Exposed communication of a MoE layer, dispatcher by dispatcher, on simulated devices.

All ranks compute forward and backward of the layer behind its router, on gloo, with tokens that
choose their experts at random; what they queue is laid out in time by the data sheet of a cluster
(:mod:`benchmarks.simulated_device.timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.contenders import Work, layer_step, make_layer
from benchmarks.shapes import LayerShape
from benchmarks.simulated_device import CUDA, Kernel, SimulatedDevice
from benchmarks.simulated_device.counts import Arrival, Exchange, Queued
from benchmarks.simulated_device.timeline import simulate
from moemesh.comm import collectives, launch
from moemesh.comm.mesh import Mesh
from moemesh.config.cluster import Cluster
from moemesh.config.layout import Layout, shard_sizes
from moemesh.config.plan import Plan
from moemesh.parallel.expert.build import make_dispatcher

#: Dispatchers with their numbers of chunks.
CASES = [
    ("all_to_all", 1),
    ("all_to_all", 2),
    ("all_to_all", 4),
    ("all_gather", 1),
    ("low_latency", 1),
    ("hierarchical", 1),
]


def exposed_exchanges(
    shape: LayerShape, machine: Cluster, ranks: launch.Ranks
) -> list[dict[str, Any]]:
    """Of every case, means over ranks in seconds: the layer's, its kernels', its exchanges', what
    of them is exposed, and what ranks waited for each other."""
    num_ranks = ranks.world_size
    # Two emulated nodes where the ranks fit on one: else hierarchical has one hop only.
    node = machine.gpus_per_node if num_ranks > machine.gpus_per_node else max(num_ranks // 2, 1)
    layout = Layout(dp=num_ranks, ep=num_ranks, ranks_per_node=node)
    found: list[dict[str, Any]] = []
    with SimulatedDevice() as device:
        mesh = Mesh.create(layout, "cuda:0")
        for name, chunks in CASES:
            region = f"{name} {chunks}"
            _run(device, region, shape, mesh, name, chunks)
            own = [_to_json(one) for one in device.totals(region).queued]
            queues = collectives.gather_json(own, mesh.control)
            lines = simulate([[_from_json(one) for one in queue] for queue in queues], machine)
            columns = {
                "seconds": [one.seconds for one in lines],
                "kernels": [one.computing for one in lines],
                "exchanges": [one.transferring() for one in lines],
                "exposed": [one.exposed() for one in lines],
                "late": [one.late for one in lines],
            }
            means = {key: sum(values) / num_ranks for key, values in columns.items()}
            found.append({"dispatcher": name, "chunks": chunks, **means})
    return found


def _run(
    device: SimulatedDevice, region: str, shape: LayerShape, mesh: Mesh, name: str, chunks: int
) -> None:
    config, num_ranks, rank = shape.config, mesh["ep"].size, mesh["ep"].index
    tokens = shard_sizes(shape.tokens, num_ranks)[rank]
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    scores_TE = torch.rand(tokens, shape.num_experts, generator=generator)
    weights_TK = torch.full((tokens, shape.top_k), 1 / shape.top_k)
    work = Work(
        experts_TK=scores_TE.argsort(1)[:, : shape.top_k].to(CUDA),
        weights_TK=weights_TK.to(CUDA),
        x_TH=x_TH.to(CUDA),
        gradient_TH=torch.ones_like(x_TH).to(CUDA),
        counts_L=torch.empty(0),
        input_splits=[],
        output_splits=[],
    )
    layer = make_layer(config, num_ranks, rank, torch.bfloat16)
    layer.experts.to("cuda")
    plan = Plan(dp=num_ranks, ep=num_ranks, ranks_per_node=mesh.layout.ranks_per_node)
    most = max(shard_sizes(shape.tokens, num_ranks))
    dispatcher = make_dispatcher(name, config, plan, mesh, most)
    step = layer_step(layer, dispatcher, num_chunks=chunks)
    step(work)
    with device.region(region):
        step(work)


def _to_json(one: Queued) -> list[Any]:
    values = [str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x for x in one]
    return [type(one).__name__, *values]


def _from_json(values: Sequence[Any]) -> Queued:
    kind, *rest = values
    if kind == "Kernel":
        *sizes, dtype, line = rest
        return Kernel(*sizes, getattr(torch, dtype), line)
    if kind == "Arrival":
        return Arrival(*rest)
    name, caller, num_bytes, ranks, stream, number = rest
    return Exchange(name, caller, num_bytes, tuple(ranks), stream, number)
