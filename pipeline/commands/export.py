"""Export of weights from a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.metrics import run_flow
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, verify_output
from rlinf.errors import InputError
from rlinf.verified_io import copy_file
from stages.layout import offline_folder
from stages.retention import best_weights


def weight_versions(run: Path) -> dict[int, Path]:
    """Return the versions of the weights on disk: 0 before the first iteration, n after n
    iterations."""
    versions, flow = {}, run_flow(run)
    if read_manifest(initial := offline_folder(run, flow.initial_stage)) is not None:
        versions[0] = initial
    for folder in sorted((run / "it").glob(f"*/{flow.publish_stage}")):
        if read_manifest(folder) is not None and not is_pruned(folder):
            versions[int(folder.parent.name) + 1] = folder
    return versions


def best_version(folder: Path) -> tuple[int, float]:
    """Return the version of the weights with the highest held-out score, and that score.

    Raises:
        InputError: no version was evaluated, or the retention policy removed the best one.
    """
    run = Run.open(folder)
    best = best_weights(run.config, run.folder)
    if best is None:
        raise InputError(f"--best: {folder} has no held-out evaluation yet; remove --best")
    if best.folder is None:
        available = ", ".join(str(number) for number in sorted(weight_versions(run.folder)))
        raise InputError(
            f"--best: version {best.version} has the best held-out score, {best.score:.3g}, but "
            "the retention policy removed it (checkpoint.keep_best keeps such weights); "
            f"choose a --version: {available}"
        )
    return best.version, best.score


def export_weights(folder: Path, to: Path, version: int | None) -> int:
    """Copy a version's policy folder to a new place; returns the version.

    Raises:
        InputError: no such version, or the target exists.
        ArtifactError: the weights on disk are damaged.
    """
    run = Run.open(folder)
    versions = weight_versions(run.folder)
    if not versions:
        raise InputError(f"{folder}: no weights yet")
    chosen = max(versions) if version is None else version
    if chosen not in versions:
        available = ", ".join(str(number) for number in sorted(versions))
        raise InputError(f"--version {chosen}: not on disk; available: {available}")
    if to.exists() and not to.is_dir():
        raise InputError(f"{to}: is a file; choose a new folder")
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")
    manifest = read_manifest(versions[chosen])
    assert manifest is not None
    verify_output(versions[chosen], manifest, checksums=False)
    folder = versions[chosen] / manifest.data / "weights"
    shutil.copytree(folder, to, dirs_exist_ok=True, copy_function=_copied)
    return chosen


def _copied(source: str, target: str) -> None:
    copy_file(Path(source), Path(target))
