"""cluster init, show, list: files that are read back, words for links, and units in messages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from moemesh.bench.settings import LinksSettings
from moemesh.cli.machine import cluster_text
from moemesh.config.cluster import KEYS, Cluster, load_cluster
from moemesh.config.devices import ACCELERATORS, MACHINES, machine_of
from moemesh.config.errors import ConfigError
from moemesh.config.sources import preset_names
from tests.test_cli import Invoke

#: Output of `bench links --json`: the part that a cluster file is made from.
MEASURED = {
    "settings": LinksSettings(ranks=2).to_json(),
    "links": [
        {
            "operation": operation,
            "ranks": 2,
            "members_per_node": 2,
            "bytes": [1024, 1048576],
            "seconds": [1e-4, 1.1e-3],
            "fit": {"alpha": 1e-4, "beta": 1e-9, "error": 0, "root": [0, 0, 0], "root_error": 0},
        }
        for operation in ("all_reduce", "send")
    ],
    "device": {
        "name": "a processor",
        "memory_bytes": 2**31,
        "memory_bandwidth": 1e10,
        "row_loss": 0.5,
        "width_loss": 0.1,
        "peak_flops": {"float32": 4e10, "bfloat16": 3e10},
    },
}


@pytest.fixture
def run(invoke: Invoke) -> Invoke:
    return partial(invoke, "cluster")


def test_every_key_of_a_cluster_is_explained() -> None:
    assert set(KEYS) == set(Cluster.model_fields)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_a_file_from_a_preset_is_that_preset(run, tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.toml"
    assert run("init", str(file), "--from", name, "--name", name)[0] == 0
    assert load_cluster(str(file)) == load_cluster(name)
    text = file.read_text()
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    for key, value in load_cluster(name).model_dump().items():
        if value and key in KEYS:
            assert f"({KEYS[key].unit})" in comments, key


def test_a_file_says_where_it_started(run, tmp_path: Path) -> None:
    assert "Started from dgx_h100." in run("init", str(tmp_path / "a.toml"))[1]
    printed = run("init", str(tmp_path / "b.toml"), "--device", "H800-80G")[1]
    assert "From the data sheet of H800-80G" in printed
    with pytest.raises(ConfigError, match=r"init mine\.toml --from hgx_h800`"):
        load_cluster("hgx_h80")


@pytest.mark.parametrize(
    ("text", "preset", "nodes"),
    [
        ("dgx_b200 x 16", "dgx_b200", 16),
        ("16 x dgx_b200", "dgx_b200", 16),
        ("dgx_b200x16", "dgx_b200", 16),
        ("2xgb200_nvl72", "gb200_nvl72", 2),
        ("DGX H100", "dgx_h100", 1),
        ("hgx-h800", "hgx_h800", 1),
    ],
)
def test_several_nodes_of_a_preset(text: str, preset: str, nodes: int) -> None:
    cluster = load_cluster(text)
    assert cluster == load_cluster(preset).model_copy(update={"nodes": nodes})


@pytest.mark.parametrize(
    ("text", "device", "devices", "gib"),
    [
        ("8x NVIDIA H100 80GB HBM3", "H100-80G", (1, 8), 80),
        ("H100 SXM5 x 16", "H100-80G", (2, 8), 80),
        ("4xA100 40GB", "A100-40G", (1, 4), 40),
        ("8xA100-SXM4-80GB", "A100-80G", (1, 8), 80),
        ("GB200 NVL72", "GB200", (1, 72), 186),
        ("8xGB200 NVL72", "GB200", (1, 8), 186),
        ("Tesla V100 32GB", "V100", (1, 8), 32),
        ("H100 94GB", "H100-80G", (1, 8), 94),
        ("2x4xH100", "H100-80G", (2, 4), 80),
    ],
)
def test_descriptions_of_devices_are_a_cluster(
    text: str, device: str, devices: tuple[int, int], gib: int
) -> None:
    cluster = load_cluster(text)
    assert (cluster.accelerator, cluster.nodes, cluster.gpus_per_node) == (device, *devices)
    assert cluster.memory_bytes == gib * 2**30


@pytest.mark.parametrize(
    ("text", "device", "nodes", "gigabits"),
    [
        ("p5.48xlarge", "H100-80G", 1, 400),
        ("4xp4d.24xlarge", "A100-40G", 4, 50),
        ("a3-megagpu-8g x 16", "H100-80G", 16, 200),
        ("2 x Standard_ND96isr_MI300X_v5", "MI300X", 2, 400),
        ("BM.GPU.H200.8", "H200-141G", 1, 400),
    ],
)
def test_machine_types_of_clouds_are_nodes(
    text: str, device: str, nodes: int, gigabits: int
) -> None:
    cluster = load_cluster(text)
    assert (cluster.accelerator, cluster.nodes, cluster.gpus_per_node) == (device, nodes, 8)
    assert cluster.inter_node_bandwidth == gigabits * 1e9 / 8
    assert cluster.memory_bytes == ACCELERATORS[device].memory_bytes
    assert cluster.check() == []


def test_every_machine_type_has_devices() -> None:
    assert all(machine_of(name) for name in MACHINES)
    with pytest.raises(ConfigError, match=r"did you mean p5\.48xlarge\?"):
        load_cluster("p5.48xlarg")
    with pytest.raises(ConfigError, match="neither a cluster preset"):
        load_cluster("0xp5.48xlarge")


@pytest.mark.parametrize(
    ("text", "name", "nodes", "devices"),
    [
        ("MI300X", "8xMI300X", 1, 8),
        ("8xH100", "8xH100-80G", 1, 8),
        ("64 x rtx 4090", "64xRTX4090", 8, 8),
        ("1x4090", "1xRTX4090", 1, 1),
        ("3*A100-40G", "3xA100-40G", 1, 3),
        ("144xGB300", "144xGB300", 2, 72),
    ],
)
def test_devices_of_a_data_sheet_are_a_cluster(
    text: str, name: str, nodes: int, devices: int
) -> None:
    cluster = load_cluster(text)
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == (name, nodes, devices)
    assert load_cluster(cluster.name) == cluster
    assert cluster.memory_bytes == ACCELERATORS[cluster.accelerator or ""].memory_bytes


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("12xB200", "not-divisible", "16xB200"),
        ("0xL4", "not-divisible", "1xL4"),
        ("8xH1000", "no-file", "8xMI300X"),
        ("8xMI300A", "no-file", "did you mean MI300X?"),
        ("8xA6000 Ada", "no-file", "8xMI300X"),
        ("2x16xH100", "not-divisible", "16xH100"),
        ("0xdgx_h100", "no-file", "dgx_h100"),
        ("an H100", "no-file", "8xMI300X"),
        ("8x", "no-file", "8xMI300X"),
    ],
)
def test_other_numbers_and_names_of_devices(text: str, code: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(text)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert fix in (problem.fix or "")


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_a_packaged_cluster_has_the_numbers_of_its_devices(name: str) -> None:
    cluster = load_cluster(name)
    if cluster.accelerator:
        sheet = ACCELERATORS[cluster.accelerator]
        assert cluster.memory_bytes == sheet.memory_bytes
        assert cluster.peak_flops["bfloat16"] == pytest.approx(sheet.peak_flops[0], rel=1e-3)
        rates = ("memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth")
        for rate in rates:
            assert getattr(cluster, rate) == pytest.approx(getattr(sheet, rate), rel=1e-3), rate


@pytest.mark.parametrize("device", sorted(ACCELERATORS))
def test_a_file_from_a_data_sheet(run, tmp_path: Path, device: str) -> None:
    file = tmp_path / "mine.toml"
    assert run("init", str(file), "--device", device, "--nodes", "3")[0] == 0
    cluster, sheet = load_cluster(str(file)), ACCELERATORS[device]
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("mine", 3, sheet.node_size)
    assert cluster.peak_flops["bfloat16"] == sheet.peak_flops[0]
    assert cluster.memory_bytes == sheet.memory_bytes


def test_a_file_from_measured_links(run, tmp_path: Path) -> None:
    result, file = tmp_path / "links.json", tmp_path / "mine.toml"
    result.write_text(json.dumps(MEASURED))
    code, _, message = run("init", str(file), "--links", str(result))
    assert code == 0, message
    cluster = load_cluster(str(file))
    assert cluster.name == "mine"
    assert [curve.operation for curve in cluster.links] == ["all_reduce", "send"]
    assert cluster.intra_node_latency == pytest.approx(1e-4)
    assert "2 measured collectives of up to 2 ranks" in cluster_text(cluster)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": {}}', "no json", '{"settings": 1}'])
def test_what_is_no_measurement(run, tmp_path: Path, text: str) -> None:
    result = tmp_path / "links.json"
    result.write_text(text)
    code, _, message = run("init", str(tmp_path / "mine.toml"), "--links", str(result))
    assert code == 2
    assert "not what `moemesh bench links --json` prints" in message


def test_init_replaces_nothing_unasked_and_names_devices(run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("precious")
    code, _, message = run("init", str(file))
    assert (code, file.read_text()) == (2, "precious")
    assert "--force" in message
    assert run("init", str(file), "--force")[0] == 0
    code, _, message = run("init", str(tmp_path / "third.toml"), "--device", "abacus")
    assert code == 2
    assert "H100-80G" in message
    assert run("init", str(tmp_path / "a.toml"), "--device", "B200", "--from", "dgx_a100")[0] == 2


def test_show_says_links_and_the_intensity(run) -> None:
    code, text, _ = run("show", "hgx_h800")
    assert code == 0
    for words in ("NVLink", "InfiniBand", "RDMA", "400 Gb/s", "295.3", "4 times slower"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    _, text, _ = run("show", "hgx_h800", "--json")
    document = json.loads(text)
    assert document["compute_bound_from"]["bfloat16"] == pytest.approx(989.4e12 / 3.35e12)
    pcie = load_cluster("hgx_h800").model_copy(update={"intra_node_bandwidth": 32e9})
    assert "PCIe" in cluster_text(pcie)


def test_list_names_all_presets(run) -> None:
    _, text, _ = run("list")
    for name in preset_names("clusters"):
        assert name in text
    _, text, _ = run("list", "--json")
    assert {one["name"] for one in json.loads(text)["clusters"]} == set(preset_names("clusters"))


def test_mistakes_name_unit_and_example(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "x"\nnodes = 0\ngpus_per_node = "many"\n')
    with pytest.raises(ConfigError) as broken:
        load_cluster(str(file))
    message = str(broken.value)
    for words in ("[bytes/s]", "intra_node_bandwidth = 450e9", "gpus_per_node = 8", "[seconds]"):
        assert words in message
    good = load_cluster("dgx_h100").to_toml("")
    line = next(one for one in good.splitlines() if one.startswith("memory_bandwidth"))
    for broken_line in ("", "memory_bandwidth = -1"):
        file.write_text(good.replace(line, broken_line))
        with pytest.raises(ConfigError, match=r"\[bytes/s\]") as broken:
            load_cluster(str(file))
        assert "memory_bandwidth = 3.35e12" in str(broken.value)
