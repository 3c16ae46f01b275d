"""Times of one dispatch under every dispatcher: published copies, brute-force routing, limits."""

from __future__ import annotations

import json
import random
import sys

import pytest

from moemesh import cli
from moemesh.config.cluster import LinkCurve, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.planner.dispatches import DispatchLoad, DispatchTime, dispatch_times

H800 = load_cluster("hgx_h800")
PUBLISHED = DispatchLoad()


def row(name: str, ep: int, load: DispatchLoad = PUBLISHED) -> DispatchTime:
    (found,) = dispatch_times(H800, load, ep, (name,))
    return found


def test_remote_copies_of_a_token_on_eight_nodes() -> None:
    """Without deduplication 7.0, with it 4.63, with at most four nodes 3.18."""
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
    """DeepEP prints 153 and 158 GB/s of NVLink for 8 H800."""
    found = row("all_to_all", 8)
    assert found.dispatch.rate == pytest.approx(153e9, rel=0.05)
    assert found.combine.rate == pytest.approx(158e9, rel=0.05)


def test_bytes_are_rows_times_copies() -> None:
    found = row("all_to_all", 64)
    sent = found.dispatch.across_bytes + found.dispatch.inside_bytes
    assert sent == pytest.approx(4096 * (7168 + 4 * 56) * 8 * 63 / 64)
    back = found.combine.across_bytes + found.combine.inside_bytes
    assert back == pytest.approx(4096 * 2 * 7168 * 8 * 63 / 64)
    assert row("all_gather", 8).copies == 7
    same = dispatch_times(H800, DispatchLoad(fp8=False), 8, ("all_to_all",))[0]
    assert same.dispatch == same.combine


def test_node_limited_dispatch_is_the_fastest_across_nodes() -> None:
    found = {one.dispatcher: one.dispatch.seconds for one in dispatch_times(H800, PUBLISHED, 64)}
    assert min(found, key=lambda name: found[name]) == "hierarchical"
    assert found["all_gather"] == max(found.values())


def test_faster_links_and_measured_ones_change_the_time() -> None:
    faster = H800.model_copy(update={"inter_node_bandwidth": 4 * H800.inter_node_bandwidth})
    quick = dispatch_times(faster, PUBLISHED, 64, ("all_to_all",))[0]
    assert quick.dispatch.seconds < 0.5 * row("all_to_all", 64).dispatch.seconds
    curve = LinkCurve(
        operation="all_to_all",
        ranks=8,
        members_per_node=8,
        bytes=(1e3, 1e12),
        seconds=(0.25, 0.25),
    )
    measured = H800.model_copy(update={"links": (curve,)})
    found = dispatch_times(measured, PUBLISHED, 8, ("all_to_all",))[0]
    assert found.dispatch.seconds == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("ep", "changes", "message"),
    [
        (12, {}, "divide the 256 experts"),
        (1, {}, "at least 2"),
        (4096, {}, "divide the 256 experts"),
        (8, {"groups": 7}, "must divide the experts"),
        (8, {"groups_kept": 9}, "keeps 1 to 8"),
        (8, {"experts_per_token": 200}, "cannot choose 200 of 128"),
        (8, {"tokens": 10**30}, "between 1 and"),
        (8, {"hidden_size": 0}, "between 1 and"),
    ],
)
def test_what_cannot_be_dispatched(ep: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dispatch_times(H800, DispatchLoad(**changes), ep)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moemesh", "dispatch", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        told = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, told.out, told.err

    return call


def test_the_table_of_the_verb(run) -> None:
    code, text, _ = run("--compare", "--cluster", "hgx_h800")
    assert code == 0
    assert "4,096 tokens a rank, 7,168 channels, 8 of 256 experts, from 4 of 8 groups" in text
    assert max(map(len, text.splitlines())) <= 80
    assert sum(line.split()[1:2] == ["hierarchical"] for line in text.splitlines()) == 4
    words = ("--tokens", "128", "--groups", "0", "--ep", "16", "--dispatcher", "low_latency")
    _, text, _ = run("--compare", "--cluster", "hgx_h800", *words, "--json")
    (found,) = json.loads(text)
    assert (found["ep"], found["dispatcher"]) == (16, "low_latency")
    assert found["copies"] == pytest.approx(2 * 8 / 16 * 15)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare"], "--cluster"),
        (["--cluster", "hgx_h800"], "goes with --compare"),
        (["even-all-to-all", "--compare", "--cluster", "hgx_h800"], "leave one out"),
        (["--compare", "--cluster", "hgx_h800", "--payload", "fp7"], "fp8"),
        (["--compare", "--cluster", "hgx_h800", "--dispatcher", "hierachical"], "hierarchical"),
        (["--compare", "--cluster", "hgx_h800", "--ep", "12"], "ep = "),
    ],
)
def test_mistakes_of_the_verb(run, words: list[str], message: str) -> None:
    code, _, told = run(*words)
    assert code == 2
    assert message in told
