"""Folders with weights in fp8 blocks or MXFP4, made from folders with plain ones.

Written apart from the code under test: numbers are chosen here from tables, by brute force.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8_folder(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Store the projections of `folder` in e4m3; returns the numbers that they stand for then."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in name or tensor.ndim != 2:
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
        values, weight = torch.zeros_like(tensor), torch.zeros_like(tensor).to(torch.float8_e4m3fn)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                place = (
                    slice(i * block[0], min((i + 1) * block[0], rows)),
                    slice(j * block[1], min((j + 1) * block[1], columns)),
                )
                scale[i, j] = tensor[place].abs().max() / 448 + 1e-9
                weight[place] = (tensor[place] / scale[i, j]).to(torch.float8_e4m3fn)
                values[place] = weight[place].float() * scale[i, j]
        stored |= {name: weight, f"{name}_scale_inv": scale}
        meant[name] = values
    found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write(folder, stored, {**found, "weight_block_size": list(block)})
    return meant


def mxfp4_folder(folder: Path) -> dict[str, Tensor]:
    """Store the experts of a gpt-oss `folder` in MXFP4; returns the numbers they stand for then."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    table = torch.tensor(_E2M1 + [-value for value in _E2M1])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(-1, (-1, 32))
        power = torch.floor(torch.log2(groups.abs().amax(-1))).int() - 2
        scaled = groups / 2.0 ** power[..., None]
        code = (scaled[..., None] - table).abs().argmin(-1)
        meant[name] = (table[code] * 2.0 ** power[..., None]).flatten(-2).transpose(1, 2)
        stored[f"{name}_blocks"] = (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = (power + 127).to(torch.uint8)
    _write(folder, stored, {"quant_method": "mxfp4"})
    return meant


def plain_folder(folder: Path, meant: dict[str, Tensor], quantized: Path) -> Path:
    """A folder with the numbers `meant` as they are, else as `quantized`."""
    folder.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in meant.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return folder


def _write(folder: Path, stored: dict[str, Tensor], quantization: dict[str, object]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
