"""Templates of pages, and the colours of stages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2

TEMPLATE_FOLDER = Path(__file__).parent


def render_template(template: str, **values: Any) -> str:
    """Render a template of this folder with escaped values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDER), autoescape=True
    )
    return environment.get_template(template).render(**values)


STAGE_COLOURS = {
    "sft": "#7d5fae",
    "rollout": "#2472ad",
    "reward": "#b57a05",
    "inference": "#2e8a57",
    "train": "#c2472e",
    "sync": "#5f6c79",
    "evaluate": "#a8467f",
}
DARK_STAGE_COLOURS = {
    "sft": "#b69ae0",
    "rollout": "#58a8e4",
    "reward": "#e6b14e",
    "inference": "#62c48e",
    "train": "#f2836c",
    "sync": "#9ba8b6",
    "evaluate": "#e388bf",
}
"""Colours on a dark page. All have a contrast of at least 3 to 1 with the background."""
EXTRA_COLOURS = ("#4aa3a2", "#8c6d46", "#7d7abc", "#b07aa1")
"""Colours of further stages, which only other flows have."""


def stage_colours(stages: Iterable[str], *, dark: bool = False) -> dict[str, str]:
    """Return a colour by stage; equal stages in equal order have equal colours."""
    colours, extra = DARK_STAGE_COLOURS if dark else STAGE_COLOURS, cycle(EXTRA_COLOURS)
    return {stage: colours.get(stage) or next(extra) for stage in stages}
