"""Saving under one layout, reading under another; completeness; retention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.store import CheckpointError, Shard, latest, open_checkpoint, save
from moemesh.checkpoint.stored import candidates
from tests.checkpoint.simulate import cut, never, save_as_ranks, save_one, whole


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def experts_over(num_ranks: int, experts_EHI: torch.Tensor) -> list[list[Shard]]:
    """Stacked experts, unevenly over ranks; the last rank may hold none."""
    return [[shard] for shard in cut("layers.3.experts.up", experts_EHI, [num_ranks, 1, 1])]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_uneven_slices_read_under_another_split(tmp_path: Path, num_ranks: int) -> None:
    experts_EHI, norm_H = numbers(5, 4, 3), numbers(7)
    per_rank = experts_over(num_ranks, experts_EHI)
    for rank, shard in enumerate(cut("norm", norm_H, [num_ranks])):
        per_rank[rank].append(shard)
    results = save_as_ranks(tmp_path, 7, per_rank, {"loss": 0.1, "cursor": 12})
    assert results == [tmp_path / "step-7"] * num_ranks
    checkpoint = open_checkpoint(tmp_path, 7)
    assert checkpoint.state == {"loss": 0.1, "cursor": 12}
    assert checkpoint.names() == ["layers.3.experts.up", "norm"]
    assert checkpoint.shape("norm") == (7,) and checkpoint.dtype("norm") == torch.float32
    assert torch.equal(checkpoint.read("layers.3.experts.up"), experts_EHI)
    for parts in ([2, 2, 1], [5, 1, 3], [3, 4, 2]):
        for shard in cut("layers.3.experts.up", experts_EHI, parts):
            read = checkpoint.read(shard.name, shard.offset, shard.tensor.shape)
            assert torch.equal(read, shard.tensor)
    blank = [replace(s, tensor=torch.zeros_like(s.tensor)) for s in cut("norm", norm_H, [3])]
    checkpoint.load_into(blank)
    assert torch.equal(torch.cat([shard.tensor for shard in blank]), norm_H)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=3),
    parts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    data=st.data(),
)
def test_any_rectangle_of_any_split(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    parts: list[int],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensor = numbers(*shape)
    save_one(folder, 0, cut("t", tensor, parts[: len(shape)]))
    checkpoint = open_checkpoint(folder, 0)
    offset = [data.draw(st.integers(0, size)) for size in shape]
    extent = [data.draw(st.integers(0, s - o)) for s, o in zip(shape, offset, strict=True)]
    index = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
    assert torch.equal(checkpoint.read("t", offset, extent), tensor[index])
    assert torch.equal(checkpoint.read("t"), tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_bit_by_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = (numbers(6, 3) * 3).to(dtype)
    scalar = tensor[1, 1].clone()
    save_one(tmp_path, 1, [*cut("t", tensor, [4, 2]), whole("scalar", scalar)])
    checkpoint = open_checkpoint(tmp_path, 1)
    read = checkpoint.read("t")
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    assert checkpoint.read("scalar").shape == ()
    bits, expected = (x.reshape(1).view(torch.uint8) for x in (checkpoint.read("scalar"), scalar))
    assert torch.equal(bits, expected)
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    with pytest.raises(CheckpointError, match="dtypes are not cast"):
        checkpoint.load_into([whole("t", torch.zeros(6, 3, dtype=other))])


def test_files_are_plain_safetensors_and_views_are_saved(tmp_path: Path) -> None:
    tensor = numbers(4, 6)
    turned = Shard(name="w", shape=(6, 4), offset=(0, 0), tensor=tensor.t())
    save_one(tmp_path, 3, [turned, whole("small", numbers(3, dtype=torch.bfloat16))])
    loaded = load_file(tmp_path / "step-3" / "rank-00000.safetensors")
    assert torch.equal(loaded["w@0,0"], tensor.t())
    assert torch.equal(open_checkpoint(tmp_path, 3).read("w"), tensor.t())


def test_load_into_checks_all_before_it_copies(tmp_path: Path) -> None:
    save_one(tmp_path, 1, [whole("a", numbers(3)), whole("b", numbers(4))])
    checkpoint = open_checkpoint(tmp_path, 1)
    first = torch.zeros(3)
    for bad, message in [
        (whole("c", torch.zeros(1)), "no tensor named c"),
        (whole("b", torch.zeros(5)), r"b has shape \[4\], the model has \[5\]"),
        (whole("b", torch.zeros(4, dtype=torch.bfloat16)), "b is float32, requested as bfloat16"),
        (
            Shard(name="b", shape=(4,), offset=(3,), tensor=torch.zeros(2)),
            r"no part of shape \[2\]",
        ),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_into([whole("a", first), bad])
        assert first.eq(0).all()
    parameter = torch.nn.Parameter(first)
    checkpoint.load_into([whole("a", parameter)])
    assert torch.equal(parameter.detach(), numbers(3))


@pytest.mark.parametrize(
    ("rank_1", "message"),
    [
        ([], r"no rank holds 6 of its 12 elements: row 2 is the first missing one"),
        ([(2, 0, 1, 3)], r"no rank holds 3 of its 12 elements: row 3 is"),
        ([(2, 0, 2, 2)], r"no rank holds 2 of its 12 elements"),
        ([(1, 0, 3, 3)], r"overlap"),
        ([(2, 0, 2, 3), (3, 2, 1, 1)], r"overlap"),
        ([(0, 0, 2, 3), (2, 0, 2, 3)], r"overlap"),
        ([(3, 0, 2, 3)], r"lies outside \[4, 3\]"),
    ],
)
def test_holes_and_overlaps_fail_on_all_ranks(
    tmp_path: Path, rank_1: list[tuple[int, int, int, int]], message: str
) -> None:
    def piece(row: int, column: int, rows: int, columns: int) -> Shard:
        tensor = torch.zeros(rows, columns)
        return Shard(name="experts", shape=(4, 3), offset=(row, column), tensor=tensor)

    save_one(tmp_path, 1, [whole("experts", numbers(4, 3))])
    per_rank = [[piece(0, 0, 2, 3)], [piece(*args) for args in rank_1], []]
    for result in save_as_ranks(tmp_path, 2, per_rank):
        assert isinstance(result, CheckpointError)
        with pytest.raises(CheckpointError, match=message):
            raise result
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert latest(tmp_path, never).step == 1  # pyright: ignore


@pytest.mark.parametrize(
    ("shards", "state", "message"),
    [
        ([whole("a", torch.zeros(2)), whole("a", torch.zeros(2))], {}, "given twice"),
        ([whole("a", torch.zeros(2, dtype=torch.complex64))], {}, "complex64 cannot be saved"),
        ([Shard(name="a", shape=(2, 1), offset=(0,), tensor=torch.zeros(2))], {}, "dimensions"),
        ([], {"loss": float("nan")}, "not plain JSON"),
        ([], {"x": object()}, "not plain JSON"),
        ([], {"pair": (1, 2)}, "does not survive JSON"),
        ([], {1: "x"}, "does not survive JSON"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, shards: list[Shard], state: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_one(tmp_path, 1, shards, state)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="integer from 0 on"):
        save_one(tmp_path, -1, [])


def test_ranks_that_disagree(tmp_path: Path) -> None:
    per_rank = [
        [Shard(name="a", shape=(4,), offset=(0,), tensor=torch.zeros(2))],
        [Shard(name="a", shape=(4,), offset=(2,), tensor=torch.zeros(2, dtype=torch.float64))],
    ]
    for result in save_as_ranks(tmp_path, 1, per_rank):
        assert "rank 1 has float64 [4], another float32 [4]" in str(result)
    # also where the rank that disagrees holds no element
    empty = Shard(name="a", shape=(5,), offset=(4,), tensor=torch.zeros(0))
    for result in save_as_ranks(tmp_path, 1, [[whole("a", torch.zeros(4))], [empty]]):
        assert "rank 1 has float32 [5]" in str(result)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    save_one(tmp_path, 5, [whole("a", numbers(3))])
    before = (tmp_path / "step-5" / "manifest.json").read_bytes()
    for result in save_as_ranks(tmp_path, 5, [[whole("a", numbers(3) + 1)], []]):
        assert "never overwritten" in str(result)
    assert (tmp_path / "step-5" / "manifest.json").read_bytes() == before
    (tmp_path / "step-6").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        save_one(tmp_path, 6, [])


def test_candidates_are_numbers_and_full_names(tmp_path: Path) -> None:
    assert candidates(tmp_path / "none") == []
    others = ("step-2.tmp-" + "a" * 32, ".trash-step-3-" + "b" * 32, "step-04", "step-x")
    others += ("my-step-5", "step-6 ", "step-\u0667")
    for name in ("step-9", "step-10", "step-100", *others):
        (tmp_path / name).mkdir()
    assert candidates(tmp_path) == [100, 10, 9]


def test_gather_of_another_world_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="1 replies of 2 ranks"):
        save(tmp_path, 1, [], {}, rank=0, world_size=2, gather=lambda value: [value])
