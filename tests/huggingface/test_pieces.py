"""Pieces: any box of a logical tensor from slices of stored ones, and the stored ones back."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface import weight_folder as hf_folder
from moemesh.checkpoint.huggingface.logical import logical_tensors
from moemesh.checkpoint.huggingface.pieces import TensorPiece, assemble, whole
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.config.huggingface.folder import SINGLE
from moemesh.config.model import ModelConfig

#: A stack of four experts whose gate and up lie one beside the other (interleaved), transposed.
INTERLEAVED = [TensorPiece("gate_up", (4, 5, 6), (4, 5, 3, 2), (0, 3, 2, 1), (0, 0, 0, 0))]
#: Queries, keys and values of two groups of three query heads.
PACKED = [
    TensorPiece("q", (2 * 3 * 4, 5), (2, 3, 4, 5), (0, 1, 2, 3), (0, 0, 0, 0)),
    TensorPiece("k", (2 * 4, 5), (2, 1, 4, 5), (0, 1, 2, 3), (0, 3, 0, 0)),
    TensorPiece("v", (2 * 4, 5), (2, 1, 4, 5), (0, 1, 2, 3), (0, 4, 0, 0)),
]
#: One expert in two tensors, and a row that is stored as a table of one row.
SEPARATE = [
    TensorPiece("gate", (3, 5), (1, 3, 5), (0, 1, 2), (0, 0, 0)),
    TensorPiece("up", (3, 5), (1, 3, 5), (0, 1, 2), (1, 0, 0)),
]
ROW = [TensorPiece("bias", (1, 7), (7,), (0,), (0,))]
CASES = {
    "interleaved": (INTERLEAVED, (4, 2, 3, 5)),
    "packed": (PACKED, (2, 5, 4, 5)),
    "separate": (SEPARATE, (2, 3, 5)),
    "row": (ROW, (7,)),
    "plain": ([whole("w", (6, 5))], (6, 5)),
}


class Store:
    """Stored tensors that count the numbers read from them."""

    def __init__(self, pieces: Sequence[TensorPiece]) -> None:
        self.tensors = {
            piece.source: torch.arange(np.prod(piece.stored)).view(piece.stored) + 1000 * index
            for index, piece in enumerate(pieces)
        }
        self.num_read = 0

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        part = self.tensors[name][tuple(slice(one.start, one.stop) for one in box)]
        self.num_read += part.numel()
        return part


def full(pieces: Sequence[TensorPiece], shape: tuple[int, ...], store: Store) -> Tensor:
    """The logical tensor by plain reshapes, without any box."""
    tensor = torch.full(shape, -1)
    for piece in pieces:
        part = store.tensors[piece.source].reshape(piece.view).permute(piece.order)
        place = [
            slice(start, start + size) for start, size in zip(piece.offset, part.shape, strict=True)
        ]
        tensor[tuple(place)] = part
    assert (tensor >= 0).all(), "the pieces leave a hole"
    return tensor


@pytest.mark.parametrize("case", CASES)
def test_every_box_is_assembled(case: str) -> None:
    pieces, shape = CASES[case]
    store = Store(pieces)
    expected = full(pieces, shape, store)
    generator = np.random.default_rng(0)
    sides = [[range(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = list(product(*sides))
    chosen = generator.permutation(len(boxes))[:300]
    for box in [boxes[index] for index in chosen]:
        tensor = assemble(pieces, box, store.read)
        assert torch.equal(tensor, expected[tuple(slice(s.start, s.stop) for s in box)]), box


@pytest.mark.parametrize("case", CASES)
def test_stored_tensors_come_back(case: str) -> None:
    pieces, shape = CASES[case]
    store = Store(pieces)
    logical = full(pieces, shape, store)
    for piece in pieces:
        place = [
            slice(start, start + size)
            for start, size in zip(piece.offset, piece.shape, strict=True)
        ]
        assert torch.equal(piece.store(logical[tuple(place)]), store.tensors[piece.source])


def test_a_shard_reads_its_own_rows_only() -> None:
    """Heads of one tensor-parallel rank, and columns of one expert: no number beyond the shard."""
    store = Store(PACKED)
    box = [range(1, 2), range(5), range(4), range(5)]
    assemble(PACKED, box, store.read)
    assert store.num_read == 5 * 4 * 5
    store = Store(SEPARATE)
    assemble(SEPARATE, [range(2), range(1, 2), range(5)], store.read)
    assert store.num_read == 2 * 5
    store = Store(INTERLEAVED)
    assemble(INTERLEAVED, [range(3, 4), range(2), range(1, 3), range(5)], store.read)
    assert store.num_read == 2 * 2 * 5


def test_an_empty_box_reads_nothing() -> None:
    store = Store(PACKED)
    tensor = assemble(PACKED, [range(1, 1), range(5), range(4), range(5)], store.read)
    assert (tensor.shape, store.num_read) == ((0, 5, 4, 5), 0)


def test_extra_prediction_layers_have_the_names_of_deepseek() -> None:
    config = ModelConfig(num_layers=3, num_mtp_layers=1)
    logical = logical_tensors(config, "deepseek_v3")
    names = {name: piece.source for name, one in logical.items() for piece in one.pieces}
    assert names["layers.3.projection"] == "model.layers.3.eh_proj.weight"
    assert names["layers.3.embedding_norm.weight"] == "model.layers.3.enorm.weight"
    assert names["layers.3.stream_norm.weight"] == "model.layers.3.hnorm.weight"
    assert names["ahead_norms.3.weight"] == "model.layers.3.shared_head.norm.weight"
    assert logical["layers.3.projection"].shape == (128, 256)


# Parts of stored tensors into any memory, and the bytes that are read for them.


def folder_of(path: Path, numbers: torch.Tensor) -> WeightFolder:
    save_file({"w": numbers}, path / SINGLE)
    return WeightFolder(path)


SHAPES = [(), (7,), (5, 9), (4, 6, 10), (3, 2, 4, 5), (40, 300)]


@pytest.mark.parametrize("buffer_bytes", [64, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_into_any_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], buffer_bytes: int
) -> None:
    monkeypatch.setattr(hf_folder, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(hf_folder, "_SHORTEST_RUN_BYTES", 16)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    folder, chosen = folder_of(tmp_path, numbers), random.Random(0)
    for _ in range(40):
        ends = [sorted(chosen.choices(range(size + 1), k=2)) for size in shape]
        box = [range(first, last) for first, last in ends]
        expected = numbers[tuple(slice(one.start, one.stop) for one in box)]
        dtype = chosen.choice([torch.float32, torch.float64, torch.bfloat16])
        # Contiguous memory, and memory with gaps.
        out = torch.zeros(expected.shape, dtype=dtype)
        if shape and chosen.random() < 0.5:
            out = torch.zeros((*expected.shape, 2), dtype=dtype)[..., 0]
        folder.read_into("w", box, out)
        assert torch.equal(out, expected.to(dtype)), box


def test_bytes_that_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, torch.zeros(4, 6, 2048))

    def read(*box: range) -> int:
        folder.bytes_read = 0
        folder.read_into("w", box, torch.empty([len(part) for part in box]))
        return folder.bytes_read

    rows = 2048 * 4
    assert read(range(4), range(6), range(2048)) == 24 * rows
    assert read(range(1, 3), range(6), range(2048)) == 12 * rows
    assert read(range(1, 2), range(2, 5), range(2048)) == 3 * rows
    assert read(range(1, 2), range(2, 5), range(1024)) == 3 * rows / 2, "runs of a page or more"
    assert read(range(1, 2), range(2, 5), range(100)) == 3 * rows, "short runs: rows in full"
    assert read(range(1, 2), range(2, 3), range(100)) == 400
    assert read(range(1, 1), range(6), range(2048)) == 0


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, torch.zeros(4))
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 6)
    with pytest.raises(CheckpointError, match="became shorter"):
        folder.read_into("w", [range(4)], torch.empty(4))
