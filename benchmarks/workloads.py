"""Routings W0 to W7: reproducible imbalance.

Routing is a pure function of (workload, seed, step, gid), where gid is the global id of a token:
the same logical work in every layout, however the tokens are spread. Defaults: 64 experts, 8 per
token, 4096 tokens, 8 placement groups of consecutive experts, 16 logical sources of consecutive
tokens.

| id | definition | isolates | expert max/mean | group max/mean |
|---|---|---|---|---|
| W0 | cycle(all experts) | control | 1.0 | 1.0 |
| W1 | hot(Z, 4), Z at seeded random ids | per-expert heat | 4.0 | by chance |
| W2 | hot(Z, 4), Z = first ids of group ``seed mod G`` | placement | 4.0 | 4.0 |
| W3 | hot(Z, 4), Z spread evenly over the groups | the same heat, spread | 4.0 | 1.0 |
| W4 | W0; a quarter of the sources is empty, the others grow | skewed sources | 1.0 | 1.0 |
| W5 | cycle(all but group 0 and the odd ids of group 1) | idle experts and ranks | 1.23 | 1.23 |
| W6 | W2 with group ``step mod G`` (W6p16: ``step // 16 mod G``) | stale plans | 4.0 | 4.0 |
| W7 | W0; for ``32 <= step mod 64 < 36`` W2 with heat 8 | bursts | 1.0 / 8.0 | 1.0 / 8.0 |

*cycle(ids)*: slot ``n = gid * K + k`` takes ``ids[(n + step * K) mod len(ids)]``, ids in a seeded
permutation. *hot(Z, heat)*: token t takes each hot expert i of Z with probability ``heat * K / E``
and fills up with the cold experts of smallest u(t, i). u is uniform from a counter-based hash.

Legend: T tokens, E experts, K experts per token, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.routing_shape import NUM_GROUPS, WORKLOADS, RoutingShape
from moemesh.config.layout import shard_sizes
from moemesh.ops.uniform import uniform

NUM_SOURCES = 16
HEAT, BURST_HEAT = 4.0, 8.0
#: Steps of W7's burst, in a period of 64.
BURST, BURST_PERIOD = range(32, 36), 64


class _Draw(NamedTuple):
    """What identifies a routing besides its name."""

    shape: RoutingShape
    seed: int
    step: int
    gids_T: Tensor


def workload(
    name: str,
    *,
    seed: int,
    step: int,
    gids: Tensor | range,
    num_experts: int = 64,
    experts_per_token: int = 8,
    num_groups: int = NUM_GROUPS,
) -> Tensor:
    """The experts of tokens `gids` in `step`, int64 [T, K]; K distinct ones in every row.

    Raises WorkloadError when `name` is unknown or the numbers do not allow it.
    """
    shape = RoutingShape(num_experts, experts_per_token, num_groups)
    shape.check(name)
    return _ROUTINGS[name](_Draw(shape, seed, step, _ids(gids)))


def source_sizes(
    name: str, *, num_tokens: int = 4096, num_sources: int = NUM_SOURCES
) -> tuple[int, ...]:
    """Tokens of each logical source; sources own consecutive ids.

    W4: source s weighs 0 for ``s < Q / 4``, else ``s - Q / 4 + 1``, rounded by largest remainder;
    all others: balanced.
    """
    if name != "W4":
        return shard_sizes(num_tokens, num_sources)
    empty = num_sources // 4
    weights = [max(0, source - empty + 1) for source in range(num_sources)]
    total = sum(weights)
    sizes = [num_tokens * weight // total for weight in weights]
    # Of equal remainders the first source gets the token.
    order = sorted(range(num_sources), key=lambda s: -(num_tokens * weights[s] % total))
    for source in order[: num_tokens - sum(sizes)]:
        sizes[source] += 1
    return tuple(sizes)


def rank_tokens(
    name: str, *, num_ranks: int, num_tokens: int = 4096, num_sources: int = NUM_SOURCES
) -> tuple[range, ...]:
    """The token ids of each data rank; rank r of n owns sources ``[r Q / n, (r + 1) Q / n)``."""
    sizes = source_sizes(name, num_tokens=num_tokens, num_sources=num_sources)
    starts = [sum(sizes[: rank * num_sources // num_ranks]) for rank in range(num_ranks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def _ids(gids: Tensor | range) -> Tensor:
    if isinstance(gids, Tensor):
        return gids
    return torch.arange(gids.start, gids.stop, gids.step)


def _balanced(draw: _Draw) -> Tensor:
    return _cycle(torch.arange(draw.shape.num_experts), draw)


def _hot_experts(draw: _Draw) -> Tensor:
    order = _permutation(draw.shape.num_experts, draw.seed)
    return _hot(order[: draw.shape.num_hot], HEAT, draw)


def _hot_rank(draw: _Draw) -> Tensor:
    return _hot_group(draw.seed, HEAT, draw)


def _spread_heat(draw: _Draw) -> Tensor:
    num_hot = draw.shape.num_hot
    return _hot(torch.arange(num_hot) * draw.shape.num_experts // num_hot, HEAT, draw)


def _idle(draw: _Draw) -> Tensor:
    return _cycle(torch.tensor(draw.shape.busy_experts), draw)


def _rotating(period: int) -> Callable[[_Draw], Tensor]:
    return lambda draw: _hot_group(draw.step // period, HEAT, draw)


def _burst(draw: _Draw) -> Tensor:
    if draw.step % BURST_PERIOD in BURST:
        return _hot_group(draw.seed, BURST_HEAT, draw)
    return _balanced(draw)


_ROUTINGS: dict[str, Callable[[_Draw], Tensor]] = {
    "W0": _balanced,
    "W1": _hot_experts,
    "W2": _hot_rank,
    "W3": _spread_heat,
    "W4": _balanced,
    "W5": _idle,
    "W6": _rotating(1),
    "W6p16": _rotating(16),
    "W7": _burst,
}
assert _ROUTINGS.keys() == WORKLOADS.keys()


def _cycle(ids: Tensor, draw: _Draw) -> Tensor:
    num_slots = draw.shape.experts_per_token
    slots_TK = draw.gids_T[:, None] * num_slots + torch.arange(num_slots)
    ids = ids[_permutation(len(ids), draw.seed)]
    return ids[(slots_TK + draw.step * num_slots) % len(ids)]


def _hot_group(group: int, heat: float, draw: _Draw) -> Tensor:
    first = group % draw.shape.num_groups * draw.shape.group_size
    return _hot(torch.arange(first, first + draw.shape.num_hot), heat, draw)


def _hot(hot: Tensor, heat: float, draw: _Draw) -> Tensor:
    """The hot experts that a token takes come first, then the cold by u; others only in need."""
    num_experts, num_chosen, _ = draw.shape
    experts = torch.arange(num_experts)
    key_TE = uniform(draw.seed, draw.step, draw.gids_T[:, None], experts).double()
    # At most E / K: then the probability is 1.
    probability = min(heat * num_chosen / num_experts, 1.0)
    u_TZ = key_TE[:, hot]
    key_TE[:, hot] = torch.where(u_TZ < probability, u_TZ - 1, u_TZ + 1)
    return torch.argsort(key_TE, dim=1, stable=True)[:, :num_chosen]


def _permutation(size: int, seed: int) -> Tensor:
    return torch.argsort(uniform(seed, 0, -1, torch.arange(size)), stable=True)
