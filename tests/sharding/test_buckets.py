"""Buckets of parameters: which travel together, and which rank owns what of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from moemesh.config.layout import SHARDED_AXES, Layout
from moemesh.sharding import buckets as rules
from moemesh.sharding.buckets import Bucket, Member, buckets, owned_sizes, unit_of


def member(
    name: str, numbers: int, axis: str = "dp_cp", size: int = 4, stages: tuple[int, ...] = (0,)
) -> Member:
    return Member(name=name, numbers=numbers, weight_bytes=size, axis=axis, stages=stages)


MODEL = [
    member("embedding.weight", 8),
    member("layers.0.attention_norm.weight", 2, "stage"),
    member("layers.0.attention.qkv", 6),
    member("layers.1.attention_norm.weight", 2, "stage", stages=(1,)),
    member("layers.1.attention.qkv", 6, stages=(1,)),
    member("layers.1.feed_forward.router.weight", 4, "stage", 8, stages=(1,)),
    member("norm.weight", 2, "stage", stages=(1,)),
    member("head.weight", 8, stages=(1,)),
]


def limited(
    members: Sequence[Member],
    data: str,
    limit: int,
    same_ranks: Callable[[str], str] | None = None,
) -> tuple[Bucket, ...]:
    """Buckets of `limit` bytes."""
    with mock.patch.multiple(rules, BUCKET_BYTES=limit, LEAST_BUCKET_BYTES=limit):
        return buckets(members, data, same_ranks)


def names(data: str, limit: int) -> list[list[str]]:
    return [[m.name for m in bucket.members] for bucket in limited(MODEL, data, limit)]


def test_alike_parameters_share_a_bucket_until_it_is_large_enough() -> None:
    dense = ["head.weight", "layers.1.attention.qkv", "layers.0.attention.qkv", "embedding.weight"]
    norms = ["norm.weight", "layers.1.attention_norm.weight", "layers.0.attention_norm.weight"]
    router = ["layers.1.feed_forward.router.weight"]
    for data in ("replicate", "zero1"):
        # In the order in which the backward fills them.
        assert names(data, 1 << 20) == [router, norms, dense]
        assert names(data, 4 * 14) == [router, dense[:2], norms, dense[2:]]


def test_a_bucket_of_zero2_stays_inside_of_a_stage_and_one_of_zero3_inside_of_a_unit() -> None:
    assert names("zero2", 1 << 20) == [
        ["layers.1.feed_forward.router.weight"],
        ["head.weight", "layers.1.attention.qkv"],
        ["norm.weight", "layers.1.attention_norm.weight"],
        ["layers.0.attention_norm.weight"],
        ["layers.0.attention.qkv", "embedding.weight"],
    ]
    for limit in (1, 1 << 20):
        assert [bucket.unit for bucket in limited(MODEL, "zero3", limit)] == (
            ["head"] * 2 + ["layers.1"] * 3 + ["layers.0"] * 2 + ["embedding"]
        )


def test_a_unit_of_zero3_is_one_bucket_where_the_axes_of_its_classes_have_the_same_ranks() -> None:
    experts = member("layers.1.feed_forward.experts.down", 12, "edp", stages=(1,))
    model = [*MODEL[:-2], experts, *MODEL[-2:]]
    joined = buckets(model, "zero3", same_ranks=Layout(dp=4).same_ranks)
    # The router's weights have another dtype.
    assert [(bucket.unit, bucket.numbers) for bucket in joined] == [
        ("head", 10), ("layers.1", 4), ("layers.1", 20), ("layers.0", 8), ("embedding", 8)
    ]  # fmt: skip
    layer = next(bucket for bucket in joined if experts in bucket.members)
    assert [layer.expert_numbers(range(*ends)) for ends in ((0, 20), (5, 14), (12, 20))] == [
        12, 7, 0
    ]  # fmt: skip
    # Under expert parallelism fewer ranks hold the same experts; others join nothing.
    split = buckets(model, "zero3", same_ranks=Layout(dp=4, ep=2).same_ranks)
    assert [bucket.numbers for bucket in split if bucket.unit == "layers.1"] == [12, 4, 8]
    for data in ("replicate", "zero1", "zero2"):
        assert buckets(model, data, same_ranks=Layout(dp=4).same_ranks) == buckets(model, data)


def test_axes_have_the_same_ranks_just_where_their_groups_are_equal() -> None:
    degrees = itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2))
    for pp, dp, cp, tp, ep, etp in degrees:
        if (dp * cp * tp) % (ep * etp) == 0:
            layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
            groups = {axis: layout.groups(axis) for axis in SHARDED_AXES}
            for one, other in itertools.combinations(SHARDED_AXES, 2):
                joined = layout.same_ranks(one) == layout.same_ranks(other)
                assert joined == (groups[one] == groups[other]), (layout, one, other)


def test_members_of_several_stages_have_a_bucket_of_their_own() -> None:
    tied = member("embedding.weight", 8, stages=(0, 1))
    result = buckets([tied, *MODEL[1:-1]], "zero2")
    assert [bucket.stages for bucket in result if bucket.members[-1] is tied] == [(0, 1)]


@pytest.mark.parametrize(("ranks", "owners"), [(1, 1), (3, 3), (30, 30), (4, 1), (5, 2)])
def test_every_number_has_one_owner(ranks: int, owners: int) -> None:
    for bucket in buckets(MODEL, "zero1"):
        sizes = owned_sizes(bucket.numbers, ranks, owners)
        assert len(sizes) == ranks and sum(sizes) == bucket.numbers
        assert max(sizes) - min(sizes[:owners]) <= 1 and not any(sizes[owners:])


def test_units() -> None:
    named = {
        "embedding.weight": "embedding",
        "layers.12.feed_forward.experts.down": "layers.12",
        "norm.weight": "head",
        "head.weight": "head",
    }
    assert {name: unit_of(name) for name in named} == named
