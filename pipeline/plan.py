"""The plan: what each stage runs on. A YAML file that a person may write and edit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from rlinf.config import RunConfig, Section, validate
from rlinf.errors import ConfigError, PlanError, nearest
from stages import SECTIONS
from stages.layout import PLAN

SINGLE_PROCESS = frozenset({"reward"})
"""Stages whose work one process does whole."""


class StagePlan(Section):
    """Resources of one stage; null takes the default of the plan, then of the cluster."""

    partition: str | None = None
    nodes: int = Field(default=1, gt=0)
    processes: int = Field(default=1, gt=0)
    """Processes per node; on GPU partitions as many as GPUs."""
    gpus: int = Field(default=0, ge=0)
    """GPUs per node."""
    gpu_type: str | None = None
    cpus: int = Field(default=1, gt=0)
    """CPUs per process."""
    mem_mb: int | None = Field(default=None, gt=0)
    """Memory per node, MiB."""
    time_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes."""


class Plan(Section):
    """Resources of every stage: ``defaults``, then what ``stages`` says of each."""

    defaults: StagePlan = StagePlan()
    stages: dict[str, StagePlan] = {}

    def of(self, stage: str) -> StagePlan:
        """The resources of a stage."""
        own = self.stages.get(stage)
        if own is None:
            merged = self.defaults
        else:
            merged = self.defaults.model_copy(update=own.model_dump(exclude_unset=True))
        if stage in SINGLE_PROCESS:
            merged = merged.model_copy(update={"nodes": 1, "processes": 1})
        return merged

    @classmethod
    def read(cls, run: Path) -> Plan:
        """The plan of a run directory.

        Raises:
            PlanError: missing or invalid.
        """
        return read_plan(run / PLAN)


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: missing, not YAML, or invalid; names the key.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"plan: no file {path}") from None
    except yaml.YAMLError as error:
        raise PlanError(f"plan: {path} is not valid YAML ({error})") from None
    return parse_plan(values or {}, str(path))


def parse_plan(values: Any, where: str) -> Plan:
    """Validate the content of a plan.

    Raises:
        PlanError: names the key.
    """
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: expected a mapping with 'defaults' and 'stages'")
    try:
        plan = validate(Plan, values, where)
    except ConfigError as error:
        raise PlanError(str(error)) from None
    for stage in plan.stages:
        if stage not in SECTIONS:
            raise PlanError(f"{where}.stages.{stage}: unknown stage{nearest(stage, SECTIONS)}")
    return plan


def load_plan(config: RunConfig) -> Plan:
    """The plan a configuration asks for: a file, a mapping, or one process per stage.

    Raises:
        PlanError: missing or invalid.
    """
    if config.plan is None:
        return Plan()
    if isinstance(config.plan, str):
        return read_plan(Path(config.plan).expanduser())
    return parse_plan(config.plan, "plan")
