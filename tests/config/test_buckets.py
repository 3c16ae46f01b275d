"""Buckets of parameters: which travel together, and which rank owns what of them."""

from __future__ import annotations

import pytest

from moemesh.config.buckets import Member, buckets, owned_sizes, unit_of


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


def names(data: str, limit: int) -> list[list[str]]:
    return [[m.name for m in bucket.members] for bucket in buckets(MODEL, data, limit)]


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
        assert [bucket.unit for bucket in buckets(MODEL, "zero3", limit)] == (
            ["head"] * 2 + ["layers.1"] * 3 + ["layers.0"] * 2 + ["embedding"]
        )


def test_members_of_several_stages_have_a_bucket_of_their_own() -> None:
    tied = member("embedding.weight", 8, stages=(0, 1))
    found = buckets([tied, *MODEL[1:-1]], "zero2")
    assert [bucket.stages for bucket in found if bucket.members[-1] is tied] == [(0, 1)]


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
