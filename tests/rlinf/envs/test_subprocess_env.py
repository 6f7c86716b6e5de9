"""Simulator processes: the same bytes, clear errors, nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.channels.channel import ChannelClosed, LocalChannel
from rlinf.channels.record_files import RecordFileWriter
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.errors import InputError
from rlinf.models.actor_critic import CNNConfig, CNNPolicy, MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter

POLICY = MLPConfig(hidden=(16,))
CARTPOLE = GymConfig(id="CartPole-v1")


def engine_for(task: GymConfig, folder: Path) -> DirectEngine:
    MLPPolicy.create(POLICY, GymEnvironment.read_spec(task), 0, folder)
    engine = DirectEngine(DirectConfig(), MLPPolicy, POLICY)
    engine.load(folder, 4)
    return engine


@contextmanager
def simulators(task: GymConfig, **options: Any) -> Iterator[GymEnvironment]:
    environment = GymEnvironment(task.model_copy(update=options), None)
    try:
        yield environment
    finally:
        environment.close()


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process ends (one that nobody waited for stays a zombie)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def run(
    environment: GymEnvironment,
    engine: DirectEngine,
    *,
    starts: int = 7,
    split: str = "train",
    horizon: int = 30,
) -> list[Trajectory]:
    episodes = RolloutRequest(1, 2, split, range(starts), starts, 1, horizon, 1.0)  # type: ignore[arg-type]
    return list(local_rollout_iter(environment, engine, episodes, "rollout"))


def contents(records: list[Trajectory]) -> list[Any]:
    return [(trajectory.identity, trajectory.to_record().digest()) for trajectory in records]


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_the_division_changes_no_byte(name: str, tmp_path: Path) -> None:
    if name == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    task = GymConfig(id=name)
    engine = engine_for(task, tmp_path)
    with simulators(task) as plain:
        expected = [contents(run(plain, engine, split=split)) for split in ("train", "test")]
    divisions: list[dict[str, Any]] = [
        {"double_buffer": True},
        {"num_processes": 1, "double_buffer": True},
    ]
    for options in (
        *divisions,
        {"num_processes": 3},
        {"max_parallel_envs": 2},
        {"max_parallel_envs": 3, "num_processes": 2},
    ):
        with simulators(task, **options) as divided:
            for split, wanted in zip(("train", "test"), expected, strict=True):
                assert contents(run(divided, engine, split=split)) == wanted, (options, split)


def test_processes_stay_between_collections_and_end_with_the_environment(tmp_path: Path) -> None:
    engine = engine_for(CARTPOLE, tmp_path)
    with simulators(CARTPOLE, num_processes=2) as environment:
        assert environment.pids == [], "they start with the first episodes"
        assert run(environment, engine, starts=0) == []
        run(environment, engine)
        first = environment.pids
        run(environment, engine)
        assert len(first) == 2
        assert environment.pids == first
    assert all(gone(pid) for pid in first)


def test_fewer_starts_than_processes_are_simulated(tmp_path: Path) -> None:
    engine = engine_for(CARTPOLE, tmp_path)
    with simulators(CARTPOLE, num_processes=3, double_buffer=True) as environment:
        assert [r.identity.sample for r in run(environment, engine, starts=1)] == [0]
        assert [r.identity.sample for r in run(environment, engine, starts=4)] == [0, 1, 2, 3]


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return "failing_worlds:Falling-v0"


def test_an_error_has_the_simulators_own_traceback(tmp_path: Path, falling: str) -> None:
    task = GymConfig(id=falling, kwargs={"how": "raise"})
    engine = engine_for(task, tmp_path)
    with simulators(task, num_processes=2, double_buffer=True) as environment:
        with pytest.raises(SimulatorError, match=r"(?s)in step.*ZeroDivisionError: the third step"):
            run(environment, engine)
        assert environment.pids == []


def test_a_process_that_dies_is_named_with_its_signal(tmp_path: Path, falling: str) -> None:
    task = GymConfig(id=falling, kwargs={"how": "die"})
    engine = engine_for(task, tmp_path)
    with (
        simulators(task, num_processes=1) as environment,
        pytest.raises(SimulatorError, match=r"process \d+ was killed by SIGKILL"),
    ):
        run(environment, engine)


def test_one_that_dies_between_collections_costs_nothing(tmp_path: Path) -> None:
    engine = engine_for(CARTPOLE, tmp_path)
    with simulators(CARTPOLE, num_processes=2) as environment:
        expected = contents(run(environment, engine))
        first = environment.pids
        os.kill(first[1], signal.SIGKILL)
        assert contents(run(environment, engine)) == expected
        assert environment.pids[0] == first[0]
        assert environment.pids[1] != first[1]


@pytest.mark.parametrize(("how", "halves"), [("die", False), ("die", True), ("hang", True)])
def test_one_that_dies_or_hangs_costs_the_episodes_that_it_steps(
    tmp_path: Path, falling: str, how: str, halves: bool
) -> None:
    """Starts 0, 2, ... are of one process, 1, 3, ... of the other (of a half each, with halves);
    each sample's episode is one."""
    task = GymConfig(id=falling, kwargs={"how": "raise", "once": str(tmp_path)})
    engine = engine_for(task, tmp_path)
    options: dict[str, Any] = {"num_processes": 2, "double_buffer": halves}
    with simulators(task, **options) as environment:
        whole = run(environment, engine)
    fails = {"how": how, "once": str(tmp_path / "fell")}
    with simulators(task, **options, kwargs=fails, timeout_s=8.0) as environment:
        struck = run(environment, engine)
        again = environment.pids
        assert contents(run(environment, engine)) == contents(whole)
        assert environment.pids == again
        counts = Counter[str]()
        environment.score(struck, counts)
    lost = [r.identity.sample for r in struck if not loss_mask(r).all()]
    assert lost
    assert len({sample % 2 for sample in lost}) == 1
    assert halves or lost in ([0, 2, 4, 6], [1, 3, 5])
    assert counts == {"failed_episodes": len(lost)}
    ends = []
    for before, after in zip(whole, struck, strict=True):
        if after.identity.sample in lost:
            # What came before the process was lost, and nothing else.
            ends.append(int((~loss_mask(after)).sum()))
            assert loss_mask(after)[ends[-1] :].all()
            assert len(after) == len(before)
        else:
            assert after.to_record().digest() == before.to_record().digest()
    # Halves do not wait for each other: one may have been at any step when the other struck.
    assert 3 <= max(ends) <= 4
    assert halves or min(ends) == max(ends)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "not finite"),
        ("too large", "not finite"),
        ("reward", "a reward that is not finite: nan"),
        ("shape", r"observation 'state', float32 \(3,\), is new"),
        ("name", "observation 'other'"),
    ],
)
def test_what_no_step_may_bring_costs_its_episode(
    tmp_path: Path,
    falling: str,
    how: str,
    message: str,
    processes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = GymConfig(id=falling, kwargs={"how": how, "once": str(tmp_path / "fell")})
    engine = engine_for(task, tmp_path)
    with simulators(task, num_processes=processes) as environment:
        records = run(environment, engine)
        counts = Counter[str]()
        environment.score(records, counts)
    assert counts == {"failed_episodes": 1}
    (struck,) = [record for record in records if not loss_mask(record).all()]
    assert (~loss_mask(struck)).sum() == 3, "the steps of the episode"
    assert all(np.isfinite(column).all() for column in struck.to_record().steps.values())
    writer = RecordFileWriter(tmp_path, "trajectories")
    for record in records:
        writer.put(record.to_record())
    writer.close()  # which takes records of one schema alone
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reset_that_fails_is_tried_with_another_simulator(
    tmp_path: Path, falling: str, processes: int
) -> None:
    kwargs = {"how": "reset", "once": str(tmp_path / "fell")}
    task = GymConfig(id=falling, kwargs=kwargs, num_processes=processes)
    engine = engine_for(task, tmp_path)
    with simulators(task) as environment:
        records = run(environment, engine)
        assert all(loss_mask(record).all() for record in records)
        assert Path(kwargs["once"]).exists()


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("name", "action", "message"),
    [
        ("Pendulum-v1", [[np.nan]], r"iteration 2, step 0: the policy's actions .* diverged"),
        ("Pendulum-v1", [[0.0, 0.0]], r"task\.action: an action \[2\] is not of Box"),
        ("CartPole-v1", [2], r"task\.action: 2 is not one of the 2 actions"),
        ("CartPole-v1", [-1], r"task\.action: -1 is not one of the 2 actions"),
    ],
)
def test_an_action_that_no_simulator_takes_is_an_error_of_the_policy(
    name: str, action: list[Any], message: str, processes: int
) -> None:
    request, answers = LocalChannel(), LocalChannel()
    steps = {"sample": np.arange(1), "action": np.array(action), "logprob": np.zeros(1)}

    def answer() -> None:
        for _ in request:
            answers.put(Record(RecordId(2, 0), steps, info={"version": 1}))
        answers.close()

    policy = threading.Thread(target=answer)
    policy.start()
    episodes = RolloutRequest(1, 2, "train", range(1), 1, 1, 30, 1.0)
    with simulators(GymConfig(id=name), num_processes=processes) as environment:
        try:
            with pytest.raises(InputError, match=message):
                list(environment.simulate(episodes, request, answers))
        finally:
            request.close()
            policy.join()


def test_worlds_share_their_memory_and_leave_none_of_it() -> None:
    """Two files without a name, one for each direction, however many worlds there are."""

    def files() -> list[str]:
        every = [f for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
        return [str(f) for f in every if "rlinf-envs" in str(f.readlink())]

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("rlinf-envs")

    gc.collect()  # what failed in other tests is in cycles
    with closing(create_simulator_process(CARTPOLE)) as process:
        first = process.reset([0, 1], [3, 4])["state"]
        more = process.reset([2, 3], [5, 6])["state"]
        stepped, errors = process.step([0, 1, 2, 3], np.ones(4, np.int64))
        assert errors == {}
        assert "rlinf-envs" not in str([*Path("/dev/shm").iterdir()])
        known = files(), maps()
        assert len(known[0]) > 2
        os.kill(process.pid, signal.SIGKILL)
        lost, errors = process.step([1, 3], np.ones(2, np.int64))
        assert lost["terminated"].tolist() == [1, 1]
        assert sorted(errors) == [0, 1]
        again = process.reset([0, 1, 2, 3], [3, 4, 5, 6])["state"]
        np.testing.assert_array_equal(again, np.concatenate([first, more]))
        twice, _ = process.step([0, 1, 2, 3], np.ones(4, np.int64))
        np.testing.assert_array_equal(twice["seen.state"], stepped["seen.state"])
        apart, _ = process.step([0, 3], np.zeros(2, np.int64))
        assert apart["seen.state"].shape == (2, 4)
        for _ in range(30):
            process.step([0, 1, 2, 3], np.ones(4, np.int64))
        assert maps() <= known[1]
        assert len(files()) <= len(known[0])
    del process
    gc.collect()
    assert (files(), maps()) == ([], 0)


def test_an_error_of_the_policy_is_raised_and_ends_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(CARTPOLE, tmp_path)
    with simulators(CARTPOLE, num_processes=2, double_buffer=True) as environment:
        run(environment, engine)
        first = environment.pids
        monkeypatch.setattr(MLPPolicy, "act", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(environment, engine)
        assert all(gone(pid) for pid in first)


def test_a_policy_that_answers_no_more_is_not_taken_for_a_dead_simulator() -> None:
    actions = LocalChannel()
    actions.close()
    episodes = RolloutRequest(1, 2, "train", range(4), 4, 1, 30, 1.0)
    with (
        simulators(CARTPOLE, num_processes=2) as environment,
        pytest.raises(ChannelClosed),
    ):
        list(environment.simulate(episodes, LocalChannel(), actions))


def test_what_a_simulator_refuses_is_not_tried_again(tmp_path: Path) -> None:
    engine = engine_for(CARTPOLE, tmp_path)
    with (
        simulators(GymConfig(id="CartPoel-v1"), num_processes=1) as environment,
        pytest.raises(InputError, match=r"task\.id: cannot make 'CartPoel-v1'"),
    ):
        run(environment, engine)


def test_nothing_is_left_when_the_stage_is_killed(tmp_path: Path) -> None:
    program = f"""
        import time
        from pathlib import Path
        from tests.rlinf.envs.test_subprocess_env import CARTPOLE, engine_for, run, simulators
        engine = engine_for(CARTPOLE, Path({str(tmp_path)!r}))
        with simulators(CARTPOLE, num_processes=2) as environment:
            run(environment, engine)
            print(*environment.pids, flush=True)
            time.sleep(600)
    """
    stage = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert stage.stdout is not None
    started = [int(pid) for pid in stage.stdout.readline().split()]
    stage.kill()
    stage.wait()
    stage.stdout.close()
    assert len(started) == 2
    assert all(gone(pid) for pid in started)


def test_a_simulator_process_loads_no_torch() -> None:
    program = (
        "import sys, rlinf.envs.gym, rlinf.envs.subprocess_env; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


PICTURES = {"id": "InvertedPendulum-v5", "images": {"free": [48, 64]}}


def test_pictures_are_of_the_state_they_come_with() -> None:
    """Rendered in a process that the environment starts by itself, the same at every time."""
    pytest.importorskip("mujoco")
    config = GymConfig.model_validate(PICTURES)
    with closing(create_simulator_process(config)) as process:
        first = process.reset([0, 1], [1, 2])
        assert first["free"].shape == (2, 48, 64, 3)
        assert first["free"].dtype == np.uint8
        came, _ = process.step([0], np.ones((1, 1)))
        assert (came["seen.free"][0] != first["free"][0]).any()
        again = process.reset([1], [1])
        np.testing.assert_array_equal(again["free"][0], first["free"][0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**PICTURES, "images": {"fornt": [48, 64]}}, r"task\.images\.fornt: no such camera"),
        ({"id": "CartPole-v1", "images": {"free": [48, 64]}}, r"task\.images: .* no images"),
    ],
)
def test_pictures_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    pytest.importorskip("mujoco")
    process = create_simulator_process(GymConfig.model_validate(values))
    with closing(process), pytest.raises(InputError, match=message):
        process.reset([0], [0])


def test_a_policy_that_sees_pictures_collects_and_is_judged_the_same(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    config = GymConfig.model_validate(
        {**PICTURES, "observation": 4, "action": {"kind": "box", "size": 1}}
    )
    small = CNNConfig(hidden=(8,), features_dim=8)
    CNNPolicy.create(small, GymEnvironment.model_spec(config), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), CNNPolicy, small)
    engine.load(tmp_path, 0)
    with closing(GymEnvironment(config, None)) as environment:
        episodes = RolloutRequest(0, 0, "train", range(2), 2, 1, 8, 1.0)
        records = list(local_rollout_iter(environment, engine, episodes, "rollout"))
    policy = CNNPolicy.load(tmp_path, small)
    logprobs = policy.evaluate(policy.collate(records), 1.0).logprobs.detach().numpy()
    for row, record in zip(logprobs, records, strict=True):
        assert record.images["free"].shape == (8, 48, 64, 3)
        np.testing.assert_allclose(row, record.logprobs, atol=1e-4)
