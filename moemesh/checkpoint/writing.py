"""The two phases of a save: the file of each rank, then manifest and rename for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moemesh.checkpoint import files
from moemesh.checkpoint.digests import WRITTEN, digest_text, hash_bytes
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.load import Shard, in_order, safetensors_bytes
from moemesh.checkpoint.manifest import DTYPES, FORMAT, MANIFEST, Manifest, encode, encode_json
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.checkpoint.stored import StoredCheckpoint, num_nonfinite, read_manifest
from moemesh.config.limits import parse_json

#: Report of a rank on its file, as JSON.
Report = dict[str, Any]


def check_shards(shards: Sequence[Shard]) -> dict[str, Shard]:
    """Key in the file -> shard; CheckpointError for shards that cannot be saved."""
    keyed: dict[str, Shard] = {}
    for shard in shards:
        dims = (len(shard.shape), len(shard.offset), shard.tensor.ndim)
        if len(set(dims)) != 1:
            raise CheckpointError(f"{shard.name}: shape, offset and tensor have {dims} dimensions")
        if dtype_of(shard) not in DTYPES:
            raise CheckpointError(f"{shard.name}: dtype {dtype_of(shard)} cannot be saved")
        key = f"{shard.name}@{','.join(map(str, shard.offset))}"
        if shard.tensor.numel() and key in keyed:
            raise CheckpointError(f"{shard.name}: given twice at offset {list(shard.offset)}")
        # Shape and dtype of an empty slice are checked as well.
        keyed[key if shard.tensor.numel() else f"{key} (empty)"] = shard
    return keyed


def check_step(final: Place, state: dict[str, Any]) -> None:
    """Raises CheckpointError if `final` exists or is not the name of a step, or if `state` is not
    plain JSON."""
    if not files.COMMITTED.fullmatch(final.name):
        raise CheckpointError(f"{final.name}: the step must be an integer from 0 on")
    if parse_json(encode_json(state)) != state:
        raise CheckpointError(
            "the state does not survive JSON: use text keys, and lists rather than tuples"
        )
    if files.is_committed(final):
        raise CheckpointError(f"{final} exists; a checkpoint is never overwritten")


def write_part(
    path: Place, keyed: Mapping[str, Shard], before_tensor: Callable[[], None] = lambda: None
) -> Report:
    """Writes the file `path` of this rank and reads it back; without numbers no file is written.
    Returns the report on its content.

    `before_tensor` is called before the header and each tensor; an exception from it ends the
    write. Raises CheckpointError with the path if the file cannot be written (with the bytes needed
    and free if the disk is full), or if it reads back differently.
    """
    filled = {key: shard for key, shard in keyed.items() if shard.tensor.numel()}
    tensors = {key: shard.deferred() for key, shard in filled.items()}
    order, nonfinite, header = in_order(tensors), set[str](), ""

    def parts() -> Iterator[bytes | memoryview]:
        nonlocal header
        for index, part in enumerate(safetensors_bytes(tensors)):
            before_tensor()
            if index == 0:
                header = hash_bytes(part)
            yield part

    def check_finite(index: int, piece: memoryview) -> None:
        """Adds a tensor with infinities or NaN to `nonfinite`. `index` of the part in the file: 0
        is the header, then come the tensors in order."""
        if index and num_nonfinite(piece, dtype_of(shard := filled[order[index - 1]])):
            nonfinite.add(shard.name)

    file, digests = None, dict[str, list[str]]()
    if filled:
        try:
            size, written = files.write_file(path, parts(), check_finite)
            files.sync_folder(path.parent)
        except OSError as error:
            needed = sum(shard.tensor.nbytes for shard in filled.values())
            raise files.explain(error, path, needed) from error
        file = {"size": size, "header": digest_text(header, WRITTEN)}
        digests = dict(zip(order, written[1:], strict=True))
    # The report: also of empty slices, whose shape and dtype are checked.
    slices: list[list[object]] = []
    for key, shard in keyed.items():
        rectangle = {"offset": list(shard.offset), "shape": list(shard.tensor.shape)}
        piece = {"file": path.name, "key": key, "chunks": digests.get(key, []), **rectangle}
        slices.append([shard.name, list(shard.shape), dtype_of(shard), piece])
    report: Report = {
        "name": path.name,
        "file": file,
        "slices": slices,
        "nonfinite": sorted(nonfinite),
        "hash": WRITTEN,
    }
    if filled:  # before the commit: a file that reads back differently is rewritten
        StoredCheckpoint(path.parent, _manifest(0, [report], {})).verify()
    return report


def commit(
    temporary: Place, final: Place, step: int, reports: Sequence[Report], state: dict[str, Any]
) -> Manifest:
    """Second phase, on rank 0: checks that every logical tensor is complete, writes the manifest to
    `temporary`, and renames the folder to `final`. In an object store both are one folder, and its
    manifest is the commit. Raises CheckpointError."""
    manifest = _manifest(step, reports, state)
    manifest.check()
    content = encode(manifest)
    try:
        files.create_file(temporary / MANIFEST, content)
        if files.read_whole(temporary / MANIFEST) != content:
            if isinstance(temporary, RemotePath):
                # Delete a manifest that was damaged in transfer, so that it can be rewritten; an
                # intact one belongs to another writer.
                try:
                    read_manifest(temporary)
                except CheckpointError:
                    files.remove_file(temporary / MANIFEST)
            raise CheckpointError(f"{temporary / MANIFEST}: reads back otherwise than written")
        if isinstance(temporary, RemotePath) or isinstance(final, RemotePath):
            return manifest
        files.rename(temporary, final)
        try:
            files.sync_folder(final.parent)
        except OSError:
            files.rename(final, temporary)  # not durable, so not committed; the caller removes it
            raise
    except OSError as error:
        raise files.explain(error, temporary / MANIFEST, len(content)) from error
    return manifest


def _manifest(step: int, reports: Sequence[Report], state: dict[str, Any]) -> Manifest:
    """Manifest with the slices of all `reports`; CheckpointError if they disagree."""
    if len(names := sorted({report["hash"] for report in reports})) > 1:
        raise CheckpointError(
            f"ranks hash by {' and '.join(names)}: install the package xxhash on all machines"
        )
    tensors: dict[str, dict[str, Any]] = {}
    for rank, report in enumerate(reports):
        for name, shape, dtype, piece in report["slices"]:
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "slices": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                raise CheckpointError(
                    f"{name}: rank {rank} has {dtype} {shape}, another {entry['dtype']} "
                    f"{entry['shape']}"
                )
            if 0 not in piece["shape"]:
                entry["slices"].append(piece)
    content = {
        "format": FORMAT,
        "step": step,
        "world_size": len(reports),
        "chunk_bytes": files.CHUNK_BYTES,
        "hash": names[0],
        "nonfinite": sorted({name for report in reports for name in report["nonfinite"]}),
        "tensors": tensors,
        "files": {report["name"]: report["file"] for report in reports if report["file"]},
        "state": state,
    }
    return Manifest.model_validate(content)


def dtype_of(shard: Shard) -> str:
    """torch's name of a shard's dtype."""
    return str(shard.tensor.dtype).removeprefix("torch.")
