"""The profile file: measured costs of an experiment on each kind of device; keys contain units.

A profile is valid only for one model, configuration and code (:class:`ProfileIdentity`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AwareDatetime, Field, model_validator

from pipeline.planning.profile.device_kinds import DeviceKind
from rlinf.artifacts import write_user_file
from rlinf.config import RunConfig, Section, json_digest, validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from stages.identity import program_version

SCHEMA: Literal[4] = 4
"""Version of the file format."""
Seconds = Annotated[float, Field(ge=0)]
MemoryLocation = Literal["device", "host"]
"""Where a memory peak was measured: in the GPU or on the host."""
SectionT = TypeVar("SectionT", bound=Section)


class Measurement(Section):
    """Repeats of one measurement."""

    seconds: tuple[Seconds, ...] = Field(min_length=1)

    @classmethod
    def of(cls, seconds: Sequence[float], **more: Any) -> Self:
        """Create a measurement from its repeats and the additional fields of a subclass."""
        return cls(seconds=tuple(seconds), **more)

    @property
    def median_s(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """The standard deviation of the repeats; 0 for a single repeat."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0


class ProfilePoint(Section):
    """The measurement of a stage with one number of processes and one amount of work."""

    stage: str
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    """Total number of processes, which is the number of devices and the data-parallel size."""
    samples: int = Field(gt=0)
    """Samples of the stage over all processes; for ``sync`` those of the iteration."""
    time: Measurement | None = None
    """Time of one iteration, without job start, imports and loading; None: the stage failed."""
    cold: Measurement | None = None
    """``time``, but of the first iteration of a process, which is longer; None: not measured."""
    peak_memory_bytes: int | None = Field(default=None, ge=0)
    """Maximum over repeats and processes: GPU memory, or resident memory without a GPU."""
    failure: str = ""
    """Why the stage could not run, usually because of memory."""

    @model_validator(mode="after")
    def _check_outcome(self) -> ProfilePoint:
        if (self.time is None) == (self.failure == ""):
            raise ValueError("a point has either a time or a failure")
        return self

    @property
    def succeeded(self) -> bool:
        """True if the stage ran."""
        return self.time is not None


OverheadName = Literal[
    "submission",
    "startup",
    "imports",
    "completion",
    "dispatch",
    "alone",
    "engine_load",
    "trainer_load",
    "weight_load",
    "publish",
    "offload",
    "onload",
]


class Overhead(Measurement):
    """Time that a job needs besides the work of its stage, for one number of processes."""

    name: OverheadName
    """``submission``: from sbatch to the start of the job, on free nodes. ``startup``: from there
    to the first line of code. ``imports``: from there until a stage can begin, including imports on
    first use. ``completion``: from the end of the work until the driver notices it. ``dispatch``:
    if each stage is a job, from the end of its inputs to its first line of code. ``alone``: if each
    stage is a job, from its start to its commit. ``engine_load``: creating an engine with weights.
    ``trainer_load``: creating a trainer with weights, optimizer and process group. ``weight_load``:
    loading new weights into an engine. ``publish``: writing weights. ``offload``, ``onload``:
    moving weights and optimizer state from the device to host memory and back."""
    stage: str = ""
    """The stage, for ``alone`` and for ``imports`` of its own job; "": valid for all stages."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)


class QueueWait(Section):
    """The expected queue wait of a job with this many nodes."""

    nodes: int = Field(gt=0)
    expected_s: Seconds
    """As Slurm's scheduler expects (``sbatch --test-only``), else the median of past jobs."""


class KindProfile(Section):
    """The measurements of one kind of device."""

    partition: str
    """Name of the partition; "" on a machine without Slurm."""
    gpu_type: str = ""
    """Name of the GPU in GRES; "" if CPU processes are the devices."""
    devices_per_node: int = Field(gt=0)
    duty_cycle: float = Field(default=1.0, gt=0, le=1)
    """Share of the time that processes may run; below 1 only on dev clusters."""
    memory: MemoryLocation | None = None
    """Where memory peaks were measured; None: unknown."""
    points: tuple[ProfilePoint, ...] = Field(min_length=1)
    overheads: tuple[Overhead, ...]
    waits: tuple[QueueWait, ...] = ()

    def overhead_s(self, name: OverheadName, processes: int) -> float:
        """Return the median of an overhead, measured at the number of processes nearest to
        ``processes``; 0 if not measured (a machine without Slurm has no submission).
        """
        matching = [entry for entry in self.overheads if entry.name == name and not entry.stage]
        if not matching:
            return 0.0
        return min(matching, key=lambda entry: abs(math.log(entry.processes / processes))).median_s


class Profile(Section):
    """The measured costs of an experiment: times, memory and queue waits on each kind of device."""

    schema_version: Literal[4]
    created_at: AwareDatetime
    estimated: bool = False
    """True if nothing was measured: the numbers are derived from data sheets, by
    :mod:`pipeline.planning.cost.estimated_profile`."""
    identity: ProfileIdentity
    samples: int = Field(gt=0)
    """Samples of one iteration of the run: prompts times group size."""
    weights_bytes: int = Field(gt=0)
    """Bytes that ``sync`` publishes."""
    lengths: tuple[int, ...] = Field(min_length=1)
    """Response lengths in steps, ascending, of rollouts of the full batch. If there are many, a
    subset in equal steps, with both extremes."""
    kinds: dict[str, KindProfile] = Field(min_length=1)
    """Measurements by ``partition``, or ``partition:gpu_type`` if a partition has several types."""

    def check_identity(self, identity: ProfileIdentity, file: str) -> None:
        """Check that this profile is valid for a run.

        Raises:
            PlanError: the model, configuration or code differs.
        """
        for name, value in identity:
            if (measured := getattr(self.identity, name)) != value:
                raise PlanError(
                    f"{file}: identity.{name}: this profile is of another {_IDENTITY_NAMES[name]} "
                    f"({measured}, the run has {value}); measure again with: rlinf profile"
                )

    def check_stages(self, stages: Collection[str], file: str) -> None:
        """Check that the profile contains only stages of a flow.

        Raises:
            PlanError: a stage is unknown; the message has its key and a similar stage.
        """
        for name, kind in self.kinds.items():
            entries = [(f"points[{i}]", p.stage) for i, p in enumerate(kind.points)]
            overheads = enumerate(kind.overheads)
            entries += [(f"overheads[{i}]", o.stage) for i, o in overheads if o.stage]
            for key, stage in entries:
                if stage not in stages:
                    raise PlanError(
                        f"{file}: kinds.{name}.{key}.stage: no stage {stage!r}"
                        f"{did_you_mean(stage, stages)}"
                    )

    def save(self, path: Path) -> None:
        """Write the profile as JSON, atomically.

        Raises:
            InputError: the file cannot be written.
        """
        write_user_file(path, self.model_dump_json(indent=1) + "\n")


_IDENTITY_NAMES = {"model": "model", "config": "configuration", "code": "version of the code"}


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        PlanError: the file is missing, not JSON or of another schema, or a value is missing or
            invalid; the message names the file and the key.
    """
    values = read_json(path, f"no file {path}; make one with: rlinf profile")
    version = values.get("schema_version", SCHEMA)
    if version != SCHEMA:
        raise PlanError(
            f"{path}: schema_version: {version!r}; this program reads {SCHEMA}. "
            "Measure again with: rlinf profile"
        )
    return validate_section(Profile, values, path)


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """Return the JSON object of a measurement file.

    Raises:
        PlanError: the file is invalid, or does not exist (with the message ``missing``).
    """
    try:
        values = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(missing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read ({error})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(
            f"{path} is not valid JSON ({error}); measure again with: rlinf profile --fresh"
        ) from None
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected a JSON object with measurements")
    return values


def validate_section(section: type[SectionT], values: Mapping[str, Any], path: Path) -> SectionT:
    """Validate the ``values`` of a file as a section.

    Raises:
        PlanError: a value is invalid; the message names the file and the key.
    """
    try:
        return validate(section, values)
    except ConfigError as error:
        raise PlanError(f"{path}: {error}; measure again with: rlinf profile --fresh") from None


COST_SECTIONS = (
    *("task", "model", "algorithm", "reward", "engine", "optimizer", "trainer", "rollout", "flow"),
)
"""Sections of the configuration on which a stage's time may depend."""
LENGTH_SECTIONS = ("sft",)
"""Sections that affect the lengths of responses."""


class ProfileIdentity(Section):
    """The digests of a profile; equal digests mean the same work."""

    model: str = Field(min_length=1)
    """Digest of the model's settings and, for a checkpoint, of its files' names and sizes."""
    config: str = Field(min_length=1)
    """Digest of the sections on which stages' times depend."""
    code: str = Field(min_length=1)
    """Version of the program and of its file formats."""

    @classmethod
    def of(cls, config: RunConfig) -> ProfileIdentity:
        """Return the identity of a run's costs."""
        values = config.semantic_values()
        # A run sets this value when it starts; measurements do not depend on it.
        values["optimizer"] |= {"lr_decay_iterations": None}
        return cls(
            model=json_digest([values["model"], _files(values["model"])]),
            config=json_digest({name: values[name] for name in (*COST_SECTIONS, *LENGTH_SECTIONS)}),
            code="+".join(map(str, program_version())),
        )


def _files(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Return names and sizes of a checkpoint's files, because the folder's content may change."""
    if not model.get("path"):
        return []
    folder = Path(model["path"]).expanduser()
    return sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.is_file())


def kind_key(identity: ProfileIdentity, kind: DeviceKind) -> str:
    """Return the digest under which the measurements of a kind are cached."""
    hardware = [kind.name, kind.gpu_type, kind.gpu_model, kind.duty_cycle]
    return json_digest([SCHEMA, identity.model_dump(), hardware])
