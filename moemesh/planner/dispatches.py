"""Dispatches with every dispatcher: bytes of a small routing by pairs of ranks, times on a
cluster."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from moemesh.config.cluster import Cluster
from moemesh.config.dispatcher_table import DISPATCHERS, PREDICTED
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.sources import read_named_table
from moemesh.config.suggest import nearest_choice, nearest_divisors
from moemesh.planner.layout_sources import plan_table, read_plan, smallest_batch
from moemesh.planner.planned_layout import ELEMENT_BYTES
from moemesh.planner.timing.columns import hardware_row
from moemesh.planner.timing.links import Links, visited_nodes
from moemesh.planner.timing.price import pricing
from moemesh.planner.traffic.dispatch_traffic import Choices, DispatchTraffic, count_choices
from moemesh.planner.traffic.exchanges import LedgerLines
from moemesh.sharding.dispatchers import expected_distinct, packed_bytes, slots_per_pair
from moemesh.trace.ledger import Ledger

# Bytes between each pair of ranks in one dispatch: the ledger's lines, kept by pairs.


class Exchange(NamedTuple):
    """One collective of a dispatch, on all groups of its axis. ``sent[i][j]`` are the bytes that
    rank i sends to rank j; the diagonal holds local bytes, which are not sent."""

    axis: str
    op: str
    phase: str
    caller: str
    sent: tuple[tuple[float, ...], ...]

    def wire_sent(self, rank: int) -> float:
        """Bytes that `rank` sends to others."""
        return sum(self.sent[rank]) - self.sent[rank][rank]

    def wire_received(self, rank: int) -> float:
        """Bytes that `rank` receives from others."""
        return sum(row[rank] for row in self.sent) - self.sent[rank][rank]


@dataclass(frozen=True, kw_only=True)
class DispatchExchanges:
    """All exchanges of one dispatch, its combine and its backward, the ledger of each rank, and the
    bytes of a dispatched and of a returned row. ``overflows``: a pair of ranks had more rows than
    fixed slots, and all ranks used the fallback of their dispatcher."""

    exchanges: tuple[Exchange, ...]
    ledgers: tuple[Ledger, ...]
    row_out: float
    row_back: float
    overflows: bool

    def of_rows(self) -> tuple[Exchange, ...]:
        """Exchanges of rows in a forward, in order of time: results take the hops of their rows in
        reverse."""
        forward = [exchange for exchange in self.exchanges if exchange.phase == "forward"]
        out = [exchange for exchange in forward if exchange.caller == "moe.dispatch"]
        back = [exchange for exchange in forward if exchange.caller == "moe.combine"]
        return (*out, *reversed(back))


ROUTINGS = "routings"
#: Dtypes of rows.
DTYPES = tuple(name for name, size in ELEMENT_BYTES.items() if size >= 2)
#: Largest number of experts, and of drawn choices of all tokens on all ranks: more would take
#: longer than seconds.
MOST_DRAWN = 1_000_000
_CHOICES = TypeAdapter(list[list[list[int]]])
_KEYS = ("about", "plan", "dispatchers", "num_experts", "hidden_size", "dtype", "experts")


@dataclass(frozen=True, kw_only=True)
class RoutingExample:
    """Tokens on the ranks of a plan with their experts: ``choices[rank][token]`` has the id of
    the expert in each slot of the token (-1: none). `about` describes the example; `dispatchers`
    are those whose exchanges are printed."""

    plan: Plan
    choices: Sequence[Choices]
    num_experts: int
    hidden_size: int = 1024
    dtype: str = "bfloat16"
    dispatchers: tuple[str, ...] = field(default_factory=lambda: tuple(PREDICTED))
    about: str = ""

    def __post_init__(self) -> None:
        plan, experts, ranks = self.plan, self.num_experts, len(self.choices)
        multiple = max(1, -(-experts // plan.ep)) * plan.ep
        problem = Problem.of
        rules = [
            (plan.pp > 1, problem("not-available", "plan.pp", plan.pp,
             "a dispatch is inside one pipeline stage", "pp = 1")),
            (plan.ep * plan.etp == 1, problem("too-small", "plan.ep", 1,
             "with ep = 1 and etp = 1 every rank keeps its rows: there is nothing to show",
             "ep = 2")),
            (experts < 1 or experts % plan.ep > 0, problem("not-divisible", "num_experts", experts,
             f"num_experts ({experts}) must be a positive multiple of ep",
             f"num_experts = {multiple}")),
            (ranks != plan.world_size, problem("shape", "experts", ranks,
             f"experts has {ranks} ranks, the plan {plan.world_size}")),
            (not 1 <= self.hidden_size <= LARGEST_SIZE,
             problem("out-of-range", "hidden_size", self.hidden_size,
             f"a row has 1 to {LARGEST_SIZE} channels")),
            (self.dtype not in DTYPES, problem("not-a-choice", "dtype", self.dtype,
             f"dtype is one of {', '.join(DTYPES)}", nearest_choice(self.dtype, DTYPES))),
            *((name not in PREDICTED, problem("not-a-choice", "dispatcher", name,
               f"dispatcher is one of {', '.join(PREDICTED)}",
               nearest_choice(name, tuple(PREDICTED)))) for name in self.dispatchers),
        ]  # fmt: skip
        problems = [broken for is_broken, broken in rules if is_broken]
        problems += islice(self._wrong_tokens(), 1)
        if problems:
            raise ConfigError(problems)

    def _wrong_tokens(self) -> Iterator[Problem]:
        """Problems of single tokens with the ids or the number of their experts."""
        for rank, tokens in enumerate(self.choices):
            for token, chosen in enumerate(tokens):
                experts = [expert for expert in chosen if expert != -1]
                where = f"rank {rank}, token {token}"
                problem = partial(Problem.of, key="experts", value=list(chosen))
                if wrong := [expert for expert in experts if not 0 <= expert < self.num_experts]:
                    message = f"{where} chose expert {wrong[0]}; experts are 0 to "
                    message += f"{self.num_experts - 1}, and -1 is none"
                    yield problem("out-of-range", message=message)
                elif len(set(experts)) < len(experts):
                    yield problem("duplicate", message=f"{where} chose an expert twice")
                elif len(chosen) != len(tokens[0]):
                    message = f"{where} has {len(chosen)} slots, token 0 {len(tokens[0])}; fill"
                    yield problem("shape", message=f"{message} with -1", fix="fill with -1")

    @property
    def slots(self) -> int:
        """Largest number of expert slots of a token."""
        return max((len(token) for tokens in self.choices for token in tokens), default=1)

    def exchanges(self, dispatcher: str) -> DispatchExchanges:
        """The exchanges of one MoE layer with `dispatcher`, for tokens with these choices. The
        number of fixed slots follows from the rank with the most tokens."""
        experts, slots = self.num_experts, self.slots
        # Only the sizes of the MoE layer are used.
        model = ModelConfig(
            num_experts=experts, experts_per_token=slots, hidden_size=self.hidden_size
        )
        plan = self.plan.model_copy(update={"dispatcher": dispatcher})
        layout, ranks = plan.layout, range(plan.world_size)
        sent = [count_choices(tokens, experts, layout, slots=slots) for tokens in self.choices]
        traffic = [
            DispatchTraffic(
                lines=LedgerLines(layout, rank),
                model=model,
                plan=plan,
                element=int(ELEMENT_BYTES[self.dtype]),
                max_tokens=max(map(len, self.choices)),
                sent_by=sent.__getitem__,
            )
            for rank in ranks
        ]
        #: Key of an exchange -> bytes from each rank to each rank.
        pairs: dict[tuple[str, str, str, str], list[list[float]]] = {}
        for rank, of_rank in enumerate(traffic):
            for counted in of_rank.exchanges():
                key, out = counted[:4], counted.amounts[0]
                peers = of_rank.lines.members(counted.axis)
                of_rank.lines.enter([counted])
                if len(peers) > 1:
                    matrix = pairs.setdefault(key, [[0.0] * len(ranks) for _ in ranks])
                    for index, peer in enumerate(peers):
                        # A gather sends the sender's block to every peer.
                        block = peers.index(rank) if counted.op == "all_gather" else index
                        matrix[rank][peer] += out[block]
        exchanges = tuple(Exchange(*key, tuple(map(tuple, rows))) for key, rows in pairs.items())
        return DispatchExchanges(
            exchanges=exchanges,
            ledgers=tuple(of_rank.lines.ledger() for of_rank in traffic),
            row_out=traffic[0].coded,
            row_back=traffic[0].plain,
            overflows={"moe.headers", "moe.counts"} <= {item.caller for item in exchanges},
        )


def random_example(
    plan: str,
    *,
    num_experts: int,
    experts_per_token: int,
    tokens: int,
    hidden_size: int,
    dtype: str,
    seed: int,
    dispatchers: Sequence[str] = (),
) -> RoutingExample:
    """`tokens` tokens on each rank of `plan`, with experts drawn with equal chance."""
    read = _plan(plan)
    # Choices of one token on every rank, and of all tokens.
    choices_each = experts_per_token * read.world_size
    choices = tokens * choices_each
    most = max(1, MOST_DRAWN // choices_each) if choices_each > 0 else 1
    beyond = partial(Problem.of, "out-of-range")
    rules = [
        (not 1 <= experts_per_token <= num_experts, beyond("experts_per_token", experts_per_token,
         f"a token has 1 to {num_experts} experts, not {experts_per_token}",
         f"--experts-per-token {max(1, min(num_experts, experts_per_token))}")),
        (num_experts % read.ep > 0, Problem.of("not-divisible", "experts", num_experts,
         f"--experts ({num_experts}) must be a multiple of ep ({read.ep})",
         f"--experts {-(-num_experts // read.ep) * read.ep}")),
        (num_experts > MOST_DRAWN, beyond("num_experts", num_experts,
         f"{num_experts} experts are more than {MOST_DRAWN}", f"--experts {MOST_DRAWN}")),
        (choices > MOST_DRAWN, beyond("tokens", tokens,
         f"{tokens} tokens on each of {read.world_size} ranks with {experts_per_token} experts "
         f"are {choices} choices, more than {MOST_DRAWN}", f"--tokens {most}")),
    ]  # fmt: skip
    for is_broken, broken in rules:
        if is_broken:
            raise ConfigError([broken])
    draw = random.Random(seed)
    drawn = [
        [sorted(draw.sample(range(num_experts), experts_per_token)) for _ in range(tokens)]
        for _ in range(read.world_size)
    ]
    return RoutingExample(
        plan=read,
        choices=drawn,
        num_experts=num_experts,
        hidden_size=hidden_size,
        dtype=dtype,
        dispatchers=tuple(dispatchers or PREDICTED),
    )


def read_example(
    source: str,
    *,
    plan: str | None = None,
    dispatchers: Sequence[str] = (),
    hidden_size: int | None = None,
    dtype: str | None = None,
) -> RoutingExample:
    """The routing of a packaged name, or of a JSON or TOML file. Arguments that are given
    override its keys. Raises ConfigError for an unreadable routing."""
    message = "neither a packaged routing nor a readable JSON or TOML file"
    table = read_named_table(source, ROUTINGS, "routing", message)

    def problem(code: str, key: str, message: str, fix: str = "") -> Problem:
        value = None if key == "experts" else table.get(key)
        return Problem(code=code, key=key, value=value, origin=source, message=message, fix=fix)

    problems = [
        problem("unknown-key", key, f"a routing has no key `{key}`", nearest_choice(key, _KEYS))
        for key in sorted(set(table).difference(_KEYS))
    ]
    fixes = {"plan": '"dp=2,ep=2"', "num_experts": "4", "experts": "[[[0, 1], [2, 3]]]"}
    problems += [
        problem("missing", key, f"a routing needs {key}", f"{key} = {fix}")
        for key, fix in fixes.items()
        if key not in table and not (key == "plan" and plan)
    ]
    kinds = {"num_experts": int, "hidden_size": int, "dtype": str, "about": str}
    problems += [
        problem("wrong-type", key, f"{key} takes a value of type {kind.__name__}")
        for key, kind in kinds.items()
        if key in table and type(table[key]) is not kind
    ]
    listed: Any = table.pop("dispatchers", [*PREDICTED])
    if not isinstance(listed, list) or not listed:
        message = "dispatchers is a list of at least one name"
        problems.append(problem("wrong-type", "dispatchers", message, '["all_to_all"]'))
    choices: list[list[list[int]]] = []
    try:
        if "experts" in table:
            choices = _CHOICES.validate_python(table.pop("experts"), strict=True)
    except ValidationError:
        message = "experts is a list of ranks, of tokens, of expert ids"
        problems.append(problem("wrong-type", "experts", message, fixes["experts"]))
    if problems:
        raise ConfigError(problems)
    given = {"hidden_size": hidden_size, "dtype": dtype}
    table |= {key: value for key, value in given.items() if value is not None}
    written = table.pop("plan", "")
    try:
        return RoutingExample(
            plan=_plan(plan or written),
            choices=choices,
            dispatchers=tuple(dispatchers) or tuple(map(str, cast("list[object]", listed))),
            **table,
        )
    except ConfigError as error:
        located = [replace(problem, origin=problem.origin or source) for problem in error.problems]
        raise ConfigError(located) from None


def _plan(text: str) -> Plan:
    """The Plan of `text`, with its sequence length and batch or arbitrary ones: tokens come from
    the routing."""
    table = plan_table(text)
    sizes = {"seq_len": 1024, "global_batch": smallest_batch(table)}
    read = read_plan(sizes | table).plan
    if read is None:
        message = "a dispatch is that of a [plan]; this has keys that no plan has"
        raise ConfigError([Problem.of("not-a-plan", "plan", text, message)])
    return read


def to_json(example: RoutingExample) -> dict[str, Any]:
    """The example as plain values: each dispatcher's exchanges with bytes by pair of ranks."""
    shown: dict[str, Any] = {}
    keys = ("axis", "op", "phase", "caller", "sent_bytes")
    for name in example.dispatchers:
        traffic = example.exchanges(name)
        shown[name] = {
            "row_bytes": {"out": traffic.row_out, "back": traffic.row_back},
            "exchanges": [dict(zip(keys, row, strict=True)) for row in traffic.exchanges],
            "wire_bytes": [ledger.total().wire_bytes for ledger in traffic.ledgers],
            "received_bytes": [ledger.total().received_bytes for ledger in traffic.ledgers],
        }
    return {"about": example.about, "experts": example.choices, "dispatchers": shown}


# One dispatch and combine under every dispatcher: copies, bytes, seconds and rate on a cluster.
#
# Each of P ranks has T tokens. Each token goes to k experts, from at most `groups_kept` of `groups`
# groups (node-limited routing). Bytes are those of one rank.
#
#     rows           a row for each choice: k T
#     slots          a row for each fixed slot: a pair of ranks has twice its mean number of rows
#     tokens         every token to every rank: P T
#     visits         a token once to each rank it visits
#     node_visits    a token once to each node it visits, and there once to each rank
#
# These are kinds of `HopRows`. The counts include rows for the sender, which are not sent. Rows for
# ranks of its node do not use the network. A direct exchange takes as long as its slower part, over
# the network card or over the links of the node; a ring has the rate of its group; latencies are
# added. Rates are the cluster's times their calibrated share, or measured ones. The printed rate is
# the bytes over the slower kind of link (of a gather: all its bytes), divided by the time of the
# exchange, as in DeepEP.


@dataclass(frozen=True, kw_only=True)
class DispatchLoad:
    """The dispatched tokens. Defaults are DeepEP's published settings: DeepSeek-V3's pre-training
    batch, dispatched in fp8 and returned in bfloat16. `groups` = 0: no limit."""

    tokens: int = 4096
    hidden_size: int = 7168
    experts: int = 256
    experts_per_token: int = 8
    groups: int = 8
    groups_kept: int = 4
    fp8: bool = True

    def check(self, ep: int) -> list[Problem]:
        """Every size out of range; else the broken rules on `ep` and groups; else a token with more
        experts than it can reach."""
        sizes = ("tokens", "hidden_size", "experts", "experts_per_token")
        problems = [
            Problem.of("out-of-range", name, value, f"it must be between 1 and {LARGEST_SIZE}", "")
            for name in sizes
            if not 1 <= (value := getattr(self, name)) <= LARGEST_SIZE
        ]
        if problems:
            return problems
        if ep < 2 or self.experts % ep:
            message = f"ep ({ep}) must be at least 2 and divide the {self.experts} experts"
            fix = f"ep = {nearest_divisors(self.experts, max(ep, 2))}"
            problems.append(Problem.of("not-divisible", "ep", ep, message, fix))
        if self.groups and (self.experts % self.groups or not 1 <= self.groups_kept <= self.groups):
            message = (
                f"groups ({self.groups}) must divide the experts ({self.experts}), and a token "
                f"keeps 1 to {self.groups} of them, not {self.groups_kept}"
            )
            key, value = "groups", self.groups
            fix = f"groups = {nearest_divisors(self.experts, self.groups)}"
            if self.experts % self.groups == 0:
                key, value, fix = "groups_kept", self.groups_kept, f"groups_kept = {self.groups}"
            problems.append(Problem.of("not-divisible", key, value, message, fix))
        reach = self.experts * self.groups_kept // self.groups if self.groups else self.experts
        if not problems and self.experts_per_token > reach:
            message = f"a token cannot choose {self.experts_per_token} of {reach} experts"
            fix = f"experts_per_token = {reach}"
            key, value = "experts_per_token", self.experts_per_token
            problems.append(Problem.of("too-large", key, value, message, fix))
        return problems

    @property
    def row_out(self) -> float:
        """Bytes of a dispatched row."""
        return packed_bytes(self.hidden_size) if self.fp8 else 2 * self.hidden_size

    @property
    def row_back(self) -> float:
        """Bytes of a returned row, in bfloat16."""
        return 2 * self.hidden_size

    def visited(self, parts: int) -> float:
        """Expected number of nodes (or ranks) out of `parts` that a token visits, if its groups,
        then its experts in them, are drawn evenly."""
        groups, kept = (self.groups, self.groups_kept) if self.groups else (1, 1)
        # Exact if a part has whole groups or a group has whole parts; else by the product form,
        # which accepts sizes that do not divide.
        if groups % parts and parts % groups:
            return float(visited_nodes(self.experts, self.experts_per_token, parts, groups, kept))
        return expected_distinct(parts, self.experts, self.experts_per_token, groups, kept)


@dataclass(frozen=True)
class Exchanged:
    """One direction: bytes that a rank sends over its network card and inside its node, seconds,
    and bytes per second over the slower kind of link (of a gather: of all bytes)."""

    across_bytes: float
    inside_bytes: float
    seconds: float
    rate: float


@dataclass(frozen=True)
class DispatchTime:
    """One dispatcher on `ep` ranks; `copies` of a token are sent to other ranks, `copies_across` to
    other nodes. ``link``: the slower kind of link, "network" or "node"."""

    ep: int
    dispatcher: str
    copies: float
    copies_across: float
    link: str
    dispatch: Exchanged
    combine: Exchanged

    def to_json(self) -> dict[str, Any]:
        """One row of the table; bytes, seconds, bytes/s."""
        return asdict(self)


def dispatch_times(
    cluster: Cluster, load: DispatchLoad, ep: int, dispatchers: Collection[str] = PREDICTED
) -> list[DispatchTime]:
    """The table for `ep` ranks; a cluster with too few nodes is extended by nodes of the same kind.
    Raises ConfigError with the broken rules."""
    problems = load.check(ep)
    node = cluster.gpus_per_node
    if ep > node and ep % node:
        message = f"ep ({ep}) spans nodes of {node} devices and must be a multiple of them"
        fix = f"ep = {-(-ep // node) * node}"
        problems.append(Problem.of("not-divisible", "ep", ep, message, fix))
    if problems:
        raise ConfigError(problems)
    prices = pricing(cluster)
    links = Links.of(hardware_row(prices.device), prices.constants, prices.table)
    node = min(node, ep)
    nodes, latency = ep // node, float(links.latency)
    #: Share of the ranks that are in other nodes.
    outside = 1 - 1 / nodes
    slots = slots_per_pair(load.tokens, load.experts_per_token, load.experts, ep) / load.tokens
    chosen = float(load.experts_per_token)
    #: Kind of rows -> copies of a token for other ranks, and copies that leave its node.
    copies = {
        "rows": (chosen * (1 - 1 / ep), chosen * outside),
        "slots": (slots * (ep - 1), slots * (ep - node)),
        "tokens": (ep - 1.0, float(ep - node)),
        "node_visits": (load.visited(ep) * (1 - 1 / ep), load.visited(nodes) * outside),
        "visits": (load.visited(ep) * (1 - 1 / ep), load.visited(ep) * outside),
    }
    times: list[DispatchTime] = []
    for name in PREDICTED:
        if name not in dispatchers:
            continue
        dispatcher = DISPATCHERS[name]
        leaving, across = copies[dispatcher.hops[0].rows]
        num_hops = 1 + (dispatcher.is_node_aware and nodes > 1)
        # A node-aware dispatch sends rows to a node once and copies them inside it.
        inside = leaving if dispatcher.is_node_aware else leaving - across
        directions: list[Exchanged] = []
        for row in (load.row_out, load.row_back):
            size = load.tokens * row
            crossing, staying = across * size, inside * size
            seconds = float("nan")
            if not dispatcher.is_node_aware and not dispatcher.has_slots:
                whole = (crossing + staying) * ep / (ep - 1)
                operation = "all_gather" if dispatcher.is_gathered else "all_to_all"
                seconds = float(links.measured(operation, ep, 1, whole))
            if np.isnan(seconds) and dispatcher.is_gathered:
                seconds = (crossing + staying) / float(links.bandwidth(ep, 1)) + (ep - 1) * latency
            elif np.isnan(seconds):
                seconds = max(crossing / links.network(nodes), staying / links.intra)
                seconds += num_hops * latency
            bottleneck = crossing if nodes > 1 else staying
            if dispatcher.is_gathered:
                bottleneck = leaving * size
            rate = bottleneck / seconds if seconds else 0.0
            directions.append(Exchanged(crossing, staying, seconds, rate))
        link = "network" if nodes > 1 else "node"
        times.append(DispatchTime(ep, name, leaving, across, link, *directions))
    return times
