"""The tables of docs/huggingface.md on families of transformers, from their architectures."""

from __future__ import annotations

from textwrap import fill

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.model import trained_families


def hub_families(old: str) -> str:
    """A row for each family with experts that the installed transformers has, as its tiny model is
    read."""
    # Late: transformers takes seconds to import.
    from moemesh.model.hub.architecture import read
    from tests.hub.families import family_names, text_of_images
    from tests.hub.training import values_of

    lines = ["| `model_type` | code | ep | pp | documents of a row | balance | generate |"]
    lines += ["|---|---|---|---|---|---|---|"]
    texts = family_names()
    for name in [*texts, *text_of_images()]:
        try:
            values = values_of(name)
            family = read(values)
        except (AssertionError, RuntimeError, ConfigError):
            continue  # transformers builds no tiny model of it, or it has experts in two stacks
        text = {**values, **dict(values.get("text_config") or {})}
        state = [one.shape for one in family.parameters if one.is_idle] + [*family.buffers.values()]
        ways = {
            "loss": text.get("router_aux_loss_coef") is not None,
            "bias": (family.num_experts,) in state,
        }
        cells = (
            "both" if name in trained_families()["family"] else "transformers",
            "yes",
            "no" if family.uncut else "yes",
            "each by itself" if family.documents == "rows" else "together",
            ", ".join(way for way, is_known in ways.items() if is_known) or "by key",
            "yes" if name in texts else "not tested",
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def hub_dense(old: str) -> str:
    """The dense families of the installed transformers whose tiny model can be trained, each with
    what it lacks."""
    from moemesh.model.hub.architecture import read
    from tests.hub.families import dense_names
    from tests.hub.training import values_of

    names: list[str] = []
    for name in dense_names():
        try:
            family = read(values_of(name))
        except Exception:
            continue  # its default configuration makes no tiny model that trains
        if not family.num_experts and name not in trained_families()["family"]:
            lacks = ["no pp"] if family.uncut else []
            lacks += ["a document a row"] if family.documents == "rows" else []
            names.append(f"`{name}`" + (f" ({', '.join(lacks)})" if lacks else ""))
    return fill(", ".join(sorted(names)), 120, break_on_hyphens=False) + "\n"


BLOCKS = {"hub_families": hub_families, "hub_dense": hub_dense}
