"""The files that the command lines of the corpus name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from moemesh.config.load import load_run, resolved_toml

MODEL = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def prepare(folder: Path) -> None:
    """Write the files of the corpus into an empty folder."""
    texts = {
        "good.toml": "[train]\nsteps = 2\n",
        "text.txt": "a text\n" * 400,
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
        "documents/letter.txt": "a letter\n",
        "mamba/config.json": json.dumps({"model_type": "mamba"}),
        "broken_model/config.json": '{"model_type": ',
        "no_weights/config.json": json.dumps(MODEL),
        "broken_run/config.toml": "[plan\n",
        "broken_run/plan.json": "{}",
        "other_run/config.toml": resolved_toml(load_run([], ["model.num_layers=3"], {}).config),
        "other_run/plan.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
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
