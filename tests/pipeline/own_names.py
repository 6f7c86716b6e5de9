"""The flow ``on_policy`` with a name of its own for each stage."""

from __future__ import annotations

from dataclasses import replace

from stages.flow import Flow, InputSource, StageSpec, on_policy

NAMES = {
    "sft": "prepare",
    "rollout": "act",
    "reward": "judge",
    "inference": "look",
    "train": "learn",
    "sync": "publish",
}


def _source(source: InputSource) -> InputSource:
    otherwise = source.initial and NAMES[source.initial]
    return replace(source, stage=NAMES[source.stage], initial=otherwise)


def _stage(name: str, stage: StageSpec) -> StageSpec:
    return replace(
        stage,
        inputs={key: _source(source) for key, source in stage.inputs.items()},
        colocate_with=stage.colocate_with and NAMES[stage.colocate_with],
        module=stage.module or f"stages.{name}",
    )


renamed = Flow(
    {NAMES[name]: _stage(name, stage) for name, stage in on_policy.stages.items()},
    {NAMES[name]: _stage(name, stage) for name, stage in on_policy.setup_stages.items()},
    _stage("evaluate", on_policy.evaluate),
)
