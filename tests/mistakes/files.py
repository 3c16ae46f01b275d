"""The files that the command lines of the mistakes name."""

from __future__ import annotations

import gzip
import json
import struct
from math import prod
from pathlib import Path

from moemesh.checkpoint.huggingface.logical import logical_tensors
from moemesh.config.huggingface.model import model_values
from moemesh.config.load import resolved_toml
from moemesh.sharding.load_run import load_run

MODEL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip

#: A cluster with units in texts, and one in other units.
UNITS = """name = "mine"
nodes = 4
gpus_per_node = 8
memory_bytes = "80 GB"
memory_bandwidth = "3.35TB/s"
peak_flops = "989 TFLOPS"
intra_node_bandwidth = "450 GB/s"
inter_node_bandwidth = "400 Gb/s"
intra_node_latency = "3us"
inter_node_latency = "8 parsec"
"""
#: A configuration of another trainer.
AXOLOTL = """base_model: Qwen/Qwen3-30B-A3B  # the base
datasets:
  - path: chats.jsonl
    type: chat_template
lora_r: 16
learning_rate: 0.0002
fsdp_config:
  fsdp_offload_params: true
wandb_project:
no_such_key: 1
"""
OTHER_UNITS = """name = "mine"
nodes = 4
gpus_per_node = 8
memory_bytes = 80
memory_bandwidth = 3350
peak_flops = { bfloat16 = 989 }
intra_node_bandwidth = 450
inter_node_bandwidth = 50
intra_node_latency = 3
inter_node_latency = 8
"""


def prepare(folder: Path) -> None:
    """Write the files of the corpus into an empty folder."""
    texts = {
        "good.toml": "[train]\nsteps = 2\n",
        "text.txt": "a text\n" * 400,
        "empty.txt": "",
        "chat.json": '{"text": "a"}\n',
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "damaged.json": '{"a": [1, 2',
        "damaged.txt": "this is no schedule\n",
        "fake.parquet": "no parquet\n",
        "text.csv": "a,b\nc,d\n",
        "loads.json": "[[4, 3, 2, 1]]",
        "ragged.json": "[[4, 3, 2, 1], [1, 2]]",
        "negative.json": "[[4, 3, 2, -1]]",
        "routing.json": json.dumps({"plan": "dp=2,ep=2", "num_experts": 4, "experts": [[[9]], []]}),
        "small_cluster.toml": 'name = "small"\n',
        "units.toml": UNITS,
        "no_family.json": '{"hidden_size": 64, "num_hidden_layers": 2}',
        "table.tsv": "id\ttext\n1\ta\n",
        "other_units.toml": OTHER_UNITS,
        "documents/letter.txt": "a letter\n",
        "encoder/config.json": json.dumps({"model_type": "t5"}),
        "broken_model/config.json": '{"model_type": ',
        "no_weights/config.json": json.dumps(MODEL),
        "adapters/adapter_config.json": json.dumps({"peft_type": "LORA", "r": 4}),
        "broken_beside_texts/config.toml": "[plan\n",
        "broken_beside_texts/a.txt": "a text\n",
        "broken_run/config.toml": "[plan\n",
        "broken_run/plan.json": "{}",
        "other_run/config.toml": resolved_toml(load_run([], ["model.num_layers=3"], {}).config),
        "other_run/plan.json": "{}",
        "axolotl.yaml": AXOLOTL,
        "deepspeed.json": '{"train_batch_size": 8, "bf16": {"enabled": true}, "extra": {"a": 1}}',
        "megatron.sh": 'ARGS="--num-layers 24 \\\n --micro-batch-size=2 --bf16"\n',
        "titan.toml": "[training]\nlocal_batch_size = 8\nsteps = 10\n[debug]\nseed = 1\n",
        "work/first/config.toml": "",
        "work/first/metrics.jsonl": "",
        "two_runs/a/config.toml": "",
        "two_runs/a/metrics.jsonl": "",
        "two_runs/b/config.toml": "",
        "two_runs/b/metrics.jsonl": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, content in {
        "binary.toml": b"\xff\xfe\x00",
        "binary_run/config.toml": b"\xff\xfe\x00",
        "binary_run/plan.json": b"{}",
        "zipped.txt": gzip.compress(b"a text\n"),
        "zeros.txt": b"a\x00b\n",
        "damaged.npz": b"PK\x03\x04 no archive",
        "damaged.npy": b"\x93NUMPY no array",
        "tokens.idx": b"MMIDIDX\x00\x00 damaged",
        "tokens.bin": b"\x00" * 10,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "empty_folder").mkdir()
    _write_models(folder)


def _write_models(folder: Path) -> None:
    """Folders of transformers whose weights are whole, cut, of another model, or not fetched."""
    weights = _safetensors(_tensors())
    other = _safetensors({**_tensors(), "model.norm.weight": (32,), "model.extra": (1,)})
    for name, content in {
        "model": weights,
        "cut_model": weights[:-100],
        "headless_model": weights[:100],
        "other_model": other,
        "unfetched_model": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(MODEL))
        (folder / name / "model.safetensors").write_bytes(content)


def _tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of MODEL."""
    config = load_run([], [], {}).config.model.model_validate(model_values(MODEL))
    tensors = logical_tensors(config, "mixtral").values()
    return {piece.source: piece.stored for one in tensors for piece in one.pieces}


def _safetensors(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A file of zeros in fp32."""
    header, end = dict[str, object](), 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)
