"""``rlinf.api``: a run from Python, and what it made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.commands.experiment import compose
from rlinf import api, package_paths
from rlinf.errors import ArtifactError, ConfigError, InputError
from rlinf.hydra_config import force_add, to_override_value
from tests.conftest import QUIET, TINY


@pytest.fixture(scope="module")
def opened(tiny_run: Path) -> Any:
    return api.load(tiny_run)


def test_importing_rlinf_loads_nothing_else() -> None:
    code = (
        "import sys, rlinf.api; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'hydra', 'stages', 'pipeline')))"
    )
    assert not subprocess.run(
        [sys.executable, "-c", code], cwd=package_paths.ROOT, check=False
    ).returncode


def test_a_run_from_python_gives_what_it_made(tmp_path: Path, undrawn: None, opened: Any) -> None:
    words = [word.removeprefix("++") for word in [*QUIET, *TINY]]
    made = api.run("arithmetic_grpo", [*words, f"run.root={tmp_path}"])
    assert made.folder == tmp_path / "tiny"
    assert made.metrics() == opened.metrics()
    again = api.run("arithmetic_grpo", [*words, f"run.root={tmp_path}", "iterations=3"])
    assert [row["iteration"] for row in again.metrics()] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"algorithm\.lrr"):
        api.run("arithmetic_grpo", {"run.root": tmp_path, "algorithm.lrr": 1.0})
    with pytest.raises(ConfigError, match="arithmetic_grpo"):
        api.run("arithmetic_grop")


def test_metrics_are_rows_of_numbers(opened: Any) -> None:
    rows = opened.metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(isinstance(value, (int, float)) for row in rows for value in row.values())
    assert {"reward/mean", "train/policy_loss"} <= rows[0].keys()
    assert [row["version"] for row in opened.evaluations()] == [0, 1, 2]
    assert all(0 <= row["score"] <= 1 for row in opened.evaluations())


def test_metrics_make_a_data_frame(opened: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(opened.metrics()).set_index("iteration")
    assert frame["reward/mean"].dtype.kind == "f"
    assert len(frame) == 2


def test_trajectories_are_the_records_of_the_iterations_in_order(opened: Any) -> None:
    every = list(opened.trajectories())
    assert [(r.identity.iteration, r.identity.sample) for r in every] == [
        (i, sample) for i in (0, 1) for sample in range(16)
    ]
    assert all(np.isfinite(sample.logprobs).all() for sample in every)
    second = list(opened.trajectories(1))
    assert [each.to_record().digest() for each in second] == [
        each.to_record().digest() for each in every[16:]
    ]
    rewards = [each.rewards.sum() for each in opened.rewards(1)]
    assert np.mean(rewards) == pytest.approx(opened.metrics()[1]["reward/mean"])
    with pytest.raises(InputError, match=r"iteration 7 on disk; available: \[0, 1\]"):
        opened.trajectories(7)
    with pytest.raises(InputError, match="no stage writes this channel"):
        opened.records("rewrads")


def test_weights_are_those_of_any_version_on_disk(opened: Any) -> None:
    assert opened.versions() == [0, 1, 2]
    first, last = opened.weights(0), opened.weights()
    assert first.keys() == last.keys()
    assert all(torch.isfinite(tensor).all() for tensor in last.values())
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(torch.equal(opened.weights(2)[name], last[name]) for name in last)
    with pytest.raises(InputError, match=r"no version 9 of the weights on disk; available: \[0, 1"):
        opened.weights(9)


def test_damaged_files_are_an_error(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "tiny")
    damaged = api.load(tmp_path / "tiny")
    for pattern in (
        "it/0001/rollout/data-*/trajectories-*.h5",
        "it/0001/sync/data-*/weights/*.saf*",
    ):
        (path,) = damaged.folder.glob(pattern)
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
    assert len(list(damaged.trajectories(0))) == 16
    with pytest.raises(ArtifactError):
        list(damaged.trajectories(1))
    with pytest.raises(ArtifactError):
        damaged.weights(2)


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        api.load(tmp_path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab '\"\\,:[]{}=$ü", max_size=6).filter(lambda text: "$" not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=5,
)


@given(VALUES)
def test_values_reach_the_configuration_as_they_are(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(force_add(f"a.b={to_override_value(value)}"))
    assert plain(override.value()) == plain(value)


def plain(value: Any) -> Any:
    """Quoted texts and keys as plain ones."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return getattr(value, "text", value)


def test_composed_values_are_those_of_the_mapping() -> None:
    given = {"run.name": "it's", "task.digits": [1, 3], "optimizer.lr": 1e-5, "model": "small"}
    words = [force_add(f"{key}={to_override_value(value)}") for key, value in given.items()]
    values = compose(["experiment=arithmetic_grpo", *words])
    assert values["run"]["name"] == "it's"
    assert values["task"]["digits"] == [1, 3]
    assert values["optimizer"]["lr"] == 1e-5
