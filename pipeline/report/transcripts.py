"""Samples of iterations whose trajectories are on disk, and the selection that a page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.metrics import folder_manifest, run_flow
from rlinf.artifacts import is_pruned
from rlinf.channels.record_files import read_record_info
from rlinf.data.record import Scalar
from stages.layout import stage_folder

MAX_ITERATIONS = 40
"""Maximum number of iterations that are read: the first, the last, and some between."""
MAX_SAMPLES, MAX_CHARACTERS = 3000, 4_000_000
"""Limits of one page."""
CHANNELS = ("trajectories", "rewards")
HEAD, TAIL = 6000, 3000
"""Number of characters that are shown from the start and the end of a long text."""


class TranscriptSample(NamedTuple):
    """One trajectory; ``text`` is None for tasks without language."""

    number: int
    length: int
    score: float
    stop: str
    prompt: str
    text: str | None
    answer: str


def iterations_on_disk(run: Path, iterations: Sequence[int]) -> list[int]:
    """Return iterations with trajectories and rewards on disk, evenly spaced if there are many."""
    complete, stages = [], [run_flow(run).producer_of(channel) for channel in CHANNELS]
    for iteration in iterations if all(stages) else ():
        folders = [stage_folder(run, str(maker), iteration) for maker in stages]
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
        trajectories, scores = (_read_infos(run, iteration, channel) for channel in CHANNELS)
        return [
            TranscriptSample(
                number=number,
                length=length,
                score=float(scores[number][1]["score"]),
                stop=str(info["stop_reason"]),
                prompt=str(info.get("prompt_text", "")),
                text=str(info["text"]) if "text" in info else None,
                answer=str(info.get("answer", "")),
            )
            for number, (length, info) in sorted(trajectories.items())
            if number in scores
        ]
    except (ValueError, KeyError, OSError):
        return []


def _read_infos(
    run: Path, iteration: int, channel: str
) -> Mapping[int, tuple[int, Mapping[str, Scalar]]]:
    folder = stage_folder(run, run_flow(run).producer_of(channel) or "", iteration)
    if (manifest := folder_manifest(folder)) is None:
        return {}
    paths = sorted((folder / manifest.data).glob(f"{channel}-r*.h5"))
    rows = [row for path in paths for row in read_record_info(path)]
    rows.sort(key=lambda row: row[0])  # the latest attempt at a sample comes last and wins
    return {identity.sample: (length, info) for identity, length, info in rows}


def transcript_columns(samples: Mapping[int, Sequence[TranscriptSample]]) -> dict[str, Any]:
    """Return transcripts as columns for the page, with each prompt stored once.

    ``total`` counts all samples, including those left out. ``unreadable`` lists the iterations with
    damaged files.
    """
    rows = {i: [s for s in candidates if s.text is not None] for i, candidates in samples.items()}
    rows = {i: candidates for i, candidates in rows.items() if candidates}
    total = sum(len(candidates) for candidates in rows.values())
    max_samples = max(4, MAX_SAMPLES // max(1, len(rows)))
    max_characters = MAX_CHARACTERS / max(1, len(rows))
    prompts: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("iteration", "sample", "prompt", "text", "answer", "stop", "score", "length")
    }
    for iteration, candidates in rows.items():
        selected, used = list[TranscriptSample](), 0
        for sample in select_samples(candidates, max_samples):
            used += min(len(sample.text or ""), HEAD + TAIL) + min(len(sample.prompt), HEAD + TAIL)
            if used > max_characters and selected:
                break
            selected.append(sample)
        for sample in sorted(selected):
            prompt, text = shorten(sample.prompt), shorten(sample.text or "")
            score = sample.score if math.isfinite(sample.score) else None
            prompt_index = prompts.setdefault(prompt, len(prompts))
            values = (iteration + 1, sample.number, prompt_index, text, shorten(sample.answer))
            for name, value in zip(
                columns, (*values, sample.stop, score, sample.length), strict=True
            ):
                columns[name].append(value)
    return {
        "unreadable": [i + 1 for i, candidates in samples.items() if not candidates],
        "prompts": list(prompts),
        "columns": columns,
        "total": total,
        "iterations": [i + 1 for i in rows],
    }


def select_samples(samples: Sequence[TranscriptSample], limit: int) -> list[TranscriptSample]:
    """Select up to ``limit`` samples: the worst, best and truncated ones alternately, then evenly
    spaced ones."""
    by_score = sorted(samples, key=lambda sample: sample.score)
    cut = [sample for sample in samples if sample.stop == "length"]
    quarter = -(-min(limit, len(samples)) // 4)
    step = max(1.0, len(samples) / limit)
    ends = zip_longest(
        by_score[:quarter], by_score[::-1][:quarter], cut[:: max(1, len(cut) // quarter or 1)]
    )
    extremes = [sample for row in ends for sample in row if sample is not None]
    evenly_spaced = [samples[int(i * step)] for i in range(min(limit, len(samples)))]
    return list(dict.fromkeys([*extremes, *evenly_spaced]))[:limit]


def shorten(text: str) -> str:
    """Return the start and the end of a long text."""
    left_out = len(text) - HEAD - TAIL
    if left_out <= 0:
        return text
    return f"{text[:HEAD]}\n[… {left_out:,} characters left out …]\n{text[-TAIL:]}"
