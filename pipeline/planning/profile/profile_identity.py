"""The identity of a profile, which is valid only for one model, configuration and code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.planning.profile.device_kinds import DeviceKind
from rlinf.config import RunConfig, Section, json_digest
from stages.identity import program_version

COST_SECTIONS = (
    *("task", "model", "algorithm", "reward", "engine", "optimizer", "trainer", "rollout", "flow"),
)
"""Sections of the configuration on which a stage's time may depend."""
LENGTH_SECTIONS = ("sft",)
"""Sections that affect the lengths of responses."""


class ProfileIdentity(Section):
    """The digests of a profile; equal digests mean the same work."""

    model: str = Field(min_length=1)
    """Digest of the model's settings and, for a checkpoint, of its files' names and sizes."""
    config: str = Field(min_length=1)
    """Digest of the sections on which stages' times depend."""
    code: str = Field(min_length=1)
    """Version of the program and of its file formats."""

    @classmethod
    def of(cls, config: RunConfig) -> ProfileIdentity:
        """Return the identity of a run's costs."""
        values = config.semantic_values()
        # A run sets this value when it starts; measurements do not depend on it.
        values["optimizer"] |= {"lr_decay_iterations": None}
        return cls(
            model=json_digest([values["model"], _files(values["model"])]),
            config=json_digest({name: values[name] for name in (*COST_SECTIONS, *LENGTH_SECTIONS)}),
            code="+".join(map(str, program_version())),
        )


def _files(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Return names and sizes of a checkpoint's files, because the folder's content may change."""
    if not model.get("path"):
        return []
    folder = Path(model["path"]).expanduser()
    return sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.is_file())


def kind_key(identity: ProfileIdentity, kind: DeviceKind) -> str:
    """Return the digest under which the measurements of a kind are cached."""
    hardware = [kind.name, kind.gpu_type, kind.gpu_model, kind.duty_cycle]
    return json_digest([identity.model_dump(), hardware])
