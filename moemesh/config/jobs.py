"""Files that start a run on a cluster: torchrun, Slurm, Kubernetes, SkyPilot."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value

Launcher = Literal["local", "torchrun", "slurm", "k8s", "sky"]

#: Default file name of each launcher that reads a file.
FILES: dict[Launcher, str] = {
    "torchrun": "torchrun.sh",
    "slurm": "job.sbatch",
    "k8s": "job.yaml",
    "sky": "task.yaml",
}
#: Seconds between the request to save and the end of a job.
GRACE_SECONDS = 300
#: Variable with the seconds after which torchrun kills ranks that received a stop signal, by
#: default 30. Versions of torch that do not read it always use the default.
_PATIENCE = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_SECONDS - 10}"
#: Legal names of partitions, accounts, images and accelerators.
_NAME = re.compile(r"\w([\w./:@,+-]*\w)?", re.ASCII)
#: The port of the first rank where no launcher chooses one.
PORT = 29500
_SHARED = (
    "Every node must see, under the same path: this Python environment, the data, the weights, and "
    "the folder of the run"
)


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on `nodes` equal nodes: the arguments of `moemesh train`, and options of schedulers."""

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
    #: Folder of the Python on the machine that writes the file, and its working directory.
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
        """The job of `config`. `ranks_per_node` None: that of the plan, else the smaller of 8 and
        the number of ranks.

        Raises ConfigError if the ranks do not fill their nodes, and for names in `more` that
        schedulers would not accept: they are written into the files unchanged.
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
        """`moemesh train` with its arguments, for bash, on one line of printable characters."""
        return " ".join(map(_word, ("moemesh", *self.arguments)))

    def text(self, launcher: Launcher) -> str:
        """The file for `launcher` from its template in ``presets/jobs``; "local": the command."""
        if launcher == "local":
            return f"{self.command}\n"
        place = ""  # lines of a script that find this environment, and files by relative paths
        if self.programs:
            path = _word(self.programs)
            place += f'export PATH={path}:"$PATH"  # this environment\n'
        if self.directory:
            place += f"cd {_word(self.directory)}  # where relative paths begin\n"
        folder = Path(__file__).parent / "presets" / "jobs"
        templates = Environment(
            loader=FileSystemLoader(folder),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return templates.get_template(f"{FILES[launcher]}.jinja").render(
            job=self,
            comment=self._comment,
            place=place,
            folder=str(Path(self.out).parent),
            shown=_printable,
            minutes=max(1, round(self.hours * 60)),
            quoted=format_value,
            grace=GRACE_SECONDS,
            patience=_PATIENCE,
            port=PORT,
        )

    def _comment(self, *texts: str) -> str:
        """Lines of comment: each of `texts` as a paragraph, and the sizes."""
        ranks = self.nodes * self.ranks_per_node
        sizes = f"{ranks} rank(s) on {self.nodes} node(s), {self.ranks_per_node} on each."
        paragraphs = (*texts, f"{sizes} {_SHARED} ({_printable(self.out)}).")
        return "".join(
            f"# {line}\n"
            for text in paragraphs
            for line in textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
        )


def _word(text: str) -> str:
    """A word for bash; one with characters that are not printable as the escapes of its bytes."""
    if text.isprintable():
        return shlex.quote(text)
    parts = (
        character.replace("\\", "\\\\").replace("'", "\\'")
        if character.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))
        for character in text
    )
    return f"$'{''.join(parts)}'"


def _printable(text: str) -> str:
    """`text` for a comment, which a character that is not printable could end."""
    return text if text.isprintable() else format_value(text)
