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
from moemesh.data.samples import Samples
from moemesh.trace.machine import processor, usable_cores
from moemesh.trace.provenance import FILE, SCHEMA, read_starts
from moemesh.train.records.run_folder import RunFolder, now

#: The first start and the newest ones are kept, so many together.
MOST_STARTS = 50
#: A longer diff is cut, and said to be.
MOST_DIFF_BYTES = 1 << 20
MOST_UNTRACKED = 100
_GIT_SECONDS = 10.0
_LIBRARY = Path(__file__).parent.parent.parent
_READ_BYTES = 1 << 20

#: Variables that may change what a run computes or how fast; nothing else of the environment is
#: written down.
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
    own = {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(mesh.device) if on_gpu else "cpu",
    }
    hosts = gather_json(own, mesh.control)
    if mesh.rank:
        return
    starts = read_starts(folder.path)
    number = 1 + max((int(start.get("number", 0)) for start in starts), default=0)
    here = Path.cwd()
    git = git_state(here)
    if text := git.pop("text", ""):
        git["diff"] = _write_diff(folder, text, git["diff_sha256"], starts, number)
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(hosts):
        ranks.setdefault(str(own["host"]), []).append(rank)
    record = {
        "number": number,
        "started": now(),
        "ended": None,
        "first_step": first_step,
        "last_step": None,
        "argv": redacted_arguments(["moemesh", *sys.argv[1:]]),
        "directory": str(here),
        "python": sys.version.split()[0],
        "packages": packages(),
        "git": git,
        "library": {"folder": str(_LIBRARY), **_commit(_LIBRARY)},
        "hardware": hardware(),
        "hosts": [{"host": host, "ranks": own} for host, own in ranks.items()],
        "devices": [str(one["device"]) for one in hosts],
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
    """Complete the newest record: the run ends now, at `last_step`. Rank 0 calls. Nothing where it
    cannot be written: the run has ended all the same."""
    if starts := read_starts(folder.path):
        starts[-1] |= {"ended": now(), "last_step": last_step}
        with suppress(OSError):
            _write(folder, starts)


def record_return(folder: RunFolder, step: int) -> None:
    """The newest start has gone back to `step`: those behind it are its own. Rank 0 calls."""
    if (starts := read_starts(folder.path)) and int(starts[-1]["first_step"]) > step + 1:
        starts[-1]["first_step"] = step + 1
        with suppress(OSError):
            _write(folder, starts)


def _write(folder: RunFolder, starts: Sequence[Mapping[str, Any]]) -> None:
    folder.write_json(FILE, {"schema": SCHEMA, "starts": starts})


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the list, secrets in them replaced."""
    return {
        name: REDACTED if _SECRET.search(name) else _IN_URL.sub(REDACTED, value)
        for name, value in sorted(environment.items())
        if VARIABLES.match(name)
    }


def redacted_arguments(argv: Sequence[str]) -> list[str]:
    """A command line without the values of what is called a secret, and without those in URLs."""
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
    # Once for each of them: the text is parsed anew whenever it is asked for.
    told = [one.metadata for one in importlib.metadata.distributions()]
    found = {str(one["Name"]): str(one["Version"]) for one in told if one and one["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def hardware() -> dict[str, Any]:
    """The machine of rank 0, as far as it says without a device."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def weights(path: Path) -> dict[str, Any]:
    """Identity of the folder of weights that a run starts from: size of each file, and a hash of
    its first and last bytes."""
    found: dict[str, Any] = {}
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
        found[file.name] = {"bytes": size, "ends_sha256": digest.hexdigest()}
    return found


def git_state(directory: Path) -> dict[str, Any]:
    """Commit, branch and changes of the repository that holds `directory`; {} where there is none.

    "text" is the diff of what git tracks, at most MOST_DIFF_BYTES of it.
    """
    root = _git(directory, "rev-parse", "--show-toplevel")
    if not root:
        return {}
    top = Path(root.strip())
    found: dict[str, Any] = {"root": str(top), **_commit(top)}
    if found.get("commit") is None:
        return found
    found["branch"] = (_git(top, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() or None
    diff = _git(top, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
    untracked = (_git(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    found["untracked"] = untracked[:MOST_UNTRACKED]
    if diff:
        whole = diff.encode(errors="surrogateescape")
        found["diff_bytes"] = len(whole)
        found["diff_sha256"] = hashlib.sha256(whole).hexdigest()
        found["diff_is_cut"] = len(whole) > MOST_DIFF_BYTES
        found["text"] = whole[:MOST_DIFF_BYTES].decode(errors="replace")
    return found


def _commit(directory: Path) -> dict[str, Any]:
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "is_changed": bool(changed)}


def _git(directory: Path, *words: str) -> str | None:
    """The output of git; None where it fails, is not there, or takes too long. It runs no program
    that a repository names."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(directory)]
    try:
        done = subprocess.run(
            [*command, *words], capture_output=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.decode(errors="surrogateescape")
    return text if done.returncode == 0 else None


def _write_diff(
    folder: RunFolder, text: str, digest: str, starts: Sequence[Mapping[str, Any]], number: int
) -> str:
    """Write the diff unless an earlier start has the same; returns the name of its file."""
    for git in (start.get("git") or {} for start in starts):
        if git.get("diff_sha256") == digest and git.get("diff"):
            return str(git["diff"])
    name = "diff.patch" if number == 1 else f"diff-{number}.patch"
    folder.write_text(name, text)
    return name
