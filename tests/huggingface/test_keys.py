"""Every key of a config.json that some reader here looks for, in every family: the logits of
transformers from the same folder, or a refusal. The table of its classes is that of the installed
version."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.keys import class_rows
from moemesh.sharding.load_run import load_run
from tests.huggingface import classes, ours
from tests.huggingface.tiny import FAMILIES, save
from tests.sandbox import ROOT

transformers = pytest.importorskip("transformers")

#: Longer than every window that is tried, and than the positions before they are stretched.
TOKENS = torch.randint(0, 288, (1, 150), generator=torch.Generator().manual_seed(1))
#: Values to try of keys whose type does not suffice to choose them.
SPECIAL: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "swish"],
    "layer_types": [["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2],
    "mlp_layer_types": [["sparse"] * 3, ["sparse", "dense", "sparse"]],
    "mlp_only_layers": [[0], None],
    "topk_method": ["greedy", "group_limited_greedy"],
    "sliding_window": [24, 96],
    "use_sliding_window": [True],
    "head_dim": [8],
    "partial_rotary_factor": [0.25],
    "rotary_dim": [4, 8],
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
#: Changes of RoPE; "type" is the older name of "rope_type".
ROPE: dict[str, dict[str, Any]] = {
    "yarn beside": {"rope_scaling": {"rope_type": "yarn", **_YARN}},
    "yarn beside, older": {"rope_scaling": {"type": "yarn", **_YARN, "rope_theta": 5e5}},
    "positions beside yarn": {
        "rope_scaling": {"rope_type": "yarn", **_YARN},
        "original_max_position_embeddings": 32,
    },
    "linear beside": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic beside": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "longrope beside": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3 beside": {
        "rope_scaling": {
            "rope_type": "llama3",
            **_YARN,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
    "proportional": {
        "rope_parameters": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "yarn without whole borders": {
        "rope_scaling": {"rope_type": "yarn", **_YARN, "rope_theta": 1e4, "truncate": None}
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 2e4, "factor": 2.0}},
    "linear with keys of yarn": {
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 2.0,
            "attention_factor": 2.0,
        }
    },
    "yarn from the model's positions": {
        "rope_parameters": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
    "empty": {"rope_parameters": {}, "rope_scaling": None},
    "missing": {"rope_parameters": None},
    "theta alone": {"rope_parameters": None, "rope_theta": 7e5},
    "theta beside": {"rope_theta": 7e5},
    "part of a head": {"partial_rotary_factor": 0.25},
    "part in the table": {
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "part of a stretched head": {
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one family, named after it."""
    return save(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the notes of transformers on keys that it does not know."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def changed(folder: Path, changes: dict[str, Any], place: Path) -> Path:
    """The folder with `changes` of its config.json; a key whose value is Ellipsis is left out."""
    place.mkdir(exist_ok=True)
    if not (place / "model.safetensors").exists():
        shutil.copy(folder / "model.safetensors", place)
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not ...}
    (place / "config.json").write_text(json.dumps(kept))
    return place


@torch.no_grad()
def theirs(folder: Path) -> Tensor | None:
    """The logits of transformers; None where the weights are not those of its model."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
            return None
        return model.eval()(TOKENS).logits
    except Exception:  # of any kind: what it cannot run has no logits
        return None


#: Configurations that were computed, of the folder at hand.
_computed: dict[tuple[Path, str], Tensor] = {}


def our_logits(folder: Path) -> Tensor | None:
    """Our logits; None where the folder is refused."""
    try:
        given = [f"model.path={folder}", "model.implementation=moemesh"]
        config = load_run([], given, {}).config.model
        name = (folder, config.model_dump_json())
        if name not in _computed:
            model = ours.load(folder, torch.float64, config)
            _computed[name] = ours.logits(model, TOKENS)[0]
        return _computed[name]
    except (ConfigError, CheckpointError):
        return None


def compare(folder: Path, changes: dict[str, Any], place: Path) -> str:
    """ "same", or "refused", or "" where transformers has no answer; a difference is an error."""
    place = changed(folder, changes, place)
    expected, ours = theirs(place), our_logits(place)
    if expected is None:
        return ""
    if ours is None:
        return "refused"
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6, msg=lambda m: f"{changes}: {m}")
    return "same"


def other_values(key: str, value: Any) -> list[Any]:
    """Values to try in place of one."""
    if key in SPECIAL:
        return [*SPECIAL[key], ...]
    match value:
        case bool():
            return [not value, None, ...]
        case int():
            return [value + 1, max(value // 2, 1), 0, ...]
        case float():
            return [value * 3, value / 2, ...]
        case _:
            return [True, 24, 0.5, ...]


def test_the_table_is_that_of_the_installed_version() -> None:
    """Mended by `python -m tests.huggingface.classes`."""
    assert (ROOT / classes.FILE).read_text(encoding="utf-8") == classes.text()
    assert class_rows() == classes.classes()


REPRESENTATIVE = ("llama", "gpt_oss", "minimax_m2")


@pytest.mark.representative("minimax_m2-one value")
@pytest.mark.parametrize("num_values", [1, None], ids=["one value", "every value"])
def test_keys_that_a_family_reads(folder: Path, tmp_path: Path, num_values: int | None) -> None:
    row, given = class_rows()[folder.name], json.loads((folder / "config.json").read_text())
    assert compare(folder, {}, tmp_path) == "same"
    for key in (*row["reads"], *row["aliases"]):
        for value in other_values(key, given.get(key))[:num_values]:
            compare(folder, {key: value}, tmp_path)


@pytest.mark.parametrize("value", [True, 24, None])
@pytest.mark.representative(*(f"{kind}-{value}" for kind in REPRESENTATIVE for value in (24,)))
def test_keys_that_a_family_does_not_read(folder: Path, tmp_path: Path, value: Any) -> None:
    """All at once: neither transformers nor this package sees them."""
    row, given = class_rows()[folder.name], json.loads((folder / "config.json").read_text())
    read = {*row["reads"], *row["aliases"], *given, *classes.NOT_ALONE, *classes.refused_keys()}
    # A mistral with kinds of layers is a ministral.
    choosing = {"layer_types"} if folder.name == "mistral" else set[str]()
    read |= choosing
    unread = sorted(classes.understood() - read)
    # Numbers of things are whole, as the window is that the cache of transformers takes.
    counts = ("num_", "n_", "sliding_", "attention_chunk_size")
    tried = [key for key in unread if value != 0.5 or not key.startswith(counts)]
    changes = dict.fromkeys(tried, value)
    lists = {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    }
    expected = ours.config_of(folder)
    assert compare(folder, changes, tmp_path) == "same"
    assert ours.config_of(tmp_path) == expected
    # Masks and cache of transformers read the lists of every family: some it then cannot run.
    changes |= {key: kinds for key, kinds in lists.items() if key not in {*row["reads"], *choosing}}
    assert compare(folder, changes, tmp_path) in ("same", "")
    assert ours.config_of(tmp_path) == expected


@pytest.mark.slow
def test_rope(folder: Path, tmp_path: Path) -> None:
    verdicts = {name: compare(folder, changes, tmp_path) for name, changes in ROPE.items()}
    assert verdicts["longrope beside"] in ("refused", "")
    assert verdicts["yarn beside"] == verdicts["dynamic beside"] == "same"


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0 sets to 0"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv = 0 sets to 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit = 0 sets to 0"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window = 0 hides every key"),
        ("mixtral", {"sliding_window": 0.0}, "sliding_window = 0 hides every key"),
        ("llama", {"rope_theta": 0, "rope_parameters": ...}, "rope_theta must be above 0"),
        ("mistral", {"rope_scaling": {"rope_theta": -1}}, "rope_theta must be above 0"),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "attention_factor": 0}},
            "attention_factor must",
        ),
        ("glm4_moe", {"partial_rotary_factor": 0.0}, "partial_rotary_factor must be above 0"),
        ("llama", {"attention_bias": "false"}, "attention_bias must be true or false"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ],
)
def test_values_that_have_no_meaning_here(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    """Values that, read as truth values, would mean another model than that of transformers."""
    folder = changed(save(kind, tmp_path / kind), changes, tmp_path / "changed")
    with pytest.raises(ConfigError, match=words):
        load_run([], [f"model.path={folder}", "model.implementation=moemesh"], {})


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
def test_a_window_that_no_layer_reads(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / kind)
    kinds = ["full_attention"] * json.loads((folder / "config.json").read_text())[
        "num_hidden_layers"
    ]
    changes: dict[str, Any] = {"sliding_window": 0, "layer_types": kinds}
    if kind == "qwen3":
        changes["use_sliding_window"] = True
    assert compare(folder, changes, tmp_path / "changed") == "same"
