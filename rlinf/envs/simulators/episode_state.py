"""Save the state of a simulator's objects as arrays, and restore it into other objects of their
kind.

An environment continues another one's episode by beginning the same episode (the seed recreates
everything that stays constant) and restoring what has changed since: plain attributes, random
generators, and MuJoCo's data. Nothing is pickled. Anything else is refused by its name, because a
silently skipped attribute would change the episode.
"""

from __future__ import annotations

import importlib
import json
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

ATTRIBUTES_KEY = "kept"
"""Everything but arrays and numpy numbers: JSON, uint8 ``[n]``."""
UNCHANGED_MODULES = (
    *("gymnasium.spaces", "gymnasium.envs.registration", "gymnasium.envs.mujoco"),
    *("mujoco", "pygame", "numpy.dtypes"),
)
"""Modules of objects that an episode does not change, or that :func:`save_physics` saves."""
UNCHANGED_TYPES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
PLAIN_TYPES = (type(None), bool, int, float, str)
SEQUENCE_TYPES: dict[str, Any] = {"tuple": tuple, "list": list, "deque": deque}
Arrays = dict[str, np.ndarray]


def wrapper_chain(env: Any) -> list[Any]:
    """Return a Gymnasium environment, the one it wraps, and so on."""
    chain = [env]
    while chain[-1] is not chain[-1].unwrapped:
        chain.append(chain[-1].env)
    return chain


def save_attributes(objects: Sequence[Any], others: Sequence[Any] = ()) -> Arrays:
    """Return the attributes of objects.

    Args:
        others: objects that they may refer to and that are saved elsewhere.

    Raises:
        ValueError: an attribute is not plain.
    """
    arrays: Arrays = {}
    kept, known = [], [*objects, *others]
    for one in objects:
        # Sorted: equal states have equal bytes, whenever an attribute first came.
        every = sorted(vars(one).items())
        values = {n: v for n, v in every if not (_same(v) or _among(v, known))}
        kept.append({n: _packed(v, arrays, f"{type(one).__name__}.{n}") for n, v in values.items()})
    text = json.dumps(kept).encode()
    return {ATTRIBUTES_KEY: np.frombuffer(text, np.uint8), **arrays}


def restore_attributes(objects: Sequence[Any], arrays: Arrays) -> None:
    """Set the attributes that :func:`save_attributes` returned for other objects of their kind."""
    for one, kept in zip(objects, json.loads(arrays[ATTRIBUTES_KEY].tobytes())):  # noqa: B905 - Python 3.9
        for name, packed in kept.items():
            setattr(one, name, _unpacked(packed, arrays, vars(one).get(name)))


def save_physics(model: Any, data: Any) -> Arrays:
    """Return the state of a MuJoCo simulation, and its derived values. The derived values belong to
    the state before the last step, so they do not follow from the saved state."""
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {
        "physics": state,
        "computed": np.concatenate([a.ravel() for a in _computed(model, data)]),
    }


def restore_physics(model: Any, data: Any, arrays: Arrays) -> None:
    """Continue from the state of :func:`save_physics`, with an equal model.

    Raises:
        ValueError: the state is of another version of MuJoCo.
    """
    mujoco = importlib.import_module("mujoco")
    mujoco.mj_setState(model, data, arrays["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)
    every = list(_computed(model, data))
    ends = np.cumsum([array.size for array in every])
    if ends[-1] != len(arrays["computed"]):
        raise ValueError("the state is of another version of MuJoCo, or of another model")
    for array, part in zip(every, np.split(arrays["computed"], ends[:-1])):  # noqa: B905 - Python 3.9
        array[...] = part.reshape(array.shape)


def _computed(model: Any, data: Any) -> Iterator[np.ndarray]:
    """Yield the derived arrays whose size the model alone determines. Others belong to the contacts
    and constraints of a step, and are computed anew in the next one."""
    empty = importlib.import_module("mujoco").MjData(model)
    for name in sorted(name for name in dir(empty) if not name.startswith("_")):
        sized = getattr(empty, name)
        if isinstance(sized, np.ndarray) and sized.dtype == np.float64 and sized.size:
            yield getattr(data, name)


def _among(value: Any, objects: Sequence[Any]) -> bool:
    return any(value is one for one in objects)


def _same(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        # A view of MuJoCo's memory: so it is in the other world, and moves with its physics.
        return type(_owner(value)).__name__ == "PyCapsule"
    return isinstance(value, UNCHANGED_TYPES) or type(value).__module__.startswith(
        UNCHANGED_MODULES
    )


def _owner(array: Any) -> Any:
    """Return the owner of an array's memory."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def _packed(value: Any, arrays: Arrays, where: str) -> Any:
    """Return a value as JSON; arrays and other types are tagged, arrays by their names.

    Args:
        where: the name of the value in error messages.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        name = f"array.{len(arrays)}"
        arrays[name] = np.array(value)
        return ["array" if isinstance(value, np.ndarray) else "number", name]
    kind = type(value).__name__
    if type(value) is SEQUENCE_TYPES.get(kind):
        most = [value.maxlen] if isinstance(value, deque) else []
        return [kind, [_packed(v, arrays, f"{where}.{n}") for n, v in enumerate(value)], *most]
    if type(value) is dict and all(type(key) in PLAIN_TYPES for key in value):
        return ["dict", [[k, _packed(v, arrays, f"{where}.{k}")] for k, v in value.items()]]
    if isinstance(value, np.random.Generator):
        return ["generator", _packed(value.bit_generator.state, arrays, where)]
    if isinstance(value, np.random.RandomState):
        return ["generator", _packed(value.get_state(legacy=False), arrays, where)]
    raise ValueError(f"{where} is of {type(value).__module__}.{kind}, which cannot be saved")


def _unpacked(packed: Any, arrays: Arrays, there: Any) -> Any:
    """
    Args:
        there: the current value in its place: a generator is updated in place, because others may
            refer to it.
    """
    if not isinstance(packed, list):
        return packed
    kind, content, *rest = packed
    if kind == "array":
        return arrays[content].copy()
    if kind == "number":
        return arrays[content][()]
    if kind == "dict":
        return {key: _unpacked(value, arrays, None) for key, value in content}
    if kind == "generator":
        state = _unpacked(content, arrays, None)
        if isinstance(there, np.random.Generator):
            there.bit_generator.state = state
        else:
            there.set_state(state)
        return there
    values = [_unpacked(value, arrays, None) for value in content]
    return deque(values, *rest) if kind == "deque" else SEQUENCE_TYPES[kind](values)
