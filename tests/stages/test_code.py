"""Which code an output depends on."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf import __version__, package_paths
from rlinf.config import RunConfig, validate
from rlinf.errors import CodeIdentityError
from stages import identity
from stages.identity import (
    CodeSnapshot,
    _ast_tokens,
    _imports,
    _module_file_digest,
    _module_path,
    _parse_module,
    product_digests,
    read_code_snapshot,
    stage_code_digest,
)
from stages.layout import CODE_FILE

Compose = Callable[..., dict[str, Any]]


def meaning(text: str) -> bytes:
    return b"".join(_ast_tokens(ast.parse(text)))


PLAIN = "x: int = 1\ndef f(a):\n    return a + x\n"


@pytest.mark.parametrize(
    "text",
    [
        '"""Says what it is."""\n\n# why\nx: int = 1  # one\n\n\ndef f(a):\n    return (a + x)\n',
        'x: int = 1\n"""One."""\ndef f(\n    a,\n):\n    "Adds."\n    return a + x\n',
    ],
)
def test_comments_docstrings_and_layout_do_not_count(text: str) -> None:
    assert meaning(text) == meaning(PLAIN)


@pytest.mark.parametrize(
    "text", [PLAIN.replace("1", "2"), PLAIN.replace("+", "-"), PLAIN.replace("f(a)", "f(a, b)")]
)
def test_everything_else_does(text: str) -> None:
    assert meaning(text) != meaning(PLAIN)


def test_imports_are_found_wherever_they_are() -> None:
    text = (
        "import a.b\ndef f():\n    from .c import d\n    from ..e import f\n    from . import g\n"
    )
    found = set(_imports(ast.parse(text), "top.sub"))
    assert {"a.b", "top.sub.c", "top.sub.c.d", "top.e", "top.e.f", "top.sub.g"} <= found


def test_every_source_file_of_a_checkout_counts(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate(RunConfig, compose())
    code = CodeSnapshot.current(config)
    assert {"rlinf/trainers/fsdp.py", "stages/train.py", "rlinf/engines/vllm.py"} <= set(
        code.product
    )
    assert not [name for name in code.product if not name.startswith(("rlinf/", "stages/"))]
    edited = code.product | {"stages/train.py": "edited"}
    monkeypatch.setattr(identity, "product_digests", lambda: edited)
    other = CodeSnapshot.current(config)
    assert other.changed_names(code) == ["stages/train.py"]
    assert other.digest("rollout") != code.digest("rollout")


def test_the_code_of_a_wheel_counts_by_its_version(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_paths, "IS_WHEEL", True)
    product_digests.cache_clear()
    try:
        code = CodeSnapshot.current(validate(RunConfig, compose()))
    finally:
        product_digests.cache_clear()
    assert code.product == {"rlinf": __version__}


def test_the_classes_of_a_stage_are_part_of_its_code(compose: Compose) -> None:
    code = CodeSnapshot.current(validate(RunConfig, compose()))
    train, rollout = (set(code.stages[stage]) for stage in ("train", "rollout"))
    assert "rlinf.algorithms.group_relative:GRPO" in train
    assert "rlinf.algorithms.group_relative:GRPO" not in rollout
    assert "rlinf.engines.transformers:TransformersEngine" in rollout


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's on the module path: a package, and a module beside it."""
    folder = tmp_path / "outside_algorithm"
    folder.mkdir()
    (folder / "__init__.py").write_text("from outside_algorithm.unlike import Y\n")
    (folder / "mine.py").write_text(
        "import numpy\nimport json\nimport outside_helper\nfrom . import shares\n"
        "from rlinf.algorithms.group_relative import GRPO\nclass Mine(GRPO): ...\n"
    )
    (folder / "shares.py").write_text("X = 1\n")
    (folder / "unlike.py").write_text("Y = 1\n")
    (folder / "unused.py").write_text("Z = 1\n")
    (tmp_path / "outside_helper.py").write_text("W = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (_parse_module, _module_file_digest, _module_path):
        cached.cache_clear()
    return tmp_path


def code_from_outside(compose: Compose) -> CodeSnapshot:
    values = compose()
    values["algorithm"] = {"name": "outside_algorithm.mine:Mine"}
    for cached in (_parse_module, _module_file_digest):
        cached.cache_clear()
    return CodeSnapshot.current(validate(RunConfig, values))


def test_a_class_from_outside_counts_with_all_it_imports_that_is_not_installed(
    compose: Compose, outside: Path
) -> None:
    names = set(code_from_outside(compose).stages["train"])
    assert {
        "outside_algorithm.mine:Mine",
        "outside_algorithm.mine",
        "outside_algorithm.shares",
        "outside_algorithm",
        "outside_algorithm.unlike",
        "outside_helper",
    } <= names
    assert not names & {"numpy", "json", "outside_algorithm.unused"}


@pytest.mark.parametrize(
    ("file", "same"),
    [
        ("outside_algorithm/mine.py", False),
        ("outside_algorithm/__init__.py", False),
        ("outside_helper.py", False),
        ("outside_algorithm/unused.py", True),
    ],
)
def test_an_edit_of_a_data_file_changes_the_identity_of_the_stages_that_use_it(
    compose: Compose, outside: Path, file: str, same: bool
) -> None:
    before = code_from_outside(compose)
    with (outside / file).open("a") as text:
        text.write("\nFURTHER = 2\n")
    after = code_from_outside(compose)
    assert (before.digest("train") == after.digest("train")) is same
    assert before.digest("rollout") == after.digest("rollout")


def run_with_files(compose: Compose, folder: Path) -> RunConfig:
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    values = compose()
    values["task"] = {"name": "jsonl", **files}
    return validate(RunConfig, values)


def test_what_is_in_a_data_file_counts_where_the_file_lies_does_not(
    compose: Compose, tmp_path: Path
) -> None:
    """Or a run whose problems were edited would go on as if it were the same."""
    config = run_with_files(compose, tmp_path)
    before = CodeSnapshot.current(config)
    assert set(before.files) == {"file:task.train", "file:task.test"}
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "3"}\n')
    after = CodeSnapshot.current(config)
    assert before.digest("rollout") != after.digest("rollout")
    assert after.changed_names(before) == ["file:task.train"]
    (tmp_path / "moved").mkdir()
    assert CodeSnapshot.current(run_with_files(compose, tmp_path / "moved")) == before


def test_the_data_file_of_a_simulator_counts_too(compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "chains.json").write_text("[1]")
    values = compose()
    kwargs = {"chains": str(tmp_path / "chains.json"), "steps": 4}
    values["task"] = {"name": "gym", "id": "CartPole-v1", "kwargs": kwargs}
    config = validate(RunConfig, values)
    before = CodeSnapshot.current(config)
    assert set(before.files) == {"file:task.kwargs.chains"}
    (tmp_path / "chains.json").write_text("[2]")
    assert CodeSnapshot.current(config).changed_names(before) == ["file:task.kwargs.chains"]


@pytest.mark.parametrize("place", ["meta/info.json", "data/chunk-000/episode_000000.parquet"])
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_demonstrations_count_for_the_stages_that_learn_from_them(
    compose: Compose, tmp_path: Path, place: str, coefficient: float
) -> None:
    """For updates only in co-training. Tables and videos of a data set count by their size."""
    for name in ("meta/info.json", "data/chunk-000/episode_000000.parquet"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        (tmp_path / "set" / name).write_text("{}")
    values = compose(f"algorithm.sft_loss_coef={coefficient}")
    data = {"demonstration_data": str(tmp_path / "set")}
    values["task"] = {"name": "gym", "id": "CartPole-v1", **data}
    config = validate(RunConfig, values)
    before = CodeSnapshot.current(config)
    assert set(before.files) == {"file:task.demonstration_data"}
    (tmp_path / "set" / place).write_text("{ }")
    after = CodeSnapshot.current(config)
    assert after.changed_names(before) == ["file:task.demonstration_data"]
    assert before.digest("sft") != after.digest("sft")
    assert (before.digest("train") != after.digest("train")) == (coefficient > 0)


def test_an_interpreter_is_no_data_file(compose: Compose) -> None:
    values = compose()
    values["task"] = {"name": "gym", "id": "CartPole-v1", "python": sys.executable}
    assert CodeSnapshot.current(validate(RunConfig, values)).files == {}


def test_a_stage_whose_data_file_was_edited_meanwhile_is_refused(
    compose: Compose, tmp_path: Path
) -> None:
    config = run_with_files(compose, tmp_path)
    code = CodeSnapshot.current(config)
    (tmp_path / CODE_FILE).write_text(code.to_json())
    assert stage_code_digest(tmp_path, config, "rollout") == code.digest("rollout")
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(
        CodeIdentityError, match=r"rollout: the file of task\.train has changed since"
    ):
        stage_code_digest(tmp_path, config, "rollout")


def test_a_record_is_read_as_it_was_written(compose: Compose, tmp_path: Path) -> None:
    code = CodeSnapshot.current(validate(RunConfig, compose()))
    assert read_code_snapshot(tmp_path) is None
    (tmp_path / CODE_FILE).write_text(code.to_json())
    assert read_code_snapshot(tmp_path) == code
    assert not code.changed_names(code)
    (tmp_path / CODE_FILE).write_bytes(b"\xff")
    with pytest.raises(CodeIdentityError, match="damaged"):
        read_code_snapshot(tmp_path)


def test_what_other_processes_run_by_its_name_counts(
    compose: Compose, outside: Path, tmp_path: Path
) -> None:
    values = compose()
    values["task"] = {"name": "gym", "id": "any", "simulator": "metaworld"}
    (tmp_path / "my_world.py").write_text("import outside_helper\ndef make(): ...\n")
    values["task"]["simulator"] = "my_world:make"
    rollout = set(CodeSnapshot.current(validate(RunConfig, values), "rollout").stages["rollout"])
    assert {"my_world", "outside_helper"} <= rollout
    values["task"]["simulator"] = "in_another_interpreter:make"
    assert not any(
        "another" in name for name in CodeSnapshot.current(validate(RunConfig, values)).modules
    )


def test_a_judges_key_is_no_data_file(compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    values = compose()
    endpoint = {"base_url": "http://localhost/v1", "api_key_file": str(tmp_path / "key")}
    values["reward"] = {"name": "judge", "endpoint": endpoint, "model": "m", "prompt": "{response}"}
    assert CodeSnapshot.current(validate(RunConfig, values)).files == {}


def test_prior_data_in_a_folder_count_by_what_is_in_them(compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "prior" / "data").mkdir(parents=True)
    (tmp_path / "prior" / "data" / "one.h5").write_text("1")
    values = compose()
    values["algorithm"]["offline_data"] = str(tmp_path / "prior")
    config = validate(RunConfig, values)
    before = CodeSnapshot.current(config)
    assert set(before.files) == {"file:algorithm.offline_data"}
    (tmp_path / "prior" / "data" / "two.h5").write_text("2")
    after = CodeSnapshot.current(config)
    assert after.changed_names(before) == ["file:algorithm.offline_data"]
    assert after.digest("train") != before.digest("train")
    (tmp_path / "prior").rename(tmp_path / "moved")
    values["algorithm"]["offline_data"] = str(tmp_path / "moved")
    assert CodeSnapshot.current(validate(RunConfig, values)) == after
