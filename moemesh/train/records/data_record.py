"""The data of a run, recorded in its folder and compared when the run goes on."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from moemesh.data.samples import Samples
from moemesh.train.records.run_folder import DATA, DATA_CHANGE, RunFolder, RunFolderError

#: Keys of [data] that leave the training samples and their order as they are.
WITHOUT_EFFECT = frozenset({"global_batch", "bad_record_share", "cache"})


def record(samples: Samples) -> dict[str, Any]:
    """Each source with its tokens, training samples and share, and the fingerprint of all."""
    shares = samples.interleaving.counts / samples.interleaving.period
    return {
        "sources": [
            {
                "name": split.source.name,
                "tokens": split.num_tokens,
                "training_samples": len(split.training),
                "share": float(share),
                "without_loss": split.without_loss,
                "loss_tokens": split.num_learned,
            }
            for split, share in zip(samples.splits, shares, strict=True)
        ],
        "validation_samples": samples.num_validation,
        "notes": samples.notes,
        "fingerprint": samples.fingerprint(),
    }


def was_tuned_on_conversations(run: Path) -> bool:
    """Whether some source of the run in this folder, if it is one, has conversations."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        sources = json.loads((run / DATA).read_text(encoding="utf-8"))["sources"]
        return any(one.get("loss_tokens") is not None for one in sources)
    return False


def changes_samples(key: str) -> bool:
    """Whether another value of the dotted `key` makes other training samples or another order."""
    section, _, name = key.partition(".")
    return key == "train.seed" or (section == "data" and name not in WITHOUT_EFFECT)


def refuse_other_data(folder: RunFolder, samples: Samples, *, allowed: bool) -> None:
    """Raises RunFolderError when a run that goes on would read other samples than it began with,
    or in another order, though its configuration is the same."""
    before, whose = folder.recorded.data, folder.recorded.whose
    if allowed or before is None:
        return
    try:
        old, facts = dict(before["fingerprint"]), list(before["sources"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{whose}: has no record of its data ({error})") from error
    new = samples.fingerprint()
    if old == new:
        return
    lines = [f"the data are not those of {whose}:"]
    for number, split in enumerate(samples.splits, start=1):
        if old.get(f"source {number}") != new[f"source {number}"] and number <= len(facts):
            was = facts[number - 1]["tokens"]
            now = split.num_tokens
            same = "as many, but not the same" if was == now else f"{now:,}"
            lines.append(f"  {split.source.name}: {was:,} tokens then, {same} now")
    if len(lines) == 1:
        lines.append("  the order of the samples is another one")
    lines += [
        "the text, or the tokenizer, was changed in place; put it back, or",
        "to train on the new data from the beginning: another folder, --out",
        f"to go on with the new data at the same count of samples: --allow-change {DATA_CHANGE}",
    ]
    raise RunFolderError("\n".join(lines))
