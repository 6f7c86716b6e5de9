"""Built-in trackers: Weights & Biases (offline by default), MLflow, Trackio and TensorBoard."""

from __future__ import annotations

import inspect
import json
import logging
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import yaml

from rlinf.config import RunConfig, Section, redact, validate
from rlinf.errors import ConfigError, MissingPackageError

STEP_METRIC = "iteration"
"""The x-axis of all metrics."""
OFFLINE = "offline"
SAMPLES = "samples"
"""Name of the table of samples."""
COMPUTE = "compute"
"""Name of the data types and devices of engine and trainer."""
log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class LoggedSample:
    """A training sample as trackers show it; its fields are the columns of the table."""

    iteration: int
    """Counted from 1."""
    sample: int
    """Index of the sample in its iteration."""
    score: float
    prompt: str
    response: str
    answer: str
    """The reference answer, or an empty text."""


SAMPLE_COLUMNS = tuple(field.name for field in fields(LoggedSample))


def _table_rows(samples: Sequence[LoggedSample]) -> list[list[Any]]:
    return [list(asdict(sample).values()) for sample in samples]


class WandbConfig(Section):
    """Keys of ``log.wandb``. None of them changes a result."""

    project: str | None = None
    """Null: ``WANDB_PROJECT``, else ``rlinf``."""
    entity: str | None = None
    """User or team. Null: ``WANDB_ENTITY``, else the account's own."""
    group: str | None = None
    """Null: ``WANDB_RUN_GROUP``, else none."""
    name: str | None = None
    """Name of the run there. Null: ``run.name``."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """Null: ``WANDB_MODE``, else ``offline``, because compute nodes often have no network."""

    @property
    def effective_mode(self) -> str:
        """Return the mode in which W&B starts."""
        return self.mode or os.environ.get("WANDB_MODE") or OFFLINE


class WandbTracker:
    """One W&B run per run directory. It has the id of ``run.json``, so resuming continues it."""

    package = ("wandb", "wandb")
    """The module to import, and the extra that installs it."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self._wandb = wandb = _import_wandb()
        name, run_id = run_name_and_id(run)
        options = _options(config)
        mode = options.effective_mode
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or "rlinf",
            entity=options.entity,
            group=options.group,
            name=options.name or name,
            tags=list(options.tags) or None,
            mode=mode,
            id=run_id[:16],
            dir=str(run),
            resume="allow",
            config=settings_of_run(run, config),
            # A run may be resumed with other settings.
            allow_val_change=True,
            # Do not continue another run of this process.
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric=STEP_METRIC)
        if mode == "online":
            log.info("tracker wandb: %s", self._run.url)
        else:
            log.warning(
                "tracker wandb is %s: nothing is sent. Upload the run with: "
                "wandb sync '%s'/wandb/offline-run-*. To send it at once: log.wandb.mode=online",
                mode,
                run,
            )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Check that there is a login, if the mode is online.

        Raises:
            ConfigError: there is no login.
        """
        if _options(config).effective_mode == "online" and not _is_logged_in(_import_wandb()):
            raise ConfigError(
                "log.wandb.mode: online needs a login, and there is none; run wandb login, export "
                "WANDB_API_KEY where the run is started, or set log.wandb.mode=offline"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B's own step only increases, but evaluations arrive later than their iteration.
        self._run.log({**metrics, STEP_METRIC: step})

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=_table_rows(samples))
        self._run.log({SAMPLES: table, STEP_METRIC: step})

    def log_compute(self, compute: Mapping[str, str]) -> None:
        values = {f"{COMPUTE}.{part}": text for part, text in compute.items()}
        self._run.config.update(values, allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


def _options(config: RunConfig) -> WandbConfig:
    return validate(WandbConfig, config.log.get("wandb", {}), "log.wandb")


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise MissingPackageError("wandb", "wandb", "log.trackers: wandb") from None
    return wandb


def _is_logged_in(wandb: Any) -> bool:
    """Return whether there are credentials, without prompting for them."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return bool(wandb.api.api_key)  # for versions whose login prompts


FILE_STORE_VARIABLE = "MLFLOW_ALLOW_FILE_STORE"
"""Without this variable, newer versions of MLflow refuse to write to a folder."""


class MlflowConfig(Section):
    """Keys of ``log.mlflow``. None of them changes a result."""

    tracking_uri: str | None = None
    """Server or store. Null: ``MLFLOW_TRACKING_URI``, else the folder ``mlflow`` of the run."""
    experiment: str | None = None
    """Null: ``MLFLOW_EXPERIMENT_NAME``, else ``rlinf``."""
    name: str | None = None
    """Name of the run there. Null: ``run.name``."""


class MlflowTracker:
    """One MLflow run per run directory, tagged with the id of ``run.json``."""

    package = ("mlflow", "mlflow")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import mlflow
        except ImportError:
            raise MissingPackageError("mlflow", "mlflow", "log.trackers: mlflow") from None
        options = validate(MlflowConfig, config.log.get("mlflow", {}), "log.mlflow")
        tracking_uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if tracking_uri is None:
            tracking_uri = (run / "mlflow").as_uri()
            # Plain files, unlike a database, are safe on the shared filesystem of a cluster.
            os.environ.setdefault(FILE_STORE_VARIABLE, "true")
            log.warning(
                "tracker mlflow has no server and writes to the run; show it with: %s=true "
                "mlflow ui --backend-store-uri '%s'. To use a server: log.mlflow.tracking_uri",
                FILE_STORE_VARIABLE,
                tracking_uri,
            )
        mlflow.set_tracking_uri(tracking_uri)
        name, run_id = run_name_and_id(run)
        experiment = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rlinf"
        mlflow.set_experiment(experiment)
        existing_runs = mlflow.search_runs(
            filter_string=f"tags.rlinf_id = '{run_id}'", output_format="list"
        )
        self._mlflow = mlflow
        mlflow.start_run(
            run_id=existing_runs[0].info.run_id if existing_runs else None,
            run_name=options.name or name,
            tags={"rlinf_id": run_id},
        )
        mlflow.log_dict(settings_of_run(run, config), "settings.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        columns = zip(*_table_rows(samples), strict=True)
        data = {name: list(column) for name, column in zip(SAMPLE_COLUMNS, columns, strict=True)}
        self._mlflow.log_table(data, f"{SAMPLES}.json")  # appends to the table

    def log_compute(self, compute: Mapping[str, str]) -> None:
        self._mlflow.set_tags({f"{COMPUTE}.{part}": text for part, text in compute.items()})

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioConfig(Section):
    """Keys of ``log.trackio``. None of them changes a result."""

    project: str = "rlinf"
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run there, which must be unique in its project. Null: ``run.name`` and the first
    digits of the run's id."""
    group: str | None = None
    """Group of runs."""
    space_id: str | None = None
    """Hugging Face Space that shows the run. Null: ``TRACKIO_SPACE_ID``, else a local folder."""


class TrackioTracker:
    """One Trackio run per run directory, in a local database unless a Space is named."""

    package = ("trackio", "trackio")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingPackageError("trackio", "trackio", "log.trackers: trackio") from None
        options = validate(TrackioConfig, config.log.get("trackio", {}), "log.trackio")
        name, run_id = run_name_and_id(run)
        self._trackio = trackio
        self._run = trackio.init(
            project=options.project,
            name=options.name or f"{name}-{run_id[:8]}",
            group=options.group,
            space_id=options.space_id,
            config=settings_of_run(run, config),
            resume="allow",
            embed=False,
            # The manifests of stages record the usage of all nodes; the driver's own is small.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        table = self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=_table_rows(samples))
        self._run.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Writes settings as text and metrics as scalars, each once despite interruptions."""

    package = ("tensorboard", "track")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError("tensorboard", "track", "log.trackers: tensorboard") from None
        self._create_writer = SummaryWriter
        self._folder = run / "tensorboard"
        self._settings = settings_of_run(run, config)
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open_writer()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        writer = self._open_writer()
        for number, sample in enumerate(samples):
            # Indented text is shown as it is, because TensorBoard renders Markdown.
            text = f"score {sample.score:g}, answer {sample.answer}\n\n" + textwrap.indent(
                f"{sample.prompt}\n---\n{sample.response}", "    ", lambda line: True
            )
            writer.add_text(f"{SAMPLES}/{number}", text, step)
        writer.flush()

    def log_compute(self, compute: Mapping[str, str]) -> None:
        for part, text in compute.items():
            self._open_writer().add_text(f"{COMPUTE}/{part}", text)

    def _open_writer(self) -> Any:
        if self._writer is None:
            is_new = not self._folder.exists()
            self._writer = self._create_writer(str(self._folder))
            if is_new:
                text = yaml.safe_dump(self._settings, sort_keys=False)
                self._writer.add_text("settings", textwrap.indent(text, "    "))
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@runtime_checkable
class Tracker(Protocol):
    """A destination of metrics. A class may also have ``package``, ``check``, ``log_samples`` and
    ``log_compute`` (see :class:`WandbTracker`)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an iteration; ``step`` counts iterations from 1."""

    def close(self) -> None: ...


def run_name_and_id(run: Path) -> tuple[str, str]:
    """Return the name and id of a run from ``run.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / "run.json"
    try:
        info = json.loads(path.read_bytes())
        return str(info["name"]), str(info["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error!r}); resume with --keep, which writes it again"
        ) from None


def settings_of_run(run: Path, config: RunConfig) -> dict[str, Any]:
    """Return all settings in effect by section, defaults included, from ``run.json``.

    If ``run.json`` has no settings (runs of earlier versions), those of ``config`` that can change
    a result are returned. Possible secrets are hidden.
    """
    try:
        settings = json.loads((run / "run.json").read_bytes()).get("settings")
    except (OSError, ValueError, AttributeError):
        settings = None
    redacted: dict[str, Any] = redact(
        settings if isinstance(settings, dict) else config.semantic_values()
    )
    return redacted


class FailSafeTracker:
    """A tracker that is dropped with one warning when it fails, because training matters more."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_tracker(lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Forward samples, if the tracker accepts them."""
        if hasattr(self._tracker, "log_samples"):
            self._call_tracker(lambda tracker: tracker.log_samples(step, samples))

    def log_compute(self, compute: Mapping[str, str]) -> None:
        """Forward data type and device of engine and trainer, if the tracker accepts them.

        Args:
            compute: such as ``bfloat16 on NVIDIA H100``, by section of the configuration.
        """
        if hasattr(self._tracker, "log_compute"):
            self._call_tracker(lambda tracker: tracker.log_compute(compute))

    def close(self) -> None:
        self._call_tracker(lambda tracker: tracker.close())
        self._tracker = None

    def _call_tracker(self, call: Callable[[Any], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # a tracker may raise anything, and must not stop training
            self.warn_disabled(self._name, error)
            self._tracker = None

    @staticmethod
    def warn_disabled(name: str, error: Exception) -> None:
        log.warning("tracker %s failed and is disabled: %s", name, error)
