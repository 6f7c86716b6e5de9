"""MLflow, into a file store in the run directory unless a tracking server is set."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from rlinf.config import RunConfig, Section, validate
from rlinf.errors import MissingPackageError
from rlinf.track.base import identified, settings_of

FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"
"""Without this variable, newer versions of MLflow refuse to write to a folder."""
log = logging.getLogger("rlinf")


class MlflowConfig(Section):
    """Keys of ``log.mlflow``. None of them changes a result."""

    tracking_uri: str | None = None
    """Server or store. Null: ``MLFLOW_TRACKING_URI``, else the folder ``mlflow`` of the run."""
    experiment: str | None = None
    """Null: ``MLFLOW_EXPERIMENT_NAME``, else ``rlinf``."""
    name: str | None = None
    """Name of the run there. Null: that of the run here."""


class MLflow:
    """One MLflow run per run directory, found again by the id of ``run.json``."""

    package = ("mlflow", "mlflow")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import mlflow
        except ImportError:
            raise MissingPackageError("mlflow", "mlflow", "log.trackers: mlflow") from None
        options = validate(MlflowConfig, config.log.get("mlflow", {}), "log.mlflow")
        place = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            place = (run / "mlflow").as_uri()
            # Plain files, unlike a database, are safe on the shared filesystem of a cluster.
            os.environ.setdefault(FILE_STORE, "true")
            log.warning(
                "tracker mlflow has no server and writes to the run; show it with: %s=true "
                "mlflow ui --backend-store-uri '%s'. To use a server: log.mlflow.tracking_uri",
                FILE_STORE,
                place,
            )
        mlflow.set_tracking_uri(place)
        name, identity = identified(run)
        experiment = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rlinf"
        mlflow.set_experiment(experiment)
        known = mlflow.search_runs(
            filter_string=f"tags.rlinf_id = '{identity}'", output_format="list"
        )
        self._mlflow = mlflow
        mlflow.start_run(
            run_id=known[0].info.run_id if known else None,
            run_name=options.name or name,
            tags={"rlinf_id": identity},
        )
        mlflow.log_dict(settings_of(run, config), "settings.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
