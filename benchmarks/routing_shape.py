"""Names and sizes of the routings that a benchmark imposes (`workloads.py` makes them)."""

# Light to import: the command reads it to know its options.
from typing import NamedTuple

from moemesh.bench.settings import BenchError, described

#: Routings by name.
WORKLOADS = {
    "W0": "all experts evenly",
    "W1": "some experts 4 times hotter, anywhere",
    "W2": "4 times hotter experts, all in one placement group",
    "W3": "4 times hotter experts, spread over the groups",
    "W4": "even experts; a quarter of the token sources is empty",
    "W5": "one and a half groups idle",
    "W6": "W2, another group each step",
    "W6p16": "W2, another group every 16 steps",
    "W7": "W0 with bursts: 4 of 64 steps send 8 times as much to one group",
}
#: Placement groups where none are asked for.
NUM_GROUPS = 8


class WorkloadError(BenchError):
    """A workload that cannot be made with these numbers."""


class RoutingShape(NamedTuple):
    """The numbers of a routing: E experts, K of them a token, and G placement groups."""

    num_experts: int
    experts_per_token: int
    num_groups: int = NUM_GROUPS

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups

    @property
    def num_hot(self) -> int:
        return min(self.experts_per_token, self.group_size)

    @property
    def busy_experts(self) -> tuple[int, ...]:
        """The experts that W5 does not leave idle."""
        second = range(self.group_size, 2 * self.group_size)
        rest = range(2 * self.group_size, self.num_experts)
        return (*(expert for expert in second if expert % 2 == 0), *rest)

    def check(self, name: str) -> None:
        """Raises WorkloadError where workload `name` does not exist for these numbers."""
        num_experts, num_chosen, num_groups = self
        if name not in WORKLOADS:
            raise WorkloadError(f"no workload {name!r} here:\n{described(WORKLOADS)}")
        if not 1 <= num_chosen <= num_experts:
            raise WorkloadError(
                f"top-k ({num_chosen}) must lie between 1 and experts ({num_experts})"
            )
        if num_groups < 1 or num_experts % num_groups:
            raise WorkloadError(f"groups ({num_groups}) must divide experts ({num_experts})")
        if name == "W5" and len(self.busy_experts) < num_chosen:
            raise WorkloadError(
                f"W5 leaves {len(self.busy_experts)} of {num_experts} experts, "
                f"fewer than top-k ({num_chosen})"
            )
