"""The environment of a rank: torchrun's variables, or the same made of those of Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moemesh.config.errors import UserError
from moemesh.monitor.devices import FOLDER_VARIABLE

#: A default MASTER_PORT follows from the numbers of job and step: 64 steps of each of 355
#: successive jobs have different ports, from 10,000 on, below those that Linux gives to outgoing
#: connections.
FIRST_PORT, NUM_JOBS, NUM_STEPS = 10_000, 355, 64
#: Variables of which any one marks a process as a rank.
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

#: Variables with the number of processes of mpirun: Open MPI, MPICH and Intel MPI, MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class RankError(UserError):
    """The variables of a rank are incomplete or wrong, or ranks cannot connect with them."""


def ranks_of(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a process that
    torchrun, srun or an operator started as a rank; empty for any other process. Ranks of our own
    launcher have no address.

    A rank without LOCAL_RANK and LOCAL_WORLD_SIZE is the only one of its node. Raises RankError for
    variables that are missing or impossible, and for one of several processes of mpirun without
    them; SlurmError as :func:`ranks_of_slurm` does.
    """
    if slurm := ranks_of_slurm(environment):
        return slurm
    if not any(environment.get(name) for name in _RANK):
        for name in _MPI_SIZES:
            if (size := environment.get(name, "")).isdecimal() and int(size) > 1:
                raise RankError(
                    f"{name} is {size}: mpirun started this process as one of {size}, and each "
                    "would train the whole plan: start ranks with torchrun or srun, or set RANK, "
                    "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
                )
        return {}
    ranks = {"LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", "")}
    if "LOCAL_RANK" not in environment and ranks["LOCAL_WORLD_SIZE"] in ("", "1"):
        ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = () if FOLDER_VARIABLE in environment else ("MASTER_ADDR", "MASTER_PORT")
    names = (*_RANK, "LOCAL_WORLD_SIZE", *address)
    given = [name for name in names if environment.get(name)]
    for name in names:
        if not ranks.setdefault(name, environment.get(name, "")):
            state = "empty" if name in environment else "missing"
            raise RankError(
                f"{name} is {state}, but {', '.join(given)} are set as for a rank: set it, or "
                "unset them all"
            )
    lowest = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}  # 0 for the others
    numbers = dict[str, int]()
    for name in ranks.keys() - {"MASTER_ADDR"}:
        least, text = lowest.get(name, 0), ranks[name]
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise RankError(f"{name} is {text!r}: it must be a whole number of at least {least}")
        numbers[name] = int(text)
    for name, bound in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[name] >= numbers[bound]:
            raise RankError(f"{name} {numbers[name]} must be below {bound} {numbers[bound]}")
    if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
        raise RankError(
            f"LOCAL_WORLD_SIZE {numbers['LOCAL_WORLD_SIZE']} must not exceed WORLD_SIZE "
            f"{numbers['WORLD_SIZE']}"
        )
    if numbers.get("MASTER_PORT", 0) > 65_535:
        raise RankError(f"MASTER_PORT is {numbers['MASTER_PORT']}: ports end at 65535")
    return ranks


class SlurmError(UserError):
    """Slurm started the ranks in a way that no mesh can be made of."""


def ranks_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of an
    srun step of several tasks.

    Empty for any other process, for the only task of a step, and for ranks that torchrun started
    inside of one. Raises SlurmError if the tasks of a node do not have successive numbers: layouts
    expect successive ranks on a node.
    """
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    if "RANK" in environment or any(name not in environment for name in names):
        return {}
    num_tasks, rank, local_rank, node = (int(environment[name]) for name in names)
    if num_tasks == 1:
        return {}
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks)))
    if sum(tasks[:node]) + local_rank != rank:
        raise SlurmError(
            f"Slurm put task {rank} on node {node} as its task {local_rank}, but ranks of a node "
            "must follow each other: srun --distribution=block"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job, step = (int(environment.get(f"SLURM_{name}_ID", 0)) for name in ("JOB", "STEP"))
    # Where Slurm reserves ports for a step (srun --resv-ports), no other step has them.
    reserved = re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", ""))
    port = FIRST_PORT + job % NUM_JOBS * NUM_STEPS + step % NUM_STEPS
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or (reserved[0] if reserved else str(port)),
    }


def rank_of(environment: Mapping[str, str]) -> int:
    """The rank in `environment`, of any launcher of :func:`ranks_of`; 0 without one."""
    is_task = int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    rank = environment.get("RANK") or (environment.get("SLURM_PROCID", "0") if is_task else "0")
    return int(rank) if rank.isdecimal() else 0


def prints_notes(environment: Mapping[str, str]) -> bool:
    """Whether this process prints the notes that all ranks have: it is rank 0 of any launcher or
    has none, and it is not a rank of our own, which has printed them."""
    return FOLDER_VARIABLE not in environment and rank_of(environment) == 0


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, from Slurm's short form.

    >>> tasks_per_node("8(x2),4")
    [8, 8, 4]
    """
    tasks: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(number)] * int(times or 1)
    return tasks


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's short form.

    >>> first_host("gpu[007-009,12],cpu1"), first_host("a-1,b-2"), first_host("r[1-2]n[03-04]")
    ('gpu007', 'a-1', 'r1n03')
    """
    outside = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", outside)
