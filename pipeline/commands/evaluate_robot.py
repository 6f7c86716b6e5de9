"""``rlinf evaluate FOLDER --suite S`` for robot policies, on published suites of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.commands.evaluate import (
    default_name,
    drive_evaluation,
    read_robot_suite,
    save_result,
)
from pipeline.commands.experiment import compose_words, prepare_run
from pipeline.commands.results import resolve_weights
from pipeline.console import create_console
from pipeline.evaluation.policy_check import check_policy, policy_name
from pipeline.evaluation.results import EvaluationResult, read_evaluation
from pipeline.evaluation.robot_suite import RUNTIME_TASK_KEYS
from pipeline.resume import OnMismatch
from pipeline.run import Run
from rlinf.config import RunConfig, validate
from rlinf.envs.simulators.requirements import get_requirements
from rlinf.errors import ConfigError, translate_resource_errors
from rlinf.hydra_config import to_override_value
from rlinf.user_code import translate_user_errors
from stages.factory import policy_class
from stages.layout import CONFIG_FILE

PROTOCOL_SECTIONS = ("task", "evaluate")
RUNTIME_KEYS = frozenset(
    {
        *(f"task.{key}" for key in RUNTIME_TASK_KEYS),
        *(f"evaluate.{key}" for key in ("videos", "video_episodes", "video_fps", "every")),
    }
)
"""Keys of a suite that do not change its results."""


def run_robot_evaluation(
    model: Path,
    suite: str,
    overrides: Sequence[str],
    name: str | None = None,
    version: int | None = None,
    episodes: int | None = None,
    on_mismatch: OnMismatch = OnMismatch.ERROR,
) -> tuple[Path, EvaluationResult]:
    """Evaluate a robot policy on a suite; returns the run directory and the results.

    Args:
        model: a policy folder, or the run directory of a policy with ``model.path``.
        suite: name of a protocol of robot tasks in ``configs/suite``.
        overrides: overrides of the configuration; those that change the protocol are rejected.
        name: name of the evaluation's run; by default the names of policy and suite.
        version: version of the weights, if ``model`` is a run; by default the best or the newest.
        episodes: number of episodes, if only a part of the protocol's; a multiple of the tasks.

    Raises:
        ConfigError, DataError, InputError: the policy or an override contradicts the protocol, or
            files are missing; nothing was written.
    """
    words, values = compose_suite(model, suite, overrides, version, episodes)
    for _ in check_policy(validate(RunConfig, values), suite, trained_task(model)):
        pass
    if not any(word.startswith("run.name=") for word in words):
        words.append(f"run.name={name or default_name(model, {suite: None})}")
    with translate_resource_errors(), translate_user_errors():
        run = prepare_run(compose_words(words), on_mismatch)
        drive_evaluation(run)
    protocol_episodes = int(_protocol(suite)["evaluate"]["samples"])
    return run.folder, save_result(run.folder, read_evaluation(run, suite, protocol_episodes))


def show_check(
    model: Path, suite: str, overrides: Sequence[str], version: int | None = None
) -> None:
    """Print in which aspects a policy fits a suite.

    Raises:
        ConfigError, DataError, InputError: the first aspect that does not fit, with its file and
            key.
    """
    _, values = compose_suite(model, suite, overrides, version)
    table = Table("aspect", "policy", suite, "source", box=SIMPLE_HEAD)
    console = create_console()
    try:
        for aspect in check_policy(validate(RunConfig, values), suite, trained_task(model)):
            table.add_row(aspect.name, aspect.folder, aspect.suite, aspect.source)
    finally:
        if table.row_count:
            console.print(table)
    console.print(f"{model} fits {suite} in these aspects")


def compose_suite(
    model: Path,
    suite: str,
    overrides: Sequence[str],
    version: int | None = None,
    episodes: int | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides that describe an evaluation, and its composed configuration.

    Raises:
        ConfigError, DataError, InputError: an override changes the protocol, or the folder has no
            policy of which evaluations are possible.
    """
    folder, _ = resolve_weights(model, version)
    base = ["experiment=evaluation", "engine=direct", f"+suite={suite}"]
    base += _model_words(model, folder, overrides)
    if episodes is not None:
        num_tasks = _num_tasks(_protocol(suite)["task"])
        if episodes < 1 or episodes % num_tasks:
            raise ConfigError(
                f"--episodes {episodes}: {suite} has {num_tasks} tasks, which have equally many "
                f"episodes; set a multiple of {num_tasks}"
            )
        base.append(f"evaluate.samples={episodes}")
    words = [*base, *overrides]
    # The name is not part of the protocol, and run.name has no default.
    expected = compose_words([*base, "run.name=check"])
    values = compose_words([*base, "run.name=check", *overrides])
    _check_protocol(suite, expected, values)
    return words, values


def trained_task(model: Path) -> Mapping[str, Any] | None:
    """Return the ``task`` section of a run; None for a policy folder."""
    if not (model / CONFIG_FILE).is_file():
        return None
    task: Mapping[str, Any] = Run.open(model).config.task.model_dump()
    return task


def _protocol(suite: str) -> dict[str, Any]:
    protocol = read_robot_suite(suite)
    assert protocol is not None, "the command line chooses only such suites"
    return protocol


def _num_tasks(task: Mapping[str, Any]) -> int:
    return len(get_requirements(task["simulator"]).task_sets.get(task["id"], (task["id"],)))


def _model_words(model: Path, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose the policy of a folder.

    Raises:
        ConfigError: the policy does not start from a folder.
        DataError: the folder is of no robot policy.
    """
    path = f"model.path={to_override_value(str(folder))}"
    if (model / CONFIG_FILE).is_file():
        config = Run.open(model).config
        if policy_class(config)[0].folder_class is None:
            raise ConfigError(
                f"{model}: model.name is {config.model.name}, and suites are for "
                "vision-language-action policies"
            )
        options = {k: v for k, v in (config.model.model_extra or {}).items() if k != "path"}
        stored = [f"model.{key}={to_override_value(value)}" for key, value in options.items()]
        return [f"model={config.model.name}", *stored, path]
    if any(word.startswith("model=") for word in overrides):
        return [path]
    return [f"model={policy_name(folder)}", path]


def _check_protocol(suite: str, expected: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check that overrides change nothing of the protocol. Cameras may be left out, because a
    policy need not observe them all.

    Raises:
        ConfigError: an override changes the protocol; the message names the key.
    """
    task = expected["task"]
    requirements = get_requirements(task["simulator"])
    paths = {f"task.kwargs.{key}" for key in (*requirements.assets, *requirements.optional)}
    for section in PROTOCOL_SECTIONS:
        for key, before, after in _differences(expected[section], values[section], section):
            is_removed_camera = key.startswith("task.images.") and after is None
            if key in RUNTIME_KEYS | paths or is_removed_camera:
                continue
            cure = "--episodes N runs only a part" if key == "evaluate.samples" else "leave it out"
            raise ConfigError(
                f"{key}: {after}, and the protocol of {suite} has {before}; {cure}, because "
                "the score could not be compared with published ones"
            )
    for key, path in values["task"]["kwargs"].items():
        if path is None:
            source = {**requirements.assets, **requirements.optional}[key]
            raise ConfigError(f"task.kwargs.{key}: is not set, and {suite} needs it; give {source}")


def _differences(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys whose values differ, with both values (None: there is none)."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from _differences(before.get(name), after.get(name), f"{key}.{name}")
    elif before != after:
        yield key, before, after
