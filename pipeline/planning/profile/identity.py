"""What a profile belongs to: costs measured for one model, configuration and code fit no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.planning.profile.kinds import Kind
from rlinf.config import RunConfig, Section, digest
from stages.identity import code_version

COSTLY = (
    *("task", "model", "algorithm", "reward", "engine", "optimizer", "trainer", "rollout", "flow"),
)
"""Sections of the configuration that a stage's time may depend on."""
FROM_DATA = ("warm_start",)
"""Sections that change what the policy says, and so how long its responses are."""


class Identity(Section):
    """Digests; profiles with equal ones measure the same work."""

    model: str = Field(min_length=1)
    """Of the model's settings and, for a checkpoint, of its files' names and sizes."""
    config: str = Field(min_length=1)
    """Of the sections that stages' times depend on."""
    code: str = Field(min_length=1)
    """Version of the program and of its file formats."""

    @classmethod
    def of(cls, config: RunConfig) -> Identity:
        """The identity of a run's costs."""
        semantic = config.semantic()
        # A run that begins fills it in; what is measured for it goes for its like.
        semantic["optimizer"] |= {"schedule_iterations": None}
        return cls(
            model=digest([semantic["model"], _files(semantic["model"])]),
            config=digest({name: semantic[name] for name in (*COSTLY, *FROM_DATA)}),
            code="+".join(map(str, code_version())),
        )


def _files(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and sizes of a checkpoint's files; the folder may hold another model one day."""
    if not model.get("path"):
        return []
    folder = Path(model["path"]).expanduser()
    return sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.is_file())


def kind_key(identity: Identity, kind: Kind) -> str:
    """Digest that the measurements on a kind are kept under."""
    hardware = [kind.name, kind.gpu_type, kind.gpu_model, kind.duty_cycle]
    return digest([identity.model_dump(), hardware])
