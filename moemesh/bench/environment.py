"""Variables of the environment that change a run, or stop it: for `moemesh doctor`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Literal

from moemesh.comm.slurm import SlurmError, ranks_of_slurm
from moemesh.config.sources import ENVIRONMENT_PREFIX, read_environment

#: warn or fail, what is so, and the fix.
Remark = tuple[Literal["warn", "fail"], str, str]

#: Variable -> the values that hurt (none named: any), and what they do.
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
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def remarks(environ: Mapping[str, str]) -> Iterator[Remark]:
    """Everything that there is to say of these variables."""
    yield from _hurtful(environ)
    yield from _interfaces(environ)
    yield from _overrides(environ)
    yield from _ranks(environ)


def _hurtful(environ: Mapping[str, str]) -> Iterator[Remark]:
    for name, (values, effect) in HURTFUL.items():
        if environ.get(name, "").upper() in values:
            yield "warn", f"{name}={environ[name]}: {effect}", f"unset {name}"
    threads, cores = environ.get("OMP_NUM_THREADS", ""), os.cpu_count() or 1
    if threads.isdecimal() and int(threads) > cores:
        text = f"OMP_NUM_THREADS={threads} on {cores} core(s): threads wait for each other"
        yield "warn", text, "unset OMP_NUM_THREADS: each rank takes its share of the cores"


def _interfaces(environ: Mapping[str, str]) -> Iterator[Remark]:
    known = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        # NCCL also knows prefixes, "^" for all but these, and "=" for exactly these.
        asked = environ.get(variable, "")
        names = [] if asked.startswith("^") else asked.lstrip("=").split(",")
        wrong = [one for one in filter(None, names) if not any(n.startswith(one) for n in known)]
        if wrong:
            text = f"{variable}={asked} names no interface of this machine"
            yield "fail", text, f"one of {', '.join(known)}"


def _overrides(environ: Mapping[str, str]) -> Iterator[Remark]:
    source = read_environment(environ)
    for problem in source.problems:
        yield "fail", f"{problem.origin}: {problem.message}", problem.fix
    if source.leaves:
        names = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX))
        text = f"{', '.join(names)} set keys of every run from this shell"
        yield "warn", text, "unset what is not meant: `moemesh config show` names its origins"


def _ranks(environ: Mapping[str, str]) -> Iterator[Remark]:
    there = [name for name in _RANK if name in environ]
    try:
        slurm = ranks_of_slurm(environ)
    except SlurmError as error:
        yield "fail", str(error), "srun --distribution=block"
        return
    if "RANK" in there and len(there) < len(_RANK):
        missing = ", ".join(name for name in _RANK if name not in environ)
        text = f"{', '.join(there)} are set as for a rank, but not {missing}"
        yield "fail", text, "unset them, or start ranks with torchrun"
    elif len(there) == len(_RANK):
        text = f"this is rank {environ['RANK']} of {environ['WORLD_SIZE']} of torchrun"
        yield (
            "warn",
            text,
            "outside of a job unset RANK and WORLD_SIZE: train would wait for others",
        )
    elif slurm:
        text = f"this is task {slurm['RANK']} of {slurm['WORLD_SIZE']} of srun"
        yield "warn", text, "srun --ntasks=1 examines a node by itself"
