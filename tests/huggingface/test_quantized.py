"""Weights in fp8 blocks and MXFP4: read as the numbers that they encode, slice by slice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import Quantization, model_values, quantization_of
from moemesh.train.weights.conversion import convert
from tests.huggingface.ours import load, logits
from tests.huggingface.test_plans import SEQ_LEN, all_plans
from tests.huggingface.tiny import make

pytest.importorskip("transformers")

#: Sizes of MXFP4 come in groups of 32; these blocks divide few sizes of the others.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "qwen3_moe": {},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}
BLOCK = (16, 20)


@pytest.fixture(scope="module", params=CHANGES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A quantized folder, and one with the same numbers in fp32."""
    path = tmp_path_factory.mktemp("models")
    quantized = path / request.param
    make(request.param, **CHANGES[request.param]).save_pretrained(quantized)
    meant = mxfp4_folder(quantized) if request.param == "gpt_oss" else fp8_folder(quantized, BLOCK)
    return quantized, plain_folder(path / "plain", meant, quantized)


def opened(folder: Path) -> WeightFolder:
    return WeightFolder(folder, quantization_of(read_config(folder)))


def test_any_slice_is_that_of_the_numbers_meant(folders: tuple[Path, Path]) -> None:
    quantized, plain = map(opened, folders)
    assert quantized.tensors.keys() == plain.tensors.keys() and quantized.packed
    chosen = random.Random(0)
    for name, tensor in plain.tensors.items():
        assert quantized.tensors[name].shape == tensor.shape
        expected = plain.read(name, [range(size) for size in tensor.shape])
        for _ in range(8):
            ends = [sorted(chosen.sample(range(size + 1), 2)) for size in tensor.shape]
            box = [range(first, last) for first, last in ends]
            part = expected[tuple(slice(one.start, one.stop) for one in box)]
            assert torch.equal(quantized.read(name, box), part), (name, box)


def test_only_the_blocks_of_a_slice_are_read(folders: tuple[Path, Path]) -> None:
    folder = opened(folders[0])
    name = next(name for name in folder.tensors if name.endswith(("down_proj", "down_proj.weight")))
    shape = folder.tensors[name].shape
    folder.read(name, [*(range(1) for _ in shape[:-1]), range(4)])
    # 4 numbers and the scale of one block; or 4 rows, which are shorter than a page.
    groups = shape[-2] // 32
    assert folder.bytes_read == (4 + 4 if len(shape) == 2 else 4 * groups * (16 + 1))


def test_the_numbers_are_those_of_transformers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    raw = load_file(folders[0] / "model.safetensors")
    meant = load_file(folders[1] / "model.safetensors")
    if folders[0].name == "gpt_oss":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        for name in (name for name in raw if name.endswith("_blocks")):
            base = name.removesuffix("_blocks")
            numbers = convert_moe_packed_tensors(raw[name], raw[f"{base}_scales"])
            assert torch.equal(numbers.float(), meant[base])
        return
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    convert_one = Fp8Dequantize(None)._dequantize_one
    compared = 0
    for name in (name for name in raw if f"{name}_scale_inv" in raw):
        rows, columns = raw[name].shape
        if rows % BLOCK[0] or columns % BLOCK[1]:
            continue  # transformers refuses a last block that is not whole
        compared += 1
        numbers = convert_one(raw[name], raw[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(numbers, meant[name])
    assert compared


def test_logits_are_those_of_the_numbers_meant(folders: tuple[Path, Path]) -> None:
    ids = torch.randint(0, 288, (1, 64), generator=torch.Generator().manual_seed(0))
    found, _ = logits(load(folders[0]), ids)
    expected, _ = logits(load(folders[1]), ids)
    assert torch.equal(found, expected)


@pytest.mark.representative("deepseek_v3")
def test_under_a_plan_and_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The loss of a plan that cuts blocks in two; the export is not quantized."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(1 + (7 * i * i + 3 * i) % 251 for i in range(3 * SEQ_LEN + 1)))
    cut = all_plans(folders[0], text, "tp=2 etp=2 zero1")
    whole = all_plans(folders[1], text, "one device")
    assert cut[0].loss == pytest.approx(whole[0].loss, rel=1e-9)

    convert(folders[0], tmp_path / "run", dtype="bfloat16")
    convert(tmp_path / "run", tmp_path / "back", dtype="bfloat16")
    assert "quantization_config" not in read_config(tmp_path / "back")
    meant = load_file(folders[1] / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    for name, tensor in meant.items():
        kept = torch.float32 if "correction_bias" in name else torch.bfloat16
        assert torch.equal(back[name], tensor.to(kept)), name


def test_the_format_is_named_before_weights_are_read(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(folders[0], tmp_path / "run")
    said = capsys.readouterr().err
    assert ("MXFP4" if folders[0].name == "gpt_oss" else "every 16 x 20 numbers") in said
    assert "do not quantize them" in said


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
        {"bits": 4},
    ],
)
def test_other_formats_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        quantization_of({"quantization_config": given})
    method = str(given.get("quant_method"))
    assert method in str(caught.value) or "weight_block_size" in str(caught.value)
    with pytest.raises(ConfigError):
        model_values({"model_type": "qwen3_moe", "quantization_config": given})


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    weight = torch.zeros(40, 30).to(torch.float8_e4m3fn)
    scale = {"a.weight_scale_inv": torch.ones(2, 2)}
    fp8 = Quantization("fp8", (32, 20))

    def refused(tensors: dict[str, torch.Tensor], quantization: Quantization) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            WeightFolder(tmp_path, quantization)
        return str(caught.value)

    assert "a.weight_scale_inv is missing" in refused({"a.weight": weight}, fp8)
    bad = refused({"a.weight": weight, "a.weight_scale_inv": torch.ones(1, 2)}, fp8)
    assert "a.weight_scale_inv is [1, 2] of float32; a.weight needs [2, 2]" in bad
    assert "not a matrix" in refused({"a.weight": weight[0]}, fp8)
    save_file({"a.weight": weight, **scale}, tmp_path / "model.safetensors")
    assert WeightFolder(tmp_path, fp8).tensors["a.weight"].shape == (40, 30)
    with pytest.raises(CheckpointError, match="float8_e4m3fn and config"):
        WeightFolder(tmp_path).check({"a.weight": (40, 30)}, scale, 1)
    blocks = torch.zeros(2, 6, 3, 16, dtype=torch.uint8)
    mxfp4 = Quantization("mxfp4", (1, 32))
    assert "b_scales is missing" in refused({"b_blocks": blocks}, mxfp4)
    assert "[2, 6, 3]" in refused(
        {"b_blocks": blocks, "b_scales": torch.zeros(2, 6, dtype=torch.uint8)}, mxfp4
    )
    assert "of bytes" in refused({"b_blocks": blocks[..., :8].contiguous()}, mxfp4)
    whole = {"b": torch.zeros(2, 96, 6), "b_blocks": blocks, "b_scales": blocks[..., 0].clone()}
    assert "b exists twice: under its name, and as b_blocks" in refused(whole, mxfp4)


# Folders with weights in fp8 blocks or MXFP4, made from folders with plain ones.
#
# Written apart from the code under test: numbers are chosen here from tables, by brute force.

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8_folder(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Store the projections of `folder` in e4m3; returns the numbers that e4m3 then encodes."""
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
    keys = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write(folder, stored, {**keys, "weight_block_size": list(block)})
    return meant


def mxfp4_folder(folder: Path) -> dict[str, Tensor]:
    """Store the experts of a gpt-oss `folder` in MXFP4; returns the numbers that MXFP4 encodes."""
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
