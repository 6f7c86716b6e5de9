"""Pages from the templates of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2

TEMPLATE_FOLDER = Path(__file__).parent


def render_template(template: str, **values: Any) -> str:
    """A page from a template of this folder; values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDER), autoescape=True
    )
    return environment.get_template(template).render(**values)


STAGE_COLOURS = {
    "warm_start": "#7d5fae",
    "rollout": "#2472ad",
    "reward": "#b57a05",
    "inference": "#2e8a57",
    "train": "#c2472e",
    "sync": "#5f6c79",
    "evaluate": "#a8467f",
}
DARK_STAGE_COLOURS = {
    "warm_start": "#b69ae0",
    "rollout": "#58a8e4",
    "reward": "#e6b14e",
    "inference": "#62c48e",
    "train": "#f2836c",
    "sync": "#9ba8b6",
    "evaluate": "#e388bf",
}
"""The same on a dark page. All have a contrast of 3 to 1 and more to the page below them."""
EXTRA_COLOURS = ("#4aa3a2", "#8c6d46", "#7d7abc", "#b07aa1")
"""Of stages that only another flow has."""


def stage_colours(stages: Iterable[str], *, dark: bool = False) -> dict[str, str]:
    """A colour for each of some stages, the same ones for the same stages in the same order."""
    known, spare = DARK_STAGE_COLOURS if dark else STAGE_COLOURS, cycle(EXTRA_COLOURS)
    return {stage: known.get(stage) or next(spare) for stage in stages}
