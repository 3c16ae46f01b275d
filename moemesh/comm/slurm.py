"""Ranks that Slurm's srun started: its variables in the words of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moemesh.config.errors import UserError

#: Ports of the first rank, one for each step of each job.
FIRST_PORT, NUM_PORTS = 20_000, 20_000


class SlurmError(UserError):
    """Slurm started the ranks in a way that no mesh can be made of."""


def ranks_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of an
    srun step of several tasks.

    Empty for any other process: alone in its step, or started by torchrun inside of one. Raises
    SlurmError where the tasks of a node are not neighbours, since ranks that follow each other are
    to share a node.
    """
    wanted = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    if "RANK" in environment or any(name not in environment for name in wanted):
        return {}
    num_tasks, rank, local_rank, node = (int(environment[name]) for name in wanted)
    if num_tasks == 1:
        return {}
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks)))
    if sum(tasks[:node]) + local_rank != rank:
        raise SlurmError(
            f"Slurm put task {rank} on node {node} as its task {local_rank}, but ranks of a node "
            "must follow each other: srun --distribution=block"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    number = int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + number % NUM_PORTS),
    }


def rank_of(environment: Mapping[str, str]) -> int:
    """The rank that `environment` gives its process, whoever started it; 0 for one that is none."""
    is_task = int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    return int(environment.get("RANK") or (environment.get("SLURM_PROCID", 0) if is_task else 0))


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, from Slurm's short form.

    >>> tasks_per_node("8(x2),4")
    [8, 8, 4]
    """
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's short form.

    >>> first_host("gpu[007-009,12],cpu1"), first_host("a-1,b-2"), first_host("r[1-2]n[03-04]")
    ('gpu007', 'a-1', 'r1n03')
    """
    outside = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", outside)
