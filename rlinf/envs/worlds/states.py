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

KEPT = "kept"
"""All but arrays and numbers of numpy's: JSON, uint8 ``[n]``."""
SAME = (
    *("gymnasium.spaces", "gymnasium.envs.registration", "gymnasium.envs.mujoco"),
    *("mujoco", "pygame", "numpy.dtypes"),
)
"""Modules of objects that an episode does not change, or that :func:`physics` saves."""
FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
PLAIN = (type(None), bool, int, float, str)
SEQUENCES = {"tuple": tuple, "list": list, "deque": deque}
GENERATORS = (np.random.Generator, np.random.RandomState)
CHANGING = ("efc_", "iefc_")
"""Begin the names of MuJoCo's data that has another size at each step, and is made anew in it."""
Arrays = dict[str, np.ndarray]


def layers(env: Any) -> list[Any]:
    """A Gymnasium environment, what it wraps, and so on."""
    found = [env]
    while found[-1] is not found[-1].unwrapped:
        found.append(found[-1].env)
    return found


def attributes(objects: Sequence[Any], others: Sequence[Any] = ()) -> Arrays:
    """What objects keep.

    Args:
        others: which they may also hold, and which are saved elsewhere.

    Raises:
        ValueError: one keeps something that is not plain.
    """
    arrays: Arrays = {}
    kept, known = [], [*objects, *others]
    for one in objects:
        values = {n: v for n, v in vars(one).items() if not (_same(v) or _among(v, known))}
        kept.append({n: _packed(v, arrays, f"{type(one).__name__}.{n}") for n, v in values.items()})
    text = json.dumps(kept).encode()
    return {KEPT: np.frombuffer(text, np.uint8), **arrays}


def put_attributes(objects: Sequence[Any], arrays: Arrays) -> None:
    """Give objects what :func:`attributes` said of others of their kind."""
    for one, kept in zip(objects, json.loads(arrays[KEPT].tobytes())):  # noqa: B905 - Python 3.9
        for name, packed in kept.items():
            setattr(one, name, _unpacked(packed, arrays, vars(one).get(name)))


def physics(model: Any, data: Any) -> Arrays:
    """The state of a MuJoCo simulation, and what was computed from it: that is of the last step,
    in which it comes before the state, so it does not follow from this one."""
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {"physics": state, **{f"physics.{name}": a.copy() for name, a in _computed(data)}}


def put_physics(model: Any, data: Any, arrays: Arrays) -> None:
    """Continue where :func:`physics` was asked, with an equal model."""
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(model, data, arrays["physics"], kind)
    mujoco.mj_forward(model, data)
    for name, array in _computed(data):
        array[...] = arrays[f"physics.{name}"]


def _computed(data: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(dir(data)):
        if not name.startswith(("_", *CHANGING)):
            array = getattr(data, name)
            if isinstance(array, np.ndarray) and array.dtype == np.float64 and array.size:
                yield name, array


def _among(value: Any, objects: Sequence[Any]) -> bool:
    return any(value is one for one in objects)


def _same(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        # A view of MuJoCo's memory: so it is in the other world, and moves with its physics.
        while isinstance(value, np.ndarray):
            value = value.base
        return type(value).__name__ == "PyCapsule"
    return isinstance(value, FIXED) or type(value).__module__.startswith(SAME)


def _packed(value: Any, arrays: Arrays, where: str) -> Any:
    """As JSON has it; what it has not by its kind, arrays by their names."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        arrays[where] = np.array(value)
        return ["array" if isinstance(value, np.ndarray) else "number", where]
    kind = type(value).__name__
    if type(value) is SEQUENCES.get(kind):
        most = [value.maxlen] if isinstance(value, deque) else []
        return [kind, [_packed(v, arrays, f"{where}.{n}") for n, v in enumerate(value)], *most]
    if type(value) is dict and all(type(key) in PLAIN for key in value):
        return ["dict", [[k, _packed(v, arrays, f"{where}.{k}")] for k, v in value.items()]]
    if isinstance(value, GENERATORS):
        random = isinstance(value, np.random.Generator)
        state = value.bit_generator.state if random else value.get_state(legacy=False)
        return ["generator", _packed(state, arrays, where)]
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
    return deque(values, *rest) if kind == "deque" else SEQUENCES[kind](values)
