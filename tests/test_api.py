"""The public names: frozen, lazy, documented; and those that no example shows in full."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moemesh as mm
from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import UserError
from moemesh.schedule.stage_times import estimated_costs
from tests.ranks import run_on_ranks
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
NAMES = [
    "ConfigError",
    "Mesh",
    "MoELayer",
    "Run",
    "Sharded",
    "clip_grad_norm_",
    "estimate",
    "expert_parameters",
    "full_state_dict",
    "load",
    "load_checkpoint",
    "parallelize",
    "partition",
    "plan",
    "rebalance_experts",
    "save_checkpoint",
    "schedules",
    "simulate",
    "train",
    "use_experts",
]


def test_the_names_are_frozen() -> None:
    assert sorted(mm.__all__) == NAMES
    assert set(NAMES) <= set(dir(mm))
    stub = (ROOT / "moemesh" / "__init__.pyi").read_text()
    assert sorted(re.findall(r"import \w+ as (\w+)", stub)) == NAMES
    for name in NAMES:
        assert getattr(mm, name) is not None


def test_a_wrong_keyword_is_answered_by_the_nearest_one() -> None:
    functions: Any = {name: getattr(mm, name) for name in NAMES if name.islower()}
    for name in ("schedules", "expert_parameters", "full_state_dict"):
        del functions[name]  # a module; no keyword to miss
    for name, function in functions.items():
        with pytest.raises(TypeError, match=rf"{name}\(\) has no argument 'qqqq': it takes \w+, "):
            function(qqqq=3)
        last = "out" if name == "train" else list(inspect.signature(function).parameters)[-1]
        with pytest.raises(TypeError, match=rf"'{last}_': did you mean '{last}'\?"):
            function(**{f"{last}_": 3})
    layer, schedule = cast("Any", mm.MoELayer), cast("Any", mm.schedules.zb_v)
    with pytest.raises(TypeError, match=r"MoELayer\(\) has no argument 'topk': .* 'top_k'\?"):
        layer(64, 64, 4, topk=2)
    with pytest.raises(TypeError, match=r"'router_scor': did you mean 'router_score'\?"):
        layer(64, 64, 4, 2, router_scor="sigmoid")
    with pytest.raises(TypeError, match=r"no argument 'ranks': did you mean 'num_ranks'\?"):
        schedule(ranks=4, num_microbatches=8)


def test_importing_is_light() -> None:
    code = (
        "import sys, moemesh as mm; mm.load; mm.schedules.zb_h1(4, 8); "
        "assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    light = "import sys, moemesh; print(len([m for m in sys.modules if 'pydantic' in m]))"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    for owner, name, words in (
        (mm, "trian", "'trian': did you mean 'train'"),
        (mm, "zzz", "it has ConfigError, Mesh"),
        (mm.schedules, "zb_h3", "schedules has no 'zb_h3'"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(owner, name)


def test_a_package_of_the_same_name_does_not_hide_the_verb() -> None:
    import moemesh.train.command

    assert callable(mm.train) and callable(moemesh.train) and moemesh.train.command is not None


def signature(name: str) -> str:
    """``mm.name(a, b, *, c)``, without types and defaults."""
    target = mm.train.from_python.train if name == "train" else getattr(mm, name)
    words, is_starred = [], False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_starred:
            words.append("*")
            is_starred = True
        words.append("**" * (parameter.kind is parameter.VAR_KEYWORD) + parameter.name)
    return f"mm.{name}({', '.join(words)})"


def test_the_document_names_every_parameter() -> None:
    import moemesh.train.from_python  # noqa: F401

    text = " ".join((ROOT / "docs" / "api.md").read_text().split())
    for name in NAMES:
        assert f"mm.{name}" in text, name
        if inspect.isfunction(getattr(mm, name)) or name in ("MoELayer", "train"):
            assert signature(name) in text, signature(name)


def test_load_takes_texts_and_dicts(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[plan]\ndp = 2\n")
    expected = mm.load(tmp_path / "a.toml", ["plan.tp=2", "train.dtype=float64"])
    assert expected.plan.world_size == 4
    nested = {"plan": {"tp": 2}, "train.dtype": "float64"}
    assert mm.load(tmp_path / "a.toml", nested) == expected
    with pytest.raises(mm.ConfigError, match="5 problems"):
        mm.load(None, {"plan": {"tp": 3, "ep": 5}})


def test_plans_and_estimates_agree(tmp_path: Path) -> None:
    task: dict[str, Any] = {"model": "tiny", "cluster": "dgx_h100", "seq_len": 256}
    answers = mm.plan(**task, global_batch=64, trainable=True, top=3)
    assert len(answers) == 3
    for answer in answers:
        estimate = mm.estimate(**task, global_batch=64, plan=answer.plan)
        assert estimate["seconds"]["total"] == pytest.approx(answer.seconds, rel=1e-12)
        assert estimate["memory"]["needed_bytes"] == answer.memory_bytes == estimate.memory_bytes
        assert estimate.seconds == pytest.approx(sum(estimate.breakdown.values()), rel=1e-12)
        assert estimate.plan == answer.plan and estimate.command == answer.command
        assert answer.command is not None and answer["command"] == answer.command
        assert answer.command.startswith("moemesh train --set model.preset=tiny")
    assert "recommended" in answers.recommended["roles"] and all(one.fits for one in answers)
    # Objects, paths and names are the same.
    model, cluster = mm.load().model, load_cluster("dgx_h100")
    by_objects = {"model": model, "cluster": cluster, "seq_len": 256}
    again = mm.plan(**by_objects, global_batch=64, trainable=True, top=3)
    assert again == answers
    (tmp_path / "tiny.toml").write_text("[model]\npreset = 'tiny'\n")
    by_path = mm.plan(**task | {"model": tmp_path / "tiny.toml"}, global_batch=64, trainable=True)
    assert by_path[0].plan == answers[0].plan
    wider = model.model_copy(update={"hidden_size": 512})
    command = mm.plan(**by_objects | {"model": wider}, global_batch=64, trainable=True)[0].command
    assert command is not None and "--set model.hidden_size=512" in command
    large = mm.estimate(**task | {"model": "qwen3-30b-a3b"}, global_batch=64, plan="dp=8")
    assert not large.fits and "fits=False" in repr(large) and "GiB" in repr(large)
    deferred = "dp=2,pp=2,zero=3,schedule=zb_h1,microbatch=4"
    layout = mm.estimate(**task, global_batch=64, plan=deferred)
    assert layout.plan.zero == 3 and layout.command is None and layout.not_trained
    chosen = mm.plan(**task, global_batch=64, tokens="1T", headroom="60GiB", why="tp=4,data=zero1")
    assert chosen[0]["speed"]["days"] == pytest.approx(
        1e12 / (256 * 64) * chosen[0].seconds / 86_400, rel=1e-12
    )
    assert chosen.why == chosen.details["why"] and chosen.why[0]["asked"] == "tp=4,data=zero1"
    assert chosen.why[0]["slower_seconds"] > 0
    assert chosen.details["usable_share"] * 80 == pytest.approx(20)
    with pytest.raises(mm.ConfigError, match="tpp"):
        mm.estimate(**task, global_batch=64, plan={"tpp": 2})
    with pytest.raises(mm.ConfigError, match="3 problems"):
        mm.plan(model="tinny", cluster="dgx", seq_len=0, global_batch=64)


# The parallel model in a loop of one's own.

SMALL = {"num_layers": 2, "hidden_size": 32, "expert_intermediate_size": 16, "vocab_size": 256}
EXTRA = {"router_selection_bias": True, "aux_loss_scope": "sequence"}


def loop(rank: int, plan: dict[str, Any], folder: str, resume: bool) -> Any:
    """Two steps, a checkpoint after the first; or the second step alone, from that checkpoint."""
    config = mm.load(None, {"model": SMALL | EXTRA, "plan": plan})
    alone = config.plan.world_size == 1
    mesh = mm.Mesh.single("cpu") if alone else mm.Mesh.create(config.plan.layout, "cpu")
    if plan == {"dp": 2}:
        other = mm.load(None, {"model": SMALL, "plan.tp": 2}).plan
        with pytest.raises(UserError, match=r"dp = 1, cp = 1, tp = 2, .* the mesh pp = 1, dp = 2"):
            mm.parallelize(config.model, other, mesh, seq_len=8, global_batch=5)
    model = mm.parallelize(
        config.model, config.plan, mesh, seq_len=8, global_batch=5, dtype="float64"
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    results = []
    for step in range(2):
        if resume and step == 0:
            state = mm.load_checkpoint(folder, state)
            assert state["step"] == 1 and state["model"] is model
            model.num_steps = 1
            continue
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (5, 9), generator=generator)
        mask = torch.rand(5, 8, generator=generator) < 0.8
        results.append(model.step(tokens, loss_mask=mask, clip=0.5))
        optimizer.step()
        if step == 0:
            mm.save_checkpoint(folder, state | {"step": 1}, step=1)
    held_out = model.evaluate(torch.arange(18).view(2, 9))
    return [(r.loss, r.aux_loss, r.grad_norm) for r in results], held_out


def test_a_loop_of_ones_own_equals_one_device(tmp_path: Path) -> None:
    expected, held_out = loop(0, {}, str(tmp_path / "one"), False)
    plan = {"pp": 2, "tp": 2, "ep": 2, "schedule": "zb_h1", "microbatches": 2}
    for found, other in run_on_ranks(4, loop, plan, str(tmp_path / "four"), False):
        assert found == [pytest.approx(row, rel=1e-9) for row in expected]
        assert other == pytest.approx(held_out, rel=1e-9)
    plan = {"pp": 2, "schedule": "search", "microbatches": 2}
    for found, _ in run_on_ranks(2, loop, plan, str(tmp_path / "search"), False):
        assert found == [pytest.approx(row, rel=1e-9) for row in expected]
    # Saved by four ranks, gone on by one and by two.
    for num_ranks, plan in ((1, {}), (2, {"dp": 2})):
        run = run_on_ranks if num_ranks > 1 else lambda _, *call: [call[0](0, *call[1:])]
        for found, other in run(num_ranks, loop, plan, str(tmp_path / "four"), True):
            assert found == [pytest.approx(expected[1], rel=1e-9)]
            assert other == pytest.approx(held_out, rel=1e-9)


def test_an_evaluation_reads_weights_that_an_optimizer_has_changed() -> None:
    """Weights in bfloat16 are copies of the masters that an optimizer or a checkpoint changes."""
    config = mm.load(None, {"model": SMALL})
    sizes: dict[str, Any] = {"seq_len": 8, "global_batch": 2, "dtype": "bfloat16"}
    model = mm.parallelize(config.model, config.plan, mm.Mesh.single("cpu"), **sizes)
    with torch.no_grad():
        for master in model.parameters():
            master.zero_()
    assert model.evaluate(torch.arange(18).view(2, 9)) == pytest.approx(math.log(256), rel=1e-6)


def test_a_search_knows_the_length_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def estimated(plan: Any, model: Any, seq_len: int) -> Any:
        lengths.append(seq_len)
        return estimated_costs(plan, model, seq_len)

    monkeypatch.setattr("moemesh.schedule.plan_schedule.estimated_costs", estimated)
    config = mm.load(None, {"model": SMALL, "plan": {"schedule": "search", "microbatches": 3}})
    mesh = mm.Mesh.single("cpu")
    mm.parallelize(config.model, config.plan, mesh, seq_len=24, global_batch=3)
    assert set(lengths) == {24}


def test_mistakes_in_a_loop_are_named() -> None:
    config = mm.load(None, {"model": SMALL})
    build = {"seq_len": 8, "global_batch": 2}
    with pytest.raises(UserError, match="the plan needs 2 ranks, the mesh has 1"):
        plan = mm.load(None, {"model": SMALL, "plan.dp": 2}).plan
        mm.parallelize(config.model, plan, mm.Mesh.single("cpu"), **build)
    with pytest.raises(UserError, match="updates weights inside of its stream"):
        plan = mm.load(None, {"model": SMALL, "plan.schedule": "pipedream"}).plan
        mm.parallelize(config.model, plan, mm.Mesh.single("cpu"), **build)
    with pytest.raises(UserError, match="shards states over an optimizer"):
        plan = config.plan.model_copy(update={"data": "zero3"})
        mm.parallelize(config.model, plan, mm.Mesh.single("cpu"), **build)
    mesh = mm.Mesh.single("cpu")
    with pytest.raises(mm.ConfigError, match=r"did you mean bfloat16\? \(choices: float32"):
        mm.parallelize(config.model, config.plan, mesh, dtype=torch.float16, **build)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seq_len must be a whole number, not '8'"):
        mm.parallelize(config.model, config.plan, mesh, seq_len="8", global_batch=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a ModelConfig, not str: moemesh\.load"):
        mm.parallelize("tiny", config.plan, mesh, **build)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs a process group"):
        mm.Mesh.create(config.plan.layout, "cpu")
    with pytest.raises(TypeError, match="an override must be a str, not int"):
        mm.load(None, [3])  # type: ignore[list-item]
    model = mm.parallelize(config.model, config.plan, mesh, dtype=torch.float64, **build)  # type: ignore[arg-type]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    for tokens, words in (
        (torch.full((2, 9), 256), "hold ids from 256 to 256, the vocabulary those from 0 to 255"),
        (torch.ones(2, 9), "must be torch.int64"),
        (torch.ones(9), r"\[B, S\]"),
    ):
        with pytest.raises((UserError, IndexError), match=words):
            model.step(tokens[:, :-1] if tokens.ndim == 2 else tokens, tokens[..., 1:])
    ids = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(UserError, match=r"\[B, S \+ 1\] where targets are left out, not \[8\]"):
        model.evaluate(ids[0])
    for name in ("valid", "loss_mask"):
        with pytest.raises(UserError, match=f"{name} must be torch.bool, not torch.int64"):
            model.step(ids, ids, **{name: ids})
    with pytest.raises(UserError, match=r"documents must be torch\.int64, not torch\.bool"):
        model.step(ids, ids, documents=ids.bool())
    with pytest.raises(TypeError, match="targets must be a Tensor, not list"):
        model.step(ids, [1, 2])  # type: ignore[arg-type]
    with torch.no_grad():
        assert mm.parallelize(config.model, config.plan, mesh, **build).evaluate(ids, ids) > 0
        with pytest.raises(UserError, match=r"step needs gradients: .* in torch\.no_grad or after"):
            model.step(ids, ids)
    with torch.inference_mode():
        assert model.evaluate(ids, ids) > 0
        with pytest.raises(UserError, match=r"step needs gradients: .* in torch\.inference_mode"):
            model.step(ids, ids)
        with pytest.raises(UserError, match="parallelize needs gradients"):
            mm.parallelize(config.model, config.plan, mesh, **build)
    for limit in (-1.0, float("nan")):
        with pytest.raises(UserError, match="clip must be a number of at least 0, not"):
            model.step(ids, ids, clip=limit)
        with pytest.raises(UserError, match="max_norm must be a number of at least 0, not"):
            mm.clip_grad_norm_(nn.Linear(2, 2), limit)
    with pytest.raises(TypeError, match=r"must be a RunConfig, not str: moemesh\.train\(moemesh"):
        mm.train("run.toml")  # type: ignore[operator]


# Checkpoints of any state.


class Net(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.moe = mm.MoELayer(6, 4, 8, 2, group)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.inner(x))[0]


def train_net(rank: int, folder: str, ranks_of_experts: int, sharded: bool) -> Any:
    """A step of AdamW, a checkpoint, and the whole state."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // ranks_of_experts, ranks_of_experts))
    model = Net(mesh)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.ones(3, 6)).sum().backward()
    for name, parameter in model.named_parameters():
        if not sharded and "moe.experts" not in name:
            dist.all_reduce(parameter.grad)
    model.moe.sync_expert_gradients()
    optimizer.step()
    mm.save_checkpoint(folder, {"model": model, "optimizer": optimizer, "at": [1, "x", None]})
    return mm.full_state_dict(model)


def load_net(rank: int, folder: str) -> Any:
    """The checkpoint in other hands: other experts, other moments, until it is loaded."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    state = mm.load_checkpoint(folder, {"model": model, "optimizer": optimizer, "at": [0, "", 1]})
    assert state["at"] == [1, "x", None] and optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    moments = optimizer.state[model.moe.experts.down]
    assert moments["exp_avg"].shape == model.moe.experts.down.shape and moments["step"] == 1
    return mm.full_state_dict(model), moments["exp_avg"]


@pytest.mark.parametrize(
    ("experts", "sharded"),
    [
        (4, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_saved_by_four_ranks_loaded_by_any(tmp_path: Path, experts: int, sharded: bool) -> None:
    folder = str(tmp_path)
    expected = run_on_ranks(4, train_net, folder, experts, sharded)[0]
    one, whole = load_net(0, folder)
    parts = run_on_ranks(2, load_net, folder)
    for found in (one, *(state for state, _ in parts)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(torch.cat([part for _, part in parts]), whole)
    everything = mm.load_checkpoint(folder)
    assert torch.equal(everything["model"]["moe.experts.down"], expected["moe.experts.down"])
    assert everything["at"] == [1, "x", None]
    assert everything["optimizer"]["param_groups"][0]["betas"] == [0.9, 0.999]


def test_any_tree_comes_back(tmp_path: Path) -> None:
    state = {"a": {3: torch.ones(2), "b": [torch.tensor(1.5), ()]}, "n": 1, "none": None, "e": {}}
    mm.save_checkpoint(tmp_path, state)
    tree = mm.load_checkpoint(tmp_path, {"a": {3: torch.zeros(2), "b": [torch.zeros(()), ()]}},
                               strict=False)  # fmt: skip
    assert tree["a"][3].tolist() == [1, 1] and tree["a"]["b"][0] == 1.5
    everything = mm.load_checkpoint(tmp_path)
    assert everything["n"] == 1 and everything["none"] is None and everything["e"] == {}
    assert everything["a"].keys() == {3, "b"} and everything["a"]["b"] == [torch.tensor(1.5), []]
    # More than ten entries, lists in lists, and a dict whose keys are the numbers of a list.
    deep = [[index, {0: "a", 1: ("b",)}] for index in range(12)]
    mm.save_checkpoint(tmp_path / "list", deep)
    assert mm.load_checkpoint(tmp_path / "list") == [
        [index, {0: "a", 1: ["b"]}] for index in range(12)
    ]
    with pytest.raises(CheckpointError, match="never overwritten"):
        mm.save_checkpoint(tmp_path, state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": object()}, "a: the type object is not supported"),
        ({"a/b": 1}, "keys are integers, or texts"),
        ({"a": {True: 1}}, "the key True cannot be saved"),
        ({"a": float("nan")}, "a is nan"),
        ({"a": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "of no module in the state"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        mm.save_checkpoint(tmp_path / "new", state)
    assert not (tmp_path / "new" / "step-0").exists()


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = mm.save_checkpoint(tmp_path, {"w": torch.arange(4.0), "n": 1})
    for state, words in (
        ({"w": torch.zeros(4), "n": 0, "v": torch.zeros(1)}, "does not hold 1 of the names: v"),
        ({"w": torch.zeros(4)}, "also holds 1 of the names: n"),
        ({"w": torch.zeros(5), "n": 0}, r"w has shape \[4\], the model has \[5\]"),
        ({"w": torch.zeros(4, dtype=torch.float64), "n": 0}, "dtypes are not cast"),
        ({"w": 0, "n": 0}, "w is a tensor, the state has the type int"),
        (
            {"w": torch.zeros(4), "n": torch.zeros(1)},
            "n is the value 1, the state has the type Tensor",
        ),
        (torch.zeros(4), "the state is of type Tensor: it must be a dict or list"),
        ("w", "the state is of type str: it must be a dict or list"),
        ({"w": object(), "n": 0}, "w: the type object is not supported"),
    ):
        with pytest.raises(CheckpointError, match=words):
            mm.load_checkpoint(tmp_path, state)
    for step in (-1, 1.5, "0", True):
        with pytest.raises(CheckpointError, match="step must be an integer of at least 0, not"):
            mm.load_checkpoint(tmp_path, step=step)  # pyright: ignore[reportArgumentType]
        with pytest.raises(CheckpointError, match="step must be an integer of at least 0, not"):
            mm.save_checkpoint(tmp_path, {}, step=step)  # pyright: ignore[reportArgumentType]
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="digest"):
        mm.load_checkpoint(tmp_path, step=0)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(CheckpointError, match="holds no"),
    ):
        mm.load_checkpoint(tmp_path)
    assert json.loads((path / "manifest.json").read_text())["step"] == 0


def mistake_on_rank_1(rank: int, folder: str) -> None:
    weights = torch.arange(4.0)
    good = {"w": weights, "n": 1}
    mm.save_checkpoint(folder, good)
    into = {"w": torch.zeros(4), "n": 0}
    for wrong, words in (
        ({"w": torch.zeros(5), "n": 0}, r"rank 1: .*w has shape \[4\], the model has \[5\]"),
        ({"w": torch.zeros(4).double(), "n": 0}, "rank 1: .*w is float32, requested as float64"),
        ({"w": torch.zeros(4), "v": 0}, "rank 1: .* does not hold 1 of the names: v"),
        ({"w": 3, "n": 0}, "rank 1: .*w is a tensor, the state has the type int"),
        (3, "rank 1: the state is of type int"),
        ({"w": torch.optim.SGD(nn.Linear(2, 2).parameters()), "n": 0}, "rank 1: w: a parameter"),
    ):
        with pytest.raises(CheckpointError, match=words):
            mm.load_checkpoint(folder, wrong if rank else into)
        assert not into["w"].any()  # nothing was changed
    # A whole state on one rank, the parts of it on another one: which rank loads what is free.
    with pytest.raises(CheckpointError, match="different whole, in rank order: False, True"):
        mm.load_checkpoint(folder, None if rank else into)
    for wrong, words in (
        ({"w": object()}, "rank 1: w: the type object is not supported"),
        ({"w": weights, "n": float("inf")}, "rank 1: n is inf"),
        ({"a/b": weights}, "rank 1: .*keys are integers"),
    ):
        with pytest.raises(CheckpointError, match=words):
            mm.save_checkpoint(folder, wrong if rank else good, step=1)
    with pytest.raises(CheckpointError, match="different step, in rank order: 1, 2"):
        mm.save_checkpoint(folder, good, step=1 + rank)
    with pytest.raises(CheckpointError, match="different check_replicas, in rank order: False, T"):
        mm.save_checkpoint(folder, good, step=1, check_replicas=bool(rank))
    # The first rank alone looks for the newest step, and warns of those that it skips.
    for fails, words in (
        (OSError(5, "Input/output error"), r"rank 0: \[Errno 5\] Input/output error"),
        (TimeoutError(), "rank 0: TimeoutError"),  # without a text
    ):
        looks = fails if rank == 0 else AssertionError("another rank looks")
        with (
            patch.object(store, "latest", side_effect=looks),
            pytest.raises(CheckpointError, match=words),
        ):
            mm.load_checkpoint(folder)
    assert mm.load_checkpoint(folder, into) == {"w": into["w"], "n": 1}
    assert torch.equal(into["w"], weights)
    if rank == 0:
        (Path(folder) / "step-7").mkdir()
        (Path(folder) / "step-7" / "manifest.json").write_text("{")
    dist.barrier()
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(CheckpointError, match="rank 0: UserWarning: checkpoint of step 7 skipped"),
    ):
        mm.load_checkpoint(folder, into)


def test_a_mistake_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_on_ranks(2, mistake_on_rank_1, str(tmp_path))
    assert not (tmp_path / "step-1").exists()


def save_different(rank: int, folder: str) -> None:
    with pytest.raises(CheckpointError, match="w differs between ranks 0 and 1"):
        mm.save_checkpoint(folder, {"w": torch.tensor([rank])})
    with pytest.raises(CheckpointError, match=r"no rank holds 2 of its 4 elements|overlap"):
        part = mm.Sharded(torch.ones(2), (4,), (0,))
        mm.save_checkpoint(folder, {"w": part}, check_replicas=False)
    mm.save_checkpoint(folder, {"w": torch.tensor([rank])}, check_replicas=False)


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    run_on_ranks(2, save_different, str(tmp_path))
    assert mm.load_checkpoint(tmp_path)["w"].tolist() == [0]


def test_errors_name_the_argument_and_not_the_option_of_the_command() -> None:
    for overrides in (["plan.tp=x"], {"plan": {"tp": "x"}}, "plan.tp"):
        with pytest.raises(mm.ConfigError) as error:
            mm.load(overrides=overrides)
        assert "overrides: plan.tp" in str(error.value) and "--set" not in str(error.value)
    for settings in (["lora.rank=x"], ["plan.tp=2"]):
        with pytest.raises(mm.ConfigError) as error:
            mm.plan(
                model="tiny", cluster="laptop_cpu", seq_len=64, global_batch=8, settings=settings
            )
        assert "settings" in str(error.value) and "--set" not in str(error.value)


def test_whole_numbers_of_numpy_and_torch() -> None:
    """Arguments, and keys of a plan in a dict; a number with a fraction is none."""
    task: dict[str, Any] = {"model": "tiny", "cluster": "laptop_cpu", "seq_len": np.int64(64)}
    task["global_batch"] = torch.tensor(8)
    answer = mm.estimate(**task, plan={"dp": np.int64(2), "ep": 2})
    assert answer.plan.dp == 2 and type(answer.plan.dp) is int
    assert mm.schedules.zb_h1(np.int64(4), torch.tensor(8)) == mm.schedules.zb_h1(4, 8)
    for wrong in (torch.tensor(4.0), np.float64(4), True):
        with pytest.raises(TypeError, match="num_ranks must be a whole number"):
            mm.schedules.zb_h1(wrong, 8)


def test_sizes_and_norms_of_numpy() -> None:
    sizes = {"hidden_size": np.int64(8), "expert_size": torch.tensor(4), "num_experts": np.int32(4)}
    layer = mm.MoELayer(**sizes, top_k=2, max_tokens=np.int64(16))  # pyright: ignore
    assert "num_experts=4" in repr(layer)
    layer(torch.ones(3, 8))[0].sum().backward()
    norm = mm.clip_grad_norm_(layer, np.float32(1e-3))
    assert norm > 1e-3
    assert mm.clip_grad_norm_(layer, 1.0) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(TypeError, match=r"model must be a Module, .*nn\.utils\.clip_grad_norm_"):
        mm.clip_grad_norm_(layer.parameters(), 1.0)  # pyright: ignore
    with pytest.raises(ValueError, match="top_k must be an integer of at least 1"):
        mm.MoELayer(8, 4, 4, np.float64(2))  # pyright: ignore


def test_one_text_in_place_of_a_list(tmp_path: Path) -> None:
    task: dict[str, Any] = {"model": "tiny", "cluster": "laptop_cpu", "seq_len": 64}
    given = {"settings": "lora.rank=4"}, {"settings": ["lora.rank=4"]}
    one, listed = (mm.plan(**task, global_batch=8, **settings) for settings in given)
    assert one.recommended.seconds == listed.recommended.seconds
    small = ["model.num_layers=1", "data.seq_len=8", "data.global_batch=1", "train.steps=1"]
    small.append("train.validation_batches=1")
    mm.train(mm.load(None, small), tmp_path / "run")
    changed = mm.load(None, [*small, "train.steps=2", "train.lr=0.1"])
    assert mm.train(changed, tmp_path / "run", allow_change="train.lr").num_steps == 2


def test_schedules_in_files_by_text(tmp_path: Path) -> None:
    schedule, file = mm.schedules.zb_h1(2, 2), tmp_path / "schedule.txt"
    for path in (file, str(file)):
        mm.schedules.save(schedule, path)
        assert mm.schedules.load(path) == schedule
