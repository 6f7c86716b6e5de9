"""``rlinf data``: the columns of data files, and the first prompts as the model gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.commands.experiment import compose_words, is_run_folder
from pipeline.console import create_console
from pipeline.run import Run
from rlinf.config import RunConfig, validate
from rlinf.data.json_lines import JsonLinesFile
from rlinf.envs.problem_set import ProblemSetEnvironment, RenderedProblem
from rlinf.envs.rendered_dataset import RenderedDataset
from rlinf.errors import ConfigError
from stages.factory import environment_class, policy_class

MAX_CELL = 60
"""Number of characters of a value in the table of columns."""
TYPES = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "dict": "mapping",
    "list": "list",
    "NoneType": "null",
}
"""Names of JSON types by their Python type."""


def show_data(words: Sequence[str], num_prompts: int) -> None:
    """Print columns, chat template and first prompts of each set of problems.

    Args:
        words: a run directory, or the overrides of an experiment.
        num_prompts: number of prompts of each set.

    Raises:
        ConfigError: the task has no files of problems, or the model has no tokenizer before a run.
        DataError: a file is missing, or a row is malformed; the message names the line.
    """
    config = (
        Run.open(Path(words[0])).config
        if is_run_folder(words)
        else validate(RunConfig, compose_words(words))
    )
    environment = _create_environment(config)
    num_shared, num_test = environment.train_test_overlap(environment.config)
    console = create_console()
    datasets = environment.prompt_sets()
    for dataset in datasets:
        problems = dataset.problems
        console.print(f"{dataset.key}: {_describe_size(dataset)}", soft_wrap=True)
        if isinstance(problems, JsonLinesFile):
            rows = JsonLinesFile(problems.path, dataset.key, lambda location, item: item)
            console.print(_column_table(rows[0]))
    if num_shared:
        console.print(f"{num_shared:,} of {num_test:,} test problems are training problems too")
    _print_template(console, environment)
    for dataset in datasets:
        for number, prompt in enumerate(dataset.first(range(min(num_prompts, len(dataset))))):
            title = f"{dataset.key}, prompt {number + 1}: {prompt.location}, "
            console.print(f"{title}{prompt.num_tokens} tokens", soft_wrap=True)
            console.rule()
            console.print(prompt.rendered, soft_wrap=True)
            console.rule()
            console.print(f"reference answer: {_shorten(prompt.answer)}", soft_wrap=True)


def _create_environment(config: RunConfig) -> ProblemSetEnvironment:
    environment_cls, options = environment_class(config)
    if not issubclass(environment_cls, ProblemSetEnvironment):
        raise ConfigError(
            f"task.name: {config.task.name!r} has no set of problems to show; rlinf report shows "
            "the samples of a run"
        )
    policy_cls, policy_options = policy_class(config)
    spec = environment_cls.model_spec(options)
    processor = policy_cls.check_spec(policy_options, spec)
    if processor is None:
        raise ConfigError("model.path: set it to a model folder, whose tokenizer makes the prompts")
    return environment_cls(options, processor)


def _describe_size(dataset: RenderedDataset[RenderedProblem]) -> str:
    problems = dataset.problems
    path = f"{problems.path}, " if isinstance(problems, JsonLinesFile) else ""
    omitted, limit = dataset.num_omitted, dataset.limit.key
    measured = "" if dataset.is_measured else f" of the first {dataset.num_measured:,}"
    left_out = f", {omitted:,}{measured or ' of them'} longer than {limit}" if omitted else ""
    return (
        f"{path}{len(problems):,} problems{left_out}; the longest prompt{measured} has "
        f"{dataset.longest} tokens"
    )


def _column_table(row: dict[str, Any]) -> Table:
    """Return the fields of a row; fields of mappings are below them, with dotted names."""
    table = Table("column", "type", "first row", box=SIMPLE_HEAD, pad_edge=False)
    for name, value in _fields(row):
        kind = type(value).__name__
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        table.add_row(name, TYPES.get(kind, kind), _shorten(text))
    return table


def _fields(row: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, dict) and value:
            fields += _fields(value, f"{prefix}{name}.")
        else:
            fields.append((f"{prefix}{name}", value))
    return fields


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CELL else f"{line[: MAX_CELL - 1]}…"


def _print_template(console: Console, environment: ProblemSetEnvironment) -> None:
    chat = environment.chat_format
    if chat.template is None:
        console.print("chat template: none, so the prompt is plain text", soft_wrap=True)
    else:
        values = ", ".join(f"{k}={json.dumps(v)}" for k, v in chat.template_kwargs.items())
        names = ", ".join(sorted(chat.argument_names))
        console.print(
            f"chat template: that of the tokenizer; model.chat_template_kwargs: {values or 'none'}"
            f"; arguments that it uses: {names or 'none'}",
            soft_wrap=True,
        )
    console.print(f"a response ends with: {chat.end_of_turn_text}", soft_wrap=True)
