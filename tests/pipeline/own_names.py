"""The flow ``on_policy`` with a name of its own for each stage."""

from __future__ import annotations

from dataclasses import replace

from stages.flow import Flow, Source, Stage, on_policy

NAMES = {
    "warm_start": "prepare",
    "rollout": "act",
    "reward": "judge",
    "inference": "look",
    "train": "learn",
    "sync": "publish",
}


def _source(source: Source) -> Source:
    otherwise = source.otherwise and NAMES[source.otherwise]
    return replace(source, stage=NAMES[source.stage], otherwise=otherwise)


def _stage(name: str, stage: Stage) -> Stage:
    return replace(
        stage,
        inputs={key: _source(source) for key, source in stage.inputs.items()},
        like=stage.like and NAMES[stage.like],
        program=stage.program or f"stages.{name}",
    )


renamed = Flow(
    {NAMES[name]: _stage(name, stage) for name, stage in on_policy.stages.items()},
    {NAMES[name]: _stage(name, stage) for name, stage in on_policy.offline.items()},
    _stage("evaluate", on_policy.evaluate),
)
