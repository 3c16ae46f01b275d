"""Rows above the bound: how often a rank was sent more rows than it computes at once.

``Experts.max_rows`` keeps memory below a bound under any routing, by computing what lies above it
in blocks, each once more in the backward. That is slow, and whoever waits for it should be told.
"""

from __future__ import annotations

from collections.abc import Callable

from moemesh.comm.collectives import gather_json
from moemesh.parallel.parallelize import ParallelModel


def tell_bounded(parallel: ParallelModel, step: int, say: Callable[[str, str], None]) -> None:
    """Say (kind "rows") which ranks had more rows than the bound, in which layers, since the last
    call; all ranks call."""
    own: list[tuple[int, int, int]] = []
    for layer, moe in parallel.model.moe_layers().items():
        if moe.experts.num_bounded:
            own.append((layer, moe.experts.num_bounded, moe.experts.max_rows or 0))
            moe.experts.num_bounded = 0
    told = gather_json(own, parallel.mesh.control)
    for rank, found in enumerate(told):
        if not found:
            continue
        calls, bound = sum(number for _, number, _ in found), found[0][2]
        layers = ", ".join(str(layer) for layer, _, _ in found)
        say(
            f"step {step}: rank {rank} was sent more than {bound} rows in {calls} forwards of "
            f"layers {layers} since the last checkpoint: computed in pieces, which is slower",
            "rows",
        )
