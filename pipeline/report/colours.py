"""The colour of each stage, in every chart and page."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

COLOURS = {
    "warm_start": "#7d5fae",
    "rollout": "#2472ad",
    "reward": "#b57a05",
    "inference": "#2e8a57",
    "train": "#c2472e",
    "sync": "#5f6c79",
    "evaluate": "#a8467f",
}
DARK = {
    "warm_start": "#b69ae0",
    "rollout": "#58a8e4",
    "reward": "#e6b14e",
    "inference": "#62c48e",
    "train": "#f2836c",
    "sync": "#9ba8b6",
    "evaluate": "#e388bf",
}
"""The same on a dark page. All have a contrast of 3 to 1 and more to the page below them."""
SPARE = ("#4aa3a2", "#8c6d46", "#7d7abc", "#b07aa1")
"""Of stages that only another flow has."""


def colours(stages: Iterable[str], *, dark: bool = False) -> dict[str, str]:
    """A colour for each of some stages, the same ones for the same stages in the same order."""
    known, spare = DARK if dark else COLOURS, cycle(SPARE)
    return {stage: known.get(stage) or next(spare) for stage in stages}
