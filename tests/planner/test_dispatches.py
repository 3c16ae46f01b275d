"""Who sends which rows to whom: the seed texts' examples, and pairs that add up to the ledger."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.errors import ConfigError
from moemesh.config.plan import Plan
from moemesh.planner.dispatches import (
    DISPATCHERS,
    Exchange,
    RoutingExample,
    random_example,
    read_example,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/seed_examples.json").read_text())


def rows(example: RoutingExample, caller: str) -> list[list[float]]:
    (name,) = example.dispatchers
    found = example.exchanges(name)
    (one,) = [one for one in found.of_rows() if one.caller == caller]
    size = found.row_out if caller == "moe.dispatch" else found.row_back
    return [[sent / size for sent in line] for line in one.sent]


def received(sent: list[list[float]]) -> list[list[int]]:
    """Of each rank, the senders of its rows, in their order."""
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
    dispatcher=st.sampled_from(DISPATCHERS),
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
    example = random_example(
        text,
        num_experts=8,
        experts_per_token=3,
        tokens=tokens,
        hidden_size=64,
        dtype="bfloat16",
        seed=seed,
    )
    found = example.exchanges(dispatcher)
    for rank, ledger in enumerate(found.ledgers):
        assert total(ledger.rows(), "wire_bytes") == sum(x.wire_sent(rank) for x in found.exchanges)
        assert total(ledger.rows(), "received_bytes") == sum(
            x.wire_received(rank) for x in found.exchanges
        )


def total(lines: list[dict[str, Any]], key: str) -> int:
    return sum(line[key] for line in lines)


def test_results_take_the_hops_of_their_rows_backwards() -> None:
    example = random_example(
        "dp=4,ep=4,ranks_per_node=2",
        num_experts=8,
        experts_per_token=2,
        tokens=4,
        hidden_size=8,
        dtype="float32",
        seed=1,
    )
    hops = [(one.caller, one.axis) for one in example.exchanges("hierarchical").of_rows()]
    out, back = (
        [axis for name, axis in hops if name == "moe.dispatch"],
        [axis for name, axis in hops if name == "moe.combine"],
    )
    assert out == ["ep_rail", "ep_node"] == back[::-1]


def transposed(one: Exchange) -> tuple[tuple[float, ...], ...]:
    return tuple(zip(*one.sent, strict=True))


def test_all_to_all_sends_results_where_rows_came_from() -> None:
    example = random_example(
        "dp=3,ep=3",
        num_experts=6,
        experts_per_token=2,
        tokens=5,
        hidden_size=8,
        dtype="float32",
        seed=0,
    )
    out, back = example.exchanges("all_to_all").of_rows()
    assert back.sent == transposed(out)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"plan": "dp=2,ep=2", "num_experts": 2}', "needs experts"),
        ('{"plan": "dp=2,ep=2", "num_experts": 2, "experts": [[[0]]]}', "experts has 1 ranks"),
        ('{"plan": "dp=2,ep=2", "num_experts": 2, "experts": [[[0]], [[2]]]}', "chose expert 2"),
        ('{"plan": "dp=2,ep=2", "num_experts": 2, "experts": [[[0, 0]], [[1, 0]]]}', "twice"),
        ('{"plan": "dp=2,ep=2", "num_experts": 3, "experts": [[[0]], [[2]]]}', "multiple of ep"),
        ('{"plan": "dp=2,ep=2", "num_experts": 2, "experts": [0, 1]}', "list of ranks"),
        ('{"plan": "dp=2,ep=2", "num_experts": 2, "experts": [[[0], [0, 1]], []]}', "slots"),
        ('{"plan": "dp=2", "num_experts": 2, "experts": [[[0]], [[1]]]}', "nothing to show"),
        ('{"plan": "dp=2,ep=2", "num_expert": 2}', "no key `num_expert`"),
        ("[1]", "a table of keys"),
        ("{", "syntax"),
    ],
)
def test_wrong_files(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "routing.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_example(str(file))
