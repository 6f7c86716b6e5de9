"""The results of a run for notebooks: metrics, trajectories and weights of committed outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import metrics
from pipeline.commands.export import weight_versions
from pipeline.metrics import iterations, run_flow, stage_manifest
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, verify_output
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig
from rlinf.data.lazy_array import to_array
from rlinf.data.record import Record
from rlinf.data.trajectory import StepRewards, Trajectory
from rlinf.errors import InputError
from stages.flow import EVALUATE
from stages.layout import stage_folder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunResults:
    """A reader of a run directory. It caches nothing, so a running run shows its latest results.

    Iterations count from 0. Version 0 of the weights is that before the first iteration, version
    ``n`` that after ``n`` iterations.
    """

    folder: Path
    """The run directory, absolute."""
    config: RunConfig
    """The frozen configuration."""

    @classmethod
    def open(cls, folder: str | Path) -> RunResults:
        """Open a run directory.

        Raises:
            ConfigError: it is no run directory, or its configuration cannot be read.
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
        found = sorted(int(path.name) for path in (self.folder / EVALUATE).glob("[0-9]*"))
        read = ((version, stage_manifest(self.folder, EVALUATE, version)) for version in found)
        return [{"version": n, **manifest.metrics} for n, manifest in read if manifest is not None]

    def trajectories(self, iteration: int | None = None) -> Iterator[Trajectory]:
        """Yield the samples of one iteration, or of all that retention keeps, in their order.

        Bytes are compared with their committed checksums as they are read.

        Raises:
            InputError: the iteration has none, or the retention policy removed them.
            ArtifactError: they are damaged on disk.
        """
        return map(Trajectory.from_record, self.records("trajectories", iteration))

    def rewards(self, iteration: int | None = None) -> Iterator[StepRewards]:
        """Yield the rewards of the samples, as :meth:`trajectories` yields the samples."""
        return map(StepRewards.from_record, self.records("rewards", iteration))

    def records(self, channel: str, iteration: int | None = None) -> Iterator[Record]:
        """Yield the records of any channel, such as ``logprobs``.

        Raises:
            InputError: no stage of the flow produces such records; else as for trajectories.
            ArtifactError: they are damaged on disk.
        """
        flow = run_flow(self.folder)
        if (maker := flow.producer_of(channel)) is None:
            known = sorted(flow.stream_channels)
            raise InputError(f"{channel}: no stage writes this channel; available: {known}")
        outputs = {i: stage_folder(self.folder, maker, i) for i in iterations(self.folder)}
        there = [i for i, out in outputs.items() if read_manifest(out) and not is_pruned(out)]
        if iteration is not None and iteration not in there:
            raise InputError(
                f"{self.folder}: no {channel} of iteration {iteration} on disk; available: {there}"
            )
        return self._records(channel, [outputs[i] for i in there if iteration in (None, i)])

    def versions(self) -> list[int]:
        """Return the versions of the weights on disk, ascending (see ``checkpoint``)."""
        return sorted(weight_versions(self.folder))

    def weights(self, version: int | None = None) -> dict[str, Tensor]:
        """Return all tensors of a version by the policy's names, on the CPU; by default the newest
        version.

        Raises:
            InputError: the version is not on disk; the message lists the versions.
            ArtifactError: it is damaged on disk.
        """
        from stages.factory import WEIGHTS, policy_class  # it loads torch

        found = weight_versions(self.folder)
        chosen = max(found, default=0) if version is None else version
        if chosen not in found:
            raise InputError(
                f"{self.folder}: no version {chosen} of the weights on disk; available: "
                f"{sorted(found)}"
            )
        policy, options = policy_class(self.config)
        folder = _verified(found[chosen]) / WEIGHTS
        tensors: dict[str, Tensor] = policy.load(folder, options).module.state_dict()
        return tensors

    def _records(self, channel: str, outputs: list[Path]) -> Iterator[Record]:
        for out in outputs:
            for record in RecordFileReader(_verified(out).glob(f"{channel}-r*.h5")):
                steps = {name: to_array(column) for name, column in record.steps.items()}
                yield replace(record, steps=steps)


def _verified(out: Path) -> Path:
    """Return the data folder of an output after checking that all files exist. Readers verify
    bytes."""
    manifest = read_manifest(out)
    assert manifest is not None, "listed as committed"
    verify_output(out, manifest, checksums=False)
    return out / manifest.data
