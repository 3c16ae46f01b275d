"""Files that start a run on a cluster: torchrun, Slurm, Kubernetes, SkyPilot."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.run import RunConfig

Launcher = Literal["local", "torchrun", "slurm", "k8s", "sky"]

#: File of each launcher where none is named.
FILES: dict[Launcher, str] = {
    "torchrun": "torchrun.sh",
    "slurm": "job.sbatch",
    "k8s": "job.yaml",
    "sky": "task.yaml",
}
#: Seconds between the request to save and the end of a job.
GRACE_SECONDS = 300
#: torchrun kills ranks that were asked to stop after so many seconds, by default 30; versions of
#: torch that do not know the variable do so whatever it says.
_PATIENCE = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_SECONDS - 10}"
#: Failures of a job before Kubernetes gives it up; one failure ends the pods of all its nodes.
_FAILURES = 6
#: Partitions, accounts, images and accelerators.
_NAME = re.compile(r"\w([\w./:@,+-]*\w)?", re.ASCII)
#: The port of the first rank where no launcher chooses one.
PORT = 29500
_SHARED = (
    "Every node must see, under the same path: this Python environment, the data, the weights, and "
    "the folder of the run"
)


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on `nodes` equal nodes: the arguments of `moemesh train`, and what schedulers ask."""

    name: str
    arguments: tuple[str, ...]
    out: str
    nodes: int
    ranks_per_node: int
    uses_gpus: bool
    hours: float = 24.0
    partition: str | None = None
    account: str | None = None
    image: str = "IMAGE_WITH_MOEMESH"
    accelerator: str = "H100"
    #: Of the machine that writes the file: the folder of its Python, and where it was called.
    programs: str = ""
    directory: str = ""

    @staticmethod
    def of(
        config: RunConfig,
        arguments: Sequence[str],
        out: Path,
        ranks_per_node: int | None,
        **more: Any,
    ) -> ClusterJob:
        """`ranks_per_node` None: as the plan says, else 8, or all ranks where there are fewer.

        Raises ConfigError where the ranks do not fill their nodes, and for words (of `more`) that
        are no names of schedulers: they stand in their files as they are.
        """
        # A scheduler or YAML would read other names as something else.
        problems: list[Problem] = []
        for key in ("partition", "account", "image", "accelerator"):
            name = more.get(key)
            if name is not None and not _NAME.fullmatch(name):
                plain = re.sub(r"[^\w./:@,+-]+", "-", name, flags=re.ASCII).strip("-:./@,+")
                message = "a name has letters and digits, with - _ . / : @ , + between them"
                fix = f"--{key} {plain or 'NAME'}"
                problems.append(Problem.of("syntax", key, name, message, fix))
        if problems:
            raise ConfigError(problems)
        ranks = config.plan.world_size
        each = ranks_per_node or config.plan.ranks_per_node or min(ranks, 8)
        if ranks % each:
            nearest = max(size for size in range(1, each + 1) if ranks % size == 0)
            message = f"{ranks} ranks do not fill nodes of {each}"
            fix = f"--ranks-per-node {nearest}"
            raise ConfigError([Problem.of("not-divisible", "ranks_per_node", each, message, fix)])
        # Slurm and Kubernetes both take such a name; a service of Kubernetes begins with a letter.
        plain = re.sub(r"[^a-z0-9-]+", "-", out.name.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"moemesh-{plain}"
        return ClusterJob(
            name=plain[:50].strip("-"),
            arguments=tuple(arguments),
            out=str(out),
            nodes=ranks // each,
            ranks_per_node=each,
            uses_gpus=config.train.device != "cpu",
            **{key: value for key, value in more.items() if value is not None},
        )

    @property
    def command(self) -> str:
        """`moemesh train` with its arguments, for a shell."""
        return shlex.join(["moemesh", *self.arguments])

    def text(self, launcher: Launcher) -> str:
        """The file for `launcher`."""
        makers = {
            "local": lambda: f"{self.command}\n",
            "torchrun": self._torchrun,
            "slurm": self._slurm,
            "k8s": self._kubernetes,
            "sky": self._sky,
        }
        return makers[launcher]()

    def _comment(self, *texts: str) -> str:
        """Lines of comment: the sizes, and each of `texts` as a paragraph."""
        ranks = self.nodes * self.ranks_per_node
        sizes = f"{ranks} ranks on {self.nodes} node(s), {self.ranks_per_node} on each."
        paragraphs = (*texts, f"{sizes} {_SHARED} ({self.out}).")
        return "".join(
            f"# {line}\n"
            for text in paragraphs
            for line in textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
        )

    def _place(self) -> str:
        """Lines of a script that find this environment, and files by relative paths."""
        lines: list[str] = []
        if self.programs:
            lines.append(f'export PATH={shlex.quote(self.programs)}:"$PATH"  # this environment')
        if self.directory:
            lines.append(f"cd {shlex.quote(self.directory)}  # where relative paths begin")
        return "".join(f"{line}\n" for line in lines)

    def _torchrun(self) -> str:
        comment = self._comment(
            "Run on every node, with NODE_RANK = 0, 1, ... and the address of the first one in "
            "MASTER_ADDR. Ctrl-C or SIGTERM saves and stops; the same script goes on from there."
        )
        return f"""\
#!/bin/bash
{comment}set -eu
export {_PATIENCE}  # seconds in which the ranks may save
{self._place()}exec torchrun \\
  --nnodes={self.nodes} --nproc-per-node={self.ranks_per_node} --node-rank="$NODE_RANK" \\
  --master-addr="$MASTER_ADDR" --master-port={PORT} \\
  --no-python {self.command}
"""

    def _slurm(self) -> str:
        minutes = max(1, round(self.hours * 60))
        lines = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks_per_node}",
            *([f"--gpus-per-node={self.ranks_per_node}"] if self.uses_gpus else []),
            "--exclusive",
            f"--time={minutes // 60}:{minutes % 60:02}:00",
            *([f"--partition={self.partition}"] if self.partition else []),
            *([f"--account={self.account}"] if self.account else []),
            "--output=%x-%j.out",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{GRACE_SECONDS}",
        ]
        comment = self._comment(
            "Submit with: sbatch THIS_FILE",
            "A task is a rank: moemesh reads Slurm's variables, no torchrun is needed. Slurm sends "
            f"USR1 to this script {GRACE_SECONDS} s before the time limit; the ranks finish their "
            "step, save and leave, and the job is queued again, to go on from there. After a "
            "failure of a node --requeue does the same.",
        )
        return f"""\
#!/bin/bash
{comment}{"".join(f"#SBATCH {line}{chr(10)}" for line in lines)}
set -u
{self._place()}time_is_up=0
trap 'time_is_up=1; kill -USR1 "$ranks"' USR1

srun --distribution=block --kill-on-bad-exit=1 \\
  {self.command} &
ranks=$!
wait "$ranks"
# A trapped signal ends a wait, while the ranks are saving.
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done
wait "$ranks"; code=$?  # remembered

if [ "$time_is_up" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

    def _kubernetes(self) -> str:
        limits = f'{{nvidia.com/gpu: "{self.ranks_per_node}"}}' if self.uses_gpus else "{}"
        comment = self._comment(
            "Submit with: kubectl apply -f THIS_FILE",
            f"A pod is a node. Pods that are evicted get SIGTERM and {GRACE_SECONDS} s to save; "
            "new ones go on from there. To change: the image, and the claim (ReadWriteMany) whose "
            "volume holds the configuration, the data and the runs.",
        )
        name, value = _PATIENCE.split("=")
        # Kubernetes itself replaces $(NAME) in arguments.
        command = self.command.replace("$(", "$$(")
        return f"""\
{comment}apiVersion: v1
kind: Service
metadata: {{name: {self.name}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # ranks look for the first pod while it starts
  selector: {{job-name: {self.name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {self.name}}}
spec:
  completionMode: Indexed
  completions: {self.nodes}
  parallelism: {self.nodes}
  backoffLimit: {_FAILURES * self.nodes}  # a failure of one pod ends all: each counts
  podFailurePolicy:
    rules:
      - {{action: Ignore, onPodConditions: [{{type: DisruptionTarget}}]}}  # evictions do not count
  template:
    spec:
      subdomain: {self.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {GRACE_SECONDS}
      containers:
        - name: ranks
          image: {self.image}
          command: [/bin/bash, -c]
          args:
            - >-
              exec torchrun --nnodes={self.nodes} --nproc-per-node={self.ranks_per_node}
              --node-rank=$JOB_COMPLETION_INDEX
              --master-addr={self.name}-0.{self.name} --master-port={PORT}
              --no-python {command}
          env: [{{name: {name}, value: "{value}"}}]
          resources: {{limits: {limits}}}
          volumeMounts:
            - {{name: shared, mountPath: {json.dumps(str(Path(self.out).parent))}}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - {{name: shared, persistentVolumeClaim: {{claimName: CLAIM}}}}
        - {{name: shm, emptyDir: {{medium: Memory}}}}
"""

    def _sky(self) -> str:
        folder = str(Path(self.out).parent)
        shared = (
            "BUCKET_URL, the address of the bucket for runs."
            if self.nodes == 1
            else f"MOUNT_SHARED_DISK, the command that mounts a disk of all machines at {folder} "
            "(a bucket knows neither locks nor growing files; train.checkpoint_folder may be one)."
        )
        comment = self._comment(
            "Start with: sky jobs launch THIS_FILE (--use-spot takes spot machines)",
            "A machine that is taken away is replaced, and the run goes on from its folder. To "
            "change: MOEMESH, the address of this package's repository or wheel, and " + shared,
        )
        # The configuration file of the run, if there is one.
        files = [one for one in self.arguments[1:2] if not one.startswith("-")]
        mounts = [f"{json.dumps(one)}: {json.dumps(one)}" for one in files]
        if self.nodes == 1:
            mounts.append(f"{json.dumps(folder)}: {{source: BUCKET_URL, mode: MOUNT_CACHED}}")
        lines = "".join(f"  {one}\n" for one in mounts)
        file_mounts = f"file_mounts:\n{lines}" if mounts else ""
        mount = "" if self.nodes == 1 else "  MOUNT_SHARED_DISK\n"
        each = self.ranks_per_node
        needs = f"accelerators: {self.accelerator}:{each}" if self.uses_gpus else f"cpus: {each}+"
        return f"""\
{comment}name: {self.name}
num_nodes: {self.nodes}
resources:
  {needs}
{file_mounts}setup: |
  pip install MOEMESH
{mount}run: |
  export {_PATIENCE}  # seconds in which the ranks may save
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc-per-node={each} \\
    --node-rank=$SKYPILOT_NODE_RANK \\
    --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) --master-port={PORT} \\
    --no-python {self.command}
"""
