"""Off-policy runs, through the stages as they are: collect, add, learn, publish, go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment, validate_experiment
from pipeline.metrics import read_metrics
from pipeline.validate_config import validate_config
from rlinf.algorithms.off_policy import OffPolicyAlgorithm
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.data.transitions import transition_dtype
from rlinf.errors import ConfigError, DataError
from rlinf.models.tanh_normal_q import MLPQPolicy
from rlinf.replay import offline_data
from rlinf.trainers.fsdp import FSDPTrainer
from stages.replay import INTERVENTIONS_FOLDER, REPLAY_FOLDER
from tests.pipeline.helpers import contents

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
TINY = [
    "task=pendulum",
    "model.hidden=[16]",
    "model.critic_hidden=[16]",
    "rollout.batch_size=3",
    "rollout.horizon=20",
    "evaluate.every=2",
    "evaluate.samples=2",
    "evaluate.horizon=20",
    "algorithm.learning_starts=60",
    "algorithm.batch_size=16",
    "algorithm.buffer_size=130",
    "algorithm.utd_ratio=0.5",
]


def sac(compose: Compose, name: str, *words: str) -> dict[str, Any]:
    return compose(f"run.name={name}", *TINY, *words, experiment="double_pendulum_sac")


def rows_of(run: Path) -> bytes:
    return (run / REPLAY_FOLDER / "transitions.bin").read_bytes()


def test_a_run_goes_on_to_the_same_bytes(compose: Compose, tmp_path: Path) -> None:
    """After its end, and where everything but the buffer's file was lost with the last iterations:
    an append is made again, and its rows are those that were there."""
    run_experiment(sac(compose, "whole", "iterations=4"))
    rows = read_metrics(tmp_path / "whole")
    assert [row["replay/size"] for row in rows] == [60, 120, 130, 130]
    assert [row["train/steps"] for row in rows] == [30] * 4
    assert [row["replay/truncated"] for row in rows] == [3] * 4
    run_experiment(sac(compose, "parts", "iterations=2"))
    run_experiment(sac(compose, "parts", "iterations=4"))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    for lost in ("it/0003", "it/0002/train", "it/0002/sync", "evaluate/0004"):
        shutil.rmtree(tmp_path / "parts" / lost)
    run_experiment(sac(compose, "parts", "iterations=4"))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


STAGES = ["rollout", "reward", "train"]
PLANS = {
    "apart": [
        {"stages": STAGES[:1], "devices": {"local": 1}},
        {"stages": STAGES[1:], "devices": {"local": 1}},
    ],
    "two_ranks": [{"stages": STAGES, "devices": {"local": 2}}],
}


@pytest.mark.parametrize("name", PLANS)
def test_pools_end_with_the_same_bytes(compose: Compose, tmp_path: Path, name: str) -> None:
    """In two pools, and in one of two processes, of which one learns."""
    run_experiment(sac(compose, "here", "iterations=2"))
    pools = {"pools": PLANS[name]}
    run_experiment(sac(compose, "pools", "iterations=2", "cluster=local") | {"plan": pools})
    found, wanted = (contents(tmp_path / run) for run in ("pools", "here"))
    assert found.keys() == wanted.keys()
    # Two processes write what they collected into a file each.
    same = [stage for stage in wanted if stage.rpartition("/")[2] in ("replay", "train", "sync")]
    assert len(same) == 6
    assert {stage: found[stage] for stage in same} == {stage: wanted[stage] for stage in same}
    assert rows_of(tmp_path / "pools") == rows_of(tmp_path / "here")


def test_iterations_add_in_order_where_rollouts_are_ahead(compose: Compose, tmp_path: Path) -> None:
    run_experiment(sac(compose, "ahead", "iterations=3", "rollout.staleness=2"))
    added = [
        [int(word) for word in file.read_text().split()[:2]]
        for file in sorted((tmp_path / "ahead").glob("it/*/replay/data-*/added.txt"))
    ]
    assert [start for start, _ in added] == [0, *(stop for _, stop in added[:2])]
    first, second = (
        json.loads((tmp_path / "ahead" / f"it/000{i}/replay/manifest.json").read_text())
        for i in (0, 1)
    )
    assert "replay" not in first["inputs"]
    assert second["inputs"]["replay"] == first["content"], "it waits for the one before"


def test_a_damaged_buffer_ends_the_run_with_what_to_do(compose: Compose, tmp_path: Path) -> None:
    run_experiment(sac(compose, "one", "iterations=1"))
    state = tmp_path / "one" / REPLAY_FOLDER / "replay.json"
    known = json.loads(state.read_text())
    known["fields"][1][2] = [4]
    state.write_text(json.dumps(known))
    with pytest.raises(DataError, match=r"another schema; field 'actions'.*run\.name"):
        run_experiment(sac(compose, "one", "iterations=2"))


def test_the_buffer_holds_what_was_collected(compose: Compose, tmp_path: Path) -> None:
    run = tmp_path / "one"
    run_experiment(sac(compose, "one", "iterations=1"))
    (folder,) = run.glob("it/0000/rollout/data-*")
    wanted = offline_data.load_offline_data(folder)
    held = np.frombuffer(rows_of(run), wanted.dtype)[: len(wanted)]
    assert held.tobytes() == wanted.take(np.arange(len(wanted))).tobytes()
    actions = RecordFileReader(folder.glob("*.h5")).get().steps["actions"]
    assert np.abs(actions).max() <= 2
    assert np.abs(actions).max() > 1


def test_what_a_person_does_in_a_run_is_drawn_like_demonstrations(
    compose: Compose, tmp_path: Path
) -> None:
    """Beside those that were there before, and the same where the run goes on."""
    import h5py

    with h5py.File(tmp_path / "prior.hdf5", "w") as file:
        for name, size in (("observations", 1), ("next_observations", 1), ("actions", 2)):
            file[name] = np.zeros((5, size))
        file["rewards"], file["terminated"] = np.zeros(5), np.ones(5)
    words = [
        *("task.simulator=tests.rlinf.envs.helped_worlds:make", "task.id=helped", "algorithm=rlpd"),
        *("task.observation=1", "task.action={kind: box, size: 2}", "model=mlp_rlpd"),
        *(f"algorithm.offline_data={tmp_path / 'prior.hdf5'}", "algorithm.policy_delay=5"),
        "evaluate.every=1",
    ]
    run_experiment(sac(compose, "whole", "iterations=3", *words))
    rows, run = read_metrics(tmp_path / "whole"), tmp_path / "whole"
    acted = [
        record.steps["intervened"] != 0
        for file in sorted(run.glob("it/*/rollout/data-*/trajectories-*.h5"))
        for record in RecordFileReader([file])
    ]
    total = sum(int(steps.sum()) for steps in acted)
    assert rows[-1]["replay/interventions"] == total > 0
    every = np.frombuffer(rows_of(run), transition_dtype(1, 2))[: 3 * 60]
    helped = (run / REPLAY_FOLDER / INTERVENTIONS_FOLDER / "transitions.bin").read_bytes()
    assert helped.startswith(every[np.concatenate(acted)].tobytes())
    run_experiment(sac(compose, "parts", "iterations=1", *words))
    run_experiment(sac(compose, "parts", "iterations=3", *words))
    assert contents(tmp_path / "parts") == contents(run)


@pytest.mark.parametrize("name", ["crossq", "rlpd"])
def test_variants_learn_from_what_a_run_collected(
    compose: Compose, tmp_path: Path, name: str
) -> None:
    """RLPD with the trajectories of another run as its prior transitions."""
    words = [f"algorithm={name}", f"model=mlp_{name}", "iterations=2"]
    if name == "rlpd":
        run_experiment(sac(compose, "before", "iterations=1"))
        (folder,) = (tmp_path / "before").glob("it/0000/rollout/data-*")
        words += [f"algorithm.offline_data={folder}", "algorithm.policy_delay=5"]
    run_experiment(sac(compose, name, *words))
    rows = read_metrics(tmp_path / name)
    assert all(np.isfinite(row["train/critic_loss"]) for row in rows)
    assert rows[-1]["train/steps"] == 30


def test_a_data_set_alone_is_learned_from(compose: Compose, tmp_path: Path) -> None:
    """IQL imitates what earned more: of two actions in one state."""
    import h5py
    import torch

    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        seen = random.normal(size=(400, 3))
        action = np.where(random.random((400, 1)) < 0.5, -1.0, 1.0)
        file["observations"], file["next_observations"] = seen, seen
        file["actions"], file["rewards"] = action, action[:, 0]
        file["terminals"] = np.ones(400)
    words = ["++flow=offline", "algorithm=iql", "model=mlp_iql", "iterations=3"]
    words += [f"algorithm.offline_data={tmp_path / 'data.hdf5'}", "algorithm.gradient_steps=100"]
    words += ["optimizer.lr=1e-2", "algorithm.beta=5"]
    run_experiment(sac(compose, "offline", *words))
    run = tmp_path / "offline"
    assert sorted(path.name for path in (run / "it" / "0002").iterdir()) == ["sync", "train"]
    (folder,) = run.glob("it/0002/sync/data-*/weights")
    policy = MLPQPolicy.load(folder, None)  # type: ignore[arg-type]
    seen_now = torch.tensor(seen[:50], dtype=torch.float32)
    with torch.inference_mode():
        chosen = policy.act({"observation": seen_now}, None, 0.0)["action"]
    assert (chosen > 0).double().mean() > 0.9


def test_prior_rewards_are_of_the_scale_of_those_that_are_collected(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one run collected is another's prior: the same steps, and the same rewards."""
    run_experiment(sac(compose, "before", "iterations=1", "reward.scale=0.1"))
    (folder,) = (tmp_path / "before").glob("it/0000/rollout/data-*")
    seen = []
    sources = OffPolicyAlgorithm._sources

    def kept(self: Any, learner: Any, online: Any) -> Any:
        found = sources(self, learner, online)
        seen.append([source.take(np.arange(len(source)))["rewards"] for source in found])
        return found

    monkeypatch.setattr(OffPolicyAlgorithm, "_sources", kept)
    words = ["algorithm=rlpd", "model=mlp_rlpd", "iterations=1", "reward.scale=0.1"]
    run_experiment(sac(compose, "after", *words, f"algorithm.offline_data={folder}"))
    ((online, before),) = seen
    # Both begin with untrained policies of one seed in the same states.
    np.testing.assert_allclose(before, online, rtol=1e-4)


def test_a_reward_of_another_kind_is_refused_with_prior_transitions(
    compose: Compose, tmp_path: Path
) -> None:
    run_experiment(sac(compose, "before", "iterations=1"))
    (folder,) = (tmp_path / "before").glob("it/0000/rollout/data-*")
    words = ["algorithm=rlpd", "model=mlp_rlpd", f"algorithm.offline_data={folder}", "reward=score"]
    with pytest.raises(ConfigError, match=r"algorithm\.offline_data: .*set reward=environment"):
        validate_config(validate(RunConfig, sac(compose, "after", *words)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["++flow=on_policy"], "algorithm.name: 'sac' needs transitions to replay"),
        (["model=mlp"], "algorithm.name: 'sac' needs values of actions"),
        (["task=cartpole"], "model.name: mlp_q chooses vectors"),
        (["algorithm.tua=0.1"], r"algorithm.tua: unknown key.*tau"),
        ([f"trainer.name={__name__}:Other"], "does not support batches of transitions"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(
    compose: Compose, words: list[str], message: str
) -> None:
    values = compose(*words, experiment="double_pendulum_sac")
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))


def test_what_learns_from_a_batch_alone_has_no_use_for_the_flow(compose: Compose) -> None:
    values = compose("++flow=off_policy", experiment="halfcheetah_ppo")
    with pytest.raises(ConfigError, match="flow: 'off_policy' needs an algorithm that learns from"):
        validate_config(validate(RunConfig, values))


def test_a_plan_that_gives_training_more_processes_is_refused_before_the_run(
    compose: Compose, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    values = compose(f"+plan={plan}", "cluster=local", experiment="double_pendulum_sac")
    plan.write_text("defaults: {processes: 2}\n")
    validate_experiment(values)  # of what one process does, one is enough
    plan.write_text("stages: {train: {processes: 2}}\n")
    with pytest.raises(ConfigError, match=r"plan\.stages\.train: 2 processes, but one"):
        validate_experiment(values)


class Other(FSDPTrainer):
    """A trainer that cuts minibatches of trajectories alone."""

    supports_batches = False
