"""Cluster files: measured links survive writing and reading; contradictions name the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.cluster import KEYS, Cluster, LinkCurve, load_cluster
from moemesh.config.errors import ConfigError

CURVE: dict[str, Any] = {
    "operation": "all_gather",
    "ranks": 4,
    "members_per_node": 2,
    "bytes": (1024.0, 4194304.0),
    "seconds": (2.25e-05, 0.0103125),
}


def cluster(**keys: Any) -> Cluster:
    return load_cluster("dgx_a100").model_copy(update=keys)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = cluster(
        name='a "quoted" name',
        constants={"gemm_efficiency": 0.8125, "collective_latency_us": 12.5},
        links=(LinkCurve(**CURVE), LinkCurve(**(CURVE | {"operation": "send", "ranks": 2}))),
    )
    file = tmp_path / "cluster.toml"
    file.write_text(wanted.to_toml("Measured.\nOn two hosts."))
    assert file.read_text().startswith("# Measured.\n# On two hosts.\n")
    assert load_cluster(str(file)) == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 1}, "at least 2 ranks, not 1"),
        ({"members_per_node": 5}, "members_per_node (5) must lie between 1 and ranks"),
        ({"seconds": (1.0,)}, "2 bytes and 1 seconds"),
        ({"seconds": (1.0, 0.0)}, "above 0"),
        ({"bytes": (4096.0, 1024.0)}, "must ascend"),
        ({"bytes": (), "seconds": ()}, "0 bytes and 0 seconds"),
    ],
)
def test_contradictions(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster(links=(LinkCurve(**(CURVE | change)),)).to_toml("Wrong."))
    with pytest.raises(ConfigError) as error:
        load_cluster(str(file))
    assert words in str(error.value)


def test_an_unknown_operation_or_key_is_told(tmp_path: Path) -> None:
    text = cluster(links=(LinkCurve(**CURVE),)).to_toml("Wrong.")
    for old, new in (('"all_gather"', '"gather"'), ("members_per_node =", "members =")):
        file = tmp_path / "cluster.toml"
        file.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match="links"):
            load_cluster(str(file))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("gpu", "accelerator"),
        ("Price_Per_Hour", "gpu_hour_price"),
        ("nics_per_node", "inter_node_bandwidth"),
        ("vram_gb", "memory_bytes"),
        ("nvlink", "intra_node_bandwidth"),
    ],
)
def test_other_words_for_a_key(tmp_path: Path, word: str, key: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"{word} = 2\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    (problem,) = (x for x in caught.value.problems if x.code == "unknown-key")
    assert problem.fix.startswith(f"{key} is ")
    assert not any(set(row.names) & KEYS.keys() for row in KEYS.values())


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("intra_node_latency", "3us", "intra_node_latency = 3e-06"),
        ("intra_node_latency", "3 GB", "intra_node_latency = 3e-6"),
        ("intra_node_bandwidth", "2 ms", "intra_node_bandwidth = 450e9"),
    ],
)
def test_a_unit_of_another_quantity_is_no_fix(
    tmp_path: Path, key: str, value: str, fix: str
) -> None:
    text = load_cluster("one_h100").to_toml("mine")
    (tmp_path / "mine.toml").write_text(re.sub(rf"(?m)^{key} = .*", f'{key} = "{value}"', text))
    with pytest.raises(ConfigError) as error:
        load_cluster(tmp_path / "mine.toml")
    assert error.value.problems[0].fix == fix


@pytest.mark.parametrize(
    ("source", "mebibytes"),
    [
        ("8xL40S", 46068),
        ("4x NVIDIA L40S 48GB", 46068),
        ("4x NVIDIA L40S 45GB", 46068),
        ("8xMI250X 128GB", 65520),
        ("8xMI250X", 65520),
        ("g6.48xlarge", 23034),
        ("g5.48xlarge", 23028),
        ("8xH100", 81559),
        ("8xH200", 143771),
        ("8xH20", 97871),
        ("8xB200", 183359),
    ],
)
def test_a_device_has_the_memory_that_its_driver_prints(source: str, mebibytes: int) -> None:
    assert load_cluster(source).memory_bytes / 2**20 == pytest.approx(mebibytes, rel=0.01)


#: Device -> dense TFLOP/s in 16 bit of its data sheet.
NAMES_ALIKE = {"A10": 125, "A10G": 70, "L4": 121, "L40": 181, "L40S": 362}


def test_cards_with_similar_names_differ() -> None:
    peaks = {name: load_cluster(f"8x{name}").peak_flops["bfloat16"] / 1e12 for name in NAMES_ALIKE}
    assert peaks == NAMES_ALIKE
