"""The results of a run: metrics, weights and trajectories for notebooks, and demonstrations.

Demonstrations are converted between LeRobot's format and trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import metrics
from pipeline.metrics import list_iterations, run_flow, stage_manifest
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, verify_output
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.config import RunConfig
from rlinf.data import lerobot
from rlinf.data.episodes import intervened_episodes
from rlinf.data.record import Record, to_array
from rlinf.data.trajectory import StepRewards, Trajectory
from rlinf.errors import DataError, InputError
from stages.flow import EVALUATE
from stages.layout import CONFIG_FILE, setup_stage_folder, stage_folder
from stages.retention import best_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunResults:
    """A reader of a run directory. It caches nothing, so an active run shows its latest results.

    Iterations count from 0. Version 0 of the weights is the one before the first iteration, and
    version ``n`` the one after ``n`` iterations.
    """

    folder: Path
    """The run directory, absolute."""
    config: RunConfig
    """The frozen configuration."""

    @classmethod
    def open(cls, folder: str | Path) -> RunResults:
        """Open a run directory.

        Raises:
            ConfigError: the folder is no run directory, or its configuration cannot be read.
        """
        run = Run.open(Path(folder))
        return cls(run.folder, run.config)

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per finished iteration: ``iteration``, and metrics named ``stage/metric``.

        ``pandas.DataFrame(run.metrics())`` makes a table of them.
        """
        return metrics.read_metrics(self.folder)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return one row per evaluated version: ``version``, ``score`` and further metrics.

        ``score`` is the mean of the task's own measure over held-out samples.
        """
        versions = sorted(int(path.name) for path in (self.folder / EVALUATE).glob("[0-9]*"))
        manifests = {v: stage_manifest(self.folder, EVALUATE, v) for v in versions}
        return [{"version": v, **m.metrics} for v, m in manifests.items() if m is not None]

    def trajectories(self, iteration: int | None = None) -> Iterator[Trajectory]:
        """Yield the samples of one iteration, or of all iterations on disk, in order.

        The bytes read are compared with their committed checksums.

        Raises:
            InputError: the iteration has no samples, or the retention policy removed them.
            ArtifactError: the samples are damaged on disk.
        """
        return map(Trajectory.from_record, self.records("trajectories", iteration))

    def evaluation_trajectories(self, version: int) -> Iterator[Trajectory]:
        """Yield the held-out samples of an evaluated version of the weights, with their scores.

        Raises:
            InputError: this version was not evaluated.
            ArtifactError: the samples are damaged on disk.
        """
        output = stage_folder(self.folder, EVALUATE, version)
        if read_manifest(output) is None:
            versions = [int(row["version"]) for row in self.evaluations()]
            raise InputError(
                f"{self.folder}: version {version} was not evaluated; evaluated: {versions}"
            )
        return map(Trajectory.from_record, self._records("trajectories", [output]))

    def rewards(self, iteration: int | None = None) -> Iterator[StepRewards]:
        """Yield the rewards of the samples, in the order of :meth:`trajectories`."""
        return map(StepRewards.from_record, self.records("rewards", iteration))

    def records(self, channel: str, iteration: int | None = None) -> Iterator[Record]:
        """Yield the records of any channel, such as ``logprobs``.

        Raises:
            InputError: no stage of the flow writes this channel, the iteration has no such records,
                or the retention policy removed them.
            ArtifactError: the records are damaged on disk.
        """
        flow = run_flow(self.folder)
        if (stage := flow.producer_of(channel)) is None:
            available = sorted(flow.stream_channels)
            raise InputError(f"{channel}: no stage writes this channel; available: {available}")
        outputs = {i: stage_folder(self.folder, stage, i) for i in list_iterations(self.folder)}
        iterations = [i for i, out in outputs.items() if read_manifest(out) and not is_pruned(out)]
        if iteration is not None and iteration not in iterations:
            raise InputError(
                f"{self.folder}: no {channel} of iteration {iteration} on disk; available: "
                f"{iterations}"
            )
        return self._records(channel, [outputs[i] for i in iterations if iteration in (None, i)])

    def versions(self) -> list[int]:
        """Return the versions of the weights on disk, ascending (see ``checkpoint``)."""
        return sorted(weight_versions(self.folder))

    def weights(self, version: int | None = None) -> dict[str, Tensor]:
        """Return all tensors of a version (default: the newest) on the CPU, by the policy's names.

        Raises:
            InputError: the version is not on disk; the message lists the versions.
            ArtifactError: the version is damaged on disk.
        """
        from stages.factory import WEIGHTS, policy_class  # imports torch

        versions = weight_versions(self.folder)
        selected = max(versions, default=0) if version is None else version
        if selected not in versions:
            raise InputError(
                f"{self.folder}: no version {selected} of the weights on disk; available: "
                f"{sorted(versions)}"
            )
        policy, options = policy_class(self.config)
        folder = verified_data_folder(versions[selected]) / WEIGHTS
        tensors: dict[str, Tensor] = policy.load(folder, options).module.state_dict()
        return tensors

    def _records(self, channel: str, outputs: list[Path]) -> Iterator[Record]:
        for out in outputs:
            for record in RecordFileReader(verified_data_folder(out).glob(f"{channel}-r*.h5")):
                steps = {name: to_array(column) for name, column in record.steps.items()}
                yield replace(record, steps=steps)


def verified_data_folder(out: Path) -> Path:
    """Return the data folder of an output after checking that all files exist. Checksums are
    compared when the files are read."""
    manifest = read_manifest(out)
    assert manifest is not None, "listed as committed"
    verify_output(out, manifest, checksums=False)
    return out / manifest.data


def weight_versions(run: Path) -> dict[int, Path]:
    """Return the output folder of each version of the weights on disk. Version 0 is the one before
    the first iteration, and version n the one after n iterations."""
    versions, flow = {}, run_flow(run)
    if read_manifest(initial := setup_stage_folder(run, flow.initial_stage)) is not None:
        versions[0] = initial
    for folder in sorted((run / "it").glob(f"*/{flow.publish_stage}")):
        if read_manifest(folder) is not None and not is_pruned(folder):
            versions[int(folder.parent.name) + 1] = folder
    return versions


def resolve_weights(model: Path, version: int | None) -> tuple[Path, int]:
    """Return the folder with the weights of a model, and their version.

    Args:
        model: a model folder, whose version is 0, or a run directory.
        version: version of the weights in a run; by default the best or the newest.

    Raises:
        InputError: there is no such folder or version.
    """
    from stages.factory import WEIGHTS  # imports torch

    folder = model.expanduser().absolute()
    if not (folder / CONFIG_FILE).is_file():
        if version is not None:
            raise InputError(f"--version {version}: {model} is no run directory")
        if not folder.is_dir():
            raise InputError(f"{model}: no such folder; name a model folder or a run directory")
        return folder, 0
    versions = weight_versions(folder)
    if version is None:
        try:
            version, _ = best_version(folder)
        except InputError:  # nothing was evaluated
            version = max(versions, default=None)
    if version is None or version not in versions:
        raise InputError(
            f"{model}: no version {version} of the weights on disk; available: {sorted(versions)}"
        )
    return verified_data_folder(versions[version]) / WEIGHTS, version


def best_version(folder: Path) -> tuple[int, float]:
    """Return the version of the weights with the highest held-out score, and that score.

    Raises:
        InputError: no version was evaluated, or the retention policy removed the best version.
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


TRAJECTORY_FILES = "trajectories-*.h5"


def extract_interventions(source: Path, to: Path) -> str:
    """Write the episodes in which a person intervened, with the executed actions
    (:mod:`rlinf.data.episodes`).

    Args:
        source: a folder with ``trajectories-*.h5`` of rollouts.
        to: a new folder.

    Returns:
        A summary of what was written.

    Raises:
        InputError: the target is not empty, or the trajectories do not record interventions.
        DataError: the source has no trajectories, or a person intervened in none of them.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(f"{source}: has no file {TRAJECTORY_FILES}")
    episodes: list[Trajectory] = []
    for trajectory in map(Trajectory.from_record, RecordFileReader(files)):
        episodes += intervened_episodes(trajectory, first_sample=len(episodes))
    if not episodes:
        raise DataError(f"{source}: no episode in which a person acted")
    to.mkdir(parents=True, exist_ok=True)
    writer = RecordFileWriter(to, "trajectories")
    for episode in episodes:
        writer.put(episode.to_record())
    writer.close()
    steps = sum(map(len, episodes))
    return (
        f"{len(episodes)} episodes, {steps} steps written to {to}; "
        f"use them with algorithm.offline_data={to}"
    )


def convert_demonstrations(
    source: Path, to: Path, *, fps: int, task: str, png: bool, solved: bool
) -> str:
    """Convert a LeRobot data set to trajectories, or trajectories to a LeRobot data set.

    Args:
        source: the folder of a LeRobot data set, or a folder with ``trajectories-*.h5`` of
            rollouts.
        to: a new folder.
        fps, task, png: settings of a written LeRobot data set.
        solved: whether every episode of a LeRobot source solved its task.

    Returns:
        A summary of what was written.

    Raises:
        InputError: the target is not empty.
        DataError: the source is in neither format, or is incomplete.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")
    if lerobot.is_lerobot_dataset(source):
        dataset = lerobot.LeRobotDataset(source, all_successful=solved)
        to.mkdir(parents=True, exist_ok=True)
        writer = RecordFileWriter(to, "trajectories")
        for trajectory in dataset.trajectories():
            writer.put(trajectory.to_record())
        writer.close()
        return f"{writer.count} episodes written to {to}; use them with algorithm.offline_data={to}"
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(
            f"{source}: neither a LeRobot data set (no {lerobot.INFO_FILE}) nor a folder with "
            f"{TRAJECTORY_FILES}"
        )
    try:
        trajectories = map(Trajectory.from_record, RecordFileReader(files))
        count = lerobot.write_lerobot_dataset(to, trajectories, fps=fps, task=task, png=png)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    return f"{count} episodes written to {to}"
