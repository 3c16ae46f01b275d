"""Names of the Hugging Face hub: the local folder of a model or a data set.

huggingface_hub finds ``owner/name``, or ``owner/name@revision``: it downloads what its cache lacks
and honours its environment (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``). The folder that it
returns, ``models--owner--name/snapshots/COMMIT``, names the commit: a run that records the folder
has recorded the revision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_path

Kind = Literal["model", "dataset"]

COMMIT = r"[0-9a-f]{40}"
#: Endings of the data files of a data set.
DATA_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
#: Files of a repository that a run reads; weights only in safetensors.
_PATTERNS: dict[Kind, list[str]] = {
    "model": ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model"],
    "dataset": [f"*{ending}" for ending in DATA_ENDINGS],
}


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a name of the Hub and is not the start of a local path."""
    return _NAME.fullmatch(name) is not None and not Path(name).parent.exists()


class HubError(Exception):
    """An unavailable repository: the reason, and the `command` that fetches it. `package`: the
    reason is that huggingface_hub is not installed."""

    def __init__(self, reason: str, command: str, *, package: bool = False) -> None:
        super().__init__(reason)
        self.command, self.package = command, package


def snapshot(
    repository: str, revision: str | None, kind: Kind, only: Sequence[str] | None = None
) -> Path:
    """The folder of a repository in the cache of huggingface_hub, downloaded if need be; `only`:
    patterns of the files that are needed. Raises HubError."""
    command = f"hf download {repository}"
    command += " --repo-type dataset" * (kind == "dataset")
    command += f" --revision {revision}" if revision else ""
    try:
        # Late: only names of the hub need it.
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        reason = "to download it needs huggingface_hub, which is not installed"
        raise HubError(reason, command, package=True) from None
    get = partial(
        snapshot_download,
        repository,
        repo_type=kind,
        revision=revision,
        allow_patterns=list(only or _PATTERNS[kind]),
    )
    if re.fullmatch(COMMIT, revision or ""):
        with suppress(Exception):  # a commit does not change: no request if the cache has it
            return Path(get(local_files_only=True))
    try:
        return Path(get())
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"the hub has no {kind} of this name that you may read (HTTP {status}): check the "
        reason += "name; where it needs a licence or a token, `hf auth login`"
    except Exception as error:  # the package raises errors of several others
        cause = str(error.__cause__ or error).partition("\n")[0][:300]
        reason = f"the hub cannot be reached, nor is it in the hub's cache ({cause})"
    raise HubError(reason, command)


def local_folder(name: str, kind: Kind, key: str, only: Sequence[str] | None = None) -> Path:
    """The folder `name`, or the :func:`snapshot` of the repository of that name. Raises ConfigError
    under `key` for a repository that cannot be had, with the command that fetches it."""
    if not is_hub_name(name):
        return Path(name)
    repository, _, revision = name.partition("@")
    try:
        return snapshot(repository, revision or None, kind, only)
    except HubError as error:
        folder = repository.rpartition("/")[2]
        use = f"{key}={folder}" if "." in key else folder
        fix = f"`{error.command} --local-dir {folder}` where the hub can be reached, then {use}"
        if error.package:
            fix = f"pip install huggingface_hub; or {fix}"
        message = f"{name} is not a local folder ({nearest_path(Path(name))}), and {error}"
        raise ConfigError([Problem.of("no-file", key, name, message, fix)]) from None


def repository_of(folder: str) -> str | None:
    """The repository, ``models--owner--name``, of a folder that is a snapshot; else None."""
    repository, snapshots, _ = ("", "", "", *Path(folder).parts)[-3:]
    return repository if snapshots == "snapshots" and "--" in repository else None


def short_name(folder: str) -> str:
    """The name of a folder; for a snapshot that of the repository, without its owner."""
    repository = repository_of(folder)
    return Path(folder).name if repository is None else repository.rpartition("--")[2]
