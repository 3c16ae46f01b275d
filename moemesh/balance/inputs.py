"""Checks of loads, placements and sizes (tensors, arrays, lists), and results of the same type."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moemesh.balance.compiled import Floats, Ints
from moemesh.config.errors import UserError
from moemesh.config.suggest import nearest_divisors

Policy = Literal["hierarchical", "global"]
Effort = Literal["fast", "quality"] | float
#: Maximum number of slots of a layer, so that a typing error does not fill the memory.
MOST_SLOTS = 2**20
#: Longest search in seconds.
MOST_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of experts, slots, groups of experts, nodes and GPUs. Under the global policy there
    is one group and one node."""

    num_experts: int
    num_slots: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def per_gpu(self) -> int:
        """Number of slots of a GPU. The properties below are numbers of a node."""
        return self.num_slots // self.num_gpus

    @property
    def node_slots(self) -> int:
        return self.num_slots // self.num_nodes

    @property
    def node_gpus(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def node_groups(self) -> int:
        return self.num_groups // self.num_nodes


class BalanceError(UserError):
    """Loads, placements, sizes or files that cannot be used; the message has the reason."""


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """A numpy array of a tensor, array or nested list. Raises BalanceError."""
    if is_tensor(value):
        if value.is_meta or value.layout != sys.modules["torch"].strided:
            kind = "a tensor on the meta device" if value.is_meta else f"of {value.layout}"
            raise BalanceError(f"{name} must be numbers in a dense tensor, and is {kind}")
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise BalanceError(f"{name}: the rows have different lengths") from error
    if array.dtype.kind not in "iufb":
        raise BalanceError(f"{name} must be numbers, and holds {array.dtype}")
    return array


def like(given: Any, *results: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """`results` in the type of `given`: CPU tensors for a tensor, lists for a list, else arrays."""
    if is_tensor(given):
        torch: Any = sys.modules["torch"]
        return tuple(torch.from_numpy(result) for result in results)
    if isinstance(given, (list, tuple)):
        return tuple(result.tolist() for result in results)
    return results


def check_loads(weight: Any, name: str = "weight") -> Floats:
    """Loads [layers, experts] as float64: finite, not negative, at least one layer and one expert.
    Raises BalanceError."""
    array = to_array(weight, name)
    if array.ndim != 2:
        hint = "; for one layer give [loads]" if array.ndim == 1 else ""
        raise BalanceError(f"{name} must be layers x experts, and has {array.ndim} dims{hint}")
    if not array.size:
        raise BalanceError(f"{name} is empty: {array.shape[0]} layers x {array.shape[1]} experts")
    loads = np.ascontiguousarray(array, np.float64)
    wrong = ~np.isfinite(loads) | (loads < 0)
    if wrong.any():
        layer, expert = (int(index) for index in np.argwhere(wrong)[0])
        more = f" (and {wrong.sum() - 1} more)" if wrong.sum() > 1 else ""
        raise BalanceError(
            f"{name}: the load of expert {expert} in layer {layer} is "
            f"{loads[layer, expert]:g}{more}; loads are finite and not negative"
        )
    return loads


def scaled(loads: Floats) -> Floats:
    """Loads times a power of two per layer: the largest is in [0.5, 1), so squares do not overflow,
    nor do those of large loads underflow."""
    top = loads.max(axis=1, keepdims=True)
    exponent = np.frexp(top)[1]
    # Loads below 2**-1074 of their layer's largest round to 0, as they would in a sum.
    return np.ldexp(loads, -exponent)


def check_count(value: Any, name: str) -> int:
    """`value` as a whole number of at least 1. Raises BalanceError."""
    try:
        number = int(value)
    except (TypeError, ValueError) as error:
        raise BalanceError(f"{name} must be a whole number, and is {value!r}") from error
    if number != value or number < 1:
        raise BalanceError(f"{name} must be a whole number of at least 1, and is {value}")
    return number


def check_shape(
    num_experts: int,
    num_replicas: Any,
    num_groups: Any,
    num_nodes: Any,
    num_gpus: Any,
    policy: Policy | None,
) -> Shape:
    """The shape of the problem under a policy; None is hierarchical if groups fit the nodes. Raises
    BalanceError with the numbers and the nearest legal value."""
    num_replicas = check_count(num_replicas, "num_replicas")
    num_groups = check_count(num_groups, "num_groups")
    num_nodes = check_count(num_nodes, "num_nodes")
    num_gpus = check_count(num_gpus, "num_gpus")
    for name, number in (("num_replicas", num_replicas), ("num_gpus", num_gpus)):
        if number > MOST_SLOTS:
            raise BalanceError(f"{name} ({number}) exceeds {MOST_SLOTS}")
    if policy not in (None, "hierarchical", "global"):
        raise BalanceError(f"no policy {policy!r}: choose hierarchical or global")
    if num_replicas < num_experts:
        fit = math.ceil(num_experts / num_gpus) * num_gpus
        raise BalanceError(
            f"num_replicas ({num_replicas}) must hold every one of {num_experts} experts: at least "
            f"{fit} on {num_gpus} GPUs"
        )
    if num_replicas % num_gpus:
        above = math.ceil(num_replicas / num_gpus) * num_gpus
        below = above - num_gpus
        choice = f"{below} or {above}" if below >= num_experts else str(above)
        count = f"{num_replicas}{', one of each expert' if num_replicas == num_experts else ''}"
        raise BalanceError(
            f"num_gpus ({num_gpus}) must divide num_replicas ({count}): take {choice} replicas"
        )
    if num_groups > num_experts:
        raise BalanceError(f"num_groups ({num_groups}) must not exceed the {num_experts} experts")
    if num_experts % num_groups:
        near = nearest_divisors(num_experts, num_groups)
        raise BalanceError(
            f"num_groups ({num_groups}) must divide the {num_experts} experts: take {near}"
        )
    if policy is None:
        policy = "hierarchical" if num_groups % num_nodes == 0 else "global"
    elif policy == "hierarchical" and num_groups % num_nodes:
        near = nearest_divisors(num_groups, num_nodes)
        raise BalanceError(
            f"num_nodes ({num_nodes}) must divide num_groups ({num_groups}) for the hierarchical "
            f"policy: take {near} nodes, or the global policy"
        )
    if policy == "global":
        num_groups, num_nodes = 1, 1
    if num_gpus % num_nodes:
        near = nearest_divisors(num_gpus, num_nodes)
        raise BalanceError(
            f"num_nodes ({num_nodes}) must divide num_gpus ({num_gpus}): take {near} nodes, or the "
            "global policy"
        )
    return Shape(
        num_experts=num_experts,
        num_slots=num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_gpus=num_gpus,
    )


def check_effort(effort: Any) -> Effort:
    """`effort` as "fast", "quality" or seconds. Raises BalanceError."""
    if effort in ("fast", "quality"):
        return effort
    if isinstance(effort, bool) or not isinstance(effort, (int, float)) or not effort >= 0:
        raise BalanceError(f"no effort {effort!r}: choose fast, quality or a number of seconds")
    if effort > MOST_SECONDS:
        raise BalanceError(
            f"an effort of {effort:g} seconds exceeds {MOST_SECONDS}, which is a day"
        )
    return float(effort)


def check_placement(
    placement: Any, num_experts: int, num_gpus: Any, num_layers: int, name: str
) -> Ints:
    """Slots [layers, slots] of logical experts, every expert at least once in every layer. Raises
    BalanceError."""
    array = to_array(placement, name)
    if array.ndim != 2 or array.shape[0] != num_layers or not array.size:
        shape = " x ".join(str(size) for size in array.shape)
        raise BalanceError(
            f"{name} must be {num_layers} layers x slots, and is {shape or 'one number'}"
        )
    with np.errstate(invalid="ignore"):  # NaN and large numbers differ from their integers
        slots = np.ascontiguousarray(array, np.int64)
    num_gpus = check_count(num_gpus, "num_gpus")
    if (slots != array).any():
        raise BalanceError(f"{name} must hold whole numbers of experts")
    if slots.shape[1] % num_gpus:
        raise BalanceError(
            f"num_gpus ({num_gpus}) must divide the {slots.shape[1]} slots of {name}: take "
            f"{nearest_divisors(slots.shape[1], num_gpus)}"
        )
    if slots.min() < 0 or slots.max() >= num_experts:
        wrong = slots.min() if slots.min() < 0 else slots.max()
        raise BalanceError(f"{name} names expert {wrong}: there are experts 0 to {num_experts - 1}")
    for layer, row in enumerate(slots):
        missing = np.flatnonzero(np.bincount(row, minlength=num_experts) == 0)
        if len(missing):
            raise BalanceError(f"{name}: expert {missing[0]} has no slot in layer {layer}")
    return slots
