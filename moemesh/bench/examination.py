"""`moemesh doctor`: problems of this machine that would prevent a run, each with its fix.

Only :func:`main` imports torch. It runs as two ranks, each a process. Rank 0 prints two lines, a
JSON object each: versions and devices, then the link.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python -m moemesh.bench.examination
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moemesh.comm.slurm import SlurmError, ranks_of_slurm
from moemesh.config.python import installed_version, python_command
from moemesh.config.sources import ENVIRONMENT_PREFIX, read_environment
from moemesh.monitor.devices import signs_of_gpus
from moemesh.trace.machine import SHARED_MEMORY, usable_cores
from moemesh.trace.memory_profile import format_bytes

Verdict = Literal["pass", "warn", "fail"]
#: Seconds for the processes that import torch.
TORCH_SECONDS = 22.0
GIB = 1 << 30
#: Free bytes of a disk below which any run is likely to fail, and below which a large run is.
DISK_FAIL, DISK_WARN = GIB, 20 * GIB
#: Bytes of shared memory below which NCCL and gloo may fail; Docker's default is 64 MiB.
SHARED_MEMORY_WARN = 256 << 20
#: Seconds by which a file server's clock may be off.
CLOCK_SECONDS = 2.0
#: Variable -> its harmful values, and their effect.
HURTFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel is waited for: nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a node talk through the host"),
    "NCCL_IB_DISABLE": (("1",), "nodes talk through TCP, not InfiniBand"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of a node talk through the network"),
    "NCCL_DEBUG": (("TRACE",), "every call is logged"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is allocated by the driver"),
    "PYTORCH_JIT": (("0",), "compiled functions run in Python"),
    "NUMBA_DISABLE_JIT": (("1",), "the balancer is not compiled"),
}
#: Variables that name network interfaces.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Variables of a rank of torchrun.
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Diagnosis(NamedTuple):
    """One line of the answer; `fix` is the remedy of a warning or a failure."""

    name: str
    verdict: Verdict
    text: str
    fix: str = ""


def examine(folder: Path, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The lines of every check. `folder`: where runs are to be written."""
    for check in CHECKS.values():
        yield from check(folder, environ)


def _versions(*_: object) -> Iterator[Diagnosis]:
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        required = importlib.metadata.metadata("moemesh")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        yield Diagnosis("python", "pass", f"{version} at {sys.executable}")
        text = "moemesh runs from its source and is not installed: its requirements are unknown"
        yield Diagnosis("packages", "warn", text, "pip install -e . in its folder")
        return
    if _keeps(version, required):
        yield Diagnosis("python", "pass", f"{version} at {sys.executable}")
    else:
        yield Diagnosis("python", "fail", f"{version}; needed is {required}", "another Python")
    problems: list[str] = []
    for line in importlib.metadata.requires("moemesh") or ():
        if "extra ==" in line:
            continue
        match = re.match(r"([A-Za-z0-9_.-]+)\s*(.*)", line)
        assert match is not None
        name, needed = match[1], match[2].strip("() ")
        if (installed := installed_version(name)) is None:
            problems.append(f"{name} is not installed")
        elif not _keeps(installed, needed):
            problems.append(f"{name} is {installed}, needed is {needed}")
    if problems:
        yield Diagnosis("packages", "fail", "; ".join(problems), "pip install --upgrade moemesh")
    else:
        yield Diagnosis("packages", "pass", "all that are needed, in versions that fit")


def _keeps(version: str, wanted: str) -> bool:
    """Whether `version` is within `wanted`, such as ">=2.10,<3"; other operators are ignored."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]]

    for bound in wanted.split(","):
        match = re.match(r"\s*(>=|<)\s*([0-9.]+)", bound)
        if match is None:
            continue
        is_below = numbers(version) < numbers(match[2])
        if is_below != (match[1] == "<"):
            return False
    return True


def _folder(folder: Path, _: object) -> Iterator[Diagnosis]:
    """Disk, locks, renames and clock of the file system that runs are written to."""
    # The folder itself need not exist yet: the checks use its nearest parent that does.
    home = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    fixes = {
        "fail": "make room, or write elsewhere with --out",
        "warn": "a checkpoint has 12 bytes a parameter, and train.checkpoints_kept of them stay",
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".moemesh-doctor-", dir=home) as scratch:
            free = shutil.disk_usage(home).free
            text = f"{format_bytes(free)} free for runs under {home}"
            verdict: Verdict = (
                "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "pass"
            )
            yield Diagnosis("disk", verdict, text, fixes.get(verdict, ""))
            yield _locks(Path(scratch) / "lease")
            clock = Path(scratch) / "clock"
            clock.write_text("")
            skew, year = clock.stat().st_mtime - time.time(), time.gmtime().tm_year
            if abs(skew) > CLOCK_SECONDS:
                text = f"the disk's clock is {skew:+.1f} s off this machine's"
                yield Diagnosis("clock", "warn", text, "synchronise both (chrony, ntpd)")
            elif year < 2025:
                fix = "set the clock: certificates and logs need it"
                yield Diagnosis("clock", "fail", f"the year is {year}", fix)
            else:
                text = "this machine and the disk of the runs agree"
                yield Diagnosis("clock", "pass", text)
    except OSError as error:
        text = f"{home}: cannot be written ({error.strerror or error})"
        yield Diagnosis("run folder", "fail", text, "choose another with --out")


def _locks(file: Path) -> Diagnosis:
    """Whether locks exclude a second handle of one file, as the lock of a run folder must."""
    with file.open("w") as first, file.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"files cannot be locked here ({error.strerror})"
            return Diagnosis("file locks", "fail", text, "runs on a file system that knows flock")
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Diagnosis("file locks", "pass", "a second run in one folder would be refused")
        except OSError as error:
            text = f"a second lock fails in another way ({error.strerror})"
            return Diagnosis("file locks", "warn", text, "never start a run twice in one folder")
    text = "two processes can lock one file: a second run would not be refused"
    return Diagnosis("file locks", "fail", text, "runs on a file system that knows flock")


def _shared_memory(*_: object) -> Iterator[Diagnosis]:
    if not SHARED_MEMORY.is_dir():
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    text = f"{format_bytes(size)} in {SHARED_MEMORY}"
    if size < SHARED_MEMORY_WARN:
        fix = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory"
        verdict: Verdict = "fail" if signs_of_gpus() else "warn"
        yield Diagnosis("shared memory", verdict, f"{text}: NCCL and gloo need more", fix)
    else:
        yield Diagnosis("shared memory", "pass", text)


def _limits(*_: object) -> Iterator[Diagnosis]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    for name, option, value, fail, warn in (
        ("open files", "-n", files, 256, 1024),
        ("processes", "-u", processes, 128, 1024),
    ):
        is_free = value == resource.RLIM_INFINITY
        text = f"{'no limit' if is_free else f'{value:,}'} (ulimit {option})"
        verdict: Verdict = "pass"
        if not is_free and value < warn:
            verdict = "fail" if value < fail else "warn"
        fix = "" if verdict == "pass" else f"ulimit {option} 65536, or limits.conf of the machine"
        yield Diagnosis(name, verdict, text, fix)
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        text = f"{locked:,} bytes (ulimit -l), and InfiniBand locks what it sends"
        yield Diagnosis("locked memory", "warn", text, "ulimit -l unlimited")


def _names_and_ports(_: object, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        text = f"{host} has no address ({getattr(error, 'strerror', None) or error})"
        yield Diagnosis("host name", "fail", text, f"a line for {host} in /etc/hosts")
    else:
        is_local = address.startswith("127.")
        text = f"{host} is {address}" + (", which no other node reaches" if is_local else "")
        fix = "on several nodes: MASTER_ADDR must be an address that all of them reach"
        yield Diagnosis("host name", "warn" if is_local else "pass", text, fix if is_local else "")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        text = f"this machine cannot be reached by itself ({error.strerror or error})"
        yield Diagnosis("ports", "fail", text, "allow connections to 127.0.0.1")
        return
    number = environ.get("MASTER_PORT", "29500")
    if not number.isdecimal() or not 0 < int(number) < 65536:
        yield Diagnosis("ports", "fail", f"MASTER_PORT is {number!r}", "a number up to 65535")
        return
    try:
        socket.create_server(("", int(number))).close()
    except OSError as error:
        text = f"port {number} is taken ({error.strerror or error})"
        yield Diagnosis(
            "ports", "warn", text, "another one: MASTER_PORT, or torchrun --master-port"
        )
    else:
        yield Diagnosis("ports", "pass", f"port {number} is free")


def _environment(_: object, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Variables that change a run, or stop it."""
    remarks: list[tuple[Verdict, str, str]] = []
    for name, (values, effect) in HURTFUL.items():
        if environ.get(name, "").upper() in values:
            remarks.append(("warn", f"{name}={environ[name]}: {effect}", f"unset {name}"))
    threads, cores = environ.get("OMP_NUM_THREADS", ""), usable_cores()
    if threads.isdecimal() and int(threads) > cores:
        text = f"OMP_NUM_THREADS={threads} on {cores} core(s): threads wait for each other"
        fix = "unset OMP_NUM_THREADS: each rank takes its share of the cores"
        remarks.append(("warn", text, fix))
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        # NCCL also takes prefixes of names; "^" excludes the names, "=" makes them exact.
        value = environ.get(variable, "")
        names = [] if value.startswith("^") else value.lstrip("=").split(",")
        if not all(any(n.startswith(name) for n in interfaces) for name in filter(None, names)):
            text = f"{variable}={value} names no interface of this machine"
            remarks.append(("fail", text, f"one of {', '.join(interfaces)}"))
    source = read_environment(environ)
    for problem in source.problems:
        remarks.append(("fail", f"{problem.origin}: {problem.message}", problem.fix))
    if source.leaves:
        names = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX))
        text = f"{', '.join(names)} set keys of every run from this shell"
        fix = "unset what is not meant: `moemesh config show` names its origins"
        remarks.append(("warn", text, fix))
    given = [name for name in _RANK if name in environ]
    try:
        slurm = ranks_of_slurm(environ)
    except SlurmError as error:
        remarks.append(("fail", str(error), "srun --distribution=block"))
    else:
        if "RANK" in given and len(given) < len(_RANK):
            missing = ", ".join(name for name in _RANK if name not in environ)
            text = f"{', '.join(given)} are set as for a rank, but not {missing}"
            remarks.append(("fail", text, "unset them, or start ranks with torchrun"))
        elif len(given) == len(_RANK):
            text = f"this is rank {environ['RANK']} of {environ['WORLD_SIZE']} of torchrun"
            fix = "outside of a job unset RANK and WORLD_SIZE: train would wait for others"
            remarks.append(("warn", text, fix))
        elif slurm:
            text = f"this is task {slurm['RANK']} of {slurm['WORLD_SIZE']} of srun"
            remarks.append(("warn", text, "srun --ntasks=1 examines a node by itself"))
    if not remarks:
        remarks.append(("pass", "no variable that hurts, no rank of a launcher", ""))
    yield from (Diagnosis("environment", *remark) for remark in remarks)


def _torch(_: object, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    start = time.monotonic()
    answers, error = _run_ranks(environ)
    took = f"{time.monotonic() - start:.0f} s"
    if not answers:
        is_installed = importlib.util.find_spec("torch") is not None
        fix = "try again when the machine is less busy" if is_installed else "pip install torch"
        yield Diagnosis("torch", "fail", f"it gave no answer ({error})", fix)
        return
    facts = answers[0]
    versions = f"{facts['torch']}, CUDA {facts['cuda'] or 'none'}, NCCL {facts['nccl'] or 'none'}"
    yield Diagnosis("torch", "pass", f"{versions}; asked in {took}")
    devices, signs = facts["devices"], signs_of_gpus()
    names = sorted({device["name"] for device in devices})
    text = f"{len(devices)} x {', '.join(names)}"
    used = [n for n, device in enumerate(devices) if device["free"] < 0.9 * device["total"]]
    if not devices and not signs:
        yield Diagnosis("devices", "pass", f"no GPU: {usable_cores()} core(s)")
    elif not devices:
        fix = "this torch is built for the CPU: install the one for CUDA"
        if facts["cuda"] is not None:
            fix = "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides the GPUs"
        reason = f"a driver is installed ({signs[0]}), torch sees no GPU"
        yield Diagnosis("devices", "fail", reason, fix)
    elif len(names) > 1:
        yield Diagnosis("devices", "warn", text, "ranks wait for the slowest: use equal devices")
    elif not used:
        yield Diagnosis("devices", "pass", text)
    if used:
        fix = "nvidia-smi names the processes that hold it"
        yield Diagnosis("devices", "warn", f"{text}; memory of {used} is in use", fix)
    if devices:
        kernels = [f"{name} {state}" for name, state in facts["experts"].items()]
        yield Diagnosis("experts", "pass", "; ".join(["grouped_mm of torch", *kernels]))
    if len(answers) < 2:
        fix = "a firewall or a wrong GLOO_SOCKET_IFNAME keeps processes of this machine apart"
        yield Diagnosis("links", "fail", f"two local ranks do not meet ({error})", fix)
        return
    link = answers[1]
    rate = link["bytes"] / link["seconds"] / 1e9
    text = f"two local ranks sum {link['bytes'] >> 20} MiB at {rate:.2f} GB/s (gloo)"
    slow = rate < 0.05
    fix = "a loaded machine, or a slow interface: `moemesh bench links` says more" if slow else ""
    yield Diagnosis("links", "warn" if slow else "pass", text, fix)


def _run_ranks(environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Run :func:`main` as two ranks. Returns the objects that rank 0 printed, and its last line on
    stderr, which is the error if it printed fewer than two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    base = {name: text for name, text in environ.items() if not name.startswith("TORCHELASTIC")}
    command = python_command("moemesh.bench.examination")
    ranks = [
        subprocess.Popen(
            command,
            env={**base, **shared, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    error = f"no end in {TORCH_SECONDS:.0f} s"
    try:
        out, errors = ranks[0].communicate(timeout=TORCH_SECONDS)
        error = (errors.strip().splitlines() or [f"exit code {ranks[0].returncode}"])[-1]
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        out, _ = ranks[0].communicate()
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return answers, error


#: Checks by name, the quick ones first: (folder of runs, environment) -> diagnoses.
CHECKS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[Diagnosis]]] = {
    "versions": _versions,
    "folder": _folder,
    "shared memory": _shared_memory,
    "limits": _limits,
    "names and ports": _names_and_ports,
    "environment": _environment,
    "torch": _torch,
}

# The processes that import torch.

#: Bytes of the tensor that both ranks sum, and number of timed sums.
LINK_BYTES, ROUNDS = 4 << 20, 3


def main() -> None:
    """Print facts on torch, then the link. The first line is printed even if the link fails."""
    import torch
    import torch.distributed as dist

    from moemesh.comm import launch
    from moemesh.comm.collectives import all_reduce_
    from moemesh.comm.mesh import Mesh
    from moemesh.config.layout import Layout
    from moemesh.ops.expert_kernels import KERNELS

    is_first = os.environ.get("RANK") == "0"
    if is_first:
        devices: list[dict[str, Any]] = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append({"name": name, "free": free, "total": total})
        has_nccl = dist.is_nccl_available()
        facts = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
            "devices": devices,
            "experts": {
                name: kernel.missing(torch.device("cuda", 0)) or kernel.version
                for name, kernel in KERNELS.items()
                if devices
            },
        }
        print(json.dumps(facts), flush=True)
    launch.start("cpu", 15.0)
    mesh = Mesh.create(Layout(dp=2), torch.device("cpu"))
    tensor = torch.ones(LINK_BYTES // 4)
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        all_reduce_(tensor, mesh["world"], caller="doctor", phase="forward")
        times.append(time.perf_counter() - start)
    assert tensor[0].item() == 2 ** (ROUNDS + 1), "a sum of two ranks is wrong"
    launch.stop()
    if is_first:
        print(json.dumps({"bytes": LINK_BYTES, "seconds": min(times[1:])}), flush=True)


if __name__ == "__main__":
    main()
