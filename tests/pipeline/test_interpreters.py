"""Stages under interpreters that the configuration names."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from launchers.launcher import JobSpec
from launchers.local import LocalLauncher
from launchers.sbatch import batch_script
from pipeline.commands.experiment import run_experiment
from pipeline.resources import stage_interpreter
from rlinf import api
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, InputError
from rlinf.interpreters import (
    ANY_TORCH_VARIABLE,
    INTERPRETERS_VARIABLE,
    check_interpreter,
    check_torch_version,
    missing_modules,
    resolve_interpreter,
)
from slurm.jobs import JobResources, JobState
from stages.flow import on_policy
from tests.environments import need_environment
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
TELL = "import os, sys; open(os.environ['TOLD'], 'a').write(' '.join(sys.orig_argv) + '\\n')\n"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Of a virtual environment with this one's packages, whose processes say what they run."""
    folder = tmp_path / "envs" / "small"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "theirs.pth").write_text(str(Path(numpy.__file__).parents[1]) + "\n")
    (site / "sitecustomize.py").write_text(TELL)
    return str(folder / "bin" / "python")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_stages_run_under_the_interpreter_of_what_they_compute_with(
    python: str, tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tmp_path / "told"
    site = tmp_path / "site.yaml"
    site.write_text(f"interpreters:\n  small: {python}\n")
    monkeypatch.setenv("TOLD", str(values))
    monkeypatch.setenv(INTERPRETERS_VARIABLE, "{}")
    run_experiment(compose("cluster=local", "iterations=1", "run.name=plain"))
    assert not values.exists()
    names = ["engine.python=small", f"cluster.site={site}", "run.name=named"]
    run_experiment(compose("cluster=local", "iterations=1", *names))
    commands = [line.split() for line in values.read_text().splitlines()]
    # Others of its processes look whether it is fit.
    ran = {words[words.index("stages") + 1] for words in commands if "stages" in words}
    assert ran == {"rollout", "evaluate"}
    assert contents(tmp_path / "named") == contents(tmp_path / "plain"), (
        "it is no part of an identity"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_trains_in_an_environment_that_has_the_trainer(
    tmp_path: Path, compose: Compose, tiny_run: Path
) -> None:
    """ZeRO with two processes, and the engine in this one's: what FSDP2 makes of it."""
    need_environment("deepspeed")
    words = [
        "cluster=local",
        "trainer=deepspeed",
        "trainer.python=deepspeed",
        "trainer.zero_stage=1",
    ]
    plan = tmp_path / "plan.yaml"
    plan.write_text("stages: {train: {processes: 2}}\n")
    run_experiment(compose(*words, f"++plan={plan}"))
    one, other = (api.load(folder) for folder in (tiny_run, tmp_path / "tiny"))
    right, found = one.weights(), other.weights()
    assert right.keys() == found.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-3, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("environment", ["sglang", "vllm"])
def test_a_run_generates_in_an_environment_that_has_the_engine(
    tmp_path: Path, compose: Compose, environment: str
) -> None:
    """In processes of the stages that train as well, where one has both."""
    need_environment(environment)
    pool = tmp_path / "pool.yaml"
    stages = "[rollout, reward, inference, train]"
    pool.write_text(f"pools:\n  - {{stages: {stages}, devices: {{cpu: 1}}}}\n")
    wide = [f"engine={environment}_in_process", "model.hidden=128", "cluster=local"]
    refused = rf"sft\.eval_generation: .*set trainer\.python={environment}"
    with pytest.raises(ConfigError, match=refused):
        run_experiment(compose(*wide))
    run_experiment(compose(*wide, "run.name=apart", "sft.eval_generation=false"))
    run_experiment(
        compose(*wide, "run.name=one", f"trainer.python={environment}", f"++plan={pool}")
    )
    for name in ("apart", "one"):
        rows = api.load(tmp_path / name).metrics()
        assert len(rows) == 2
        assert max(row["train/rollout_logprob_diff"] for row in rows) < 1e-5


def test_a_stage_has_the_interpreter_of_what_it_computes_with(
    python: str, compose: Compose
) -> None:
    both = validate(RunConfig, compose(f"engine.python={python}", "trainer.python=/bin/sh"))
    found = {name: stage_interpreter(both, on_policy, name) for name in on_policy.all_stages}
    engine, trainer = python, "/bin/sh"
    assert found == {
        **dict.fromkeys(("sft", "inference", "train", "sync"), trainer),
        **dict.fromkeys(("rollout", "evaluate"), engine),
        "reward": None,
    }
    assert stage_interpreter(both, on_policy, "inference", "train", "reward") == trainer
    with pytest.raises(ConfigError, match="two interpreters") as error:
        stage_interpreter(both, on_policy, "rollout", "train")
    assert "engine.python of rollout and trainer.python of train" in str(error.value)


def test_a_process_starts_under_its_interpreter(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(values))
    needs = JobResources(interpreter=python)
    launcher = LocalLauncher()
    job = JobSpec("one", (), tmp_path / "out", tmp_path / "logs", needs, module="this")
    identity = launcher.submit(job)
    while launcher.poll([identity])[identity].state.is_active:
        time.sleep(0.05)
    assert launcher.poll([identity])[identity].state is JobState.DONE
    assert values.read_text().split() == [python, "-m", "this"]
    assert f"{python} -u -m launchers.job_entrypoint" in batch_script([job])


def test_what_cannot_run_is_refused_before_anything_is_written(
    python: str, compose: Compose, tmp_path: Path
) -> None:
    for words, text in (
        (["cluster=local", "trainer.python=/no/python"], r"trainer\.python: there is no interpr"),
        (["cluster=inprocess", f"engine.python={python}"], r"engine\.python: .*own process"),
        (["trainer=deepspeed"], r"trainer=deepspeed needs the package .*rlinf-slurm\[deepspeed\]"),
        (
            ["engine=vllm_in_process", "engine.python=null"],
            r"engine=vllm_in_process needs the package .*rlinf-slurm\[vllm\]",
        ),
        (
            ["engine=vllm_in_process", "cluster=local", f"engine.python={python}"],
            r"engine\.python: .* lacks the package vllm",
        ),
        (
            ["trainer=deepspeed", "cluster=local", f"trainer.python={python}"],
            r"trainer\.python: .* lacks the package deepspeed",
        ),
    ):
        values = compose(*words)
        with pytest.raises(InputError, match=text) as error:
            run_experiment(values)
        assert error.value.exit_code == 65
        assert not (Path(values["run"]["root"]) / values["run"]["name"]).exists()


def test_a_table_of_interpreters_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRETERS_VARIABLE, "{bad")
    with pytest.raises(ConfigError, match="RLINF_INTERPRETERS: no JSON object"):
        resolve_interpreter("any", "engine.python")
    monkeypatch.delenv(INTERPRETERS_VARIABLE)
    with pytest.raises(
        ConfigError, match=r"engine\.python: /bin/cat .*ended with 1: .*cat"
    ) as values:
        missing_modules("/bin/cat", "engine.python", ["torch"])
    assert "find_spec" not in str(values.value), "not the program that was tried"


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "1.13.1"])
def test_a_torch_that_is_too_old_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the driver has torch .* need 2\.13 or newer"):
        check_torch_version(version, "the driver")
    monkeypatch.setenv(ANY_TORCH_VARIABLE, "1")
    check_torch_version(version, "the driver")


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.1", "2.20.0", "3.0"])
def test_a_newer_torch_is_accepted(version: str) -> None:
    check_torch_version(version, "the driver")


def test_the_torch_of_another_interpreter_is_checked_too(python: str, tmp_path: Path) -> None:
    check_interpreter(python, "trainer.python", ["torch"])
    site = next(Path(python).parents[1].glob("lib/python*")) / "site-packages"
    old = site / "torch-2.11.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    with pytest.raises(ConfigError, match=r"trainer\.python: .* has torch 2\.11\.0"):
        check_interpreter(python, "trainer.python", ["torch"])
    check_interpreter(python, "task.python", ["numpy"])


def test_a_run_does_not_start_with_an_old_torch(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    values = compose()
    with pytest.raises(ConfigError, match=r"has torch 2\.11\.0, but stages need 2\.13"):
        run_experiment(values)
    assert not (Path(values["run"]["root"]) / values["run"]["name"]).exists()
