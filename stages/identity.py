"""What makes the output of a stage what it is."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf import __version__
from rlinf.artifacts import SCHEMA
from rlinf.config import RunConfig, digest
from stages import SECTIONS


def code_version() -> list[str | int]:
    """Version of the program and of its file formats."""
    return [__version__, SCHEMA]


def stage_key(config: RunConfig, stage: str, iteration: int, inputs: Mapping[str, str]) -> str:
    """Digest of the configuration that matters to a stage, its inputs' contents and the code.

    Resources, paths and log options are not part of it.

    Args:
        inputs: content digest of each input by name.
    """
    semantic = config.semantic()
    sections = {name: semantic[name] for name in SECTIONS[stage]}
    if "evaluate" in sections:
        # When, not how.
        sections["evaluate"] = {k: v for k, v in sections["evaluate"].items() if k != "every"}
    schedule = sections.get("algorithm", {}).get("schedule", "constant")
    if stage == "train" and schedule != "constant":
        sections["iterations"] = semantic["iterations"]
    return digest(
        {
            "stage": stage,
            "iteration": iteration,
            "config": sections,
            "inputs": dict(inputs),
            "code": code_version(),
        }
    )
