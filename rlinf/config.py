"""Typed configuration: Hydra composes, these classes validate, once, at the door.

Every part (an algorithm, a task, an engine, ...) keeps its own :class:`Section` beside it; this
module has what they share and the frame of a whole run, :class:`RunConfig`.
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
from rlinf.renamed_keys import RENAMED_KEYS

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A frozen, closed piece of configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def validate(section: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Check ``values`` against ``section``; ``where`` is the dotted key they stand under.

    Raises:
        ConfigError: names the first wrong key, with the nearest valid one for an unknown key.
    """
    try:
        # Strict, and as JSON: lists are tuples, text is a path, but ``true`` is no number and
        # ``"8"`` neither.
        text = json.dumps(values, default=_plain)
        return section.model_validate_json(text, strict=True)
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{where or 'config'}: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = _keys(problem, values)
        key = ".".join([where, *path] if where else path)
        if problem["type"] == "extra_forbidden":
            owner = _owner(section, path[:-1])
            hint = did_you_mean(path[-1], owner.model_fields) if owner else ""
            if owner and RENAMED_KEYS.get(key) in owner.model_fields:
                hint = f"; it is {RENAMED_KEYS[key]!r} now"
            if where == "algorithm" and path[-1] in OptimizerSection.model_fields:
                hint = f"; it is optimizer.{path[-1]}"
            raise ConfigError(f"{key}: unknown key{hint}") from None
        got = problem.get("input")
        shown = f" (got {_short(got)})" if path and not isinstance(got, Mapping) else ""
        message = problem["msg"].removeprefix("Value error, ")
        if not path and re.split(r"\W", message, maxsplit=1)[0] in section.model_fields:
            # What a whole section complains of begins with the key.
            raise ConfigError(f"{where}.{message}" if where else message) from None
        raise ConfigError(f"{key or 'config'}: {message}{shown}") from None
    except ValueError as error:  # a value that contains itself
        raise ConfigError(f"{where or 'config'}: {error}") from None


def _plain(value: Any) -> str:
    """What YAML or Python has and JSON has not, as text."""
    if isinstance(value, (Path, datetime.date)):
        return str(value)
    raise TypeError(f"expected plain values, not {type(value).__name__}")


def _keys(problem: ErrorDetails, values: Any) -> list[str]:
    """The user's keys in the place of an error, which names the members of unions too."""
    path: list[str] = []
    at = values
    for part in problem["loc"]:
        if isinstance(at, Mapping) and part in (names := {str(key): key for key in at}):
            at = at[names[str(part)]]
        elif isinstance(at, (list, tuple)) and isinstance(part, int) and part < len(at):
            at = at[part]
        elif not isinstance(at, Mapping) or problem["type"] != "missing":
            continue
        path.append(str(part))
    return path


def _short(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _owner(section: type[Section], path: list[str]) -> type[Section] | None:
    """The section class that holds the key at ``path``."""
    at: Any = section
    for part in path:
        if isinstance(at, type) and issubclass(at, Section):
            field = at.model_fields.get(part)
            at = field.annotation if field else None
        else:
            # A table of sections by name.
            at = get_args(at)[-1] if get_args(at) else None
    return at if isinstance(at, type) and issubclass(at, Section) else None


class NamedComponent(BaseModel):
    """A part chosen by name; its other keys are validated by the part's own section."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def validate_options(self, section: type[S], where: str) -> S:
        """The keys beside ``name``, validated by the part's section."""
        return validate(section, self.model_extra or {}, where)


class RunSection(Section):
    """Which run this is and where its files go."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its directory is ``root/name``, with the suffix."""
    suffix: str = ""
    """Tells apart the points of a sweep; made from the keys that vary."""
    root: Path = Path("runs")
    """Folder of all runs, on a filesystem that every node sees."""

    @property
    def folder(self) -> Path:
        """The run's directory, absolute."""
        suffix = re.sub(r"[^A-Za-z0-9._-]+", "_", self.suffix)
        return self.root.expanduser().absolute() / f"{self.name}{suffix}"


class SamplingSection(Section):
    """What cuts and ends samples; :class:`rlinf.data.sampling_params.SamplingParams` says how each is meant.

    Log-probabilities are always those of ``softmax(logits / temperature)``, which is trained:
    ``top_k``, ``top_p``, ``min_p`` and ``min_tokens`` do not enter them."""

    top_k: int = Field(default=0, ge=0)
    """Draw among so many most likely tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the most likely tokens that together have this probability."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw among tokens of at least this share of the highest probability."""
    min_tokens: int = Field(default=0, ge=0)
    """No end before so many tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a sample."""

    def non_default_settings(self) -> dict[str, int | float | str]:
        """What differs from the defaults, as requests carry it."""
        told = self.model_dump(exclude_defaults=True)
        return told | ({"stop": json.dumps(self.stop)} if self.stop else {})


class RolloutSection(Section):
    """How much experience one iteration collects."""

    batch_size: int = Field(gt=0)
    """Independent starts per iteration: prompts, or environments stepped in parallel."""
    group_size: int = Field(default=1, gt=0)
    """Samples per start; group-relative advantages compare them. Of a simulator each is one episode
    then."""
    horizon: int = Field(gt=0)
    """Most steps one sample may take: new tokens, or environment steps per iteration; where a
    policy acts by chunks, so many chunks."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    sampling: SamplingSection = SamplingSection()
    """What else there is to drawing tokens. Engines whose steps are whole actions have none of
    it."""
    max_resamples: int | None = Field(default=None, gt=0)
    """Most times that a group which the algorithm would not keep is drawn anew, of another start;
    of ``flow=dynamic_sampling``."""
    staleness: int = Field(default=0, ge=0, le=64)
    """How many updates behind the weights are that collect: a rollout waits for none of the last
    ``staleness`` updates and goes on while they are made. 0: on-policy."""
    in_flight_updates: bool = False
    """Samples under way go on with newer weights as soon as those are there, and say of every step
    which version chose it. What comes out depends on timing then. Needs ``staleness``."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]


class OptimizerSection(Section):
    """How gradients change the weights."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    group_lr: dict[str, Rate] = {}
    """Peak learning rate of groups of parameters that have another one, by the group's name
    (:attr:`rlinf.models.base.Policy.parameter_groups`); all have the same schedule."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over the run's iterations, after the warm-up."""
    lr_decay_iterations: int | None = Field(default=None, gt=0)
    """Iterations the schedule takes; those of the run at its first start by default. Further ones
    run at its last rate."""
    lr_warmup_iterations: int = Field(default=0, ge=0)
    """Iterations over which the learning rate rises linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate of a falling schedule, as a share of ``lr``."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW; the first is the momentum of SGD."""
    eps: float = Field(default=1e-8, gt=0)
    """Of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled from the gradient for AdamW; of tensors with two dimensions or more."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of all parameters that an update changes, but those of
    ``group_clip_grad``."""
    group_clip_grad: dict[str, Rate] = {}
    """Largest norm of the gradient of groups of parameters that are clipped by themselves."""

    def learning_rate(self, iteration: int, iterations: int, group: str = "") -> float:
        """Learning rate of an iteration (counted from 0) of a schedule of ``iterations``.

        A schedule that is over goes on at its last rate; one that is constant is never over.
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
    """Supervised fine-tuning before reinforcement learning; ``max_steps: 0`` leaves it out."""

    max_steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=256, gt=0)
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over ``max_steps``, after the warm-up."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate of a falling schedule, as a share of ``lr``."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled from the gradient; of tensors with two dimensions or more."""
    eval_every: int = Field(default=25, gt=0)
    """Steps between held-out evaluations."""
    eval_generation: bool = True
    """Whether held-out samples are generated and scored then; without it all steps are done."""
    target_score: float = Field(default=1.0, ge=0, le=1)
    """Stop as soon as the held-out score reaches this."""
    eval_samples: int = Field(default=0, ge=0)
    """Held-out demonstrations whose loss is taken then, of tasks that have some; 0: none."""


class EvaluateSection(Section):
    """Held-out evaluation."""

    every: int = Field(default=10, ge=0)
    """Iterations between evaluations; 0: only before the first and after the last."""
    samples: int = Field(default=512, gt=0)
    """Held-out prompts or episodes."""
    horizon: int | None = Field(default=None, gt=0)
    """Most steps of a held-out sample; that of the rollout by default."""
    temperature: float = Field(default=0.0, ge=0)
    sampling: SamplingSection | None = None
    """That of the rollout by default."""
    videos: int = Field(default=0, ge=0)
    """Held-out episodes, the first ones, of which each camera's video is written beside the
    trajectories; of simulators with cameras (``task.images``, ``task.video``)."""
    video_fps: int = Field(default=20, gt=0)
    """Steps of a second of these."""


class CheckpointSection(Section):
    """Which weights and optimizer checkpoints stay on disk."""

    keep_last: int = Field(default=2, ge=1)
    """Newest versions kept."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep each version divisible by this; 0: none."""
    keep_best: int = Field(default=1, ge=0)
    """Also keep the weights of so many versions, those with the highest held-out scores; 0: none.
    Without evaluations between the first and the last weights it keeps nothing more."""
    keep_trajectories: int = Field(default=5, ge=1)
    """Iterations whose trajectories are kept, besides the first."""


NON_SEMANTIC_KEYS = frozenset({"run", "cluster", "plan", "log", "device_memory_gib"})
"""Top-level keys that never change a result: they are not part of any identity."""


SECTIONS_WITH_LOCATION_KEYS = frozenset({"task", "engine", "trainer", "reward"})
"""Sections some of whose keys are :data:`PLACES`."""
LOCATION_KEYS = frozenset({"python", "server_python", "endpoint"})
"""Keys that say where something runs: the interpreter of processes, the address of a server."""


class RunConfig(Section):
    """One experiment. The sections and keys of :data:`TRANSIENT` never change its result."""

    run: RunSection
    seed: int = Field(default=0, ge=0, lt=2**32)
    iterations: int = Field(ge=0)
    """Of reinforcement learning; 0: what the warm start makes is the result."""
    flow: str = "on_policy"
    task: NamedComponent
    model: NamedComponent
    algorithm: NamedComponent
    reward: NamedComponent
    engine: NamedComponent
    trainer: NamedComponent
    rollout: RolloutSection
    optimizer: OptimizerSection = OptimizerSection()
    warm_start: SftSection = SftSection()
    evaluate: EvaluateSection = EvaluateSection()
    retention: CheckpointSection = CheckpointSection()
    cluster: dict[str, Any] = {}
    """How stages become processes; validated by the launchers."""
    plan: dict[str, Any] | str | None = None
    """Resources of each stage, or the path of a plan file."""
    _read_keys: tuple[str, ...] = ()
    log: dict[str, Any] = {}
    """Trackers and verbosity."""
    device_memory_gib: float | None = Field(default=None, gt=0)
    """What engine, trainer and reference of one process may together keep on its device while
    stages take turns there; the rest waits in the host's memory. By default 60 % of a GPU; all of
    it on a CPU."""

    @model_validator(mode="after")
    def _groups(self) -> RunConfig:
        if self.rollout.group_size > 1 and self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature 0 makes all samples of a group equal; "
                "set it above 0 or rollout.group_size=1"
            )
        return self

    @model_validator(mode="after")
    def _newer_weights(self) -> RunConfig:
        if self.rollout.in_flight_updates and not self.rollout.staleness:
            raise ValueError(
                "rollout.in_flight_updates: there are no newer weights while rollout.staleness is 0"
            )
        return self

    @property
    def environment_keys(self) -> tuple[str, ...]:
        """The dotted keys of the task that nobody gave: they were read from its environment."""
        return self._read_keys

    def with_environment_keys(self, task: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with keys of the task that were read from its environment."""
        made = self.model_copy(update={"task": self.task.model_copy(update=dict(task))})
        made._read_keys = tuple(f"task.{key}" for key in task)
        return made

    def semantic_values(self) -> dict[str, Any]:
        """The part of the configuration that changes the result, as plain JSON values."""
        return select_semantic(self.model_dump(mode="json"))

    def explicit_values(self) -> dict[str, Any]:
        """The same, but only keys that were given.

        A frozen configuration gives all that the program which froze it knew; keys that came later
        have their defaults and are not part of it.
        """
        return select_semantic(self.model_dump(mode="json", exclude_unset=True))


def select_semantic(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a whole configuration changes the result."""
    kept = {key: value for key, value in values.items() if key not in NON_SEMANTIC_KEYS}
    for section in SECTIONS_WITH_LOCATION_KEYS & kept.keys():
        kept[section] = {k: v for k, v in kept[section].items() if k not in LOCATION_KEYS}
    return kept


def json_digest(values: Any) -> str:
    """Short stable digest of JSON values."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


REDACTED = "(not shown)"
FULLY_REDACTED_KEYS = frozenset({"env", "notify_command"})
"""Keys whose values are hidden one by one: variables of processes, and the words of a command."""
SECRET_KEY = re.compile(r"(?:^|[_\W])(?:token|secret|passw(?:or)?d|api_?key|credentials?)$", re.I)
"""Keys of texts that are secrets; a number under such a key is none."""
URL_LOGIN = re.compile(r"(?<=://)[^/\s?#]+@")
URL_SECRET = re.compile(
    r"(?<=[?&])([^=&\s]*(?:token|secret|password|key|signature)=)[^&#\s]+", re.I
)


def redact(value: Any, key: str = "") -> Any:
    """Return settings, or any plain value, with :data:`REDACTED` in place of what may be secret.

    Hidden are the values of ``cluster.env`` and ``cluster.notify_command``, texts under keys that end in
    token, secret, password or api_key, and in each URL the login and such parts of its query.
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
