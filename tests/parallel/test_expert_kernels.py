"""Kernels of other packages: their contract, and the choice when a run starts."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.simulated_device import SimulatedDevice
from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.model.dispatcher import DispatchedRows
from moemesh.model.experts import Experts
from moemesh.model.initialization import initialize
from moemesh.model.moe import MoE, plain_exchange
from moemesh.model.seams import PLAIN_FLOW
from moemesh.model.transformer import Transformer
from moemesh.ops.expert_kernels import KERNELS, ExpertKernel, KernelPackage
from moemesh.ops.permute import group_by_expert
from moemesh.parallel.expert import kernels
from moemesh.parallel.expert.kernels import checked_seconds, inputs_of, plain_path, set_kernel
from tests.model.test_router import config_of, context_of
from tests.train.runs import sets, settings, small, text_file

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
    num_experts=4, experts_per_token=2, expert_intermediate_size=8,
)  # fmt: skip


def loop(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The definition, one choice after another."""
    sums = []
    for x_H, weights_K, experts_K in zip(x_TH, weights_TK, experts_TK.tolist(), strict=True):
        outputs = []
        for weight, expert in zip(weights_K, experts_K, strict=True):
            gate_F, up_F = gate_up[expert] @ x_H
            outputs.append(weight * (down[expert] @ (torch.nn.functional.silu(gate_F) * up_F)))
        sums.append(torch.stack(outputs).sum(0))
    return torch.stack(sums).to(x_TH.dtype)


def package(load: Callable[[], ExpertKernel], capability: tuple[int, int] = (8, 0)) -> Any:
    """A package that is installed: torch's version is that of the kernel."""
    return KernelPackage("torch", capability, load)


def test_a_kernel_computes_local_and_dispatched_rows() -> None:
    torch.manual_seed(0)
    calls = list[int]()

    def counted(*given: Tensor) -> Tensor:
        calls.append(len(given[0]))
        return loop(*given)

    results = []
    moe = MoE(config_of()).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    x_TH = torch.randn(5, moe.config.hidden_size, dtype=torch.float64)
    routing = moe.router(x_TH)
    for kernel in (None, counted):
        moe.experts.kernel = kernel
        x = x_TH.clone().requires_grad_()
        weights_TK = routing.weights_TK.detach().requires_grad_()
        where, tokens = (
            (moe.dispatcher, PLAIN_FLOW, moe.experts),
            (x, weights_TK, routing.experts_TK),
        )
        y_TH, _ = plain_exchange(*where, tokens, is_complete=True)
        rows, flat_R, counts_L = group_by_expert(routing.experts_TK, moe.config.num_experts)
        weights_R = weights_TK.reshape(-1)[flat_R]
        y_RH = moe.experts(DispatchedRows(x, rows, weights_R, counts_L))
        (y_TH.square().sum() + y_RH.square().sum()).backward()
        results.append(
            [y_TH, y_RH, x.grad, weights_TK.grad, *(p.grad for p in moe.experts.parameters())]
        )
        moe.zero_grad()
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected)
    assert calls == [5, 5 * moe.config.experts_per_token]


@pytest.mark.parametrize("change", ["recomputes", "bounded", "no expert", "biases"])
def test_our_operations_compute_what_a_kernel_cannot(change: str) -> None:
    def refuse(*given: Tensor) -> Tensor:
        raise AssertionError("the kernel was called")

    config = config_of(expert_bias=change == "biases")
    moe = MoE(config)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    moe.experts.kernel = refuse
    moe.experts.recomputes = change == "recomputes"
    moe.experts.max_rows = 3 if change == "bounded" else None
    context = context_of(6)
    if change == "no expert":
        context = context_of(6, padded=[4, 5])
    moe(torch.randn(6, config.hidden_size), context).y_TH.sum().backward()
    moe.experts.recomputes, moe.experts.max_rows = False, None
    if change in ("recomputes", "bounded"):
        with pytest.raises(AssertionError, match="was called"):
            moe(torch.randn(6, config.hidden_size), context)


def chosen(wanted: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, Any]:
    """The note and the kernel of a model on a simulated device."""
    monkeypatch.setattr(kernels, "ROUNDS", 1)
    with SimulatedDevice(capability=options.pop("capability", (9, 0))):
        model = Transformer(MODEL)
        initialize(model, seed=0, dtype=torch.bfloat16)
        model.to("cuda")
        (note,) = set_kernel(
            model, wanted, Mesh.single("cuda:0"), tokens_per_rank=8, defers=False, **options
        )
    (kernel,) = {moe.experts.kernel for moe in model.moe_layers().values()}
    return note, kernel


def test_auto_takes_the_fastest_that_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {plain_path: 3e-3, loop: 2e-3}
    monkeypatch.setattr(kernels, "measured_seconds", lambda kernel, _: seconds[kernel])
    monkeypatch.setitem(KERNELS, "liger", package(lambda: loop))
    monkeypatch.setitem(KERNELS, "sonicmoe", package(lambda: lambda *given: 3 * loop(*given)))
    note, kernel = chosen("auto", monkeypatch)
    version = torch.__version__
    assert note.startswith(
        f"experts auto: liger {version} (grouped_mm 3.00 ms a layer; liger 2.00 ms a layer; "
        "sonicmoe: torch "
    )
    assert "its numbers differ by 2 of the largest" in note and kernel is loop
    seconds[loop] = 4e-3
    note, kernel = chosen("auto", monkeypatch)
    assert note.startswith("experts auto: grouped_mm (") and kernel is None
    note, kernel = chosen("liger", monkeypatch)
    assert note.startswith(f"experts liger: liger {version} (") and kernel is loop


def fails() -> ExpertKernel:
    raise AttributeError("module has no attribute 'LigerFusedMoEFunction'")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (package(fails), "has no attribute 'LigerFusedMoEFunction'"),
        (package(lambda: lambda x: x), "takes 1 positional argument but 5 were given"),
        (package(lambda: loop, (10, 0)), "needs compute capability 10.0, the device has 9.0"),
        (KernelPackage("no-such-package", (8, 0), fails), "pip install no-such-package"),
    ],
)
def test_a_kernel_that_cannot_run_is_one_line(
    row: KernelPackage, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "liger", row)
    note, kernel = chosen("liger", monkeypatch)
    assert note.startswith("experts liger: grouped_mm (") and "\n" not in note
    assert reason in note and kernel is None


def test_a_cpu_keeps_our_operations() -> None:
    model = Transformer(MODEL)
    options: dict[str, Any] = {"tokens_per_rank": 8, "defers": False}
    assert set_kernel(model, "auto", Mesh.single("cpu"), **options) == []
    (note,) = set_kernel(model, "liger", Mesh.single("cpu"), **options)
    expected = "it needs a CUDA device, the experts are on cpu"
    assert note == f"experts liger: grouped_mm (liger: {expected})"


def test_a_schedule_that_defers_weight_gradients_keeps_our_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KERNELS, "liger", package(lambda: loop))
    with SimulatedDevice():
        model = Transformer(MODEL)
        options: dict[str, Any] = {"tokens_per_rank": 8, "defers": True}
        (note,) = set_kernel(model, "liger", Mesh.single("cuda:0"), **options)
    assert "plan.schedule defers weight gradients" in note


LIGER = """
import torch
from moemesh.model.experts import Experts
from moemesh.ops.expert_kernels import KERNELS
from moemesh.parallel.expert.kernels import forward_and_backward, inputs_of, plain_path
from torch.testing import assert_close

torch.manual_seed(0)
experts = Experts({experts}, {hidden}, {width})
inputs = inputs_of(experts, {tokens}, {slots})
kernel = KERNELS["liger"].load()
results = [forward_and_backward(f, inputs) for f in (plain_path, kernel)]
for ours, theirs in zip(*results, strict=True):
    assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
half = [x.detach().half() if x.is_floating_point() else x for x in inputs]
half[1] = half[1].float()
with torch.no_grad():
    assert_close(kernel(*half), plain_path(*half), rtol=1e-2, atol=5e-3)
print("equal")
"""


@pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None,
    reason="needs liger-kernel and triton",
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"experts": 4, "hidden": 16, "width": 16, "tokens": 6, "slots": 2},
        {"experts": 3, "hidden": 32, "width": 16, "tokens": 5, "slots": 1},
    ],
    ids=["slots", "rows"],
)
def test_liger_computes_the_numbers_of_the_plain_path(sizes: dict[str, int]) -> None:
    """Under Triton's interpreter, which has no products of bfloat16: float32, and float16."""
    done = subprocess.run(
        [sys.executable, "-c", LIGER.format(**sizes)],
        env={
            "PYTHONPATH": ":".join(sys.path),
            "TRITON_INTERPRET": "1",
            "LIGER_FUSED_MOE_AUTOTUNE": "0",
            "HOME": ".",
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_numbers_within_rounding_pass() -> None:
    experts = Experts(4, 16, 8)
    inputs = inputs_of(experts, 6, 2)
    assert checked_seconds(loop, inputs) > 0
    with pytest.raises(ValueError, match="differ by"):
        checked_seconds(lambda *given: loop(*given) * 1.05, inputs)


def test_the_first_lines_of_a_run_name_the_kernel(invoke: Any, tmp_path: Path) -> None:
    keys = small(train__experts="sonicmoe", train__steps=1)
    keys |= {"data.path": str(text_file(tmp_path))}
    code, log, _ = invoke("train", *sets(*settings(keys)), "--out", str(tmp_path / "run"))
    assert code == 0
    assert "experts sonicmoe: grouped_mm (sonicmoe: it needs a CUDA device" in " ".join(log.split())
