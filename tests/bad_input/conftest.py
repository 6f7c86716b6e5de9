"""What bad input is made from: whole configurations, a small checkpoint, problem files."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import compose as hydra_compose
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from tests.bad_input.door import Base, merged
from tests.conftest import QUIET, TINY

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def composed() -> dict[str, dict[str, Any]]:
    """One composed configuration of each experiment: composing takes longer than checking."""
    return {
        "arithmetic": hydra_compose(["experiment=arithmetic_grpo", *QUIET, *TINY]),
        "cartpole": hydra_compose(["experiment=cartpole_ppo", *QUIET]),
        "jsonl": hydra_compose(
            [
                "experiment=jsonl_grpo",
                *QUIET,
                "++run.name=tiny",
                "++rollout.batch_size=4",
                "++rollout.group_size=4",
                "++rollout.horizon=8",
                "++evaluate.samples=4",
                "++model.path=MODEL",
                "++task.train=TRAIN",
                "++task.test=TEST",
            ]
        ),
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few thousand weights with a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    folder.mkdir()
    config = CausalLMConfig(
        architecture="llama", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32
    )
    CausalLM.create(config, {"alphabet": ALPHABET}, 0, folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def problems(path: Path, first: int, count: int) -> Path:
    """A file of problems that are not those of another ``first``."""
    rows = ({"question": f"{i} and 1?", "answer": str(i + 1)} for i in range(first, first + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def base(composed: dict[str, dict[str, Any]], checkpoint: Path, tmp_path: Path) -> Base:
    """Makes the values of an experiment, with files of its own, and changes."""

    def make(experiment: str, changes: dict[str, Any]) -> dict[str, Any]:
        values = copy.deepcopy(composed[experiment])
        values["run"]["root"] = str(tmp_path / "runs")
        if experiment == "jsonl":
            files = tmp_path / "files"
            files.mkdir(exist_ok=True)
            values["task"]["train"] = str(problems(files / "train.jsonl", 0, 8))
            values["task"]["test"] = str(problems(files / "test.jsonl", 100, 8))
            values["model"]["path"] = str(files / "model")
            if not (files / "model").exists():
                shutil.copytree(checkpoint, files / "model")
        return merged(values, changes)

    return make


@pytest.fixture
def files(base: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """The folder of ``model``, ``train.jsonl`` and ``test.jsonl``, for a test to spoil."""
    base("jsonl", {})
    return tmp_path / "files"
