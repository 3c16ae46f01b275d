"""Random configurations of every family: the logits of transformers, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.export import config_json, differences
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import model_values
from moemesh.sharding.load_run import load_run
from moemesh.train.weights.conversion import convert
from tests.huggingface.ours import config_of, load, logits
from tests.huggingface.tiny import DENSE, make
from tests.huggingface.variants import OPTIONS, draw

pytest.importorskip("transformers")

SEEDS = range(8)
CASES = [f"{kind}-{seed}" for kind in OPTIONS for seed in SEEDS]
#: Switches that our model does not have, by what the refusal names.
REFUSED = {"mlp_bias": "mlp_bias = True", "use_bias": "use_bias"}


def refused(values: dict[str, Any]) -> str | None:
    """The switch of a configuration that must be refused."""
    return next((name for key, name in REFUSED.items() if values.get(key)), None)


@pytest.mark.representative("qwen2_moe-1", "deepseek_v2-0", "dots1-0", "gpt_oss-2", "mistral-0")
@pytest.mark.parametrize("case", CASES)
def test_random_configurations(case: str, tmp_path: Path) -> None:
    kind, _, seed = case.rpartition("-")
    values = draw(kind, int(seed))
    model, folder = make(kind, **values), tmp_path / "model"
    model.save_pretrained(folder)
    if (name := refused(values)) is not None:
        with pytest.raises(ConfigError, match=name):
            model_values(read_config(folder))
        return
    ids = torch.randint(0, 288, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.double()(ids).logits
    found, _ = logits(load(folder, torch.float64), ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)

    # Our config.json of it, in the keys of old versions alone, means the same model.
    config = config_of(folder)
    if config.routed_layers or kind in DENSE:
        written = config_json(config, kind)
        assert differences(config, kind, model_values(written)) == {}
        del written["rope_parameters"]
        assert differences(config, kind, model_values(written)) == {}
    convert(folder, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert load_run([], [f"model.path={tmp_path / 'back'}"]).config.model == config
