"""Bandwidth by shape of the group, node-limited routing, tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.config.cluster import LinkCurve
from moemesh.planner.timing.links import Links, LinkTable, members_per_node, visited_nodes
from moemesh.sharding.dispatchers import expected_distinct


def test_group_bandwidth_counts_members_per_node():
    """Measured all-reduce on 2 x 8 A100: 44.7, 20.8, 16.2, 8.1 GB/s with 8, 4, 2, 1 members."""
    links = Links(node_size=8, intra=250e9, inter=5.6e9)
    bandwidths = [float(links.bandwidth(2 * q, 8 // q)) for q in (8, 4, 2, 1)]
    assert bandwidths == pytest.approx([44.8e9, 22.4e9, 11.2e9, 5.6e9])
    assert links.bandwidth(8, 1) == 250e9
    assert replace(links, inter=100e9).bandwidth(64, 1) == 250e9


def test_members_per_node_never_exceed_the_group():
    assert members_per_node(4, 1, 8) == 4
    assert members_per_node(64, 2, 8) == 4
    assert members_per_node(64, 16, 8) == 1


def test_contention_is_a_power_of_the_nodes():
    plain = Links(node_size=8, intra=250e9, inter=5e9)
    crowded = replace(plain, contention=0.1)
    assert plain.bandwidth(128, 1) / crowded.bandwidth(128, 1) == pytest.approx(16**0.1)


def test_a_ring_has_a_hop_for_each_rank():
    """A ring of 32 ranks on 4 nodes has 28 hops inside a node, 4 between nodes."""
    links = Links(node_size=8, intra=250e9, inter=5e9)
    assert links.ring_latency(8, 1) == pytest.approx(7 * 3.4e-6)
    assert links.ring_latency(32, 1) == pytest.approx(28 * 3.4e-6 + 4 * 14e-6)
    # Members of tensor groups of 8 are on nodes of their own.
    assert links.ring_latency(4, 8) == pytest.approx(4 * 14e-6)


@given(nodes=st.sampled_from([1, 2, 4, 8, 16]), per_node=st.integers(1, 32), k=st.integers(1, 12))
def test_smooth_nodes_equal_the_binomials(nodes, per_node, k):
    experts = nodes * per_node
    if k > experts:
        return
    visited = visited_nodes(experts, k, nodes, 1, 1)
    assert visited == pytest.approx(expected_distinct(nodes, experts, k), rel=1e-9)


def curve(**times: float) -> LinkCurve:
    """An all-reduce of 8 ranks in one node; `times` are seconds by size, "e6" bytes and so on."""
    return LinkCurve(
        operation="all_reduce",
        ranks=8,
        members_per_node=8,
        bytes=tuple(float(f"1{size}") for size in times),
        seconds=tuple(times.values()),
    )


def test_table_interpolates_in_logarithms():
    table = LinkTable([curve(e6=1e-4, e8=1e-3)])
    times = table.column("all_reduce", 8, 8, np.array([1e7, 1e6, 1e3, 1e9]))
    assert times == pytest.approx([np.sqrt(1e-7), 1e-4, 1e-4, 1e-2], rel=1e-9)
    twice = LinkTable([curve(e6=1e-4), curve(e6=3e-4)])
    assert twice.column("all_reduce", 8, 8, 1e6) == pytest.approx(2e-4)


def test_table_has_no_answer_for_what_was_not_measured():
    table = LinkTable([curve(e6=1e-4)])
    assert np.isnan(table.column("all_reduce", 16, 8, 1e6))
    assert np.isnan(table.column("all_gather", 8, 8, 1e6))
