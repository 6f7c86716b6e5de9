"""``rlinf evaluate`` and ``rlinf compare``: score models on sets of problems, and compare them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.commands.experiment import compose_words, drive, prepare_run
from pipeline.commands.results import resolve_weights
from pipeline.console import create_console
from pipeline.evaluation.results import (
    EvaluationResult,
    SetComparison,
    compare_results,
    read_evaluation,
)
from pipeline.evaluation.statistics import Estimate, Proportion
from pipeline.report.theme import render_template
from pipeline.resume import OnMismatch
from pipeline.run import Run
from pipeline.validate_config import warn_of_training_problems
from rlinf import package_paths
from rlinf.artifacts import write_atomic
from rlinf.config import RunConfig
from rlinf.envs.suite import SETS_KEY
from rlinf.errors import (
    ConfigError,
    InputError,
    InterruptedByUser,
    did_you_mean,
    translate_resource_errors,
)
from rlinf.hydra_config import to_override_value
from rlinf.user_code import translate_user_errors
from stages.layout import CONFIG_FILE

SUITE_FOLDER = package_paths.ROOT / "configs" / "suite"
GENERIC_SUITE = "data"
"""The protocol of ``--data``."""
RESERVED_NAMES = frozenset({*RunConfig.model_fields, "score"})
"""Names that no set may have, because overrides and metrics begin with them."""
PAGE = Path("report") / "evaluation.html"
"""The page of an evaluation, below its run directory."""


def run_evaluation(
    model: Path,
    suites: Sequence[str],
    data: Sequence[Path],
    overrides: Sequence[str],
    name: str | None = None,
    version: int | None = None,
    on_mismatch: OnMismatch = OnMismatch.ERROR,
) -> tuple[Path, EvaluationResult]:
    """Evaluate a model on sets of problems; an interrupted evaluation continues.

    Returns the run directory, which also has ``evaluation.json`` and the page, and the results.

    Args:
        model: a Hugging Face folder, or a run directory.
        suites: ``NAME=FILE``: a protocol of ``configs/suite``, and the file with its problems.
        data: files of problems that are graded as mathematics.
        overrides: overrides of the configuration; ``SET.KEY=VALUE`` changes the protocol of a set.
        name: name of the evaluation's run; by default the names of model and sets.
        version: version of the weights, if ``model`` is a run; by default the best or the newest.

    Raises:
        ConfigError, DataError, InputError: nothing was written.
    """
    sets = named_sets(suites, data)
    folder, _ = resolve_weights(model, version)
    words = evaluation_words(folder, sets, overrides)
    if not any(word.startswith("run.name=") for word in words):
        words.append(f"run.name={name or default_name(model, sets)}")
    with translate_resource_errors(), translate_user_errors():
        run = prepare_run(compose_words(words), on_mismatch)
        if (model / CONFIG_FILE).is_file():
            _warn_of_training_problems(Run.open(model), run)
        drive_evaluation(run)
    return run.folder, save_result(run.folder, read_evaluation(run))


def drive_evaluation(run: Run) -> None:
    """Run an evaluation to its end.

    Raises:
        InterruptedByUser: the user interrupted it.
    """
    try:
        drive(run)
    except InterruptedByUser:
        # Only this command writes the results, so rlinf resume would not suffice.
        raise InterruptedByUser(
            f"interrupted; committed results are kept in {run.folder}. Continue with the same "
            "rlinf evaluate command"
        ) from None


def save_result(folder: Path, result: EvaluationResult) -> EvaluationResult:
    """Write results and page into the run directory; returns the results."""
    result.save(folder)
    write_page(folder, result)
    return result


def _warn_of_training_problems(trained: Run, evaluation: Run) -> None:
    """Warn of problems that the evaluated model was trained on, if the run still has its files."""
    with contextlib.suppress(InputError):  # its data files are gone
        warn_of_training_problems(trained.config, evaluation.config.evaluate.sets)


def write_page(folder: Path, result: EvaluationResult) -> Path:
    """Write the page of an evaluation into its run directory; returns the file."""
    page = folder / PAGE
    page.parent.mkdir(exist_ok=True)
    write_atomic(page, render_template("evaluation.html.jinja", name=folder.name, result=result))
    return page


def named_sets(suites: Sequence[str], data: Sequence[Path]) -> dict[str, tuple[str, Path]]:
    """Return protocol and file of each set by its name.

    Raises:
        ConfigError: there is none, a suite is unknown or has no file, two sets have one name, or a
            name is reserved.
    """
    available = sorted(path.stem for path in SUITE_FOLDER.glob("*.yaml"))
    entries = []
    for entry in suites:
        suite, _, file = entry.partition("=")
        if suite not in available:
            raise ConfigError(
                f"--suite {entry}: unknown suite {suite!r}{did_you_mean(suite, available)}"
            )
        if read_robot_suite(suite) is not None:
            raise ConfigError(
                f"--suite {entry}: {suite} is a suite of robot tasks, which is evaluated alone and "
                f"without files: --suite {suite}"
            )
        if not file:
            raise ConfigError(
                f"--suite {suite}: name the file with its problems: --suite {suite}=FILE.jsonl; "
                f"{SUITE_FOLDER / suite}.yaml says which fields its rows have"
            )
        entries.append((suite, suite, Path(file)))
    entries += [(_set_name(path.stem), GENERIC_SUITE, path) for path in data]
    sets: dict[str, tuple[str, Path]] = {}
    for name, suite, path in entries:
        if name in RESERVED_NAMES:
            raise ConfigError(
                f"{path}: a set cannot have the name {name!r}, because the configuration or the "
                "metrics have it already; rename the file"
            )
        if name in sets:
            raise ConfigError(
                f"{path}: the set {name!r} is already that of {sets[name][1]}; rename the file"
            )
        sets[name] = suite, path.expanduser().absolute()
    if not sets:
        raise ConfigError(
            "nothing to evaluate on: add --suite NAME=FILE or --data FILE; suites: "
            + ", ".join(name for name in available if name != GENERIC_SUITE)
        )
    return sets


def read_robot_suite(name: str) -> dict[str, Any] | None:
    """Return the protocol of a suite of robot tasks: the sections ``task`` and ``evaluate``. None:
    there is no such suite, or it is one of problems."""
    path = SUITE_FOLDER / f"{name}.yaml"
    values = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return values if "evaluate" in values else None


def _set_name(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "set"


def default_name(model: Path, sets: Mapping[str, Any]) -> str:
    """Return the name of an evaluation's run."""
    text = "-".join([model.expanduser().absolute().name, *sets])
    return "evaluate-" + re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:100]


def evaluation_words(
    folder: Path, sets: Mapping[str, tuple[str, Path]], overrides: Sequence[str]
) -> list[str]:
    """Return the overrides that describe an evaluation.

    Raises:
        ConfigError: an override begins with the name of no set and of no section.
    """
    words = ["experiment=evaluation", f"model.path={to_override_value(str(folder))}"]
    for name, (suite, file) in sets.items():
        words.append(f"+suite@{SETS_KEY}.{name}={suite}")
        words.append(f"{SETS_KEY}.{name}.task.test={to_override_value(str(file))}")
    for word in overrides:
        name, is_nested, _ = word.lstrip("+~").partition("=")[0].partition(".")
        is_known = name in {*sets, *RunConfig.model_fields, "hydra"} or "@" in name
        if is_nested and not is_known:
            hint = did_you_mean(name, [*sets, *RunConfig.model_fields])
            raise ConfigError(
                f"{word}: there is no set {name!r}; the sets are {', '.join(sets)}"
                + (hint if "did you mean" in hint else "")
            )
        words.append(f"{SETS_KEY}.{word}" if name in sets and is_nested else word)
    return words


def show_result(result: EvaluationResult) -> None:
    """Print the results as a table: per cent ± standard error."""
    if result.suites:
        return show_suites(result)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("set", no_wrap=True)
    for header in ("problems", "k", "avg@k", "pass@k", "maj@k", "truncated"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, values in result.sets.items():
        size = values.samples_per_problem
        table.add_row(
            name,
            str(values.num_problems),
            str(size),
            percent(values.average),
            percent(values.pass_at_k.get(size)),
            percent(values.majority),
            f"{100 * values.truncated_share:.1f}",
        )
    console = create_console()
    console.print(table)
    for name, values in result.sets.items():
        for kind, number in values.failures.items():
            console.print(f"{name}: {number} responses not graded: {kind.replace('_', ' ')}")
    console.print(f"{result.tokens_per_s:,.0f} tokens/s in {result.generation_s:,.1f} s")


def show_suites(result: EvaluationResult) -> None:
    """Print the results on suites of robot tasks: shares in per cent with 95 % intervals."""
    console = create_console()
    for name, suite in result.suites.items():
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
        for header in ("task", "episodes", "success %", "95 % interval", "steps"):
            justify: Any = "left" if header == "task" else "right"
            table.add_column(header, justify=justify)
        for row in suite.tasks:
            text = f"{row.task} {row.instruction}".strip()
            table.add_row(text, *proportion_cells(row.success), f"{row.mean_steps:.0f}")
        for number, success in enumerate(suite.chain_success, 1):
            table.add_row(f"{number} subtasks or more", *proportion_cells(success), "")
        if suite.success is not None:
            table.add_row(name, *proportion_cells(suite.success), "")
        console.print(table)
        if suite.success is None:
            estimate = suite.average
            interval = estimate.interval or (estimate.mean, estimate.mean)
            console.print(
                f"{name}: average length {estimate.mean:.2f}, 95 % interval {interval[0]:.2f} to "
                f"{interval[1]:.2f}"
            )
        if suite.is_partial:
            console.print(
                f"{name}: partial, {len(suite.episodes)} of {suite.protocol_episodes} episodes; "
                "this is not the score of the published protocol"
            )
        for kind, number in suite.failures.items():
            console.print(f"{name}: {number} episodes failed and score 0: {kind}")
    console.print(
        f"{sum(len(s.episodes) for s in result.suites.values())} episodes in "
        f"{result.generation_s:,.1f} s"
    )


def proportion_cells(value: Proportion) -> tuple[str, str, str]:
    """Return the number of episodes, the share and its interval, in per cent."""
    low, high = value.interval
    return str(value.total), f"{100 * value.mean:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"


def show_comparison(left: Path, right: Path) -> dict[str, SetComparison]:
    """Print the comparison of two evaluations, paired by problem.

    Args:
        left, right: run directories of evaluations, or their ``evaluation.json``.

    Raises:
        InputError: an evaluation is missing or unfinished.
        ConfigError: they are not comparable.
    """
    results = EvaluationResult.load(left), EvaluationResult.load(right)
    comparisons = compare_results(*results)
    table = Table("set", "left", "right", "difference", "95 % interval", box=SIMPLE_HEAD)
    for name, values in comparisons.items():
        interval = values.difference.interval
        table.add_row(
            name,
            percent(values.left),
            percent(values.right),
            f"{100 * values.difference.mean:+.1f} points",
            "" if interval is None else f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}",
        )
    console = create_console()
    # Paths are too long for the head of a column.
    for side, path in (("left", left), ("right", right)):
        console.print(f"{side}: {path}", soft_wrap=True)
    console.print(table)
    for name in comparisons:
        a, b = (result.all_results[name].prompts_digest for result in results)
        if a != b:
            console.print(
                f"{name}: the prompts differ as tokens, because tokenizers or chat templates differ"
            )
    return comparisons


def percent(estimate: Estimate | None) -> str:
    """Return an estimate as per cent, with its standard error; empty if there is none."""
    if estimate is None:
        return ""
    error = estimate.standard_error
    return f"{100 * estimate.mean:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
