"""The size of a placement problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Experts, slots, groups of experts, nodes and GPUs.

    The global policy is one group and one node.
    """

    num_experts: int
    num_slots: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def per_gpu(self) -> int:
        """Slots of a GPU."""
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

    @property
    def is_easy(self) -> bool:
        """Whether the first packing is optimal: one slot per GPU, or every expert on every GPU."""
        return self.per_gpu == 1 or self.per_gpu >= self.num_experts // self.num_nodes
