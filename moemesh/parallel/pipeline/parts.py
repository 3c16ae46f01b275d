"""Parts of the model: the layers of each stage, and the pipeline ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.stages import cut_layers
from moemesh.model.transformer import ModelPart, Transformer
from moemesh.schedule.action import Schedule


def stage_parts(config: ModelConfig, plan: Plan, schedule: Schedule) -> tuple[ModelPart, ...]:
    """The part that each stage runs: embedding with the first, head and extra prediction layers
    with the last."""
    layers = cut_layers(config, schedule.num_stages, plan.layers_per_stage)
    last = schedule.num_stages - 1
    return tuple(ModelPart(cut, stage == 0, stage == last) for stage, cut in enumerate(layers))


def parts_of(schedule: Schedule, parts: tuple[ModelPart, ...], rank: int) -> dict[int, ModelPart]:
    """Stage -> part, of every stage that pipeline rank `rank` runs (in whatever pipe)."""
    return {stage: parts[stage] for _, stage in schedule.stages_of(rank)}


def parameters_of(model: Transformer, part: ModelPart) -> list[nn.Parameter]:
    """The parameters of this part of the model."""
    ahead = model.config.mtp_layers if part.last else range(0)
    modules: list[nn.Module | None] = [model.layers[str(index)] for index in (*part.layers, *ahead)]
    if part.first or ahead or (part.last and model.head is None):
        modules.append(model.embedding)
    if part.last:
        modules += [model.norm, model.ahead_norms, model.head]
    return [p for module in modules if module is not None for p in module.parameters()]


def stages_of(model: Transformer, parts: Mapping[int, ModelPart]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the stages of this rank (``parts``) that use it, ascending."""
    used = {stage: set(parameters_of(model, part)) for stage, part in sorted(parts.items())}
    return {
        name: tuple(stage for stage, parameters in used.items() if parameter in parameters)
        for name, parameter in model.named_parameters()
    }


def holders(
    config: ModelConfig, schedule: Schedule, parts: tuple[ModelPart, ...]
) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the pipeline ranks that hold it, ascending."""
    found: dict[str, tuple[int, ...]] = {}
    for rank in range(schedule.num_ranks):
        held = Transformer(config, list(parts_of(schedule, parts, rank).values()))
        for name, _ in held.named_parameters():
            found[name] = (*found.get(name, ()), rank)
    return found
