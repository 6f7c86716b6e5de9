"""Spaces of environments: descriptions, conversion of actions, and flattening of structured spaces.

Spaces of Gymnasium may be structured: ``Dict`` and ``Tuple`` of other spaces, matrices, discrete
spaces. Policies read a vector and images, and return a vector or one discrete action.
:class:`FlattenWrapper` converts between them:

- observations: every part that is not an image is flattened into one ``state``, in the order of the
  space and by Gymnasium's own rules (a discrete value is one-hot). Images (uint8 ``[H, W, 3]``,
  from 0 to 255) keep their names. Other parts (text, sequences, graphs) are rejected by an
  error that names them;
- actions: boxes become one vector; several discrete actions become one, whose values are all
  combinations.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library and numpy.
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
"""From this magnitude on, a bound means unbounded, because some simulators use the largest number
of a type."""


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
    """A space of the integers from 0 to ``n - 1``."""

    n: int


def is_box(space: Any) -> bool:
    """Return whether a space has arrays within bounds."""
    return hasattr(space, "low") and hasattr(space, "high")


def is_discrete(space: Any) -> bool:
    """Return whether a space has ``n`` discrete values."""
    return not is_box(space) and hasattr(space, "n") and not getattr(space, "shape", ())


def to_env_actions(space: Any, actions: np.ndarray) -> Any:
    """Convert actions ``[n, ...]`` to the environment's form.

    Vectors are clipped to the space and cast to its type, rounded if it is an integer type.
    Discrete actions become integers counted from the ``start`` of the space (nested lists if rows
    are chunks).

    Raises:
        InvalidEnvConfig: an action has another size than the space, or is not one of its values.
    """
    if hasattr(space, "low"):
        if actions.shape[actions.ndim - len(space.shape) :] != space.shape or actions.ndim < 2:
            shape = list(actions.shape[1:])
            raise InvalidEnvConfig(f"task.action: an action {shape} is not of {space}")
        # Same as rlinf.data.transitions.clip_actions, which a simulator process cannot import.
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
        dtype, text = np.dtype(space.dtype).name, str(space)
        description = {"kind": "box", "shape": list(space.shape), "dtype": dtype, "text": text}
        if len(space.shape) == 1:
            description.update(low=_bounds_list(space.low), high=_bounds_list(space.high))
        return description
    if is_discrete(space):
        return {"kind": "discrete", "size": int(space.n), "text": str(space)}
    return {"kind": type(space).__name__, "text": str(space)}


def _bounds_list(bounds: np.ndarray) -> list[float | int | None]:
    """Return the bounds of a box as plain values; None: no bound."""
    unbounded = abs(bounds.astype(np.float64)) >= UNBOUNDED_MAGNITUDE
    return [None if is_none else b for b, is_none in zip(bounds.tolist(), unbounded)]  # noqa: B905


MAX_ACTION_COMBINATIONS = 4096
"""Maximum number of combinations of discrete actions, because a policy has an output for each."""
SpacePath = tuple[str, ...]
"""Path of a part in a structured space."""


def flatten_env(env: Any, selection: ObservationSelection, *, batched: bool = False) -> Any:
    """Return an environment whose observations are a state vector and images, and whose actions are
    a vector or one discrete action. An environment that has such spaces is returned unchanged.

    Args:
        selection: the observations that are used.
        batched: the environment is a batch that steps together.

    Raises:
        InvalidEnvConfig: a part of a space cannot be flattened, or is not used; names the part.
    """
    observation = _ObservationFlattener(env.observation_space, selection)
    action = _ActionConverter(env.action_space)
    if observation.is_flat and action.is_flat:
        return env
    return FlattenWrapper(env, observation, action, batched)


class FlattenWrapper:
    """An environment with flattened spaces; other attributes come from the wrapped environment."""

    def __init__(
        self,
        env: Any,
        observation: _ObservationFlattener,
        action: _ActionConverter,
        batched: bool,
    ) -> None:
        self._env, self._observation, self._action = env, observation, action
        self._batched = batched
        self.observation_space, self.action_space = observation.space, action.space

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._env, name)
        if name == "expert_action":
            return lambda: self._action.flatten(attribute())
        return attribute

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        if self._batched:
            return self._observation.flatten(self._env.reset(*args, **kwargs), batched=True)
        observation, info = self._env.reset(*args, **kwargs)
        return self._observation.flatten(observation), info

    def step(self, action: Any) -> Any:
        if self._batched:
            observation, *rest = self._env.step(self._action.unflatten(np.asarray(action)))
            return (self._observation.flatten(observation, batched=True), *rest)
        actions = self._action.unflatten(np.asarray(action)[None])
        observation, *rest = self._env.step(_first_action(actions, self._action.env_space))
        return (self._observation.flatten(observation), *rest)

    def close(self) -> None:
        self._env.close()


class _ObservationFlattener:
    """Converts observations of a space to a state and separate parts."""

    def __init__(self, space: Any, selection: ObservationSelection) -> None:
        self._state_parts: list[tuple[SpacePath, Any]] = []
        self._separate_parts: list[tuple[SpacePath, Any]] = []
        """Parts that keep their names: images, and an instruction."""
        ignored, matched = set(selection.ignored), set[str]()
        leaves = list(leaf_spaces(space))
        for path, part in leaves:
            if matches := ignored & {"_".join(path[:end]) for end in range(1, len(path) + 1)}:
                matched |= matches
            elif path == (INSTRUCTION,) and is_box(part):
                self._separate_parts.append((path, part))
            elif is_image(part):
                self._add_image(path, part, selection)
            elif (obstacle := _flatten_obstacle(part)) is not None:
                raise InvalidEnvConfig(
                    f"task.ignore_observations: the observation {_path_name(path)} is {part}, "
                    f"{obstacle}; leave it out by its name here, or wrap the environment"
                )
            else:
                self._state_parts.append((path, part))
        for name in sorted(ignored - matched):
            names = ", ".join("_".join(path) for path, _ in leaves if path) or "no names"
            raise InvalidEnvConfig(f"task.ignore_observations: there is no {name!r}, but {names}")
        if not self._state_parts:
            raise InvalidEnvConfig(
                f"task.id: its observations are {space}; policies need numbers in addition to "
                "images; wrap the environment so that it returns some"
            )
        (path, part), *others = self._state_parts
        is_vector = not others and is_box(part) and len(part.shape) == 1
        has_flat_images = all(len(path) == 1 for path, _ in self._separate_parts)
        self.is_flat = is_vector and path in ((), (STATE,)) and has_flat_images and not matched
        """Whether observations need no conversion."""
        self.space = space if self.is_flat else self._flat_space()

    def _add_image(self, path: SpacePath, part: Any, selection: ObservationSelection) -> None:
        name, size = "_".join(path) or "pixels", list(part.shape[:2])
        if name in selection.video_only:
            return
        if part.shape[-1] != 3 or name not in selection.images:
            layout = "" if part.shape[-1] == 3 else ": images must be [H, W, 3]"
            cure = "" if layout else f"set task.images.{name}={size}, or "
            raise InvalidEnvConfig(
                f"task.images.{name}: the environment returns the image {_path_name(path)} "
                f"{list(part.shape)}, which is not used{layout}; {cure}leave it out by "
                f"task.ignore_observations=[{name}]"
            )
        if list(selection.images[name]) != size:
            raise InvalidEnvConfig(f"task.images.{name}: its images are {size}")
        self._separate_parts.append((path, part))

    def _flat_space(self) -> Any:
        bounds = [_flat_bounds(part) for _, part in self._state_parts]
        low, high = (np.concatenate(arrays) for arrays in zip(*bounds))  # noqa: B905 - Python 3.9
        images = {"_".join(path): part for path, part in self._separate_parts}
        return SimpleNamespace(spaces={STATE: Box(low, high), **images})

    def flatten(self, observation: Any, *, batched: bool = False) -> Arrays:
        """Return the state ``[D]`` and images by name; for many environments ``[n, ...]`` each."""
        vectors = [
            _to_vector(part, _value_at(observation, path), batched)
            for path, part in self._state_parts
        ]
        images = {"_".join(p): np.array(_value_at(observation, p)) for p, _ in self._separate_parts}
        return {STATE: np.concatenate(vectors, -1), **images}


class _ActionConverter:
    """Converts a vector, or one discrete action, to an action of a space."""

    def __init__(self, space: Any) -> None:
        self.env_space = space
        self._parts = [part for _, part in leaf_spaces(space)]
        part_sizes = [_discrete_sizes(part) for part in self._parts]
        self._sizes: list[tuple[int, ...]] = []
        """For each part, the number of values of its discrete actions; empty for boxes."""
        self.is_flat = (is_box(space) and len(space.shape) == 1) or is_discrete(space)
        """Whether actions need no conversion."""
        if self.is_flat:
            self.space: Any = space
        elif self._parts and _are_boxes_of_one_kind(self._parts):
            low, high = (
                np.concatenate([np.ravel(getattr(part, name)) for part in self._parts])
                for name in ("low", "high")
            )
            self.space = Box(low, high)
        elif self._parts and all(part_sizes):
            self._sizes = [sizes for sizes in part_sizes if sizes]
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
                f"task.id: its actions are {space}; policies return vectors (boxes, all or none "
                "of integers) or discrete actions, but not both; wrap the environment"
            )

    def unflatten(self, actions: np.ndarray) -> Any:
        """Return vectors ``[n, A]`` or discrete actions ``[n]`` in the structure of the space,
        ``[n, ...]``."""
        if self.is_flat:
            return actions
        if self._sizes:
            all_sizes = [n for sizes in self._sizes for n in sizes]
            indices = np.stack(np.unravel_index(actions.astype(np.int64), all_sizes), -1)
            columns = _split(indices, [len(sizes) for sizes in self._sizes])
        else:
            columns = _split(actions, [math.prod(part.shape) for part in self._parts])
        parts = [_to_part(part, column) for part, column in zip(self._parts, columns)]  # noqa: B905
        return _assemble(self.env_space, iter(parts))

    def flatten(self, action: Any) -> Any:
        """Return the vector or discrete action that corresponds to an action of the space."""
        if self.is_flat:
            return action
        values = [np.asarray(_value_at(action, path)) for path, _ in leaf_spaces(self.env_space)]
        if not self._sizes:
            return np.concatenate([value.ravel() for value in values])
        indices = [
            np.ravel(value - _first_value(part)).astype(np.int64)
            for part, value in zip(self._parts, values)  # noqa: B905 - Python 3.9
        ]
        all_sizes = tuple(n for sizes in self._sizes for n in sizes)
        return np.ravel_multi_index(tuple(np.concatenate(indices).tolist()), all_sizes)


def leaf_spaces(space: Any, path: SpacePath = ()) -> Iterator[tuple[SpacePath, Any]]:
    """Yield the parts of a space that have no parts themselves, with their paths."""
    parts = _subspaces(space)
    if parts is None:
        yield path, space
    else:
        for name, part in parts:
            yield from leaf_spaces(part, (*path, name))


def _subspaces(space: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a ``Dict`` or ``Tuple`` by name or index; None for other spaces."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        return [(str(name), part) for name, part in spaces.items()]
    if isinstance(spaces, (tuple, list)) and type(space).__name__ == "Tuple":
        return [(str(index), part) for index, part in enumerate(spaces)]
    return None


def is_image(space: Any) -> bool:
    """Return whether a space has images, by the rule of Stable-Baselines3: uint8 from 0 to 255 in
    three dimensions, the first or last of which has 1, 3 or 4 channels."""
    if not is_box(space) or len(space.shape) != 3 or np.dtype(space.dtype) != np.uint8:
        return False
    channels = {space.shape[0], space.shape[-1]} & {1, 3, 4}
    return bool(channels and np.all(space.low == 0) and np.all(space.high == 255))


class _Gymnasium(NamedTuple):
    """The class and functions of Gymnasium that this module uses."""

    space_class: type
    flatten: Any
    flatten_space: Any


def _gymnasium() -> _Gymnasium | None:
    """Return Gymnasium if the simulator has imported it."""
    spaces = sys.modules.get("gymnasium.spaces")
    if spaces is None:
        return None
    return _Gymnasium(spaces.Space, spaces.utils.flatten, spaces.utils.flatten_space)


def _flatten_obstacle(space: Any) -> str | None:
    """Return why a part cannot become a vector of fixed length; None if it can."""
    if is_box(space):
        return None
    gymnasium = _gymnasium()
    if gymnasium is None or not isinstance(space, gymnasium.space_class):
        return "of a kind that is not Gymnasium's"
    if type(space).__name__ in ("Text", "Sequence", "Graph", "OneOf"):
        return "which has no numbers in fixed places"
    try:
        flat = gymnasium.flatten_space(space)
    except (NotImplementedError, ValueError, TypeError):
        flat = None
    return None if is_box(flat) else "which Gymnasium cannot flatten"


def _flat_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    gymnasium = _gymnasium()
    if gymnasium is not None and isinstance(space, gymnasium.space_class):
        space = gymnasium.flatten_space(space)
    return np.ravel(space.low), np.ravel(space.high)


def _to_vector(space: Any, value: Any, batched: bool) -> np.ndarray:
    """Return one part of an observation as a vector, ``[..., D]``."""
    if is_box(space):
        array = np.asarray(value)
        return array.reshape(len(array), -1) if batched else array.ravel()
    gymnasium = _gymnasium()
    assert gymnasium is not None, "other spaces were rejected"
    if batched:
        return np.stack([np.asarray(gymnasium.flatten(space, row)) for row in value])
    return np.asarray(gymnasium.flatten(space, value))


def _value_at(value: Any, path: SpacePath) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            # Keys may be numbers.
            value = value[name] if name in value else {str(k): v for k, v in value.items()}[name]
        else:
            value = value[int(name)]
    return value


def _path_name(path: SpacePath) -> str:
    return repr("_".join(path)) if path else "itself"


def _discrete_sizes(space: Any) -> tuple[int, ...] | None:
    """Return the number of values of each discrete action of a space; None: it has none."""
    if is_discrete(space):
        return (int(space.n),)
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if type(space).__name__ == "MultiBinary":
        return (2,) * math.prod(space.shape)
    return None


def _are_boxes_of_one_kind(parts: Sequence[Any]) -> bool:
    """Return whether all parts are boxes, and either all or none have an integer type."""
    is_integer = {is_box(part) and np.issubdtype(part.dtype, np.integer) for part in parts}
    return len(is_integer) == 1 and all(is_box(part) for part in parts)


def _first_value(space: Any) -> Any:
    return getattr(space, "start", 0)


def _split(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1], axis=-1)


def _to_part(space: Any, column: np.ndarray) -> np.ndarray:
    """Return a column ``[n, size]`` as actions of a part, ``[n, *shape]``, of the part's type."""
    shape = () if is_discrete(space) else tuple(space.shape)
    actions = column.reshape(len(column), *shape) + (0 if is_box(space) else _first_value(space))
    return actions.astype(getattr(space, "dtype", None) or actions.dtype)


def _assemble(space: Any, parts: Iterator[np.ndarray]) -> Any:
    """Return an action of a structured space from its parts, in the order of the space."""
    subspaces = _subspaces(space)
    if subspaces is None:
        return next(parts)
    values = [_assemble(subspace, parts) for _, subspace in subspaces]
    if isinstance(space.spaces, Mapping):
        return dict(zip(space.spaces, values))  # noqa: B905 - Python 3.9
    return tuple(values)


def _first_action(value: Any, space: Any) -> Any:
    """Return the single action of ``[1, ...]``."""
    if isinstance(value, dict):
        return {name: _first_action(part, space.spaces[name]) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_action(part, sub) for part, sub in zip(value, space.spaces))  # noqa: B905
    return int(value[0]) if is_discrete(space) else np.asarray(value[0])
