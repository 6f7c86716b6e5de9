"""The samples of a run as transcripts, for the report and for trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pipeline.metrics import folder_manifest, run_flow
from rlinf.artifacts import is_pruned
from rlinf.channels.record_files import read_record_info
from rlinf.data.record import Scalar
from stages.layout import stage_folder

MAX_ITERATIONS = 40
"""Maximum number of iterations whose samples are read: the first, the last, and some between."""
CHANNELS = ("trajectories", "rewards")
"""Channels from which transcripts are read."""
HEAD, TAIL = 6000, 3000
"""Number of characters that are shown from the start and the end of a long text."""


class TranscriptSample(NamedTuple):
    """One scored trajectory."""

    number: int
    """Index of the sample in its iteration."""
    length: int
    """Number of steps."""
    score: float
    stop: str
    """Reason for the end of the sample; ``length`` if it was truncated."""
    prompt: str
    text: str | None
    """The response; None for tasks without language."""
    answer: str
    """The reference answer, or an empty text."""


def iterations_on_disk(run: Path, iterations: Sequence[int]) -> list[int]:
    """Return iterations with trajectories and rewards on disk, evenly spaced if there are many."""
    complete, stages = [], [run_flow(run).producer_of(channel) for channel in CHANNELS]
    for iteration in iterations if all(stages) else ():
        folders = [stage_folder(run, str(stage), iteration) for stage in stages]
        if all((out / "manifest.json").exists() and not is_pruned(out) for out in folders):
            complete.append(iteration)
    if len(complete) <= MAX_ITERATIONS:
        return complete
    step = (len(complete) - 1) / (MAX_ITERATIONS - 1)
    return [complete[round(i * step)] for i in range(MAX_ITERATIONS)]


def read_samples(run: Path, iteration: int) -> list[TranscriptSample]:
    """Return the scored samples of an iteration, by number; empty if a file is missing or
    damaged."""
    try:
        trajectories, rewards = (_read_infos(run, iteration, channel) for channel in CHANNELS)
        return [
            TranscriptSample(
                number=number,
                length=length,
                score=float(rewards[number][1]["score"]),
                stop=str(info["stop_reason"]),
                prompt=str(info.get("prompt_text", "")),
                text=str(info["text"]) if "text" in info else None,
                answer=str(info.get("answer", "")),
            )
            for number, (length, info) in sorted(trajectories.items())
            if number in rewards
        ]
    except (ValueError, KeyError, OSError):
        return []


def _read_infos(
    run: Path, iteration: int, channel: str
) -> Mapping[int, tuple[int, Mapping[str, Scalar]]]:
    """Return the length and the info of each record of a channel, by index of the sample."""
    folder = stage_folder(run, run_flow(run).producer_of(channel) or "", iteration)
    if (manifest := folder_manifest(folder)) is None:
        return {}
    paths = sorted((folder / manifest.data).glob(f"{channel}-r*.h5"))
    rows = [row for path in paths for row in read_record_info(path)]
    rows.sort(key=lambda row: row[0])  # the latest attempt at a sample comes last and wins
    return {record_id.sample: (length, info) for record_id, length, info in rows}


def select_samples(samples: Sequence[TranscriptSample], limit: int) -> list[TranscriptSample]:
    """Select up to ``limit`` samples: the worst, best and truncated ones alternately, then evenly
    spaced ones."""
    by_score = sorted(samples, key=lambda sample: sample.score)
    truncated = [sample for sample in samples if sample.stop == "length"]
    quarter = -(-min(limit, len(samples)) // 4)
    step = max(1.0, len(samples) / limit)
    spaced = truncated[:: max(1, len(truncated) // quarter or 1)]
    triples = zip_longest(by_score[:quarter], by_score[::-1][:quarter], spaced)
    extremes = [sample for triple in triples for sample in triple if sample is not None]
    evenly_spaced = [samples[int(i * step)] for i in range(min(limit, len(samples)))]
    return list(dict.fromkeys([*extremes, *evenly_spaced]))[:limit]


def shorten(text: str) -> str:
    """Return the start and the end of a long text."""
    left_out = len(text) - HEAD - TAIL
    if left_out <= 0:
        return text
    return f"{text[:HEAD]}\n[… {left_out:,} characters left out …]\n{text[-TAIL:]}"
