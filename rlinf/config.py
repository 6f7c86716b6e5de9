"""Typed configuration: Hydra composes it, and these classes validate it once, at the start.

Every component (an algorithm, a task, an engine, ...) defines its own :class:`Section` in its
module. This module has the shared sections and the configuration of a whole run,
:class:`RunConfig`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rlinf.errors import ConfigError, did_you_mean
from rlinf.renamed_keys import REMOVED_KEYS, RENAMED_KEYS

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of all configuration sections: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def validate(section: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Validate ``values`` against ``section``; ``where`` is the dotted key of the section.

    Raises:
        ConfigError: names the first wrong key, and the nearest valid one for an unknown key.
    """
    try:
        # Strict JSON mode reads lists as tuples and texts as paths, but no number from ``"8"``.
        text = json.dumps(values, default=_plain)
        return section.model_validate_json(text, strict=True)
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{where or 'config'}: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = _keys(problem, values)
        key = ".".join([where, *path] if where else path)
        if problem["type"] == "extra_forbidden":
            owner, fields = _owner(section, path[:-1])
            hint = did_you_mean(path[-1], owner.model_fields) if owner else ""
            general_key = ".".join([*([where] if where else []), *fields, path[-1]])
            if owner and RENAMED_KEYS.get(general_key) in owner.model_fields:
                hint = f"; it is {RENAMED_KEYS[general_key]!r} now"
            if general_key in REMOVED_KEYS:
                hint = f"; it was removed: {REMOVED_KEYS[general_key]}"
            if where == "algorithm" and path[-1] in OptimizerSection.model_fields:
                hint = f"; it is optimizer.{path[-1]}"
            raise ConfigError(f"{key}: unknown key{hint}") from None
        value = problem.get("input")
        is_shown = path and not isinstance(value, Mapping)
        got = f" (got {_short(value)})" if is_shown else ""
        message = problem["msg"].removeprefix("Value error, ")
        if not path and re.split(r"\W", message, maxsplit=1)[0] in section.model_fields:
            # Messages of a section's own validators begin with the key.
            raise ConfigError(f"{where}.{message}" if where else message) from None
        raise ConfigError(f"{key or 'config'}: {message}{got}") from None
    except ValueError as error:  # a value that contains itself
        raise ConfigError(f"{where or 'config'}: {error}") from None


def _plain(value: Any) -> str:
    """Convert a value that JSON does not support, such as a path or a date, to text."""
    if isinstance(value, (Path, datetime.date)):
        return str(value)
    raise TypeError(f"expected plain values, not {type(value).__name__}")


def _keys(problem: ErrorDetails, values: Any) -> list[str]:
    """Return the path of an error in the user's keys, without pydantic's names of union members."""
    path: list[str] = []
    node = values
    for part in problem["loc"]:
        if isinstance(node, Mapping) and part in (names := {str(key): key for key in node}):
            node = node[names[str(part)]]
        elif isinstance(node, (list, tuple)) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif not isinstance(node, Mapping) or problem["type"] != "missing":
            continue
        path.append(str(part))
    return path


def _short(value: Any, max_length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def _owner(section: type[Section], path: list[str]) -> tuple[type[Section] | None, list[str]]:
    """Return the section class that holds the key at ``path``, and the path without the names in
    tables of sections."""
    node: Any = section
    fields = []
    for key in path:
        if isinstance(node, type) and issubclass(node, Section):
            field = node.model_fields.get(key)
            fields.append(key)
            node = field.annotation if field else None
        else:
            # A table of sections by name.
            node = get_args(node)[-1] if get_args(node) else None
    return (node if isinstance(node, type) and issubclass(node, Section) else None), fields


class NamedComponent(BaseModel):
    """A component chosen by name; its other keys are validated by its own section."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def validate_options(self, section: type[S], where: str) -> S:
        """Validate the keys beside ``name`` with the component's section."""
        return validate(section, self.model_extra or {}, where)


class RunSection(Section):
    """Name and folder of the run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its directory is ``root/name``, with the suffix."""
    suffix: str = ""
    """Distinguishes the points of a sweep; generated from the keys that vary."""
    root: Path = Path("runs")
    """Folder of all runs, on a filesystem that every node can access."""

    @property
    def folder(self) -> Path:
        """Absolute path of the run's directory."""
        suffix = re.sub(r"[^A-Za-z0-9._-]+", "_", self.suffix)
        return self.root.expanduser().absolute() / f"{self.name}{suffix}"


class SamplingSection(Section):
    """Sampling settings beside the temperature, defined by
    :class:`rlinf.engines.token_sampling.SamplingParams`.

    Log-probabilities are always those of ``softmax(logits / temperature)``, which is trained:
    ``top_k``, ``top_p``, ``min_p`` and ``min_tokens`` do not change them.
    """

    top_k: int = Field(default=0, ge=0)
    """Draw among the ``top_k`` most likely tokens; 0: all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the most likely tokens with this total probability."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw among tokens with at least this fraction of the highest probability."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum length of a sample in tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a sample."""

    def non_default_settings(self) -> dict[str, int | float | str]:
        """Return the values that differ from the defaults, as requests carry them."""
        values = self.model_dump(exclude_defaults=True)
        return values | ({"stop": json.dumps(self.stop)} if self.stop else {})


class RolloutSection(Section):
    """Size and sampling of the rollout of one iteration."""

    batch_size: int = Field(gt=0)
    """Number of starts per iteration: prompts, or environments stepped in parallel."""
    group_size: int = Field(default=1, gt=0)
    """Samples per start, which group-relative advantages compare. If above 1 with a simulator, each
    sample is one episode."""
    horizon: int = Field(gt=0)
    """Maximum steps of a sample: new tokens, or environment steps per iteration. If the policy acts
    by chunks, the number of chunks."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    sampling: SamplingSection = SamplingSection()
    """Other sampling settings of language models. Engines of actions do not support them."""
    max_resamples: int | None = Field(default=None, gt=0)
    """Dynamic sampling (DAPO): maximum number of times that a group which the algorithm filters out
    is resampled from another start. None: such groups stay out of the batch."""
    staleness: int = Field(default=0, ge=0, le=64)
    """Number of updates that the rollout weights may lag behind: the rollout does not wait for the
    last ``staleness`` updates and continues while they run. 0: on-policy."""
    in_flight_updates: bool = False
    """Samples in progress switch to newer weights as soon as these arrive, and record the version
    that chose each step. Results then depend on timing. Needs ``staleness``."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]


class OptimizerSection(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    group_lr: dict[str, Rate] = {}
    """Peak learning rate of parameter groups that differ from ``lr``, by the group's name
    (:attr:`rlinf.models.base.Policy.groups`). All groups share the schedule."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the iterations of the run, after the warm-up."""
    lr_decay_iterations: int | None = Field(default=None, gt=0)
    """Length of the schedule in iterations; by default ``iterations`` when the run was created.
    Later iterations use the last rate."""
    lr_warmup_iterations: int = Field(default=0, ge=0)
    """Iterations over which the learning rate rises linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate of a decaying schedule, as a fraction of ``lr``."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW; the first one is the momentum of SGD."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of tensors with at least two dimensions; decoupled for AdamW."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Maximum gradient norm of all updated parameters except the groups of ``group_clip_grad``."""
    group_clip_grad: dict[str, Rate] = {}
    """Maximum gradient norm of parameter groups that are clipped separately."""

    def learning_rate(self, iteration: int, iterations: int, group: str = "") -> float:
        """Return the learning rate of an iteration, counted from 0.

        Args:
            iterations: length of the schedule; later iterations use its last rate.
            group: name of the parameter group; "": the groups without a rate of their own.
        """
        lr = self.group_lr.get(group, self.lr)
        if self.lr_scheduler_type != "constant":
            iteration = min(iteration, iterations - 1)
        if iteration < self.lr_warmup_iterations:
            return lr * (iteration + 1) / self.lr_warmup_iterations
        if self.lr_scheduler_type == "constant":
            return lr
        span = max(1, iterations - self.lr_warmup_iterations - 1)
        progress = min(1.0, (iteration - self.lr_warmup_iterations) / span)
        if self.lr_scheduler_type == "linear":
            share = 1 - progress
        else:
            share = 0.5 * (1 + math.cos(math.pi * progress))
        return lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


class SftSection(Section):
    """Supervised fine-tuning before reinforcement learning; ``max_steps: 0`` skips it."""

    max_steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=256, gt=0)
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over ``max_steps``, after the warm-up."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate of a decaying schedule, as a fraction of ``lr``."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of tensors with at least two dimensions."""
    demonstration_steps: int | None = Field(default=None, gt=0)
    """Consecutive steps of each demonstration that a batch includes, drawn at random; null: all.
    For robot policies, whose steps are independent."""
    eval_every: int = Field(default=25, gt=0)
    """Steps between held-out evaluations."""
    eval_generation: bool = True
    """Whether evaluations generate and score held-out samples. If false, ``target_score`` has no
    effect."""
    target_score: float = Field(default=1.0, ge=0, le=1)
    """Stop as soon as the held-out score reaches this value."""
    eval_samples: int = Field(default=0, ge=0)
    """Number of held-out demonstrations whose loss is evaluated, if the task has any; 0: none."""


class SuiteSet(Section):
    """One set of problems and its protocol."""

    task: NamedComponent
    """A task with a fixed set of problems, such as ``jsonl`` or ``multiple_choice``. Its test
    problems are asked."""
    max_problems: int | None = Field(default=None, gt=0)
    """Ask only the first problems; None: all."""
    samples_per_problem: int = Field(default=1, gt=0)
    """Number of attempts at each problem."""
    horizon: int = Field(gt=0)
    """Maximum number of tokens of a response. A longer response is truncated."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    sampling: SamplingSection = SamplingSection()
    """Other sampling settings."""

    @model_validator(mode="after")
    def _check_temperature(self) -> SuiteSet:
        if self.samples_per_problem > 1 and self.temperature == 0:
            raise ValueError(
                "temperature 0 makes all samples of a problem equal; set temperature above 0, or "
                "samples_per_problem=1"
            )
        return self

    def sampling_settings(self) -> dict[str, int | float | str]:
        """Return the sampling settings as requests carry them."""
        settings = self.sampling.non_default_settings()
        return {"horizon": self.horizon, "temperature": self.temperature, **settings}


class EvaluateSection(Section):
    """Held-out evaluation."""

    sets: dict[str, SuiteSet] = {}
    """Sets of problems by name, on which the policy is evaluated instead of the task's test
    problems. They replace ``samples``, ``horizon``, ``temperature`` and ``sampling``."""
    every: int = Field(default=10, ge=0)
    """Iterations between evaluations; 0: only before the first and after the last."""
    samples: int = Field(default=512, gt=0)
    """Number of held-out prompts or episodes."""
    horizon: int | None = Field(default=None, gt=0)
    """Maximum steps of a held-out sample; by default that of the rollout."""
    temperature: float = Field(default=0.0, ge=0)
    sampling: SamplingSection | None = None
    """By default that of the rollout."""
    videos: int = Field(default=0, ge=0)
    """Number of held-out episodes, the first ones, for which a video of each camera is written
    beside the trajectories; for simulators with cameras (``task.images``, ``task.video``)."""
    video_fps: int = Field(default=20, gt=0)
    """Steps per second of these videos."""


class CheckpointSection(Section):
    """Retention of weights, optimizer checkpoints and trajectories on disk."""

    save_every: int = Field(default=1, ge=1)
    """Iterations between checkpoints (weights and optimizer state) on disk; the last iteration
    always has one, and with ``trainer.lora`` each evaluated version, unless ``keep_best`` is 0. In
    between, the checkpoint is only in the trainer's memory: if that is lost, up
    to this many updates are computed again from their trajectories, which are kept. Values above 1
    need pools, or a run in one process."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest versions to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep each version divisible by this number; 0: none."""
    keep_best: int = Field(default=1, ge=0)
    """Also keep the weights of this many versions with the highest held-out scores, and with
    ``trainer.lora`` their checkpoints; 0: none. Has no effect unless versions between the first and
    the last are evaluated."""
    keep_trajectories: int = Field(default=5, ge=1)
    """Number of iterations whose trajectories are kept, besides the first."""


class BudgetSection(Section):
    """Limits on the resources of a run."""

    gpu_hours: float | None = Field(default=None, gt=0)
    """GPU-hours of all jobs of the run. It ends before an iteration that would exceed them, at the
    mean of the finished ones; no stage starts once they are used up. Null: no limit."""


NON_SEMANTIC_KEYS = frozenset({"run", "cluster", "plan", "log", "budget", "device_memory_gib"})
"""Top-level keys that never change a result: they are not part of any identity."""


SECTIONS_WITH_LOCATION_KEYS = frozenset({"task", "engine", "trainer", "reward"})
"""Sections some of whose keys are :data:`LOCATION_KEYS`."""
LOCATION_KEYS = frozenset({"python", "server_python", "endpoint"})
"""Keys that say where something runs: the interpreter of processes, the address of a server."""


class RunConfig(Section):
    """Configuration of one run. The keys of :data:`NON_SEMANTIC_KEYS` never change its result."""

    run: RunSection
    seed: int = Field(default=0, ge=0, lt=2**32)
    iterations: int = Field(ge=0)
    """Iterations of reinforcement learning; 0: the result is that of supervised fine-tuning."""
    flow: str = "on_policy"
    task: NamedComponent
    model: NamedComponent
    algorithm: NamedComponent
    reward: NamedComponent
    engine: NamedComponent
    trainer: NamedComponent
    rollout: RolloutSection
    optimizer: OptimizerSection = OptimizerSection()
    sft: SftSection = SftSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: dict[str, Any] = {}
    """Cluster settings, validated by the launchers."""
    plan: dict[str, Any] | str | None = None
    """Resources of each stage, or the path of a plan file."""
    _environment_keys: tuple[str, ...] = ()
    log: dict[str, Any] = {}
    """Trackers and verbosity."""
    budget: BudgetSection = BudgetSection()
    device_memory_gib: float | None = Field(default=None, gt=0)
    """Device memory that engine, trainer and reference of one process may together keep while
    stages take turns; the rest is offloaded to host memory. By default 60 % of a GPU, and all of it
    on a CPU."""

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        if self.rollout.group_size > 1 and self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature 0 makes all samples of a group equal; "
                "set it above 0 or rollout.group_size=1"
            )
        return self

    @model_validator(mode="after")
    def _check_in_flight_updates(self) -> RunConfig:
        if self.rollout.in_flight_updates and not self.rollout.staleness:
            raise ValueError(
                "rollout.in_flight_updates: there are no newer weights while rollout.staleness is 0"
            )
        return self

    @property
    def environment_keys(self) -> tuple[str, ...]:
        """Dotted keys of the task that were read from its environment, not set by the user."""
        return self._environment_keys

    def with_environment_keys(self, task: Mapping[str, Any]) -> RunConfig:
        """Return a copy with keys of the task that were read from its environment."""
        config = self.model_copy(update={"task": self.task.model_copy(update=dict(task))})
        config._environment_keys = tuple(f"task.{key}" for key in task)
        return config

    def semantic_values(self) -> dict[str, Any]:
        """Return the part of the configuration that changes results, as JSON values."""
        return select_semantic(self.model_dump(mode="json"))

    def explicit_values(self) -> dict[str, Any]:
        """Return the semantic values of the keys that were set explicitly.

        The frozen configuration of a run sets every key that existed when the run was created. Keys
        that were added to the program later are not set and have their defaults.
        """
        return select_semantic(self.model_dump(mode="json", exclude_unset=True))


def select_semantic(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a full configuration that changes results."""
    kept = {key: value for key, value in values.items() if key not in NON_SEMANTIC_KEYS}
    for section in SECTIONS_WITH_LOCATION_KEYS & kept.keys():
        kept[section] = {k: v for k, v in kept[section].items() if k not in LOCATION_KEYS}
    return kept


def json_digest(values: Any) -> str:
    """Return a short, stable digest of JSON values."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


REDACTED = "(not shown)"
FULLY_REDACTED_KEYS = frozenset({"env", "notify_command"})
"""Keys below which every value is hidden: environment variables and arguments of commands."""
SECRET_KEY = re.compile(r"(?:^|[_\W])(?:token|secret|passw(?:or)?d|api_?key|credentials?)$", re.I)
"""Pattern of keys whose values are secrets if they are texts; numbers are shown."""
URL_LOGIN = re.compile(r"(?<=://)[^/\s?#]+@")
URL_SECRET = re.compile(
    r"(?<=[?&])([^=&\s]*(?:token|secret|password|key|signature)=)[^&#\s]+", re.I
)


def redact(value: Any, key: str = "") -> Any:
    """Return settings, or any plain value, with possible secrets replaced by :data:`REDACTED`.

    Secrets are the values of ``cluster.env`` and ``cluster.notify_command``, texts under keys that
    end in token, secret, password or api_key, and in URLs the login and query parameters with such
    names.
    """
    if isinstance(value, Mapping):
        return {
            name: redact(item, key if key in FULLY_REDACTED_KEYS else str(name))
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(redact(item, key) for item in value)
    if key in FULLY_REDACTED_KEYS and value is not None:
        return REDACTED
    if not isinstance(value, str) or not value:
        return value
    if SECRET_KEY.search(key):
        return REDACTED
    return URL_SECRET.sub(rf"\1{REDACTED}", URL_LOGIN.sub(f"{REDACTED}@", value))
