"""Names of the Hugging Face hub: the local folder of a model or a data set.

huggingface_hub finds ``owner/name``, or ``owner/name@revision``: it downloads what its cache lacks
and honours its environment (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``). The folder that it
returns, ``models--owner--name/snapshots/COMMIT``, names the commit: a run that records the folder
has recorded the revision.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_path

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
#: Files of a repository that a run reads: formats of weights other than safetensors are left there.
_PATTERNS: dict[Kind, list[str] | None] = {
    "model": ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model"],
    "dataset": None,
}


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a name of the hub, and is no path of this machine."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def local_folder(name: str, kind: Kind, key: str) -> Path:
    """The folder `name`, or the snapshot of the repository of that name, downloaded if need be.

    Raises ConfigError under `key` for a repository that cannot be had, with the command that
    fetches it.
    """
    if not is_hub_name(name):
        return Path(name)
    repository, _, revision = name.partition("@")
    folder = repository.rpartition("/")[2]
    command = f"hf download {repository} --local-dir {folder}"
    command += " --repo-type dataset" * (kind == "dataset")
    command += f" --revision {revision}" * bool(revision)
    fix = f"`{command}` where the hub can be reached, then {key}={folder}"
    message = f"{name} is no folder here ({nearest_path(Path(name))}), and "
    try:
        from huggingface_hub import snapshot_download  # late: only names of the hub need it
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        message += "to download it needs huggingface_hub, which is not installed"
        fix = f"pip install huggingface_hub; or {fix}"
        raise ConfigError([Problem.of("no-file", key, name, message, fix)]) from None
    try:
        snapshot = snapshot_download(
            repository, repo_type=kind, revision=revision or None, allow_patterns=_PATTERNS[kind]
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        message += f"the hub has no {kind} of this name that you may read (HTTP {status})"
        fix = f"check the name; where it needs a licence or a token: `hf auth login`; {fix}"
        raise ConfigError([Problem.of("no-file", key, name, message, fix)]) from None
    except (OSError, ValueError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        message += f"the hub cannot be reached, nor is it in the hub's cache ({reason})"
        raise ConfigError([Problem.of("no-file", key, name, message, fix)]) from None
    return Path(snapshot)


def repository_of(folder: str) -> str | None:
    """The repository, ``models--owner--name``, that a folder is a snapshot of; None of another."""
    _, *homes = Path(folder).parts[-3:][::-1]
    return homes[1] if len(homes) == 2 and homes[0] == "snapshots" and "--" in homes[1] else None


def short_name(folder: str) -> str:
    """The last part of a folder's name, or of the name of the repository of a snapshot."""
    return (repository_of(folder) or Path(folder).name).rpartition("--")[2]
