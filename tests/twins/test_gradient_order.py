"""A backward brings gradients in the order from which buffers of their sums are predicted."""

import pytest
from torch import nn

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.gradient_buffers import arrivals
from moemesh.planner.traffic.tensors import StagePlacement
from tests.parity import training
from tests.parity.models import ALL

SHAPE = training.Shape(seq_len=12, global_batch=4)


@pytest.mark.representative(
    "moe",
    "grouped",
    "sigmoid",
    "dense",
    "latent",
    "deepseek",
    "windows",
    "over_projection",
    "together_sequence",
    "expert_choice",
    "bias",
    "granite",
    "pattern",
    "ahead_tied",
    "deep_global",
)
@pytest.mark.parametrize("model", ALL)
def test_gradients_come_as_predicted(model: str) -> None:
    config, plan = ModelConfig(**ALL[model]), Plan()
    parallel = training.build(Mesh.single("cpu"), config, plan, SHAPE, "float64", seed=1)
    names: dict[nn.Parameter, str] = {}
    for bucket in parallel.reducer.buckets:
        names |= zip(bucket.parameters, bucket.names, strict=True)
    came: list[str] = []
    parallel.reducer.watch = lambda parameter, _: came.append(names[parameter])
    training.gradients(parallel, plan, SHAPE)
    said = [one.name for one in arrivals(StagePlacement(config, plan, SHAPE.seq_len), 0, 0)]
    last = list(dict.fromkeys(reversed(came)))[::-1]

    def without_expert_biases(order: list[str]) -> list[str]:
        """One operation brings up to four gradients of experts, in an order of autograd's own."""
        return [name for name in order if not ("experts." in name and config.expert_bias)]

    assert without_expert_biases(last) == without_expert_biases(said)
    assert sorted(last) == sorted(said)
