"""Changes that make a model fit its cluster, each with its seconds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
#: Shortest sequence that is tried.
_SHORTEST = 512

#: Options of `moemesh plan` that need less memory -> fields of the layouts (`Space.trained`); the
#: best first.
Tunings = Mapping[str, Mapping[str, Any]]
#: All layouts of the model on a cluster in a space.
Search = Callable[[Cluster, Space], SearchSpace]


def remedies(
    shape: ModelShape,
    cluster: Cluster,
    space: Space,
    tunings: Sequence[Tunings],
    progress: Callable[[str], None],
) -> Iterator[str]:
    """Options of `moemesh plan` that make the model fit, in this order:

    - the smallest number of nodes that is the given one times a power of two;
    - of each group of `tunings` the first that fits: fewer weights train, the others have fewer
      bits, the optimizer is on the hosts;
    - if none fits, the longest half, quarter, ... of the sequence with which one of them, or no
      option, fits;
    - the first packaged cluster, by the memory of a device, that has more memory a device and on
      which the model fits, with at least the same number of devices.
    """
    search = partial(SearchSpace, shape, progress=progress)
    nodes = cluster.nodes * 2
    while nodes <= cluster.nodes * _MOST_TIMES and nodes * cluster.gpus_per_node <= LARGEST_DEGREE:
        larger = cluster.model_copy(update={"nodes": nodes})
        if seconds := _seconds(search, larger, space):
            yield f"--nodes {nodes}: {seconds}"
            break
        nodes *= 2
    tuned = [_first(search, cluster, space, group) for group in tunings]
    yield from filter(None, tuned)
    #: Options ("": none) -> fields of the layouts.
    all_tunings, length = {"": space.trained}, space.seq_len // 2
    for group in tunings:
        all_tunings |= group
    while not any(tuned) and length >= _SHORTEST:
        shorter = {
            f"--seq-len {length} {options}".rstrip(): shares
            for options, shares in all_tunings.items()
        }
        tuned = [_first(search, cluster, replace(space, seq_len=length), shorter)]
        yield from filter(None, tuned)
        length //= 2
    packaged = [load_cluster(name) for name in preset_names("clusters")]
    candidates = [other for other in packaged if other.memory_bytes > cluster.memory_bytes]
    for other in sorted(candidates, key=lambda other: other.memory_bytes):
        nodes = ceil(cluster.num_devices / other.gpus_per_node)
        other = other.model_copy(update={"nodes": nodes})
        if seconds := _seconds(search, other, space):
            yield f"--cluster {other.name} --nodes {nodes} ({other.num_devices} devices): {seconds}"
            break


def _first(search: Search, cluster: Cluster, space: Space, group: Tunings) -> str:
    """The first options of `group` with which the model fits, with their seconds; "" if none do."""
    for options, shares in group.items():
        if seconds := _seconds(search, cluster, replace(space, trained=dict(shares))):
            return f"{options}: {seconds}"
    return ""


def _seconds(search: Search, cluster: Cluster, space: Space) -> str:
    """Seconds a step of the fastest layout that fits, as text; "" if none fits."""
    sizes = {"num_devices": cluster.num_devices, "node_size": cluster.gpus_per_node}
    with suppress(ConfigError):
        searched = search(cluster, replace(space, **sizes))
        if fastest := searched.fitting(searched.capacity, 1):
            return f"{searched.seconds(fastest[0]):.3g} s a step"
    return ""
