"""The charts of the report page, as columns that its scripts draw: every metric, and the Gantt
chart."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.metrics import step_unit
from pipeline.report.data import ReportData
from pipeline.report.worker_timeline import iteration_windows, sort_lanes

TITLES = {
    "reward/mean": "mean reward",
    "reward/score": "mean score of the task",
    "reward/std": "std of rewards",
    "reward/group_std": "std of rewards within a group",
    "reward/used_fraction": "share of samples used",
    "train/loss": "loss",
    "train/entropy": "entropy (nats)",
    "train/approx_kl": "KL to the old policy (nats)",
    "train/kl": "KL to the reference (nats)",
    "train/reward_kl_penalty": "KL to the reference, in the reward",
    "train/clip_ratio": "share of clipped steps",
    "train/grad_norm": "gradient norm",
    "train/lr": "learning rate",
    "train/value_loss": "value loss",
    "train/explained_variance": "explained variance",
    "rollout/completion_length": "mean length of samples",
    "rollout/truncated_ratio": "share of truncated samples",
    "rollout/resampled_groups": "resampled groups",
    "rollout/rejected_groups": "groups rejected in the end",
    "rollout/staleness_mean": "mean staleness (updates)",
    "train/rollout_logprob_diff": "|Δ log-prob| engine - trainer",
    "train/rollout_ratio_mean": "ratio trainer / engine, mean",
    "train/rollout_ratio_max": "ratio trainer / engine, max",
    "train/rollout_kl": "KL(engine, trainer) (nats)",
    "train/rollout_is_mean": "importance weight, mean",
    "train/rollout_is_clip_ratio": "share of capped weights",
    "inference/logprob_diff_mean": "|Δ log-prob| engine - trainer, mean",
    "inference/logprob_diff_max": "|Δ log-prob| engine - trainer, max",
    "sync/bytes": "published weights (bytes)",
}
HEADLINES = (
    "reward/mean",
    "rollout/completion_length",
    "train/kl",
    "train/reward_kl_penalty",
    "train/approx_kl",
    "train/entropy",
)
"""The metrics in the first group, after the score."""
OPTIMIZATION = ("train/loss", "train/grad_norm")
"""The metrics that come first in the group of the training stages."""
GIB = 2**30
BINS = 24
Usage = list[dict[str, Any]]
"""Resource usage of the processes of one stage, as in ``stages.resource_usage``."""


def build_plots(data: ReportData) -> dict[str, Any]:
    """Return the shared columns (``xs``, by name) and the charts (``groups``: titles and plots).

    ``constant`` has the charts of metrics that did not change, with their value; the page hides
    them behind one line.

    A plot has ``id``, ``title``, ``name``, ``x`` (a name in ``xs``) and ``series`` (``label``,
    ``colour``, ``y``, ``kind``: line or points). ``stack`` adds series up; ``linked`` plots zoom
    together.
    """
    xs: dict[str, list[float]] = {"rows": [row["iteration"] + 1 for row in data.rows]}
    names = sorted({name for row in data.rows for name in row} - {"iteration"})
    metrics = {name: _metric(data, name) for name in names}
    headlines = [metrics.pop(name) for name in HEADLINES if name in metrics]
    optimization = [metrics.pop(name) for name in OPTIMIZATION if name in metrics]
    groups = [
        ("Learning", [*_learning(data, xs), *headlines]),
        ("Supervised fine-tuning", _sft(data, xs)),
    ]
    for title, first, stages in (
        ("Optimization", optimization, ("train", "inference", "sync")),
        ("Rollout and reward", [], ("rollout", "reward")),
    ):
        names_of_group = [name for name in metrics if _of(name) in stages]
        names_of_group.sort(key=lambda name: (stages.index(_of(name)), name))
        groups.append((title, [*first, *(metrics.pop(name) for name in names_of_group)]))
    groups.append(("More metrics", list(metrics.values())))
    groups.append(("Evaluation", _evaluation(data, xs)))
    groups.append(("Samples", _distributions(data, xs)))
    groups.append(("Time", [*_stage_times(data, xs), *_throughput(data, xs)]))
    groups.append(("Hardware", _machine(data, xs)))
    constant = [plot for _, plots in groups for plot in plots if is_constant(plot)]
    shown = [(title, [p for p in plots if p not in constant]) for title, plots in groups]
    return {
        "xs": xs,
        "groups": [{"title": title, "plots": plots} for title, plots in shown if plots],
        "constant": [{**plot, "value": plot["series"][0]["y"][0]} for plot in constant],
    }


def is_constant(plot: Mapping[str, Any]) -> bool:
    """Return whether a chart shows one metric with two or more values, all of them equal."""
    if len(plot["series"]) != 1:
        return False
    values = plot["series"][0]["y"]
    return len(values) > 1 and values[0] is not None and all(y == values[0] for y in values)


def json_numbers(values: Iterable[float | None]) -> list[float | None]:
    """Return values for JSON, with None for non-finite ones.

    Each has six digits, or as many as separate the smallest and the largest by four digits.
    """
    found = [None if value is None or not math.isfinite(value) else value for value in values]
    finite = [value for value in found if value is not None]
    digits = _digits(min(finite), max(finite)) if finite else 6
    return [None if value is None else float(f"{value:.{digits}g}") for value in found]


def _digits(low: float, high: float) -> int:
    size, spread = max(abs(low), abs(high)), high - low
    if spread <= 0 or not math.isfinite(spread):
        return 6
    return min(17, max(6, 4 + math.ceil(math.log10(size / spread))))


def _of(name: str) -> str:
    return name.partition("/")[0]


def _line(label: str, colour: str, y: Iterable[float | None], kind: str = "line") -> dict[str, Any]:
    return {"label": label, "colour": colour, "y": json_numbers(y), "kind": kind}


def _plot(
    name: str, title: str, x: str, series: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    about = {"id": name.replace("/", "-"), "name": name, "title": title, "x": x}
    return {**about, "series": list(series), "linked": True, **more}


def _metric(data: ReportData, name: str) -> dict[str, Any]:
    title = TITLES.get(name, name.partition("/")[2].replace("_", " "))
    line = _line(name, _of(name), (row.get(name) for row in data.rows), "metric")
    return _plot(name, title, "rows", [line])


def _learning(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the held-out score of each evaluated version, beside that of training samples."""
    known = {row["iteration"] + 1: row.get("reward/score") for row in data.rows}
    held_out = {row["version"]: row["evaluate/score"] for row in data.evaluated}
    if held_out or any(value is not None for value in known.values()):
        xs["learning"] = sorted(known.keys() | held_out.keys())
        lines = [_line("training samples", "rollout", map(known.get, xs["learning"]), "metric")]
        if held_out:
            y = map(held_out.get, xs["learning"])
            lines.append(_line("held-out", "evaluate", y, "points"))
        return [_plot("learning", "Score", "learning", lines, wide=True)]
    return []


def _sft(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the held-out score and the loss of supervised fine-tuning, by step."""
    found = []
    warm = [(p["step"], p["score"]) for p in data.sft if p.get("score") is not None]
    if warm:
        xs["sft"] = [step for step, _ in warm]
        line = _line("held-out", "sft", (score for _, score in warm), "points")
        title = "Held-out score, by step"
        found.append(_plot("sft-score", title, "sft", [line], linked=False))
    return [*found, *_fine_tuning(data, xs)]


def _fine_tuning(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the loss of each supervised step, and on held-out demonstrations if measured."""
    if not data.sft:
        return []
    xs["sft_losses"] = [point["step"] for point in data.sft]
    lines = [_line("training", "sft", (p["loss"] for p in data.sft), "metric")]
    held_out = [point.get("eval_loss") for point in data.sft]
    if any(loss is not None for loss in held_out):
        lines.append(_line("held-out", "evaluate", held_out, "points"))
    title = "Loss, by step"
    return [_plot("sft-loss", title, "sft_losses", lines, linked=False)]


def _evaluation(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    xs["versions"] = [row["version"] for row in data.evaluated]
    # The score is in the first chart.
    known = {name for row in data.evaluated for name in row}
    names = sorted(known - {"version", "evaluate/score"})
    return [
        _plot(
            name,
            name.partition("/")[2].replace("_", " "),
            "versions",
            [_line(name, "evaluate", (row.get(name) for row in data.evaluated), "points")],
        )
        for name in names
    ]


def _distributions(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return histograms of scores and lengths of the first and the last samples on disk. A
    quantity that is the same in all samples has none."""
    found = []
    unit = step_unit(data.run.config)
    for name, title in (("score", "score"), ("length", f"length ({unit})")):
        table = {
            label: np.array([getattr(sample, name) for sample in samples], dtype=float)
            for label, samples in data.first_and_last_samples.items()
        }
        table = {label: values[np.isfinite(values)] for label, values in table.items()}
        table = {label: values for label, values in table.items() if len(values)}
        if not table:
            continue
        every = np.concatenate(list(table.values()))
        low, high = float(every.min()), float(every.max())
        if low == high:
            continue
        edges = bin_edges(low, high, BINS)
        xs[f"bins-{name}"] = [x for x in json_numbers(edges) if x is not None]
        lines = []
        for colour, (label, values) in zip(("sync", "train"), table.items(), strict=False):
            share = np.histogram(values, edges)[0] / len(values)
            lines.append(_line(label, colour, [*share, share[-1]], "bars"))
        more = {"linked": False, "percent": True, "zero": True, "half": True}
        found.append(_plot(f"samples-{name}", title, f"bins-{name}", lines, **more))
    return found


def bin_edges(low: float, high: float, bins: int) -> np.ndarray:
    """Return the edges of a histogram's bins; one bin if all values are equal."""
    if high > low:
        return np.linspace(low, high, bins + 1)
    half = max(0.5, abs(low) * 1e-3)
    return np.array([low - half, low + half])


def _stage_times(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    seconds: dict[str, dict[int, float]] = {stage: {} for stage in data.stage_names}
    for entry in data.stages:
        if entry["stage"] in seconds:
            seconds[entry["stage"]][entry["iteration"] + 1] = entry["seconds"]
    xs["stages"] = sorted({i for times in seconds.values() for i in times})
    if not xs["stages"]:
        return []
    lines = [
        _line(stage, stage, (times.get(int(i), 0.0) for i in xs["stages"]))
        for stage, times in seconds.items()
    ]
    title = "Seconds per stage"
    return [_plot("stage-times", title, "stages", lines, stack=True, wide=True, unit="s")]


def steps_per_s(data: ReportData) -> tuple[dict[int, float], dict[int, float]]:
    """Return steps per second by iteration, of the rollout alone and of the whole iteration."""
    steps = {row["iteration"]: row["rollout/steps"] for row in data.rows if "rollout/steps" in row}
    alone: dict[int, float] = {}
    whole: dict[int, float] = {}
    # Stages of pools overlap, so their times do not add up to that of the iteration.
    lasted = {i: end - start for i, (start, end) in iteration_windows(data.spans).items()}
    for entry in data.stages:
        iteration = entry["iteration"]
        if entry["stage"] in data.stage_names and iteration in steps:
            whole[iteration] = whole.get(iteration, 0.0) + entry["seconds"]
            if data.uses_pools and iteration in lasted:
                whole[iteration] = lasted[iteration]
            if entry["stage"] == "rollout":
                alone[iteration] = entry["seconds"]
    alone = {i: steps[i] / s for i, s in sorted(alone.items()) if s > 0}
    return alone, {i: steps[i] / s for i, s in sorted(whole.items()) if s > 0}


def _throughput(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    alone, whole = steps_per_s(data)
    if not alone and not whole:
        return []
    at = [int(x) - 1 for x in xs["rows"]]
    lines = [
        _line("rollout", "rollout", map(alone.get, at), "metric"),
        _line("whole iteration", "train", map(whole.get, at), "metric"),
    ]
    title = f"{step_unit(data.run.config).capitalize()} per second"
    return [_plot("throughput", title, "rows", lines, zero=True, half=True)]


def _machine(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the resource usage of stages: the sum over processes, or the largest one."""
    wanted: dict[str, tuple[str, Callable[[Usage], float | None], dict[str, Any]]] = {
        "processors": ("CPU cores in use", lambda u: _total(_cores(e) for e in u), {}),
        "memory": (
            "Memory, peak of the largest process",
            lambda u: _most(e["memory_peak_bytes"] / GIB for e in u),
            {"unit": "GiB"},
        ),
        "gpu": (
            "GPU utilization",
            lambda u: _mean(e["gpu_share"] for e in u if "gpu_share" in e),
            {"percent": True},
        ),
        "gpu-memory": (
            "GPU memory, peak of the fullest GPU",
            lambda u: _most(e["gpu_peak_bytes"] / GIB for e in u if "gpu_peak_bytes" in e),
            {"unit": "GiB"},
        ),
    }
    used = {
        (entry["stage"], entry["iteration"] + 1): entry["usage"]
        for entry in data.stages
        if entry["usage"] and entry["stage"] in data.stage_names
    }
    found = []
    for name, (title, of, more) in wanted.items():
        lines = [
            _line(
                stage,
                stage,
                (
                    of(used[stage, int(i)]) if (stage, int(i)) in used else None
                    for i in xs["stages"]
                ),
            )
            for stage in data.stage_names
            if used
        ]
        lines = [line for line in lines if any(y is not None for y in line["y"])]
        if lines:
            found.append(
                _plot(f"machine-{name}", title, "stages", lines, zero=True, half=True, **more)
            )
    return found


def _cores(entry: Mapping[str, float]) -> float:
    return entry["cpu_s"] / max(entry["seconds"], 1e-3)


def _total(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) if known else None


def _most(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def gantt_columns(data: ReportData) -> dict[str, Any] | None:
    """Return the lanes and segments of the Gantt chart, ordered by lane and start; None without
    any.

    Columns are little-endian, in base64: ``start`` (float64, seconds since ``origin``), ``length``
    (float32, seconds), ``iteration`` (uint32, from 1; 0 for offline stages), ``kind`` (uint8: twice
    the index of the stage, plus 1 if it waits). ``first`` has the first row of each lane, and the
    number of rows. ``windows`` are iteration, start and end of iterations, in seconds.
    """
    if not data.segments:
        return None
    lanes = sort_lanes(piece.lane for piece in data.segments)
    stages = list(data.colours)
    row, number = {lane: i for i, lane in enumerate(lanes)}, {s: i for i, s in enumerate(stages)}
    pieces = sorted(data.segments, key=lambda piece: (row[piece.lane], piece.start))
    origin = min(piece.start for piece in pieces)
    first = np.searchsorted([row[piece.lane] for piece in pieces], np.arange(len(lanes) + 1))
    return {
        "stages": stages,
        "lanes": lanes,
        "origin": origin,
        "first": first.tolist(),
        "start": _packed((piece.start - origin for piece in pieces), "<f8"),
        "length": _packed((piece.seconds for piece in pieces), "<f4"),
        "iteration": _packed(
            (piece.iteration + 1 if piece.stage in data.stage_names else 0 for piece in pieces),
            "<u4",
        ),
        "kind": _packed((2 * number[p.stage] + (not p.is_computing) for p in pieces), "|u1"),
        "windows": [
            [i + 1, round(start - origin, 3), round(end - origin, 3)]
            for i, (start, end) in iteration_windows(data.spans).items()
        ],
    }


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.array(list(values), dtype=dtype).tobytes()).decode()
