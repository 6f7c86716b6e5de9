"""Weights & Biases; offline unless the configuration or the environment says otherwise."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlinf.config import RunConfig, Section, validate
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.track.base import identified, settings_of

STEP = "iteration"
"""What all is drawn over."""
OFFLINE = "offline"
log = logging.getLogger("rlinf")


class WandbConfig(Section):
    """Keys of ``log.wandb``. None of them changes a result."""

    project: str | None = None
    """Null: ``WANDB_PROJECT``, else ``rlinf``."""
    entity: str | None = None
    """User or team. Null: ``WANDB_ENTITY``, else the account's own."""
    group: str | None = None
    """Null: ``WANDB_RUN_GROUP``, else none."""
    name: str | None = None
    """Name of the run there. Null: that of the run here."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """Null: ``WANDB_MODE``, else ``offline``, because compute nodes often have no network."""

    @property
    def effective_mode(self) -> str:
        """The mode that W&B is started in."""
        return self.mode or os.environ.get("WANDB_MODE") or OFFLINE


class WeightsAndBiases:
    """One W&B run per run directory: its id is that of ``run.json``, so a resumed run goes on."""

    package = ("wandb", "wandb")

    def __init__(self, run: Path, config: RunConfig) -> None:
        wandb = _package()
        name, identity = identified(run)
        options = _options(config)
        mode = options.effective_mode
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or "rlinf",
            entity=options.entity,
            group=options.group,
            name=options.name or name,
            tags=list(options.tags) or None,
            mode=mode,
            id=identity[:16],
            dir=str(run),
            resume="allow",
            config=settings_of(run, config),
            # Another run of this process is not gone on with.
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric=STEP)
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
        """See that W&B can be reached with a login, where it is to be online.

        Raises:
            ConfigError: there is no login.
        """
        if _options(config).effective_mode == "online" and not _is_logged_in(_package()):
            raise ConfigError(
                "log.wandb.mode: online needs a login, and there is none; run wandb login, export "
                "WANDB_API_KEY where the run is started, or set log.wandb.mode=offline"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B's own step only goes up, and what is evaluated comes later than what it is of.
        self._run.log({**metrics, STEP: step})

    def close(self) -> None:
        self._run.finish()


def _options(config: RunConfig) -> WandbConfig:
    return validate(WandbConfig, config.log.get("wandb", {}), "log.wandb")


def _package() -> Any:
    try:
        import wandb
    except ImportError:
        raise MissingPackageError("wandb", "wandb", "log.trackers: wandb") from None
    return wandb


def _is_logged_in(wandb: Any) -> bool:
    """Whether there are credentials; nobody is asked for them."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return bool(wandb.api.api_key)  # of versions that would ask
