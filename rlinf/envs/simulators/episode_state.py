"""What the objects of a simulator keep, as arrays, and put back into others of their kind.

A world is put where another one was by beginning the same episode (the seed makes everything that
stays the same in it) and putting over it what changed since: plain attributes, generators of random
numbers, MuJoCo's data. Nothing is pickled. Whatever is none of these is refused by its name: what
was passed over would go on from somewhere else, and nobody would see it.
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
"""All but arrays and numbers of numpy's: JSON, uint8 ``[n]``."""
UNCHANGED_MODULES = (
    *("gymnasium.spaces", "gymnasium.envs.registration", "gymnasium.envs.mujoco"),
    *("mujoco", "pygame", "numpy.dtypes"),
)
"""Modules of objects that an episode does not change, or that :func:`physics` saves."""
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
    """A Gymnasium environment, what it wraps, and so on."""
    found = [env]
    while found[-1] is not found[-1].unwrapped:
        found.append(found[-1].env)
    return found


def save_attributes(objects: Sequence[Any], others: Sequence[Any] = ()) -> Arrays:
    """What objects keep.

    Args:
        others: which they may also hold, and which are saved elsewhere.

    Raises:
        ValueError: one keeps something that is not plain.
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
    """Give objects what :func:`attributes` said of others of their kind."""
    for one, kept in zip(objects, json.loads(arrays[ATTRIBUTES_KEY].tobytes())):  # noqa: B905 - Python 3.9
        for name, packed in kept.items():
            setattr(one, name, _unpacked(packed, arrays, vars(one).get(name)))


def save_physics(model: Any, data: Any) -> Arrays:
    """The state of a MuJoCo simulation, and what was computed from it: that is of the last step,
    in which it comes before the state, so it does not follow from this one."""
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {
        "physics": state,
        "computed": np.concatenate([a.ravel() for a in _computed(model, data)]),
    }


def restore_physics(model: Any, data: Any, arrays: Arrays) -> None:
    """Continue where :func:`physics` was asked, with an equal model.

    Raises:
        ValueError: by another version of MuJoCo.
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
    """What a simulation keeps in arrays that the model alone sizes. Others are of the contacts and
    constraints of a step, and made anew in the next one; data in which nothing was computed have
    none of them."""
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
    """Whose memory an array is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def _packed(value: Any, arrays: Arrays, where: str) -> Any:
    """As JSON has it; what it has not by its kind, arrays by their names.

    Args:
        where: what it is called where it is refused.
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
        there: what stands in its place: generators stay, others may hold them too.
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
