"""The section [lora]: low-rank adapters of frozen weights (Hu et al., 2021, arXiv:2106.09685).

A projection with weight W [out, in] that `targets` names computes ``x W^T + s (x A^T) B^T``: A is
[rank, in], B is [out, rank] and zero at first, s the :attr:`LoraConfig.scaling`. Names are those of
transformers and PEFT; several projections may be parts of one parameter of ours (``qkv``, or
``gate_up``), and each expert has an A and a B of its own.

| parameter | shape | sharded | gradient summed over |
|---|---|---|---|
| A | [rank, in] | as the input of the weight is | the axis of the weight, and those that cut "out" |
| B | [the part of the weight, rank] | as its output | the axis of the weight, and those that cut "in" |
| both, of experts | [E, ...] | also over ep | edp; edp_etp if etp does not shard the factor |

If a factor is not sharded although the weight is, each rank computes a part of its gradient: the
sum is over the ranks of the weight's shards, too.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

from moemesh.config.errors import Problem
from moemesh.config.section import Count, Positive, Section

#: Target name for every projection of attention and MLPs, experts included.
ALL_LINEAR = "all-linear"
#: The two files of a folder of adapters, as PEFT writes it: sizes, and tensors.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Values of fields of PEFT's LoraConfig that adapter_config.json may leave out.
PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False}
#: Numbers in a block of NF4 (:mod:`moemesh.ops.nf4`), and its bytes: 4 bits each, 4 for the scale.
NF4_BLOCK, NF4_BLOCK_BYTES = 64, 36
#: Most packed numbers that are (de)quantized at a time, unless one expert or row has more.
NF4_NUMBERS_AT_ONCE = 1 << 26


def packed_bytes(columns: int) -> int:
    """Bytes of a row of `columns` numbers in NF4."""
    return columns // 2 + 4 * math.ceil(columns / NF4_BLOCK)


class LoraConfig(Section):
    """The adapters of a run; ``rank = 0`` is none."""

    section: ClassVar[str] = "lora"

    rank: Count = 0
    alpha: Positive = 16.0
    #: Projections that have an adapter, by transformers' names.
    targets: tuple[str, ...] = (ALL_LINEAR,)
    #: alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, 2023, arXiv:2312.03732).
    rslora: bool = False
    #: Form of the frozen weights of attention, MLPs and experts: the run's dtype, or 4 bits.
    base: Literal["same", "nf4"] = "same"
    #: A folder of PEFT's whose adapters the run starts from; None: B is zero.
    path: str | None = None

    @property
    def trains(self) -> tuple[str, ...]:
        """Patterns over the names of adapters, which train; empty if there are none."""
        return ("*_lora_A", "*_lora_B") if self.rank else ()

    @property
    def is_packed(self) -> bool:
        """Whether frozen weights are held in NF4."""
        return self.base == "nf4"

    @property
    def scaling(self) -> float:
        """The number that the product of the factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def check(self) -> list[Problem]:
        """Problems of the section by itself."""
        problems = self.range_problems()
        if not self.rank and self.path is not None:
            message = f"path ({self.path}) names adapters, and rank = 0 means that there are none"
            fix = "leave rank out: it is that of the folder"
            problems.append(self.problem("conflict", "path", message, fix, "rank"))
        if not self.rank and self.is_packed:
            message = "base = nf4 holds weights that do not train, and rank = 0 trains all of them"
            problems.append(self.problem("conflict", "base", message, "rank = 16", "rank"))
        if self.rank and not self.targets:
            message = "targets is empty: no projection would have an adapter"
            problems.append(
                self.problem("empty", "targets", message, f'targets = ["{ALL_LINEAR}"]')
            )
        return problems

    def adapts(self, target: str) -> bool:
        """Whether the projection `target` has an adapter."""
        return bool(self.rank) and (target in self.targets or ALL_LINEAR in self.targets)

    @property
    def adapts_mlps(self) -> bool:
        """Whether a projection of MLPs, and so of experts, has an adapter."""
        return any(map(self.adapts, ("gate_proj", "up_proj", "down_proj")))


#: A model without adapters.
NO_ADAPTERS = LoraConfig()


class TargetPart(NamedTuple):
    """The part of a parameter that is the projection `target`: `size` indices of `dim` from `start`
    on; `dim` None: the whole parameter. In a stack of experts, `dim` is a dim of one expert."""

    target: str
    dim: int | None = None
    start: int = 0
    size: int = 0

    def shape(self, whole: tuple[int, ...], *, is_stack: bool) -> tuple[int, ...]:
        """The shape of the part, from that of the whole parameter."""
        if self.dim is None:
            return whole
        place = self.dim + is_stack
        return (*whole[:place], self.size, *whole[place + 1 :])


class Factor(NamedTuple):
    """One adapter parameter: the end of its name, its shape, which axis shards which dim, and the
    axis that its gradient is summed over."""

    leaf: str
    shape: tuple[int, ...]
    shards: dict[str, int]
    summed_over: str


#: Parts of parameters, by the end of the parameter's name; a part without dim is all of it.
_GATE_UP = (TargetPart("gate_proj", 0, 0, 1), TargetPart("up_proj", 0, 1, 1))
_WHOLE = {
    "up": "up_proj",
    "down": "down_proj",
    "output": "o_proj",
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_up": "kv_b_proj",
}
#: An axis of gradients, and the axis that cuts weights of its class -> the axis over both.
_WIDER = {("dp_cp", "tp"): "stage", ("edp", "etp"): "edp_etp"}


def parts_of(leaf: str, shape: tuple[int, ...]) -> tuple[TargetPart, ...]:
    """The projections that the parameter `leaf` of this shape holds; () for other parameters."""
    if leaf == "qkv":  # [key/value heads, their query heads + a key + a value, head dim, hidden]
        groups = shape[1] - 2
        return (
            TargetPart("q_proj", 1, 0, groups),
            TargetPart("k_proj", 1, groups, 1),
            TargetPart("v_proj", 1, groups + 1, 1),
        )
    if leaf == "gate_up":
        return _GATE_UP
    return (TargetPart(_WHOLE[leaf]),) if leaf in _WHOLE else ()


def factors_of(
    lora: LoraConfig,
    parts: Iterable[TargetPart],
    shape: tuple[int, ...],
    shards: Mapping[str, int],
    summed_over: str,
    *,
    is_stack: bool,
) -> Iterator[Factor]:
    """Adapter parameters of the `parts` of one parameter of this `shape`, in order. `shards`: mesh
    axis -> dim of the parameter that it shards; `summed_over`: the axis that its gradient is summed
    over; `is_stack`: its first dim is the expert."""
    last = len(shape) - 1
    first = 1 if is_stack else 0
    for part in parts:
        if not lora.adapts(part.target):
            continue
        *rows, inputs = part.shape(shape, is_stack=is_stack)
        # Dims of the weight -> dims of the factor.
        a_dims = {0: 0, last: first + 1} if is_stack else {last: 1}
        b_dims = {dim: dim for dim in range(last)}
        for name, dims, factor_shape in (
            ("A", a_dims, (*shape[:first], lora.rank, inputs)),
            ("B", b_dims, (*rows, lora.rank)),
        ):
            axis = summed_over
            for mesh_axis, dim in shards.items():
                if dim not in dims:
                    axis = _WIDER[axis, mesh_axis]
            factor_shards = {name: dims[dim] for name, dim in shards.items() if dim in dims}
            yield Factor(factor_name(part.target, name), factor_shape, factor_shards, axis)


def factor_name(target: str, factor: str) -> str:
    """The end of the name of an adapter parameter; `factor` is A or B."""
    return f"{target}_lora_{factor}"


def is_adapter(name: str) -> bool:
    """Whether `name` is that of an adapter parameter, or of its optimizer state."""
    return name.endswith(("_lora_A", "_lora_B"))
