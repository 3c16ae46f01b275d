"""The optimizer over fp32 masters.

A parameter in bfloat16 has an fp32 master: the optimizer steps the master, and the parameter is its
rounded copy. Parameters in fp32 and fp64 are their own masters, unless masters are offloaded to the
host. The optimizers of :mod:`moemesh.config.optimizer_table` work element by element on local
shards, or on matrices that :mod:`moemesh.train.muon` collects from the ranks, so the result does
not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from moemesh.checkpoint.store import Shard
from moemesh.comm.mesh import Mesh
from moemesh.config.optimizer_table import OPTIMIZERS, has_matrices
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import RankModel
from moemesh.train.muon import MatrixUpdates
from moemesh.train.offload import HostGradients
from moemesh.train.owned import owned_shards


def has_master(dtype: torch.dtype) -> bool:
    """Whether the optimizer steps an fp32 copy of weights of this dtype."""
    return dtype == torch.bfloat16


class Optimizer:
    """The optimizer of :data:`OPTIMIZERS` that [train] names, on the masters that a rank owns."""

    @classmethod
    def of(cls, parallel: RankModel, config: TrainConfig, *, offload: bool = False) -> Optimizer:
        """The optimizer of what this rank owns of a model; an update also publishes the weights.
        `offload`: masters and states are in host memory, where they always are on a CPU."""
        reducer = parallel.reducer
        offload = offload and parallel.mesh.device.type != "cpu"
        return cls(
            reducer.weights,
            config,
            scales={name for name, where in parallel.placements.items() if where.is_vector},
            publish=reducer.publish,
            parts=partial(owned_shards, parallel),
            mesh=parallel.mesh,
            host=HostGradients(reducer) if offload else None,
        )

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        *,
        scales: Collection[str] | None = None,
        publish: Callable[[], None] | None = None,
        parts: Callable[[Mapping[str, Tensor]], Iterable[Shard]] | None = None,
        mesh: Mesh | None = None,
        host: HostGradients | None = None,
    ) -> None:
        """`scales`: names of parameters without weight decay (None: those of one dim). `publish`
        sends updated parameters to other ranks; all ranks must then call :meth:`step`,
        :meth:`restore` and :meth:`load_state` together. `parts` and `mesh` are needed by an
        optimizer that updates whole matrices: `parts` returns this rank's parts of local tensors
        (:func:`~moemesh.train.owned.owned_shards`). `host`: gradients in host memory, which then
        also holds masters and states."""
        self._row, self._config = OPTIMIZERS[config.optimizer], config
        self.num_updates = 0
        self._parameters, self._publish, self._host = dict(parameters), publish, host
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            master = parameter
            if has_master(parameter.dtype):
                master = nn.Parameter(parameter.detach().float())
            self.masters[name] = master if host is None else nn.Parameter(master.detach().cpu())
        #: Parameters that are not their own master, and their masters.
        rounded = [name for name in parameters if self.masters[name] is not parameters[name]]
        self._rounded: list[Tensor] = [parameters[name] for name in rounded]
        self._copied_masters: list[Tensor] = [self.masters[name] for name in rounded]
        # No decay for norms and biases: they are scales and offsets, not directions.
        if scales is None:
            scales = {name for name, master in self.masters.items() if master.ndim == 1}
        options = {name: getattr(config, key) for key, name in self._row.options.items()}
        groups: list[dict[str, Any]] = []
        rest = dict(self.masters)
        if self._row.matrix_states:
            assert parts is not None and mesh is not None
            names = [name for name in rest if has_matrices(name)]
            groups.append({"params": [rest.pop(name) for name in names], "names": names})
            dtype = torch.float64 if config.dtype == "float64" else torch.float32
            options["update"] = MatrixUpdates(mesh, parts, dtype)
        groups += [
            {"params": [m for name, m in rest.items() if name not in scales]},
            {"params": [m for name, m in rest.items() if name in scales], "weight_decay": 0.0},
        ]
        options |= {"lr": config.lr, "weight_decay": config.weight_decay, **self._row.constants}
        self._torch: torch.optim.Optimizer = resolve_name(self._row.make)(groups, **options)

    def gradients(self, reduced: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The complete gradients in the memory where :meth:`step` reads them: `reduced`, which are
        on the device of the weights, or their copies on the host, after a wait."""
        return reduced if self._host is None else self._host.wait()

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One update from complete gradients (fp32 or fp64, the shapes of the parameters)."""
        for group in self._torch.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            master.grad = gradients[name]
        self._torch.step()
        self.num_updates += 1
        for master in self.masters.values():
            master.grad = None
        self.round_masters()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copy the masters into the parameters that are not their own master, and publish."""
        if self._host is not None:
            self._host.send(self.masters, self._parameters)
        elif self._rounded:
            torch._foreach_copy_(self._rounded, self._copied_masters)
        if self._publish is not None:
            self._publish()

    def snapshot(self) -> dict[str, Any]:
        """A copy of all that a step changes, for :meth:`restore`."""
        return {
            "num_updates": self.num_updates,
            "masters": {name: master.detach().clone() for name, master in self.masters.items()},
            "torch": deepcopy(self._torch.state_dict()),
        }

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`snapshot` to the bit; its tensors become the optimizer's."""
        self.num_updates = snapshot["num_updates"]
        for name, master in self.masters.items():
            master.copy_(snapshot["masters"][name])
        self._torch.load_state_dict(snapshot["torch"])
        self.round_masters()

    def state_names(self, name: str | None = None) -> tuple[str, ...]:
        """The kinds of per-element state that this optimizer can have, of a parameter or of any."""
        if name is not None:
            return self._row.states_of(name)
        return (*self._row.matrix_states, *self._row.states)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that exist; the same on every rank, also on one that owns no part."""
        row = self._row
        has_states = not row.states_need or getattr(self._config, row.states_need)
        return self.state_names() if self.num_updates and has_states else ()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Kind ("exp_avg", ...) -> parameter name -> tensor of the local shape; empty at step 0."""
        states: dict[str, dict[str, Tensor]] = {}
        for kind in self.state_names():
            for name, master in self.masters.items():
                tensor = self._torch.state[master].get(kind)
                if tensor is not None:
                    states.setdefault(kind, {})[name] = tensor
        return states

    def counts(self) -> dict[str, int]:
        """Parameter name -> number of its updates, of parameters whose state counts them. It is
        below `num_updates` for one whose state began later: after a change of the optimizer."""
        steps: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            step = self._torch.state[master].get("step")
            if step is not None:
                steps[name] = step
        # One copy to the host: a fused kernel keeps each counter on the device.
        numbers = torch.stack([*steps.values()]).cpu() if steps else ()
        return {name: int(number) for name, number in zip(steps, numbers, strict=True)}

    def load_state(
        self,
        state: Mapping[str, Mapping[str, Tensor]],
        num_updates: int,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Restore what :meth:`state` returned after `num_updates` updates; skipped steps do not
        count. `counts`: those of :meth:`counts` that differ from it. Parameters without a state,
        such as after a change of the optimizer, start with a new one."""
        self._torch.state.clear()
        for kind, tensors in state.items():
            for name, tensor in tensors.items():
                master_state = self._torch.state[self.masters[name]]
                master_state[kind] = tensor
                if self._row.counts_steps and kind in self._row.states:
                    # A fused kernel on an accelerator refuses a step counter on the CPU.
                    device = self.masters[name].device
                    count = float((counts or {}).get(name, num_updates))
                    master_state["step"] = torch.tensor(count, device=device)
        self.num_updates = num_updates
        self.round_masters()

    def num_state_bytes(self, *, on_host: bool = False) -> int:
        """Bytes of masters that are not parameters, and of moments, on the device of the weights.
        `on_host`: instead those that are offloaded to host memory, with the gradients there."""
        if on_host != (self._host is not None):
            return 0
        moments = [tensor for kind in self.state().values() for tensor in kind.values()]
        gradients = 0 if self._host is None else self._host.num_bytes
        return gradients + sum(tensor.nbytes for tensor in [*self._copied_masters, *moments])
