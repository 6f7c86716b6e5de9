"""Save the state of a simulator's objects as arrays, and restore it into other objects of the same
classes.

To continue another environment's episode, an environment begins the same episode (the seed
recreates everything that stays constant) and restores what has changed since: plain attributes,
random generators, and MuJoCo's data. Nothing is pickled. Any other attribute is an error that names
it, because an attribute that is silently skipped would change the episode.
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
"""Key of all attributes except arrays and numpy numbers: JSON, uint8 ``[n]``."""
UNCHANGED_MODULES = (
    *("gymnasium.spaces", "gymnasium.envs.registration", "gymnasium.envs.mujoco"),
    *("mujoco", "pygame", "numpy.dtypes"),
)
"""Modules of classes whose objects do not change in an episode, or are saved by
:func:`save_physics`."""
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
"""Saved arrays by name."""


def wrapper_chain(env: Any) -> list[Any]:
    """Return a Gymnasium environment and all environments that it wraps, from outside to inside."""
    chain = [env]
    while chain[-1] is not chain[-1].unwrapped:
        chain.append(chain[-1].env)
    return chain


def save_attributes(objects: Sequence[Any], others: Sequence[Any] = ()) -> Arrays:
    """Return the attributes of objects.

    Args:
        others: objects that are saved elsewhere; attributes that refer to them are left out.

    Raises:
        ValueError: an attribute cannot be saved.
    """
    arrays: Arrays = {}
    all_packed, references = [], [*objects, *others]
    for target in objects:
        # Sorted, so that equal states have equal bytes, in whatever order attributes were set.
        items = sorted(vars(target).items())
        values = {n: v for n, v in items if not (_is_unchanged(v) or _is_in(v, references))}
        name = type(target).__name__
        all_packed.append({n: _pack(v, arrays, f"{name}.{n}") for n, v in values.items()})
    text = json.dumps(all_packed).encode()
    return {ATTRIBUTES_KEY: np.frombuffer(text, np.uint8), **arrays}


def restore_attributes(objects: Sequence[Any], arrays: Arrays) -> None:
    """Set the attributes that :func:`save_attributes` returned for other objects of the same
    classes."""
    packed_attributes = json.loads(arrays[ATTRIBUTES_KEY].tobytes())
    for target, attributes in zip(objects, packed_attributes):  # noqa: B905 - Python 3.9
        for name, packed in attributes.items():
            setattr(target, name, _unpack(packed, arrays, vars(target).get(name)))


def save_physics(model: Any, data: Any) -> Arrays:
    """Return the state of a MuJoCo simulation, and its derived values. These cannot be computed
    from the saved state, because they belong to the state before the last step."""
    mujoco = importlib.import_module("mujoco")
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, data, state, spec)
    return {
        "physics": state,
        "computed": np.concatenate([a.ravel() for a in _derived_arrays(model, data)]),
    }


def restore_physics(model: Any, data: Any, arrays: Arrays) -> None:
    """Continue from the state of :func:`save_physics`, with an equal model.

    Raises:
        ValueError: the state is of another version of MuJoCo.
    """
    mujoco = importlib.import_module("mujoco")
    mujoco.mj_setState(model, data, arrays["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)
    derived = list(_derived_arrays(model, data))
    ends = np.cumsum([array.size for array in derived])
    if ends[-1] != len(arrays["computed"]):
        raise ValueError("the state is of another version of MuJoCo, or of another model")
    for array, values in zip(derived, np.split(arrays["computed"], ends[:-1])):  # noqa: B905 - Python 3.9
        array[...] = values.reshape(array.shape)


def _derived_arrays(model: Any, data: Any) -> Iterator[np.ndarray]:
    """Yield the derived arrays whose size depends only on the model. Others belong to the contacts
    and constraints of a step, and the next step computes them again."""
    empty = importlib.import_module("mujoco").MjData(model)
    for name in sorted(name for name in dir(empty) if not name.startswith("_")):
        array = getattr(empty, name)
        if isinstance(array, np.ndarray) and array.dtype == np.float64 and array.size:
            yield getattr(data, name)


def _is_in(value: Any, objects: Sequence[Any]) -> bool:
    return any(value is other for other in objects)


def _is_unchanged(value: Any) -> bool:
    """Return whether a value need not be saved."""
    if isinstance(value, np.ndarray):
        # A view of MuJoCo's memory: the other environment has such a view too, and the physics
        # update it.
        return type(_owner(value)).__name__ == "PyCapsule"
    return isinstance(value, UNCHANGED_TYPES) or type(value).__module__.startswith(
        UNCHANGED_MODULES
    )


def _owner(array: Any) -> Any:
    """Return the owner of an array's memory."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def _pack(value: Any, arrays: Arrays, name: str) -> Any:
    """Return a value as JSON: a plain value, or a list of a tag and the content. An array is added
    to ``arrays``, and its content is the key there. ``name`` is for error messages."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        key = f"array.{len(arrays)}"
        arrays[key] = np.array(value)
        return ["array" if isinstance(value, np.ndarray) else "number", key]
    type_name = type(value).__name__
    if type(value) is SEQUENCE_TYPES.get(type_name):
        values = [_pack(v, arrays, f"{name}.{index}") for index, v in enumerate(value)]
        return [type_name, values, *([value.maxlen] if isinstance(value, deque) else [])]
    if type(value) is dict and all(type(key) in PLAIN_TYPES for key in value):
        return ["dict", [[k, _pack(v, arrays, f"{name}.{k}")] for k, v in value.items()]]
    if isinstance(value, np.random.Generator):
        return ["generator", _pack(value.bit_generator.state, arrays, name)]
    if isinstance(value, np.random.RandomState):
        return ["generator", _pack(value.get_state(legacy=False), arrays, name)]
    raise ValueError(f"{name} is of {type(value).__module__}.{type_name}, which cannot be saved")


def _unpack(packed: Any, arrays: Arrays, current: Any) -> Any:
    """Return the value that :func:`_pack` packed. If the attribute's ``current`` value is a
    generator, it is updated in place, because other objects may refer to it."""
    if not isinstance(packed, list):
        return packed
    tag, content, *rest = packed
    if tag == "array":
        return arrays[content].copy()
    if tag == "number":
        return arrays[content][()]
    if tag == "dict":
        return {key: _unpack(value, arrays, None) for key, value in content}
    if tag == "generator":
        state = _unpack(content, arrays, None)
        if isinstance(current, np.random.Generator):
            current.bit_generator.state = state
        else:
            current.set_state(state)
        return current
    values = [_unpack(value, arrays, None) for value in content]
    return deque(values, *rest) if tag == "deque" else SEQUENCE_TYPES[tag](values)
