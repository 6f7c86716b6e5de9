"""Plain functions as rewards, also with the signatures of TRL and verl.

The names of its parameters say how a function is called:

- ``def reward(completion, answer, **row) -> float``: once per sample;
- ``def reward(prompts, completions, **columns) -> list[float]``, as in TRL: once per batch, with a
  list per argument (``trl.GRPOTrainer``, ``reward_funcs``);
- ``def compute_score(data_source, solution_str, ground_truth, extra_info=None)``, as in verl: once
  per sample; returns a number, or a dictionary with ``score`` (``custom_reward_function``).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from rlinf.config import Section
from rlinf.data.trajectory import Trajectory, accepted_answers
from rlinf.errors import ConfigError, InputError
from rlinf.progress import PROGRESS
from rlinf.registry import PROMPTS, RunComponents, import_user_attribute
from rlinf.rewards.base import Reward, RewardResources, RewardResult

NO_REWARD = "no_reward"
"""Kind of failure: all functions returned None for a sample."""
VERL_PARAMETERS = frozenset({"solution_str", "ground_truth"})
TRL_PARAMETER = "completions"


class FunctionRewardConfig(Section):
    """Keys of ``reward=function``."""

    function: str | tuple[str, ...] = Field(min_length=1)
    """``module:function``, or a list of several; their weighted sum is the reward."""
    weights: tuple[float, ...] = ()
    """Weight of each function; empty: 1 each."""
    conversational: bool = False
    """Pass prompts and completions to functions of TRL's form as lists of messages (``role`` and
    ``content``), as TRL does for chat data; otherwise as texts."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of all functions."""
        return (self.function,) if isinstance(self.function, str) else self.function

    @model_validator(mode="after")
    def _check_weights(self) -> FunctionRewardConfig:
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.functions)} functions; give one for "
                "each, or leave weights out"
            )
        return self


class FunctionReward(Reward):
    """The weighted sum of what functions return. A sample for which all of them return None is
    excluded from the update, as in TRL."""

    Config = FunctionRewardConfig
    config: FunctionRewardConfig
    requires = frozenset({PROMPTS})
    needs_score = False
    failure_kinds = (NO_REWARD,)

    @classmethod
    def check(cls, options: FunctionRewardConfig, run: RunComponents) -> None:
        super().check(options, run)
        for name in options.functions:
            load_function(name)

    def __init__(self, config: FunctionRewardConfig, resources: RewardResources) -> None:
        super().__init__(config, resources)
        self._functions = [load_function(name) for name in config.functions]

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> Sequence[RewardResult]:
        rows = [row_of(trajectory) for trajectory in trajectories]
        values = [
            self._call(name, function, rows)
            for name, function in zip(self.config.functions, self._functions, strict=True)
        ]
        weights = self.config.weights or (1.0,) * len(values)
        results = []
        for i in range(len(rows)):
            terms = [
                weight * _to_number(name, trajectories[i], column[i])
                for name, weight, column in zip(self.config.functions, weights, values, strict=True)
                if column[i] is not None
            ]
            if terms:
                results.append(RewardResult(math.fsum(terms)))
            else:
                results.append(RewardResult(0.0, valid=False, failure=NO_REWARD))
        return results

    def _call(
        self, name: str, function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]
    ) -> Sequence[Any]:
        """Return what a function returns for each row."""
        parameters = inspect.signature(function).parameters
        if TRL_PARAMETER in parameters:
            columns = _trl_columns(rows, conversational=self.config.conversational)
            return _one_per_sample(name, function(**_select(name, parameters, columns)), len(rows))
        if parameters.keys() >= VERL_PARAMETERS:
            arguments = map(_verl_arguments, rows)
        else:
            arguments = map(dict, rows)
        results = []
        for values in arguments:
            results.append(function(**_select(name, parameters, values)))
            PROGRESS.mark()
        return results


def load_function(name: str) -> Callable[..., Any]:
    """Import a function, ``module:function``.

    Raises:
        ConfigError: it cannot be imported, is not callable, is a class or async, or has parameters
            that have no name.
    """
    key = "reward.function"
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ConfigError(f"{key}: {name!r} names no function; expected MODULE:FUNCTION")
    function: Callable[..., Any] = import_user_attribute(module, attribute, key)
    if inspect.isclass(function) and issubclass(function, Reward):
        raise ConfigError(f"{key}: {name} is a class of rewards; set reward.name={name} instead")
    if inspect.isclass(function):
        raise ConfigError(f"{key}: {name} is a class; name a function, or an object with __call__")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{key}: {name} is async, and rewards are called without an event loop; name a plain "
            "function that calls asyncio.run"
        )
    if not callable(function):
        raise ConfigError(f"{key}: {name} is of type {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {name} has no readable signature; wrap it in def") from None
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ConfigError(f"{key}: {name} has parameters without a name; leave out the /")
    return function


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the values that a function may take by name: ``completion``, ``prompt``, ``answer``,
    ``completion_ids``, ``truncated``, and the fields of ``task.info_fields``. If a row has several
    reference answers, ``answer`` is their list."""
    answers = accepted_answers(str(trajectory.answer))
    known: dict[str, Any] = {
        "completion": str(trajectory.text),
        "prompt": str(trajectory.prompt_text),
        "answer": answers if len(answers) > 1 else answers[0],
        "completion_ids": trajectory.actions.tolist(),
        "truncated": trajectory.stop_reason == "length",
    }
    return {**trajectory.extra, **known}


def _trl_columns(rows: Sequence[Mapping[str, Any]], *, conversational: bool) -> dict[str, Any]:
    """Return the arguments of TRL's form: one list per column."""
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    prompts, completions = columns.pop("prompt", []), columns.pop("completion", [])
    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    return {**columns, "prompts": prompts, TRL_PARAMETER: completions}


def _verl_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of verl's form. ``extra_info`` has all values of the row, and those of
    its field ``extra_info``."""
    extra: dict[str, Any] = {**row}
    with contextlib.suppress(ValueError, TypeError):
        extra |= json.loads(row.get("extra_info", ""))  # fields that are no scalars are JSON
    return {
        **row,
        "data_source": row.get("data_source", ""),
        "solution_str": row["completion"],
        "ground_truth": row["answer"],
        "extra_info": extra,
    }


def _select(
    name: str, parameters: Mapping[str, inspect.Parameter], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that a function takes.

    Raises:
        InputError: a parameter without default has no value.
    """
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for parameter in parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in values:
            raise InputError(
                f"reward.function: {name} needs {parameter.name!r}; available: "
                f"{', '.join(sorted(values))}. Name further fields of the data file in "
                "task.info_fields, or give the parameter a default"
            )
    return {key: value for key, value in values.items() if takes_all or key in parameters}


def _one_per_sample(name: str, values: Any, count: int) -> Sequence[Any]:
    is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)
    if not is_list or len(values) != count:
        got = f"{len(values)} values" if is_list else f"{type(values).__name__} {values!r:.60}"
        raise InputError(
            f"reward.function: {name} returned {got} for {count} completions; it must return a "
            "list with one number for each"
        )
    return list(values)


def _to_number(name: str, trajectory: Trajectory, value: Any) -> float:
    """Return a function's value for a sample as a number.

    Raises:
        InputError: it is no finite number.
    """
    number = value
    if isinstance(value, Mapping) and "score" in value:
        number = value["score"]
    try:
        if isinstance(number, str | bytes):
            raise TypeError
        number = float(number)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"reward.function: {name} returned {type(value).__name__} {value!r:.60} for sample "
            f"{trajectory.identity.sample}; it must return a finite number"
        )
    return float(number)
