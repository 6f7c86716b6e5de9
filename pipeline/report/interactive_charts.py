"""The charts of the report page, as columns that its scripts draw: every metric, and the Gantt
chart."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.metrics import step_unit
from pipeline.report.data import ReportData, iteration_windows, sort_lanes

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
"""The metrics in the first group of charts, after the score."""
OPTIMIZATION = ("train/loss", "train/grad_norm")
"""The first metrics in the group of the training stages."""
GIB = 2**30
BINS = 24
"""Number of bins of a histogram."""
Usage = list[dict[str, Any]]
"""Resource usage of the processes of one stage, as in ``stages.resource_usage``."""


def build_plots(data: ReportData) -> dict[str, Any]:
    """Return the shared columns (``xs``, by name) and the charts (``groups``: titles and plots).

    ``constant`` has the charts of metrics that did not change, with their value; the page hides
    them behind one line.

    A plot has ``id``, ``title``, ``name``, ``x`` (a name in ``xs``) and ``series`` (``label``,
    ``colour``, ``y``, ``kind``: line, points, bars, or metric for a line that the page can smooth).
    ``stack`` adds series up; ``linked`` plots zoom together; ``zero`` includes 0 in the range;
    ``wide`` and ``half`` set the width of the chart, ``percent`` and ``unit`` the format of values.
    """
    xs: dict[str, list[float]] = {"rows": [row["iteration"] + 1 for row in data.rows]}
    names = sorted({name for row in data.rows for name in row} - {"iteration"})
    metrics = {name: _metric_plot(data, name) for name in names}
    headlines = [metrics.pop(name) for name in HEADLINES if name in metrics]
    optimization = [metrics.pop(name) for name in OPTIMIZATION if name in metrics]
    groups = [
        ("Learning", [*_score_plots(data, xs), *headlines]),
        ("Supervised fine-tuning", _sft_plots(data, xs)),
    ]
    for title, leading, stages in (
        ("Optimization", optimization, ("train", "inference", "sync")),
        ("Rollout and reward", [], ("rollout", "reward")),
    ):
        names_of_group = [name for name in metrics if _stage_of(name) in stages]
        names_of_group.sort(key=lambda name: (stages.index(_stage_of(name)), name))
        groups.append((title, [*leading, *(metrics.pop(name) for name in names_of_group)]))
    groups.append(("More metrics", list(metrics.values())))
    groups.append(("Evaluation", _evaluation_plots(data, xs)))
    groups.append(("Samples", _sample_histograms(data, xs)))
    groups.append(("Time", [*_stage_times(data, xs), *_throughput(data, xs)]))
    groups.append(("Hardware", _resource_usage(data, xs)))
    constant = [plot for _, plots in groups for plot in plots if is_constant(plot)]
    visible = [(title, [p for p in plots if p not in constant]) for title, plots in groups]
    return {
        "xs": xs,
        "groups": [{"title": title, "plots": plots} for title, plots in visible if plots],
        "constant": [{**plot, "value": plot["series"][0]["y"][0]} for plot in constant],
    }


def is_constant(plot: Mapping[str, Any]) -> bool:
    """Return whether a chart shows one metric with two or more values, all of them equal."""
    if len(plot["series"]) != 1:
        return False
    values = plot["series"][0]["y"]
    return len(values) > 1 and values[0] is not None and all(y == values[0] for y in values)


def json_numbers(values: Iterable[float | None]) -> list[float | None]:
    """Return values for JSON, with None for values that are not finite.

    Values are rounded to six significant digits, or to more if fewer than four digits of the
    differences between them would remain.
    """
    numbers = [None if value is None or not math.isfinite(value) else value for value in values]
    finite = [value for value in numbers if value is not None]
    digits = _digits(min(finite), max(finite)) if finite else 6
    return [None if value is None else float(f"{value:.{digits}g}") for value in numbers]


def _digits(low: float, high: float) -> int:
    size, spread = max(abs(low), abs(high)), high - low
    if spread <= 0 or not math.isfinite(spread):
        return 6
    return min(17, max(6, 4 + math.ceil(math.log10(size / spread))))


def _stage_of(name: str) -> str:
    return name.partition("/")[0]


def _line(label: str, colour: str, y: Iterable[float | None], kind: str = "line") -> dict[str, Any]:
    return {"label": label, "colour": colour, "y": json_numbers(y), "kind": kind}


def _plot(
    name: str, title: str, x: str, series: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    plot = {"id": name.replace("/", "-"), "name": name, "title": title, "x": x}
    return {**plot, "series": list(series), "linked": True, **more}


def _metric_plot(data: ReportData, name: str) -> dict[str, Any]:
    title = TITLES.get(name, name.partition("/")[2].replace("_", " "))
    line = _line(name, _stage_of(name), (row.get(name) for row in data.rows), "metric")
    return _plot(name, title, "rows", [line])


def _score_plots(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the scores of held-out and of training samples, by version of the weights."""
    training = {row["iteration"] + 1: row.get("reward/score") for row in data.rows}
    held_out = {row["version"]: row["evaluate/score"] for row in data.evaluated}
    if held_out or any(value is not None for value in training.values()):
        xs["learning"] = sorted(training.keys() | held_out.keys())
        lines = [_line("training samples", "rollout", map(training.get, xs["learning"]), "metric")]
        if held_out:
            y = map(held_out.get, xs["learning"])
            lines.append(_line("held-out", "evaluate", y, "points"))
        return [_plot("learning", "Score", "learning", lines, wide=True)]
    return []


def _sft_plots(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    plots = []
    points = [(p["step"], p["score"]) for p in data.sft if p.get("score") is not None]
    if points:
        xs["sft"] = [step for step, _ in points]
        line = _line("held-out", "sft", (score for _, score in points), "points")
        title = "Held-out score, by step"
        plots.append(_plot("sft-score", title, "sft", [line], linked=False))
    return [*plots, *_sft_loss_plots(data, xs)]


def _sft_loss_plots(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    if not data.sft:
        return []
    xs["sft_losses"] = [point["step"] for point in data.sft]
    lines = [_line("training", "sft", (p["loss"] for p in data.sft), "metric")]
    held_out = [point.get("eval_loss") for point in data.sft]
    if any(loss is not None for loss in held_out):
        lines.append(_line("held-out", "evaluate", held_out, "points"))
    title = "Loss, by step"
    return [_plot("sft-loss", title, "sft_losses", lines, linked=False)]


def _evaluation_plots(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    xs["versions"] = [row["version"] for row in data.evaluated]
    # The score is in the first chart.
    recorded = {name for row in data.evaluated for name in row}
    names = sorted(recorded - {"version", "evaluate/score"})
    return [
        _plot(
            name,
            name.partition("/")[2].replace("_", " "),
            "versions",
            [_line(name, "evaluate", (row.get(name) for row in data.evaluated), "points")],
        )
        for name in names
    ]


def _sample_histograms(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return histograms of scores and lengths in the first and the last iteration on disk. If all
    samples have the same score or length, its histogram is left out."""
    plots = []
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
        all_values = np.concatenate(list(table.values()))
        low, high = float(all_values.min()), float(all_values.max())
        if low == high:
            continue
        edges = bin_edges(low, high, BINS)
        xs[f"bins-{name}"] = [x for x in json_numbers(edges) if x is not None]
        lines = []
        for colour, (label, values) in zip(("sync", "train"), table.items(), strict=False):
            share = np.histogram(values, edges)[0] / len(values)
            # One value per edge, so the last bin stands twice.
            lines.append(_line(label, colour, [*share, share[-1]], "bars"))
        more = {"linked": False, "percent": True, "zero": True, "half": True}
        plots.append(_plot(f"samples-{name}", title, f"bins-{name}", lines, **more))
    return plots


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
    rollout: dict[int, float] = {}
    iteration_s: dict[int, float] = {}
    # Stages of pools overlap, so the time of an iteration is not the sum of their times.
    window_s = {i: end - start for i, (start, end) in iteration_windows(data.spans).items()}
    for entry in data.stages:
        iteration = entry["iteration"]
        if entry["stage"] in data.stage_names and iteration in steps:
            iteration_s[iteration] = iteration_s.get(iteration, 0.0) + entry["seconds"]
            if data.uses_pools and iteration in window_s:
                iteration_s[iteration] = window_s[iteration]
            if entry["stage"] == "rollout":
                rollout[iteration] = entry["seconds"]
    rollout = {i: steps[i] / s for i, s in sorted(rollout.items()) if s > 0}
    return rollout, {i: steps[i] / s for i, s in sorted(iteration_s.items()) if s > 0}


def _throughput(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    rollout, whole_iteration = steps_per_s(data)
    if not rollout and not whole_iteration:
        return []
    indices = [int(x) - 1 for x in xs["rows"]]
    lines = [
        _line("rollout", "rollout", map(rollout.get, indices), "metric"),
        _line("whole iteration", "train", map(whole_iteration.get, indices), "metric"),
    ]
    title = f"{step_unit(data.run.config).capitalize()} per second"
    return [_plot("throughput", title, "rows", lines, zero=True, half=True)]


def _resource_usage(data: ReportData, xs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return charts of the resource usage by stage: sum, mean or maximum over its processes."""
    charts: dict[str, tuple[str, Callable[[Usage], float | None], dict[str, Any]]] = {
        "processors": ("CPU cores in use", lambda u: _sum(_cores(e) for e in u), {}),
        "memory": (
            "Memory, peak of the largest process",
            lambda u: _max(e["memory_peak_bytes"] / GIB for e in u),
            {"unit": "GiB"},
        ),
        "gpu": (
            "GPU utilization",
            lambda u: _mean(e["gpu_share"] for e in u if "gpu_share" in e),
            {"percent": True},
        ),
        "gpu-memory": (
            "GPU memory, peak of the fullest GPU",
            lambda u: _max(e["gpu_peak_bytes"] / GIB for e in u if "gpu_peak_bytes" in e),
            {"unit": "GiB"},
        ),
    }
    usages = {
        (entry["stage"], entry["iteration"] + 1): entry["usage"]
        for entry in data.stages
        if entry["usage"] and entry["stage"] in data.stage_names
    }
    plots = []
    for name, (title, aggregate, more) in charts.items():
        lines = [
            _line(
                stage,
                stage,
                (
                    aggregate(usages[stage, int(i)]) if (stage, int(i)) in usages else None
                    for i in xs["stages"]
                ),
            )
            for stage in data.stage_names
            if usages
        ]
        lines = [line for line in lines if any(y is not None for y in line["y"])]
        if lines:
            plots.append(
                _plot(f"machine-{name}", title, "stages", lines, zero=True, half=True, **more)
            )
    return plots


def _cores(entry: Mapping[str, float]) -> float:
    return entry["cpu_s"] / max(entry["seconds"], 1e-3)


def _sum(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) if numbers else None


def _max(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def gantt_columns(data: ReportData) -> dict[str, Any] | None:
    """Return the lanes and segments of the Gantt chart, ordered by lane and start; None without
    segments.

    Columns are little-endian, in base64: ``start`` (float64, seconds since ``origin``), ``length``
    (float32, seconds), ``iteration`` (uint32, from 1; 0 for stages outside iterations), ``kind``
    (uint8: twice the index of the stage, plus 1 if it waits). ``first`` has the index of each
    lane's first segment, then the number of segments. ``windows`` has the number (from 1), start
    and end of each iteration, in seconds since ``origin``.
    """
    if not data.segments:
        return None
    lanes = sort_lanes(segment.lane for segment in data.segments)
    stages = list(data.colours)
    lane_index = {lane: i for i, lane in enumerate(lanes)}
    stage_index = {stage: i for i, stage in enumerate(stages)}
    segments = sorted(data.segments, key=lambda segment: (lane_index[segment.lane], segment.start))
    origin = min(segment.start for segment in segments)
    lane_starts = np.searchsorted(
        [lane_index[segment.lane] for segment in segments], np.arange(len(lanes) + 1)
    )
    return {
        "stages": stages,
        "lanes": lanes,
        "origin": origin,
        "first": lane_starts.tolist(),
        "start": _base64((segment.start - origin for segment in segments), "<f8"),
        "length": _base64((segment.seconds for segment in segments), "<f4"),
        "iteration": _base64(
            (s.iteration + 1 if s.stage in data.stage_names else 0 for s in segments),
            "<u4",
        ),
        "kind": _base64((2 * stage_index[s.stage] + (not s.is_computing) for s in segments), "|u1"),
        "windows": [
            [i + 1, round(start - origin, 3), round(end - origin, 3)]
            for i, (start, end) in iteration_windows(data.spans).items()
        ],
    }


def _base64(values: Any, dtype: str) -> str:
    return base64.b64encode(np.array(list(values), dtype=dtype).tobytes()).decode()
