"""Provenance of a run: ``provenance.json``, one record for each start, and ``diff.patch``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from moemesh.comm import launch
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_STARTS
from moemesh.data.samples import Samples
from moemesh.trace.machine import physical_bytes, processor, usable_cores
from moemesh.trace.provenance import SCHEMA, read_starts
from moemesh.train.records.run_folder import RunFolder, now

#: Largest number of kept records: the first start and the newest ones.
MOST_STARTS = 50
#: Longest diff that is kept in full; a longer one is truncated and marked.
MOST_DIFF_BYTES = 1 << 20
#: Largest number of listed untracked files.
MOST_UNTRACKED = 100
#: Longest time of a call of git in seconds.
_GIT_SECONDS = 10.0
#: Folder of the package.
_LIBRARY = Path(__file__).parent.parent.parent
#: Number of first and of last bytes of a weight file in its hash.
_READ_BYTES = 1 << 20

#: Variables that may change the results or the speed of a run; no others are recorded.
VARIABLES = re.compile(
    r"(MOEMESH__|OMP_|MKL_|OPENBLAS_|KMP_|GOMP_|NUMBA_|ATEN_|TORCH|PYTORCH_|CUBLAS_|CUDA_|CUDNN_|NVIDIA_|NCCL_|GLOO_"
    r"|TRITON_|TOKENIZERS_|SLURM_(JOB|NNODES|NTASKS|NODELIST|STEP|PROCID|LOCALID|RESTART)|LOCAL_WORLD_SIZE"
    r"|WORLD_SIZE|GROUP_WORLD_SIZE|PYTHONHASHSEED|PYTHONPATH|LD_PRELOAD|MALLOC_|GLIBC_TUNABLES|VIRTUAL_ENV)"
)
_SECRET = re.compile(
    r"(token(?!izer)|secret|passw|credential|api[-_]?key|access[-_]?key|private[-_]?key|auth)", re.I
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
REDACTED = "(redacted)"


def record_start(
    folder: RunFolder, config: RunConfig, mesh: Mesh, samples: Samples, first_step: int
) -> None:
    """Add a record of this start, whose first step is `first_step`; all ranks call."""
    on_gpu = mesh.device.type == "cuda"
    local = {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(mesh.device) if on_gpu else "cpu",
    }
    hosts = gather_json(local, mesh.control)
    if mesh.rank:
        return
    starts = read_starts(folder.path)
    number = 1 + max((int(start.get("number", 0)) for start in starts), default=0)
    directory = Path.cwd()
    git = git_state(directory)
    if text := git.pop("text", ""):
        # The file of an earlier start with the same diff, or a new one.
        of_starts = (start.get("git") or {} for start in starts)
        same = (old for old in of_starts if old.get("diff_sha256") == git["diff_sha256"])
        git["diff"] = next(filter(None, (old.get("diff") for old in same)), None)
        if git["diff"] is None:
            git["diff"] = "diff.patch" if number == 1 else f"diff-{number}.patch"
            folder.write_text(git["diff"], text)
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(str(host["host"]), []).append(rank)
    record = {
        "number": number,
        "started": now(),
        "ended": None,
        "first_step": first_step,
        "last_step": None,
        "argv": redacted_arguments(["moemesh", *sys.argv[1:]]),
        "directory": str(directory),
        "python": sys.version.split()[0],
        "packages": packages(),
        "git": git,
        "library": {"folder": str(_LIBRARY), **_commit(_LIBRARY)},
        "hardware": hardware(),
        "hosts": [{"host": name, "ranks": numbers} for name, numbers in ranks.items()],
        "devices": [str(host["device"]) for host in hosts],
        "ranks_per_node": mesh.layout.ranks_per_node,
        "threads": torch.get_num_threads(),
        "seed": config.train.seed,
        "environment": redacted(launch.environment()),
        "data": samples.fingerprint(),
        "weights": None if config.model_path is None else weights(Path(config.model_path)),
        "config": resolved_toml(config),
    }
    _write(folder, [*starts[:1], *starts[1:][-(MOST_STARTS - 2) :], record])


def record_end(folder: RunFolder, last_step: int) -> None:
    """Complete the newest record: the run ends now, at `last_step`. Rank 0 calls. Write errors are
    ignored, since the run has ended."""
    if starts := read_starts(folder.path):
        starts[-1] |= {"ended": now(), "last_step": last_step}
        with suppress(OSError):
            _write(folder, starts)


def record_return(folder: RunFolder, step: int) -> None:
    """Record a return of the newest start to `step`: if that is before its first step, the start
    now begins after `step`. Rank 0 calls. Write errors are ignored: the run continues."""
    if (starts := read_starts(folder.path)) and int(starts[-1]["first_step"]) > step + 1:
        starts[-1]["first_step"] = step + 1
        with suppress(OSError):
            _write(folder, starts)


def _write(folder: RunFolder, starts: Sequence[Mapping[str, Any]]) -> None:
    folder.write_json(RUN_STARTS, {"schema": SCHEMA, "starts": starts})


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that match :data:`VARIABLES`, with secrets replaced."""
    return {
        name: REDACTED if _SECRET.search(name) else _IN_URL.sub(REDACTED, value)
        for name, value in sorted(environment.items())
        if VARIABLES.match(name)
    }


def redacted_arguments(argv: Sequence[str]) -> list[str]:
    """A command line in which secrets are replaced: values of arguments with a name such as
    ``--token``, and the user part of URLs."""
    shown: list[str] = []
    hides_next = False
    for argument in argv:
        name, is_value, _ = argument.partition("=")
        if hides_next:
            shown.append(REDACTED)
        elif is_value and _SECRET.search(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(_IN_URL.sub(REDACTED, argument))
        is_secret_option = argument.startswith("--") and bool(_SECRET.search(argument))
        hides_next = not hides_next and not is_value and is_secret_option
    return shown


def packages() -> dict[str, str]:
    """Every installed distribution with its version."""
    # Read the metadata once per distribution: each access parses the text.
    metadata = [distribution.metadata for distribution in importlib.metadata.distributions()]
    named = [fields for fields in metadata if fields and fields["Name"]]
    versions = {str(fields["Name"]): str(fields["Version"]) for fields in named}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def hardware() -> dict[str, Any]:
    """The machine of rank 0, as far as it is known without a device."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "memory_bytes": physical_bytes(),
    }


def weights(path: Path) -> dict[str, Any]:
    """Identity of the folder of initial weights: size of each .json and .safetensors file, and a
    hash of its first and last bytes."""
    files: dict[str, Any] = {}
    names = sorted(p for p in path.expanduser().glob("*") if p.suffix in (".json", ".safetensors"))
    for file in names:
        try:
            size = file.stat().st_size
            with file.open("rb") as opened:
                digest = hashlib.sha256(opened.read(_READ_BYTES))
                if size > _READ_BYTES:
                    opened.seek(max(size - _READ_BYTES, _READ_BYTES))
                    digest.update(opened.read(_READ_BYTES))
        except OSError:
            continue
        files[file.name] = {"bytes": size, "ends_sha256": digest.hexdigest()}
    return files


def git_state(directory: Path) -> dict[str, Any]:
    """Commit, branch and changes of the repository that contains `directory`; {} without one.

    "text" is the diff of tracked files, at most MOST_DIFF_BYTES of it.
    """
    root = _git(directory, "rev-parse", "--show-toplevel")
    if not root:
        return {}
    top = Path(root.strip())
    state: dict[str, Any] = {"root": str(top), **_commit(top)}
    if state.get("commit") is None:
        return state
    state["branch"] = (_git(top, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() or None
    diff = _git(top, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
    untracked = (_git(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    state["untracked"] = untracked[:MOST_UNTRACKED]
    if diff:
        whole = diff.encode(errors="surrogateescape")
        state["diff_bytes"] = len(whole)
        state["diff_sha256"] = hashlib.sha256(whole).hexdigest()
        state["diff_is_cut"] = len(whole) > MOST_DIFF_BYTES
        state["text"] = whole[:MOST_DIFF_BYTES].decode(errors="replace")
    return state


def _commit(directory: Path) -> dict[str, Any]:
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "is_changed": bool(changed)}


def _git(directory: Path, *words: str) -> str | None:
    """The output of git; None if it fails, is missing, or takes too long. Git starts no program
    that the repository configures."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(directory)]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*command, *words], capture_output=True, timeout=_GIT_SECONDS, check=True
        )
        return done.stdout.decode(errors="surrogateescape")
    return None
