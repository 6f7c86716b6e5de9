"""The colour of each stage, in every chart and page."""

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
