"""The model card of an exported model: Markdown with the front matter of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.evaluation.statistics import Estimate, mean_over_problems
from pipeline.metrics import folder_manifest
from pipeline.run import Run, read_run_record
from rlinf import __version__
from rlinf.artifacts import verify_output
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import redact, select_semantic
from rlinf.data.trajectory import Trajectory
from rlinf.errors import CodeIdentityError
from rlinf.track.trackers import settings_of_run
from stages.factory import policy_class
from stages.flow import EVALUATE
from stages.identity import FILE_PREFIX, data_file_path, read_code_snapshot
from stages.layout import stage_folder

CARD_FILE = "README.md"
HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")
"""Name of a model's folder in the Hugging Face cache: ``models--OWNER--NAME``."""


def model_card(run: Run, version: int, name: str, *, is_adapter: bool = False) -> str:
    """Return the card of a version of a run's weights: origin, scores, data and settings.

    Args:
        name: name of the model, the title of the card.
        is_adapter: whether the folder has adapters only.
    """
    record = read_run_record(run.folder)
    settings = select_semantic(settings_of_run(run.folder, run.config))
    base = (run.config.model.model_extra or {}).get("path")
    rows = {
        "base model": hub_name(Path(base)) or str(redact(base)) if base else "none",
        "algorithm": run.config.algorithm.name,
        "task": str(settings["task"].get("id", settings["task"]["name"])),
        "reward": run.config.reward.name,
        "weights": _describe_version(run, version),
        "run": f"{run.folder.name}, {record.created}" if record else run.folder.name,
        "rlinf": record.version if record else __version__,
    }
    scores = evaluation_estimates(run, sorted({0, version}))
    parts = [
        _front_matter(run, base, is_adapter=is_adapter),
        f"# {name}",
        _summary(run, is_adapter=is_adapter),
        _table(("", ""), rows.items()),
        "## Held-out scores",
        _score_table(scores) if scores else "These weights were not evaluated.",
        "## Data",
        _data_table(run) or "The task generates its data.",
        "## Settings",
        "All settings of the run that can change its result, defaults included:",
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def hub_name(folder: Path) -> str | None:
    """Return the name ``owner/model`` of a folder in the Hugging Face cache; None elsewhere."""
    for part in reversed(folder.parts):
        if match := HUB_FOLDER.fullmatch(part):
            return f"{match[1]}/{match[2]}"
    return None


def evaluation_estimates(run: Run, versions: Sequence[int]) -> dict[int, dict[str, Estimate]]:
    """Return the mean held-out score and its standard error, by version and by set.

    The name of the set is empty if the evaluation has only one. Versions that were not evaluated,
    and samples without a score, are left out.

    Raises:
        ArtifactError: the samples of an evaluation are damaged on disk.
    """
    estimates = {}
    for version in versions:
        output = stage_folder(run.folder, EVALUATE, version)
        if (manifest := folder_manifest(output)) is None:
            continue
        verify_output(output, manifest, checksums=False)
        scores: dict[str, list[float]] = {}
        for record in RecordFileReader((output / manifest.data).glob("trajectories-r*.h5")):
            trajectory = Trajectory.from_record(record)
            if trajectory.score is not None and not np.isnan(trajectory.score):
                scores.setdefault(str(trajectory.task or ""), []).append(trajectory.score)
        if scores:
            estimates[version] = {
                name: mean_over_problems(np.array(values)) for name, values in scores.items()
            }
    return estimates


def _front_matter(run: Run, base: Any, *, is_adapter: bool) -> str:
    values: dict[str, Any] = {}
    if base and (name := hub_name(Path(base))):
        values["base_model"] = name
    if is_adapter:
        values["library_name"] = "peft"
    elif _is_language_model(run):
        values["library_name"] = "transformers"
    if _is_language_model(run):
        values["pipeline_tag"] = "text-generation"
    values["tags"] = ["rlinf", "reinforcement-learning", run.config.algorithm.name]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _is_language_model(run: Run) -> bool:
    from rlinf.models.causal_lm import CausalLM

    return issubclass(policy_class(run.config)[0], CausalLM)


def _summary(run: Run, *, is_adapter: bool) -> str:
    content = "LoRA adapters, trained" if is_adapter else "A model, trained"
    kind = "reinforcement learning" if run.config.iterations else "supervised fine-tuning"
    return f"{content} with rlinf by {kind}."


def _describe_version(run: Run, version: int) -> str:
    if not version:
        return "before the first iteration" + (", after SFT" if run.config.sft.max_steps else "")
    return f"after {version} of {run.config.iterations} iterations"


def _score_table(scores: Mapping[int, Mapping[str, Estimate]]) -> str:
    rows = []
    for version, by_set in scores.items():
        for name, estimate in by_set.items():
            error = estimate.standard_error
            text = f"{estimate.mean:.4g}" + ("" if error is None else f" ± {error:.2g}")
            rows.append((f"{version}", name or "held-out samples", text))
    note = "Iteration 0 is before training. The error is the standard error over samples."
    return f"{_table(('iteration', 'set', 'mean score'), rows)}\n\n{note}"


def _data_table(run: Run) -> str:
    """Return the data files with the digests of their content; empty without files."""
    try:
        snapshot = read_code_snapshot(run.folder)
    except CodeIdentityError:
        snapshot = None
    rows = []
    for name, digest in sorted(snapshot.files.items()) if snapshot is not None else ():
        file = data_file_path(run.config, name)
        rows.append((f"`{name.removeprefix(FILE_PREFIX)}`", str(file), f"`{digest}`"))
    return _table(("key", "file", "digest"), rows) if rows else ""


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
