"""Our model from a folder of transformers, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moemesh.checkpoint.huggingface.pieces import Read, slices
from moemesh.checkpoint.huggingface.weight_folder import HuggingFaceWeights
from moemesh.checkpoint.load import DeferredTensor
from moemesh.config.huggingface.folder import SINGLE, read_config
from moemesh.config.huggingface.model import model_values
from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.seams import Vocabulary
from moemesh.model.transformer import Transformer
from moemesh.train.weights.conversion import convert
from tests.checkpoint.simulate import whole


def config_of(folder: Path) -> ModelConfig:
    """The configuration that `moemesh train` would use."""
    return ModelConfig.model_validate(model_values(read_config(folder)))


def load(
    folder: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> Transformer:
    """The whole model on one device; `config` may have adapters."""
    config = config or config_of(folder)
    model = Transformer(config)
    initialize(model, seed=0, dtype=dtype)
    HuggingFaceWeights(folder, config).load_into(
        [whole(f"model.{name}", tensor.detach()) for name, tensor in named_tensors(model).items()]
    )
    return model


def named_tensors(model: Transformer) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def weights(model: Transformer) -> Read:
    """The weights of a model in memory."""
    named = named_tensors(model)
    return lambda name, box: named[name].detach()[slices(box)]


def deferred(tensors: dict[str, Tensor]) -> dict[str, DeferredTensor]:
    """Tensors in memory, as what is written takes them."""
    return {
        name: DeferredTensor(tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }


def there_and_back(folder: Path, here: Path, **options: Any) -> Path:
    """The export of the run that a folder was made to, both below `here`."""
    convert(folder, here / "run")
    convert(here / "run", here / "back", **options)
    return here / "back"


def as_cache(folder: Path) -> Path:
    """The files of `folder` as the hub's cache keeps them: links to files named by digests."""
    home = folder.parent / "models--a--b"
    snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"digest{index}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"digest{index}")
    return snapshot


def assert_same_weights(folder: Path, other: Path) -> None:
    """Name by name and bit by bit, in their dtypes."""
    first, second = (load_file(path / SINGLE) for path in (folder, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Assert equality within the precision of float32."""
    found, expected = found.detach(), expected.detach()
    assert (found - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


class _Logits(Vocabulary):
    """Keeps the logits that the loss is computed from."""

    logits_TV: Tensor

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        self.logits_TV = x_TH @ weight_VH.T
        return super().cross_entropy(x_TH, weight_VH, targets_T)


@torch.no_grad()
def logits(model: Transformer, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V], and the tokens that every expert of every MoE layer got [L, E]."""
    kept = model.vocabulary = _Logits()
    batch = Batch(
        tokens_BS=tokens_BS,
        targets_BS=tokens_BS,
        sequences_B=torch.arange(len(tokens_BS)),
        training=False,
    )
    output = model(batch)
    return kept.logits_TV.view(*tokens_BS.shape, -1), output.counts_LE
