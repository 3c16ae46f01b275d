"""Who sends which rows to whom: the seed texts' examples, and pairs that add up to the ledger."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.cluster import LinkCurve, load_cluster
from moemesh.config.dispatcher_table import PREDICTED
from moemesh.config.errors import ConfigError
from moemesh.config.plan import Plan
from moemesh.planner.dispatches import (
    DispatchLoad,
    DispatchTime,
    RoutingExample,
    dispatch_times,
    random_example,
    read_example,
)
from tests.test_cli import Invoke

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/seed_examples.json").read_text())


def rows(example: RoutingExample, caller: str) -> list[list[float]]:
    (name,) = example.dispatchers
    traffic = example.exchanges(name)
    (one,) = [one for one in traffic.of_rows() if one.caller == caller]
    size = traffic.row_out if caller == "moe.dispatch" else traffic.row_back
    return [[sent / size for sent in line] for line in one.sent]


def received(sent: list[list[float]]) -> list[list[int]]:
    """Senders of the rows of each rank, in the order of the rows."""
    ranks = range(len(sent))
    return [[sender for sender in ranks for _ in range(int(sent[sender][to]))] for to in ranks]


def test_even_all_to_all() -> None:
    sent = rows(read_example("even-all-to-all"), "moe.dispatch")
    assert received(sent) == GOLDEN["all_to_all"]["even"]["after"]


def test_uneven_all_to_all_and_its_counts() -> None:
    golden, example = GOLDEN["all_to_all"]["uneven"], read_example("uneven-all-to-all")
    sent = rows(example, "moe.dispatch")
    assert sent == [golden["input_splits_on_every_rank"]] * golden["world"]
    assert received(sent) == golden["after"]
    # The first phase: every rank sends one count (int64) to every other.
    counts = example.exchanges("all_to_all").exchanges[0]
    assert counts.caller == "moe.counts"
    assert {size for line in counts.sent for size in line} == {8.0}


def test_uneven_reduce_scatter() -> None:
    golden, example = GOLDEN["uneven_reduce_scatter"], read_example("uneven-reduce-scatter")
    for rank, tokens in golden["tokens_owned_and_routed_here"].items():
        routed = [i for i, chosen in enumerate(example.choices[int(rank)]) if chosen[0] >= 0]
        assert routed == [int(name[1]) - 1 for name in tokens]
    sent = rows(example, "moe.combine")
    assert [sent[rank][rank] for rank in range(4)] == golden["rows_kept"]
    assert [sum(sent[rank]) - sent[rank][rank] for rank in range(4)] == golden["rows_sent"]
    columns = [sum(line[rank] for line in sent) - sent[rank][rank] for rank in range(4)]
    assert columns == golden["rows_received"]


@given(
    dispatcher=st.sampled_from(tuple(PREDICTED)),
    dp=st.sampled_from([2, 4, 8]),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2]),
    ranks_per_node=st.sampled_from([0, 2, 4]),
    tokens=st.integers(0, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_pairs_add_up_to_the_ledger(
    dispatcher: str, dp: int, ep: int, etp: int, ranks_per_node: int, tokens: int, seed: int
) -> None:
    plan = Plan(dp=dp, ep=ep, etp=etp, ranks_per_node=ranks_per_node or None)
    if ep * etp == 1 or plan.check() or ep * etp > dp:
        return
    text = f"dp={dp},ep={ep},etp={etp}" + (
        f",ranks_per_node={ranks_per_node}" if ranks_per_node else ""
    )
    sizes: dict[str, Any] = {"num_experts": 8, "experts_per_token": 3, "hidden_size": 64}
    example = random_example(text, tokens=tokens, dtype="bfloat16", seed=seed, **sizes)
    traffic = example.exchanges(dispatcher)
    for rank, ledger in enumerate(traffic.ledgers):
        total = ledger.total()
        assert total.wire_bytes == sum(one.wire_sent(rank) for one in traffic.exchanges)
        assert total.received_bytes == sum(one.wire_received(rank) for one in traffic.exchanges)


def test_results_take_the_way_of_their_rows_backwards() -> None:
    sizes: dict[str, Any] = {"tokens": 4, "hidden_size": 8, "dtype": "float32", "seed": 1}
    sizes |= {"num_experts": 8, "experts_per_token": 2}
    example = random_example("dp=4,ep=4,ranks_per_node=2", **sizes)
    hops = [(one.caller, one.axis) for one in example.exchanges("hierarchical").of_rows()]
    out, back = (
        [axis for name, axis in hops if name == f"moe.{way}"] for way in ("dispatch", "combine")
    )
    assert out == ["ep_rail", "ep_node"] == back[::-1]
    sent, returned = example.exchanges("all_to_all").of_rows()
    assert returned.sent == tuple(zip(*sent.sent, strict=True))


def test_a_file_without_experts(tmp_path: Path) -> None:
    """Other mistakes in a file are in ``tests/mistakes``."""
    for content, words in (("[1]", "a table of keys"), ('{"plan": "dp=2,ep=2"}', "needs")):
        (tmp_path / "routing.json").write_text(content)
        with pytest.raises(ConfigError, match=words):
            read_example(str(tmp_path / "routing.json"))


# Times of one dispatch under every dispatcher: published copies, brute-force routing, limits.


H800 = load_cluster("hgx_h800")
PUBLISHED = DispatchLoad()


def row(name: str, ep: int, load: DispatchLoad = PUBLISHED) -> DispatchTime:
    (prediction,) = dispatch_times(H800, load, ep, (name,))
    return prediction


def test_remote_copies_of_a_token_on_eight_nodes() -> None:
    """Copies of a row: 7.0 without deduplication, 4.63 with it, 3.18 with at most four nodes."""
    free = DispatchLoad(groups=0)
    assert row("all_to_all", 64).copies_across == pytest.approx(7.0)
    assert row("hierarchical", 64, free).copies_across == pytest.approx(4.63, abs=0.005)
    assert row("hierarchical", 64).copies_across == pytest.approx(3.18, abs=0.005)


@pytest.mark.parametrize(("groups", "kept"), [(0, 0), (8, 4), (8, 2), (2, 1), (16, 5)])
@pytest.mark.parametrize("places", [2, 8, 32])
def test_visited_places_are_those_of_drawn_tokens(groups: int, kept: int, places: int) -> None:
    load = DispatchLoad(experts=64, experts_per_token=4, groups=groups, groups_kept=kept)
    draw, total, tokens = random.Random(0), 0, 6000
    for _ in range(tokens):
        chosen = draw.sample(range(groups), kept) if groups else [0]
        size = 64 // (groups or 1)
        reach = [group * size + one for group in chosen for one in range(size)]
        total += len({expert * places // 64 for expert in draw.sample(reach, 4)})
    assert load.visited(places) == pytest.approx(total / tokens, rel=0.02)


def test_published_settings_inside_a_node_reach_the_published_rate() -> None:
    """DeepEP prints 153 and 158 GB/s for 8 H800."""
    times = row("all_to_all", 8)
    assert times.dispatch.rate == pytest.approx(153e9, rel=0.05)
    assert times.combine.rate == pytest.approx(158e9, rel=0.05)


def test_faster_links_and_measured_ones_change_the_time() -> None:
    faster = H800.model_copy(update={"inter_node_bandwidth": 4 * H800.inter_node_bandwidth})
    quick = dispatch_times(faster, PUBLISHED, 64, ("all_to_all",))[0]
    assert quick.dispatch.seconds < 0.5 * row("all_to_all", 64).dispatch.seconds
    curve = LinkCurve(
        operation="all_to_all", ranks=8, members_per_node=8, bytes=(1e3, 1e12), seconds=(0.25, 0.25)
    )
    measured = H800.model_copy(update={"links": (curve,)})
    times = dispatch_times(measured, PUBLISHED, 8, ("all_to_all",))[0]
    assert times.dispatch.seconds == pytest.approx(0.25)


def test_the_table_of_the_verb(invoke: Invoke) -> None:
    code, text, _ = invoke("dispatch", "--compare", "--cluster", "hgx_h800")
    assert code == 0
    assert "4,096 tokens a rank, 7,168 channels, 8 of 256 experts, from 4 of 8 groups" in text
    assert max(map(len, text.splitlines())) <= 80
    assert sum(line.split()[1:2] == ["hierarchical"] for line in text.splitlines()) == 4
    words = ("--tokens", "128", "--groups", "0", "--ep", "16", "--dispatcher", "low_latency")
    _, text, _ = invoke("dispatch", "--compare", "--cluster", "hgx_h800", *words, "--json")
    (priced,) = json.loads(text)
    assert (priced["ep"], priced["dispatcher"]) == (16, "low_latency")
    assert priced["copies"] == pytest.approx(2 * 8 / 16 * 15)


@pytest.mark.parametrize(("experts", "ranks"), [(48, {8, 16}), (7, {7})])
def test_other_experts_have_no_groups_and_their_own_ranks(
    invoke: Invoke, experts: int, ranks: set[int]
) -> None:
    given = ("--cluster", "hgx_h800", "--experts", str(experts), "--experts-per-token", "2")
    code, text, err = invoke("dispatch", "--compare", *given, "--json")
    assert code == 0, err
    assert {row["ep"] for row in json.loads(text)} == ranks
