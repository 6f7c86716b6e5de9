"""Spaces of environments: descriptions, conversion of actions, and flattening of structured spaces.

Gymnasium composes spaces: ``Dict`` and ``Tuple`` of others, matrices, choices. Policies read a
vector and images, and return a vector or one choice. :class:`FlattenWrapper` translates between
them:

- observations: every part that is not an image is flattened into one ``state``, in the order of the
  space and by Gymnasium's own rules (a choice is one-hot). Images (uint8 ``[H, W, 3]``, from 0 to
  255) keep their names. Any other part (text, sequences, graphs) is refused by name;
- actions: boxes become one vector; several choices become one choice among their combinations.

Also loaded in the simulator process (:mod:`rlinf.envs.vector_env`): it imports the standard library
and numpy alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .observations import (
    INSTRUCTION,
    STATE,
    Arrays,
    InvalidEnvConfig,
    ObservationSelection,
    get_instruction,
)

UNBOUNDED_MAGNITUDE = 1e18
"""A bound of this magnitude counts as none, because some simulators use the largest number of a
type."""


class Box(NamedTuple):
    """A space of vectors within bounds."""

    low: np.ndarray
    high: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def dtype(self) -> Any:
        return self.low.dtype


class Discrete(NamedTuple):
    """A space of numbered choices, from 0."""

    n: int


def is_box(space: Any) -> bool:
    """Return whether a space holds arrays within bounds."""
    return hasattr(space, "low") and hasattr(space, "high")


def is_discrete(space: Any) -> bool:
    """Return whether a space holds one choice among ``n``."""
    return not is_box(space) and hasattr(space, "n") and not getattr(space, "shape", ())


def to_env_actions(space: Any, actions: np.ndarray) -> Any:
    """Convert actions ``[n, ...]`` to the environment's form.

    Vectors are clipped to the space and cast to its type, rounded if it is an integer type. Choices
    become integers counted from the start of the space (nested lists if rows are chunks).

    Raises:
        InvalidEnvConfig: an action has another size than the space, or is not one of its choices.
    """
    if hasattr(space, "low"):
        if actions.shape[actions.ndim - len(space.shape) :] != space.shape or actions.ndim < 2:
            shape = list(actions.shape[1:])
            raise InvalidEnvConfig(f"task.action: an action {shape} is not of {space}")
        # As rlinf.data.transitions.clip_actions has it, which a simulator process cannot import.
        clipped = np.minimum(np.maximum(actions, space.low), space.high)
        if np.issubdtype(space.dtype, np.integer):
            clipped = np.rint(clipped)
        return clipped.astype(space.dtype)
    for action in actions[(actions < 0) | (actions >= space.n)].tolist():
        raise InvalidEnvConfig(
            f"task.action: {action} is not one of the {space.n} actions of {space}"
        )
    return (actions + int(getattr(space, "start", 0))).tolist()


def describe_spaces(env: Any) -> dict[str, Any]:
    """Return the spaces of an environment as plain values."""
    return {
        "observation": describe_space(env.observation_space),
        "action": describe_space(env.action_space),
        "instruction": get_instruction(env),
    }


def describe_space(space: Any) -> dict[str, Any]:
    """Describe a space: ``kind`` (box, discrete, dict of others, or its class), its size, and its
    text. A box of vectors also has ``dtype``, ``low`` and ``high``, with None for no bound."""
    if isinstance(getattr(space, "spaces", None), dict):
        parts = {name: describe_space(part) for name, part in space.spaces.items()}
        return {"kind": "dict", "parts": parts, "text": str(space)}
    if is_box(space):
        kind = np.dtype(space.dtype).name
        description = {"kind": "box", "shape": list(space.shape), "dtype": kind, "text": str(space)}
        if len(space.shape) == 1:
            description.update(low=_plain(space.low), high=_plain(space.high))
        return description
    if is_discrete(space):
        return {"kind": "discrete", "size": int(space.n), "text": str(space)}
    return {"kind": type(space).__name__, "text": str(space)}


def _plain(bounds: np.ndarray) -> list[float | int | None]:
    """Return the bounds of a box as plain values; None: no bound."""
    unbounded = abs(bounds.astype(np.float64)) >= UNBOUNDED_MAGNITUDE
    return [None if none else b for b, none in zip(bounds.tolist(), unbounded)]  # noqa: B905


MAX_ACTION_COMBINATIONS = 4096
"""Most combinations of several choices that become one, because a policy has an output for each."""
SpacePath = tuple[str, ...]
"""Path of a part in a composed space."""


def flatten_env(env: Any, shown: ObservationSelection, *, batched: bool = False) -> Any:
    """Return an environment with a state vector and images as observations, and a vector or one
    choice as actions. An environment that already has this form is returned as it is.

    Args:
        shown: the observations that are used.
        batched: it steps many environments together.

    Raises:
        InvalidEnvConfig: a part of a space cannot be flattened, or is not used; names it.
    """
    observation = _Observations(env.observation_space, shown)
    action = _Actions(env.action_space)
    if observation.is_plain and action.is_plain:
        return env
    return FlattenWrapper(env, observation, action, batched)


class FlattenWrapper:
    """An environment with structured spaces behind plain ones; every other attribute is its own."""

    def __init__(
        self, env: Any, observation: _Observations, action: _Actions, batched: bool
    ) -> None:
        self._env, self._observation, self._action = env, observation, action
        self._batched = batched
        self.observation_space, self.action_space = observation.space, action.space

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._env, name)
        if name == "expert_action":
            return lambda: self._action.encoded(attribute())
        return attribute

    def reset(self, *args: Any, **where: Any) -> Any:
        if self._batched:
            return self._observation.read(self._env.reset(*args, **where), batched=True)
        observation, info = self._env.reset(*args, **where)
        return self._observation.read(observation), info

    def step(self, action: Any) -> Any:
        if self._batched:
            observation, *rest = self._env.step(self._action.decoded(np.asarray(action)))
            return (self._observation.read(observation, batched=True), *rest)
        decoded = self._action.decoded(np.asarray(action)[None])
        observation, *rest = self._env.step(_first(decoded, self._action.structure))
        return (self._observation.read(observation), *rest)

    def close(self) -> None:
        self._env.close()


class _Observations:
    """Converts observations of a space to a state and images."""

    def __init__(self, space: Any, shown: ObservationSelection) -> None:
        self._states: list[tuple[SpacePath, Any]] = []
        self._images: list[tuple[SpacePath, Any]] = []
        ignored, met = set(shown.ignored), set[str]()
        every = list(leaf_spaces(space))
        for path, part in every:
            if named := ignored & {"_".join(path[:end]) for end in range(1, len(path) + 1)}:
                met |= named
            elif path == (INSTRUCTION,) and is_box(part):
                self._images.append((path, part))
            elif is_image(part):
                self._picture(path, part, shown)
            elif (why := _misfit(part)) is not None:
                raise InvalidEnvConfig(
                    f"task.ignore_observations: the observation {_named(path)} is {part}, {why}; "
                    "leave it out by its name here, or wrap the environment"
                )
            else:
                self._states.append((path, part))
        for name in sorted(ignored - met):
            there = ", ".join("_".join(path) for path, _ in every if path) or "no names"
            raise InvalidEnvConfig(f"task.ignore_observations: there is no {name!r}, but {there}")
        if not self._states:
            raise InvalidEnvConfig(
                f"task.id: its observations are {space}; policies here need numbers beside "
                "images; wrap the environment so that it returns some"
            )
        (path, part), *others = self._states
        alone = not others and is_box(part) and len(part.shape) == 1
        plain = all(len(path) == 1 for path, _ in self._images)
        self.is_plain = alone and path in ((), (STATE,)) and plain and not met
        self.space = space if self.is_plain else self._plain_space()

    def _picture(self, path: SpacePath, part: Any, shown: ObservationSelection) -> None:
        name, size = "_".join(path) or "pixels", list(part.shape[:2])
        if name in shown.video_only:
            return
        if part.shape[-1] != 3 or name not in shown.images:
            layout = "" if part.shape[-1] == 3 else ", and images here are [H, W, 3]"
            cure = "" if layout else f"set task.images.{name}={size}, or "
            raise InvalidEnvConfig(
                f"task.images.{name}: the environment returns the image {_named(path)} "
                f"{list(part.shape)}, which is not used{layout}; {cure}leave it out by "
                f"task.ignore_observations=[{name}]"
            )
        if list(shown.images[name]) != size:
            raise InvalidEnvConfig(f"task.images.{name}: its images are {size}")
        self._images.append((path, part))

    def _plain_space(self) -> Any:
        bounds = [_flat_bounds(part) for _, part in self._states]
        low, high = (np.concatenate([pair[place] for pair in bounds]) for place in (0, 1))
        parts = {"_".join(path): part for path, part in self._images}
        return SimpleNamespace(spaces={STATE: Box(low, high), **parts})

    def read(self, observation: Any, *, batched: bool = False) -> Arrays:
        """Return the state ``[D]`` and images by name; for many environments ``[n, ...]`` each."""
        vectors = [_vector(part, _at(observation, path), batched) for path, part in self._states]
        images = {"_".join(p): np.array(_at(observation, p)) for p, _ in self._images}
        return {STATE: np.concatenate(vectors, -1), **images}


class _Actions:
    """Converts a vector, or one choice, to an action of a space."""

    def __init__(self, space: Any) -> None:
        self.structure = space
        parts = list(leaf_spaces(space))
        self._parts = [part for _, part in parts]
        choices = [_counts(part) for part in self._parts]
        self._sizes: list[tuple[int, ...]] = []
        self.is_plain = (is_box(space) and len(space.shape) == 1) or is_discrete(space)
        if self.is_plain:
            self.space: Any = space
        elif parts and _boxes_alike(self._parts):
            low, high = (
                np.concatenate([np.ravel(getattr(part, name)) for part in self._parts])
                for name in ("low", "high")
            )
            self.space = Box(low, high)
        elif parts and all(choices):
            self._sizes = [sizes for sizes in choices if sizes]
            count = math.prod(n for sizes in self._sizes for n in sizes)
            if count > MAX_ACTION_COMBINATIONS:
                raise InvalidEnvConfig(
                    f"task.id: its actions are {space}, which have {count:,} combinations; a "
                    f"policy chooses one of {MAX_ACTION_COMBINATIONS:,} at most; wrap the "
                    "environment"
                )
            self.space = Discrete(count)
        else:
            raise InvalidEnvConfig(
                f"task.id: its actions are {space}; policies here return vectors (boxes, of "
                "integers all or none) or choices, not both and nothing else; wrap the environment"
            )

    def decoded(self, actions: np.ndarray) -> Any:
        """Return actions ``[n, A]`` or choices ``[n]`` in the structure of the space, ``[n,
        ...]``."""
        if self.is_plain:
            return actions
        if self._sizes:
            every = [n for sizes in self._sizes for n in sizes]
            digits = np.stack(np.unravel_index(actions.astype(np.int64), every), -1)
            columns = _split(digits, [len(sizes) for sizes in self._sizes])
        else:
            columns = _split(actions, [math.prod(part.shape) for part in self._parts])
        shaped = [_shaped(part, column) for part, column in zip(self._parts, columns)]  # noqa: B905
        return _built(self.structure, iter(shaped))

    def encoded(self, action: Any) -> Any:
        """Return the vector or choice of an action of the space."""
        if self.is_plain:
            return action
        values = [np.asarray(_at(action, path)) for path, _ in leaf_spaces(self.structure)]
        if not self._sizes:
            return np.concatenate([value.ravel() for value in values])
        digits = [
            np.ravel(value - _start(part)).astype(np.int64)
            for part, value in zip(self._parts, values)  # noqa: B905 - Python 3.9
        ]
        every = tuple(n for sizes in self._sizes for n in sizes)
        return np.ravel_multi_index(tuple(np.concatenate(digits).tolist()), every)


def leaf_spaces(space: Any, path: SpacePath = ()) -> Iterator[tuple[SpacePath, Any]]:
    """Yield the parts of a space that are not composed of others, each with its path."""
    parts = _subspaces(space)
    if parts is None:
        yield path, space
    else:
        for name, part in parts:
            yield from leaf_spaces(part, (*path, name))


def _subspaces(space: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a ``Dict`` or ``Tuple`` by name or number; None: it is neither."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        return [(str(name), part) for name, part in spaces.items()]
    if isinstance(spaces, (tuple, list)) and type(space).__name__ == "Tuple":
        return [(str(number), part) for number, part in enumerate(spaces)]
    return None


def is_image(space: Any) -> bool:
    """Return whether a space holds images, by the rule of Stable-Baselines3: bytes from 0 to 255 in
    three dimensions, one of which has 1, 3 or 4 channels."""
    if not is_box(space) or len(space.shape) != 3 or np.dtype(space.dtype) != np.uint8:
        return False
    channels = {space.shape[0], space.shape[-1]} & {1, 3, 4}
    return bool(channels and np.all(space.low == 0) and np.all(space.high == 255))


class _Gymnasium(NamedTuple):
    """The functions of Gymnasium in use, if the simulator has imported it."""

    space: type
    flatten: Any
    flatten_space: Any


def _gymnasium() -> _Gymnasium | None:
    spaces = sys.modules.get("gymnasium.spaces")
    if spaces is None:
        return None
    return _Gymnasium(spaces.Space, spaces.utils.flatten, spaces.utils.flatten_space)


def _misfit(space: Any) -> str | None:
    """Return why a part has no vector of fixed length; None: it has one."""
    if is_box(space):
        return None
    own = _gymnasium()
    if own is None or not isinstance(space, own.space):
        return "of a kind that is not Gymnasium's"
    if type(space).__name__ in ("Text", "Sequence", "Graph", "OneOf"):
        return "which has no numbers in fixed places"
    try:
        flat = own.flatten_space(space)
    except (NotImplementedError, ValueError, TypeError):
        flat = None
    return None if is_box(flat) else "which Gymnasium cannot flatten"


def _flat_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    own = _gymnasium()
    if own is not None and isinstance(space, own.space):
        space = own.flatten_space(space)
    return np.ravel(space.low), np.ravel(space.high)


def _vector(space: Any, value: Any, batched: bool) -> np.ndarray:
    """Return one part of an observation as a vector, ``[..., D]``."""
    if is_box(space):
        array = np.asarray(value)
        return array.reshape(len(array), -1) if batched else array.ravel()
    own = _gymnasium()
    assert own is not None, "others were refused"
    if batched:
        return np.stack([np.asarray(own.flatten(space, one)) for one in value])
    return np.asarray(own.flatten(space, value))


def _at(value: Any, path: SpacePath) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            # Keys may be numbers.
            value = value[name] if name in value else {str(k): v for k, v in value.items()}[name]
        else:
            value = value[int(name)]
    return value


def _named(path: SpacePath) -> str:
    return repr("_".join(path)) if path else "itself"


def _counts(space: Any) -> tuple[int, ...] | None:
    """Return the number of options of each choice of a space; None: it has no choices."""
    if is_discrete(space):
        return (int(space.n),)
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if type(space).__name__ == "MultiBinary":
        return (2,) * math.prod(space.shape)
    return None


def _boxes_alike(parts: Sequence[Any]) -> bool:
    """Return whether all parts are boxes, and either all or none are of integers."""
    integers = {is_box(part) and np.issubdtype(part.dtype, np.integer) for part in parts}
    return len(integers) == 1 and all(is_box(part) for part in parts)


def _start(space: Any) -> Any:
    return getattr(space, "start", 0)


def _split(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1], axis=-1)


def _shaped(space: Any, column: np.ndarray) -> np.ndarray:
    """Return a column ``[n, size]`` as actions of a part, ``[n, *shape]``, of its type."""
    shape = () if is_discrete(space) else tuple(space.shape)
    shaped = column.reshape(len(column), *shape) + (0 if is_box(space) else _start(space))
    return shaped.astype(getattr(space, "dtype", None) or shaped.dtype)


def _built(space: Any, columns: Iterator[np.ndarray]) -> Any:
    parts = _subspaces(space)
    if parts is None:
        return next(columns)
    built = [_built(part, columns) for _, part in parts]
    if isinstance(space.spaces, Mapping):
        return dict(zip(space.spaces, built))  # noqa: B905 - Python 3.9
    return tuple(built)


def _first(value: Any, space: Any) -> Any:
    """Return the single action of ``[1, ...]``."""
    if isinstance(value, dict):
        return {name: _first(part, space.spaces[name]) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first(part, one) for part, one in zip(value, space.spaces))  # noqa: B905
    return int(value[0]) if is_discrete(space) else np.asarray(value[0])
