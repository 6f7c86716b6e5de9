"""Bad input gets one clear error that names the key, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.experiment import prepare
from rlinf.errors import InputError, SlurmError
from rlinf.launch import forced, main, suffix

Compose = Callable[..., dict[str, Any]]

HELPS = {
    "grain": "segment",
    "pools": [
        {"stages": ["reward", "inference", "train"], "gpus": {"cpu": 1}, "helps_rollout": True},
        {"stages": ["rollout"], "gpus": {"cpu": 1}},
    ],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"algorithm": {"name": "grpo", "lrr": 1}},
            r"algorithm\.lrr: unknown key; did you mean 'lr'",
        ),
        ({"algorithm": {"name": "gpro"}}, "unknown algorithm 'gpro'; did you mean 'grpo'"),
        ({"task": {"name": "arithmetc"}}, "did you mean 'arithmetic'"),
        ({"iterations": "many"}, r"iterations: .*integer"),
        ({"sede": 1}, "sede: unknown key; did you mean 'seed'"),
        ({"rollout": {"batch": 0, "horizon": 4}}, r"rollout\.batch"),
        ({"rollout": {"batch": 3, "group_size": 2, "horizon": 4}}, None),
        (
            {"rollout": {"batch": 4, "horizon": 4, "group_size": 2, "temperature": 0}},
            "temperature 0",
        ),
        ({"run": {"name": "../escape"}}, r"run\.name"),
        ({"model": {"name": "causal_lm", "path": "/no/such/folder"}}, r"model\.path: no folder"),
        ({"model": {"name": "causal_lm", "heads": 3}}, r"model\.heads"),
        ({"model": {"name": "mlp"}}, "observation vectors"),
        ({"task": {"name": "jsonl", "train": "/no.jsonl", "test": "/no.jsonl"}}, "cannot read /no"),
        ({"plan": {"stages": {"trian": {}}}}, "unknown stage 'trian'; did you mean 'train'"),
        (
            {"plan": {"stages": {"train": {"gpu": 1}}}},
            r"train\.gpu: unknown key; did you mean 'gpus'",
        ),
        ({"plan": "/no/plan.yaml"}, "no file /no/plan.yaml"),
        (
            {"plan": {"transports": {"rollout -> rewards": "file"}}},
            "no stage gets anything by 'rollout -> rewards'; did you mean 'rollout -> reward'",
        ),
        (
            {"plan": {"transports": {"rollout -> reward": "http"}}},
            r"transports\.rollout -> reward: .*'shared_memory', 'socket', .* or 'file'",
        ),
        (
            {"plan": {"transports": {"rollout -> reward": "nccl"}}},
            r"transports\.rollout -> reward: nccl carries weights alone, and here go trajectories",
        ),
        (
            {"plan": HELPS},
            r"pools\[0\]\.helps_rollout: needs an elastic pool",
        ),
        ({"cluster": {"launcher": "slrum"}}, r"cluster\.launcher"),
        ({"log": {"trackers": ["wandbb"]}}, "did you mean 'wandb'"),
    ],
)
def test_refused_before_anything_is_written(
    compose: Compose, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    values = {**compose(), **change}
    if message is None:
        values["algorithm"] = {**values["algorithm"], "minibatches": 4}
        message = "cannot be cut into 4 equal minibatches"
    with pytest.raises(InputError, match=message):
        prepare(values)
    assert not (tmp_path / "tiny").exists()


def test_slurm_missing(compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="this machine has no Slurm"):
        prepare(compose("cluster=slurm"))


def test_a_folder_that_cannot_be_written(compose: Compose) -> None:
    values = compose()
    values["run"]["root"] = "/proc/runs"
    with pytest.raises(InputError, match=r"run\.root"):
        prepare(values)


def test_a_lone_launcher_is_refused_with_the_right_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["experiment=arithmetic_grpo", "hydra/launcher=submitit_slurm"]) == 65
    said = capsys.readouterr().err
    assert "python -m rlinf.launch -m experiment=arithmetic_grpo" in said
    assert "cluster=slurm" in said


def test_the_points_of_a_sweep_are_named_after_what_varies() -> None:
    words = ["-m", "algorithm.lr=1e-4,3e-4", "task.digits=[1,2]", "rollout.batch=choice(2,4)"]
    assert suffix(words) == ["++run.suffix='-lr-${algorithm.lr}-batch-${rollout.batch}'"]
    assert suffix([*words, "run.name=mine"]) == suffix(words)
    assert suffix([*words, "run.name=lr-${algorithm.lr}"]) == []
    assert suffix([*words, "run.name=a,b"]) == []
    assert suffix([*words, "run.suffix=-mine"]) == []
    assert suffix(words[1:]) == []


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("algorithm.lr=1", "++algorithm.lr=1"),
        ("iterations=3", "++iterations=3"),
        ("experiment=x", "experiment=x"),
        ("algorithm=dapo", "algorithm=dapo"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("~task.digits", "~task.digits"),
        ("-m", "-m"),
    ],
)
def test_keys_are_judged_by_our_own_validation(word: str, want: str) -> None:
    assert forced(word) == want
