"""Changes with which a model fits that does not fit its cluster, each with its seconds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.config.plan import LARGEST_DEGREE
from moemesh.config.sources import preset_names
from moemesh.planner.search.search import SearchSpace
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.shape import ModelShape

#: Largest multiple of the given number of nodes that is tried.
_MOST_TIMES = 64


def remedies(
    shape: ModelShape,
    cluster: Cluster,
    space: Space,
    adapters: Mapping[str, Any] | None,
    progress: Callable[[str], None],
) -> Iterator[str]:
    """The options of `moemesh plan` that make the model fit: the smallest number of nodes that is
    the given one times a power of two, adapters in place of all weights (`adapters`: their shares
    of a layout; None: they cannot be tried), all weights with the optimizer on the hosts, and the
    packaged cluster of at least as many devices with the least memory a device."""
    nodes = cluster.nodes * 2
    while nodes <= cluster.nodes * _MOST_TIMES and nodes * cluster.gpus_per_node <= LARGEST_DEGREE:
        larger = cluster.model_copy(update={"nodes": nodes})
        if seconds := _seconds(shape, larger, space, progress):
            yield f"--nodes {nodes}: {seconds}"
            break
        nodes *= 2
    if adapters:
        tuned = replace(space, trained=dict(adapters))
        if seconds := _seconds(shape, cluster, tuned, progress):
            yield f"--set lora.rank=16 (adapters instead of all weights): {seconds}"
    if not space.trained:
        offloaded = replace(space, trained={"offload": "optimizer"})
        if seconds := _seconds(shape, cluster, offloaded, progress):
            yield f"--set plan.offload=optimizer (its states in host memory): {seconds}"
    packaged = [load_cluster(name) for name in preset_names("clusters")]
    packaged = [one for one in packaged if one.memory_bytes > cluster.memory_bytes]
    for other in sorted(packaged, key=lambda one: one.memory_bytes):
        nodes = ceil(cluster.num_devices / other.gpus_per_node)
        same = other.model_copy(update={"nodes": nodes})
        if seconds := _seconds(shape, same, space, progress):
            yield f"--cluster {other.name} --nodes {nodes} ({same.num_devices} devices): {seconds}"
            break


def _seconds(
    shape: ModelShape, cluster: Cluster, space: Space, progress: Callable[[str], None]
) -> str:
    """Seconds a step of the fastest layout that fits, as text; "" if none fits."""
    sizes = {"num_devices": cluster.num_devices, "node_size": cluster.gpus_per_node}
    with suppress(ConfigError):
        search = SearchSpace(shape, cluster, replace(space, **sizes), progress)
        if numbers := search.fitting(search.capacity, 1):
            return f"{search.seconds(numbers[0]):.3g} s a step"
    return ""
