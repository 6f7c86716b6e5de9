"""What makes the output of a stage what it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rlinf import __version__
from rlinf.artifacts import SCHEMA, Manifest
from rlinf.config import RunConfig, digest
from rlinf.errors import ConfigError
from stages.flow import EVALUATE, flow_of
from stages.layout import KEPT


def code_version() -> list[str | int]:
    """Version of the program and of its file formats, for measurements; no part of a key."""
    return [__version__, SCHEMA]


def stage_key(
    config: RunConfig, stage: str, iteration: int, inputs: Mapping[str, str], code: str
) -> str:
    """Digest of the configuration that matters to a stage, its inputs' contents and its code.

    Resources, paths and log options are not part of it. Nor are keys that the frozen configuration
    does not have, because the program that wrote it did not know them: their defaults hold.

    Args:
        inputs: content digest of each input by name.
        code: digest of the stage's code (:mod:`stages.code`).
    """
    given = config.given()
    wanted = flow_of(config).table[stage].sections
    sections = {name: given[name] for name in wanted if name in given}
    if EVALUATE in sections:
        # When, not how.
        sections[EVALUATE] = {k: v for k, v in sections[EVALUATE].items() if k != "every"}
    return digest(
        {
            "stage": stage,
            "iteration": iteration,
            "config": sections,
            "inputs": dict(inputs),
            "code": code,
        }
    )


class Kept(BaseModel):
    """Results that count though configuration or code is another now (``--keep``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str
    why: tuple[str, ...]
    """What differed."""
    outputs: dict[str, str]
    """Keys of the results that stay, by ``stage/iteration``."""


class Ledger(BaseModel):
    """All of a run, oldest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kept: tuple[Kept, ...] = ()

    def keeps(self, manifest: Manifest) -> bool:
        """Whether a result counts whatever its key."""
        name = f"{manifest.stage}/{manifest.iteration}"
        return any(entry.outputs.get(name) == manifest.key for entry in self.kept)


def read_ledger(run: Path) -> Ledger:
    """The ledger of a run; empty when nothing was ever kept.

    Raises:
        ConfigError: damaged.
    """
    path = run / KEPT
    try:
        mark = path.stat()
    except FileNotFoundError:
        return Ledger()
    return _read(path, (mark.st_mtime_ns, mark.st_ino, mark.st_size))


@lru_cache(maxsize=8)
def _read(path: Path, mark: tuple[int, ...]) -> Ledger:
    try:
        return Ledger.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ConfigError(
            f"{path}: damaged ({reason}); remove it, and resume with --keep to keep what is there"
        ) from None
