"""Memory while the weights of a folder are read: what a rank holds, and little beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hub.families import model_class
from tests.waiting import PATIENCE

transformers = pytest.importorskip("transformers")

#: 96 MB in bfloat16, and the most that a reader may hold beside the model: a fifth of them.
SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 384, "num_experts": 16,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
MOST = 20 << 20
#: Prints the peak of resident memory during the reading, above that before and after it.
PROGRAM = """
import sys
from pathlib import Path
import torch
from moemesh.comm.mesh import Mesh
from moemesh.config.train import TrainConfig
from moemesh.train.inference.evaluation import open_weights
from moemesh.train.opening import construct
from moemesh.train.optimizer import Optimizer
from moemesh.train.weights.saving import load_weights
from moemesh.train.weights.weight_sources import config_of

def status(name):
    line = next(one for one in open("/proc/self/status") if one.startswith(name))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
config = config_of(Path(sys.argv[1]), [f"model.implementation={sys.argv[2]}"])
parallel = construct(config, Mesh.single("cpu"))
optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd", momentum=0.0))
weights, before = open_weights(config, print), status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is measured from this point
load_weights(weights, parallel, optimizer)
print("peak", status("VmHWM") - max(before, status("VmRSS")))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES)
    with torch.device("meta"):
        model = model_class(config)(config)
    model.to(torch.bfloat16).to_empty(device="cpu").save_pretrained(path)
    assert (path / "model.safetensors").stat().st_size > 95e6
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets the peak")
@pytest.mark.parametrize("implementation", ["moemesh", "transformers"])
def test_a_rank_holds_one_tensor_beside_its_weights(folder: Path, implementation: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder), implementation]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert int(re.findall(r"^peak (-?\d+)$", done.stdout, re.MULTILINE)[0]) < MOST
