"""MLflow, into a file store in the run directory unless a tracking server is set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlinf.config import RunConfig
from rlinf.errors import MissingPackageError
from rlinf.track.base import identified, settings_of


class MLflow:
    """One MLflow run per run directory, found again by the id of ``run.json``."""

    package = ("mlflow", "mlflow")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import mlflow
        except ImportError:
            raise MissingPackageError("mlflow", "mlflow", "log.trackers: mlflow") from None
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri((run / "mlflow").as_uri())
        name, identity = identified(run)
        mlflow.set_experiment("rlinf")
        known = mlflow.search_runs(
            filter_string=f"tags.rlinf_id = '{identity}'", output_format="list"
        )
        self._mlflow = mlflow
        mlflow.start_run(
            run_id=known[0].info.run_id if known else None,
            run_name=name,
            tags={"rlinf_id": identity},
        )
        mlflow.log_dict(settings_of(run, config), "settings.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
