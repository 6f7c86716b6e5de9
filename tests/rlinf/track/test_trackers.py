"""Trackers are told everything once, in whatever order it comes, and let go at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from rlinf.config import RunConfig
from rlinf.errors import ConfigError
from rlinf.track.trackers import (
    LoggedSample,
    MlflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
    settings_of_run,
)

Compose = Callable[..., dict[str, Any]]


class Table:
    """Stands for the tables of W&B and Trackio."""

    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in data)
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


SAMPLES = [
    LoggedSample(1, 5, 0.0, "1+1=", "3", "2"),
    LoggedSample(1, 7, 1.0, "2+2=", "4", "4"),
]


class Settings(dict[str, Any]):
    """Stands for the settings of a run in W&B, whose values change only where that is allowed."""

    def update(self, values: Mapping[str, Any], *, allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change or not self.keys() & values.keys()
        super().update(values)


class Board:
    """Stands for W&B as far as it refuses: steps that go back, a second run beside an open one."""

    def __init__(self) -> None:
        self.runs: list[Board.Run] = []

    class Run:
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self.step, self.open = -1, True
            self.config = Settings()

        def define_metric(self, name: str, step_metric: str) -> None:
            self.over = step_metric

        def log(self, row: Mapping[str, float], step: int | None = None) -> None:
            step = self.step + 1 if step is None else step
            if step >= self.step:
                self.step = step
                self.rows.append(dict(row))

        def finish(self) -> None:
            self.open = False
            raise OSError("the last words of a tracker may fail too")

        url = "https://wandb.example/run"

    def login(self, prompt: bool = True) -> bool:
        assert not prompt, "nobody is there to be asked"
        return self.key

    key = False

    def init(self, **wanted: Any) -> Board.Run:
        assert wanted["reinit"] == "create_new"
        self.wanted = wanted
        assert not any(run.open for run in self.runs)
        self.runs.append(self.Run())
        return self.runs[-1]


def installed(
    monkeypatch: pytest.MonkeyPatch,
    init: Callable[..., Any],
    login: Callable[..., bool] | None = None,
) -> None:
    """A package ``wandb`` that has but this."""
    module = ModuleType("wandb")
    module.init, module.login = init, login  # type: ignore[attr-defined]
    module.Table = Table  # type: ignore[attr-defined]
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    module.__spec__ = ModuleSpec("wandb", None, origin=__file__)
    monkeypatch.setitem(sys.modules, "wandb", module)


@pytest.mark.usefixtures("undrawn")
def test_every_score_arrives_and_each_run_has_its_own(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    installed(monkeypatch, board.init)
    for name in ("first", "second"):
        run_experiment(compose("log.trackers=[wandb]", f"run.name={name}", "evaluate.every=1"))
    assert len(board.runs) == 2
    for run in board.runs:
        over = [row[run.over] for row in run.rows if "evaluate/score" in row]
        assert over == [0, 1, 2]
        assert [row[run.over] for row in run.rows if "train/loss" in row] == [1, 2]
        assert not run.open


@pytest.mark.usefixtures("undrawn")
def test_samples_arrive_as_a_table(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board = Board()
    installed(monkeypatch, board.init)
    words = ("log.trackers=[wandb]", "log.samples=3", "log.samples_every=2", "iterations=3")
    run_experiment(compose(*words))
    run_experiment(compose(*words, "iterations=4"))
    tables = [
        (row[r.over], row["samples"].rows) for r in board.runs for row in r.rows if "samples" in row
    ]
    assert [step for step, _ in tables] == [1, 3], "a resumed run sends none again"
    for step, rows in tables:
        assert len(rows) == 3
        for row in rows:
            assert row["iteration"] == step
            assert row["prompt"].endswith("=")
            assert row.keys() == {"iteration", "sample", "score", "prompt", "response", "answer"}
    board.runs.clear()
    run_experiment(compose("log.trackers=[wandb]", "log.samples=0", "run.name=none"))
    assert not [row for r in board.runs for row in r.rows if "samples" in row]


@pytest.mark.usefixtures("undrawn")
def test_a_tracker_that_cannot_begin_stops_nothing(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**wanted: Any) -> None:
        raise OSError("no such server")

    installed(monkeypatch, init)
    run_experiment(compose("log.trackers=[wandb]"))
    assert "tracker wandb failed and is disabled: no such server" in capsys.readouterr().err


SETTINGS = {
    "project": "sums",
    "entity": "mylab",
    "group": "first",
    "name": "short",
    "tags": ["a", "b"],
    "mode": "online",
}


def configured(**log: Any) -> RunConfig:
    return RunConfig.model_construct(log={"trackers": ["wandb"], **log})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"name": "sums-1", "id": "0123456789abcdef0123"}')
    return tmp_path


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    board = Board()
    installed(monkeypatch, board.init, board.login)
    monkeypatch.setattr(RunConfig, "semantic_values", lambda self: {})
    return board


def test_trackers_get_no_secrets(folder: Path) -> None:
    reward = {"judge": {"url": "https://u:p@host/v1", "max_tokens": 7}}
    (folder / "run.json").write_text(json.dumps({"settings": {"reward": reward}}))
    assert settings_of_run(folder, configured())["reward"] == {
        "judge": {"url": "https://(not shown)@host/v1", "max_tokens": 7}
    }


def test_settings_of_wandb_reach_it(board: Board, folder: Path) -> None:
    WandbTracker(folder, configured(wandb=SETTINGS))
    assert {name: board.wanted[name] for name in SETTINGS} == SETTINGS


def test_data_types_and_devices_reach_wandb_and_mlflow(
    board: Board, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, store = WandbTracker(folder, configured()), Store()
    for dtype in ("float32", "bfloat16"):
        tracker.log_compute({"engine": f"{dtype} on cpu"})
    assert board.runs[0].config == {"compute.engine": "bfloat16 on cpu"}
    monkeypatch.setitem(sys.modules, "mlflow", store)  # type: ignore[arg-type]
    MlflowTracker(folder, configured()).log_compute({"engine": "bfloat16 on cpu"})
    assert store.calls["set_tags"] == ({"compute.engine": "bfloat16 on cpu"},)


def test_without_settings_the_environment_of_wandb_decides(
    board: Board, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WandbTracker(folder, configured())
    wanted = board.wanted
    assert (wanted["project"], wanted["name"], wanted["mode"]) == ("rlinf", "sums-1", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_MODE", "online")
    board.runs.clear()
    WandbTracker(folder, configured())
    assert (board.wanted["project"], board.wanted["mode"]) == ("theirs", "online")


def test_an_offline_run_is_said_with_the_command_that_uploads_it(
    board: Board, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="rlinf"):
        WandbTracker(folder, configured())
        board.runs.clear()
        WandbTracker(folder, configured(wandb={"mode": "online"}))
    offline, online = caplog.messages
    assert f"wandb sync '{folder}'/wandb/offline-run-*" in offline
    assert "log.wandb.mode=online" in offline
    assert online == "tracker wandb: https://wandb.example/run"


def test_online_without_a_login_is_refused_before_the_run_begins(
    board: Board, compose: Compose, tmp_path: Path
) -> None:
    values = compose("log.trackers=[wandb]", "log.wandb.mode=online")
    with pytest.raises(ConfigError, match=r"log\.wandb\.mode: online needs a login.*wandb login"):
        run_experiment(values)
    assert not (tmp_path / "tiny").exists()
    WandbTracker.check(configured())  # offline needs none
    board.key = True
    WandbTracker.check(configured(wandb={"mode": "online"}))


class Store:
    """Stands for MLflow as far as it is told where to write."""

    def __init__(self) -> None:
        self.calls = dict[str, Any]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> list[Any]:
            self.calls[name] = arguments or named
            return []

        return call


def test_settings_of_mlflow_reach_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    store = Store()
    monkeypatch.setitem(sys.modules, "mlflow", store)  # type: ignore[arg-type]
    MlflowTracker(folder, configured())
    assert store.calls["set_tracking_uri"] == ((folder / "mlflow").as_uri(),)
    assert store.calls["set_experiment"] == ("rlinf",)
    assert store.calls["start_run"]["run_name"] == "sums-1"
    assert "mlflow ui --backend-store-uri" in caplog.text
    settings = {"tracking_uri": "http://server:5000", "experiment": "sums", "name": "short"}
    caplog.clear()
    MlflowTracker(folder, configured(mlflow=settings))
    assert store.calls["set_tracking_uri"] == ("http://server:5000",)
    assert store.calls["set_experiment"] == ("sums",)
    assert store.calls["start_run"]["run_name"] == "short"
    assert not caplog.text


def test_mlflow_gets_samples_as_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setitem(sys.modules, "mlflow", store)  # type: ignore[arg-type]
    MlflowTracker(folder, configured()).log_samples(1, SAMPLES)
    data, name = store.calls["log_table"]
    assert name == "samples.json"
    assert data["response"] == ["3", "4"]
    assert data["iteration"] == [1, 1]


class TrackioServer(ModuleType):
    """Stands for Trackio: settings of the run, and its logged rows."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.Table = Table
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def init(self, project: str, **wanted: Any) -> TrackioServer:
        self.wanted = {"project": project, **wanted}
        return self

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.rows.append((-1, {}))


def test_settings_of_trackio_reach_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunConfig, "semantic_values", lambda self: {})
    server = TrackioServer()
    monkeypatch.setitem(sys.modules, "trackio", server)
    TrackioTracker(folder, configured())
    wanted = server.wanted
    assert (wanted["project"], wanted["name"]) == ("rlinf", "sums-1-01234567")
    assert wanted["resume"] == "allow"
    settings = {"project": "sums", "name": "short", "group": "first", "space_id": "me/sums"}
    tracker = TrackioTracker(folder, configured(trackio=settings))
    assert {name: server.wanted[name] for name in settings} == settings
    tracker.log(1, {"train/loss": 0.5})
    tracker.log_samples(1, SAMPLES)
    tracker.close()
    (_, metrics), (step, table), (last, _) = server.rows
    assert (metrics, step, last) == ({"train/loss": 0.5}, 1, -1)
    assert [row["response"] for row in table["samples"].rows] == ["3", "4"]


def test_a_resumed_run_of_the_real_trackio_is_one_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="the extra 'trackio' is not installed")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(RunConfig, "semantic_values", lambda self: {"seed": 3})
    for step in (1, 2):
        tracker = TrackioTracker(folder, configured(trackio={"project": "rlinf-test"}))
        tracker.log(step, {"train/loss": 1 / step})
        tracker.log_samples(step, SAMPLES)
        tracker.close()
    assert str(utils.TRACKIO_DIR).startswith(("/tmp", "/var")), "set TRACKIO_DIR for this test"
    assert SQLiteStorage.get_runs("rlinf-test") == ["sums-1-01234567"]
    logs = SQLiteStorage.get_logs("rlinf-test", "sums-1-01234567")
    assert [row["train/loss"] for row in logs if "train/loss" in row] == [1.0, 0.5]


def test_a_resumed_run_of_the_real_mlflow_is_one_run_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for step in (1, 2):
        tracker = MlflowTracker(folder, configured(mlflow={"experiment": "sums"}))
        tracker.log(step, {"train/loss": 1 / step})
        tracker.log_compute({"engine": "float32 on cpu"})
        tracker.close()
    (found,) = mlflow.search_runs(experiment_names=["sums"], output_format="list")
    assert found.info.run_name == "sums-1"
    assert found.data.metrics == {"train/loss": 0.5}


def test_an_offline_run_of_the_real_wandb_is_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    monkeypatch.setenv("HOME", str(folder))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for step in (1, 2):
        # The run was resumed with other settings.
        monkeypatch.setattr(RunConfig, "semantic_values", lambda self, step=step: {"seed": step})
        tracker = WandbTracker(folder, configured(wandb={"project": "sums", "group": "first"}))
        tracker.log(step, {"train/loss": 0.5})
        tracker.log_samples(step, SAMPLES)
        tracker.log_compute({"engine": f"float{step} on cpu"})
        tracker.close()
    for written in (folder / "wandb").glob("offline-run-*"):
        assert list(written.glob("run-*.wandb"))
    with pytest.raises(ConfigError, match="needs a login"):
        WandbTracker.check(configured(wandb={"mode": "online"}))


def test_an_older_step_after_a_resume_erases_nothing(tmp_path: Path) -> None:
    """What is evaluated is told later than what it is of."""
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig.model_construct()
    first = TensorBoardTracker(tmp_path, config)
    for step in range(1, 7):
        first.log(step, {"train/loss": 1 / step})
    first.close()
    resumed = TensorBoardTracker(tmp_path, config)
    resumed.log(5, {"evaluate/score": 0.5})
    resumed.log(7, {"train/loss": 1 / 7})
    resumed.log_samples(7, SAMPLES)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, 8)]
    assert [event.step for event in events.Scalars("evaluate/score")] == [5]
    (text,) = events.Tensors("samples/1/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert shown == "score 1, answer 4\n\n    2+2=\n    ---\n    4"
