"""The group of ranks of a `MoELayer`: its axes, and the dispatchers that layers on it share."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moemesh.comm import launch
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.dispatcher import Dispatcher
from moemesh.parallel.expert.build import tested_dispatcher
from moemesh.parallel.expert.spread import LayerError


def axes_of(group: ProcessGroup | DeviceMesh | None) -> tuple[Axis, Axis]:
    """The axis that shares the experts, and the axis of their replicas."""
    alone = Mesh.single("cpu")["ep"]
    is_running = dist.is_available() and dist.is_initialized()
    if group is None and is_running:
        group = dist.group.WORLD
    if group is None:
        if (started := launch.num_joined()) > 1:
            raise LayerError(
                f"{started} ranks were started, but there is no process group: call "
                "torch.distributed.init_process_group() before the layer is built"
            )
        return alone, alone
    if not is_running:
        raise LayerError(
            "the process group of the layer is not initialized: call "
            "torch.distributed.init_process_group() first, or leave group out"
        )
    try:
        if isinstance(group, DeviceMesh) and group.ndim == 2:
            replicas, ranks = group.get_all_groups()
            return Axis.from_group(ranks, "ep"), Axis.from_group(replicas, "edp")
        return Axis.from_group(group, "ep"), alone
    except ValueError as error:
        raise LayerError(str(error)) from error


class Connection:
    """A mesh over the group, and its dispatchers: the layers of a model share them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.dispatchers: dict[tuple[object, ...], Dispatcher] = {}

    @classmethod
    def over(cls, ranks: Axis, device: torch.device) -> Connection:
        """That of another layer of the group, or a new one."""
        if ranks.group is None:
            return cls(Mesh.single(device))
        # The connection keeps the group alive, so no other object has its id.
        key = (id(ranks.group), device)
        found = _CONNECTIONS.get(key)
        if found is None:
            node = launch.ranks_of_a_node(ranks.ranks)
            layout = Layout(dp=ranks.size, ep=ranks.size, ranks_per_node=node)
            found = _CONNECTIONS[key] = cls(Mesh.from_group(ranks.group, layout, device))
        return found

    def dispatcher(
        self, config: ModelConfig, plan: Plan, dtype: torch.dtype, num_tokens: int
    ) -> Dispatcher:
        """The dispatcher of layers with these options."""
        key = (config, plan, dtype, num_tokens)
        if key not in self.dispatchers:
            self.dispatchers[key], _ = tested_dispatcher(
                config, plan, self.mesh, dtype=dtype, tokens_per_rank=num_tokens
            )
        return self.dispatchers[key]


_CONNECTIONS: WeakValueDictionary[tuple[int, torch.device], Connection] = WeakValueDictionary()
