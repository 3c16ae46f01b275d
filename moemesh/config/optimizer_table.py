"""Optimizers by name, one row each: constructor, options, states, advice.

An optimizer is a row of :data:`OPTIMIZERS`; its class is torch's, or a similar one in a module of
its own. Configuration, training, checkpoints, the planner's memory and the advice before a run read
the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Last parts of the names of parameters that consist of weight matrices: those of attention, MLPs
#: and experts. Embedding, head, norms, biases, routers and adapters are others.
MATRICES = frozenset(
    (
        *("qkv", "query", "query_down", "query_up", "key_value_down", "key_value_up", "output"),
        *("gate_up", "down"),
    )
)


def has_matrices(name: str) -> bool:
    """Whether the parameter `name` consists of weight matrices."""
    return name.rpartition(".")[2] in MATRICES


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """Facts on an optimizer for code outside of its class."""

    #: "module:class" of an optimizer; gets groups, lr, weight_decay, `options`, `constants`.
    make: str
    #: Names of the state tensors of a parameter; each has the shape of the parameter, and the dtype
    #: of its gradient.
    states: tuple[str, ...]
    #: State tensors of parameters that consist of weight matrices
    #: (:mod:`moemesh.sharding.matrices`), which the class updates as a whole; empty: `states`.
    matrix_states: tuple[str, ...] = ()
    #: Keys of [train] that only some optimizers read -> arguments of the class.
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    #: Arguments of the class that no key sets.
    constants: Mapping[str, object] = field(default_factory=dict[str, object])
    #: Key of [train]: if it is 0, the class keeps no states; empty: it always keeps them.
    states_need: str = ""
    #: Whether parameters with `states` also have a state "step", the number of their updates.
    counts_steps: bool = False
    #: Multiple of the usual learning rate from which a rate is probably a mistake.
    high_rate: int = 10

    def states_of(self, name: str) -> tuple[str, ...]:
        """Names of the state tensors of the parameter `name`."""
        return self.matrix_states if self.matrix_states and has_matrices(name) else self.states


#: Optimizers by name, in the order of messages and tables.
OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        make="torch.optim:AdamW",
        states=("exp_avg", "exp_avg_sq"),
        options={"adam_betas": "betas", "epsilon": "eps"},
        constants={"fused": True},
        counts_steps=True,
    ),
    "sgd": OptimizerRow(
        make="torch.optim:SGD",
        states=("momentum_buffer",),
        options={"momentum": "momentum"},
        states_need="momentum",
        high_rate=1000,
    ),
    "muon": OptimizerRow(
        make="moemesh.train.muon:Muon",
        states=("exp_avg", "exp_avg_sq"),
        matrix_states=("momentum_buffer",),
        options={"muon_momentum": "momentum", "adam_betas": "betas", "epsilon": "eps"},
        counts_steps=True,
    ),
}
#: Names of the rows that every rank has; a program may add others.
PACKAGED = frozenset(OPTIMIZERS)
