"""Parts of stored tensors into any memory, and the bytes that are read for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface import weight_folder as hf_folder
from moemesh.checkpoint.huggingface.weight_folder import Place, SliceReader

SHAPES = [(), (7,), (5, 9), (4, 6, 10), (3, 2, 4, 5), (40, 300)]


@pytest.mark.parametrize("buffer_bytes", [64, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_into_any_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], buffer_bytes: int
) -> None:
    monkeypatch.setattr(hf_folder, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(hf_folder, "_SHORTEST_RUN_BYTES", 16)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "file"
    path.write_bytes(b"head" + numbers.numpy().tobytes())
    reader, chosen = SliceReader(), random.Random(0)
    for _ in range(40):
        ends = [sorted(chosen.choices(range(size + 1), k=2)) for size in shape]
        box = [range(first, last) for first, last in ends]
        expected = numbers[tuple(slice(one.start, one.stop) for one in box)]
        dtype = chosen.choice([torch.float32, torch.float64, torch.bfloat16])
        # Contiguous memory, and memory with gaps.
        out = torch.zeros(expected.shape, dtype=dtype)
        if shape and chosen.random() < 0.5:
            out = torch.zeros((*expected.shape, 2), dtype=dtype)[..., 0]
        reader.read_into(path, Place(4, torch.float32, shape), box, out)
        assert torch.equal(out, expected.to(dtype)), box


def test_bytes_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * 6 * 2048 * 4))
    place = Place(0, torch.float32, (4, 6, 2048))

    def read(*box: range) -> int:
        reader = SliceReader()
        out = torch.empty([len(part) for part in box])
        reader.read_into(path, place, box, out)
        return reader.bytes_read

    rows = 2048 * 4
    assert read(range(4), range(6), range(2048)) == 24 * rows
    assert read(range(1, 3), range(6), range(2048)) == 12 * rows
    assert read(range(1, 2), range(2, 5), range(2048)) == 3 * rows
    assert read(range(1, 2), range(2, 5), range(1024)) == 3 * rows / 2, "runs of a page or more"
    assert read(range(1, 2), range(2, 5), range(100)) == 3 * rows, "short runs: rows in full"
    assert read(range(1, 2), range(2, 3), range(100)) == 400
    assert read(range(1, 1), range(6), range(2048)) == 0


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    place = Place(4, torch.float32, (4,))
    with pytest.raises(CheckpointError, match="became shorter"):
        SliceReader().read_into(path, place, [range(4)], torch.empty(4))
