"""Model folders and adapters from the weights of a run, each with a model card."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.commands.model_card import CARD_FILE, model_card
from pipeline.commands.results import verified_data_folder, weight_versions
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, write_atomic
from rlinf.errors import InputError
from rlinf.verified_io import copy_file
from stages.factory import CHECKPOINT, WEIGHTS, component_class, policy_class
from stages.flow import flow_of
from stages.layout import stage_folder


def export_weights(folder: Path, to: Path, version: int | None) -> int:
    """Copy a version's policy folder to a new folder, and add a model card; returns the version.

    Args:
        version: None: the newest.

    Raises:
        InputError: no such version, or the target exists.
        ArtifactError: the weights on disk are damaged.
    """
    run = Run.open(folder)
    versions = weight_versions(run.folder)
    if not versions:
        raise InputError(f"{folder}: no weights yet")
    selected = max(versions) if version is None else version
    if selected not in versions:
        available = ", ".join(str(number) for number in sorted(versions))
        raise InputError(f"--version {selected}: not on disk; available: {available}")
    _check_target(to)
    policy_folder = verified_data_folder(versions[selected]) / WEIGHTS
    shutil.copytree(policy_folder, to, dirs_exist_ok=True, copy_function=_copy_verified)
    write_atomic(to / CARD_FILE, model_card(run, selected, to.name))
    return selected


def export_adapter(folder: Path, to: Path, version: int | None) -> int:
    """Write the adapters of a version to a new folder for PEFT, with a model card; returns the
    version.

    Args:
        version: None: the newest whose checkpoint is on disk.

    Raises:
        InputError: the run has no adapters, or none that belong to the model of ``model.path``; no
            such version; the target exists.
        ArtifactError: the checkpoint on disk is damaged.
    """
    from rlinf.models.causal_lm import CausalLM
    from rlinf.trainers.lora import LoRAConfig, write_adapter_folder

    run = Run.open(folder)
    settings = getattr(component_class(run.config, "trainer")[1], "lora", None)
    if not isinstance(settings, LoRAConfig):
        raise InputError(
            f"--adapter: {folder} trains all weights (trainer.lora is not set); remove --adapter"
        )
    policy, options = policy_class(run.config)
    base = getattr(options, "path", None)
    if base is None or not issubclass(policy, CausalLM):
        raise InputError(
            f"--adapter: {folder} does not train a language model of model.path, so PEFT could not "
            "load its adapters; remove --adapter, which exports them merged into the weights"
        )
    if run.config.sft.max_steps:
        raise InputError(
            f"--adapter: the adapters of {folder} belong to the weights after SFT, not to those of "
            "model.path; remove --adapter, which exports them merged into the weights"
        )
    outputs = _checkpoints(run)
    selected = max(outputs, default=None) if version is None else version
    if selected is None or selected not in outputs:
        available = ", ".join(map(str, sorted(outputs))) or "none"
        number = "" if version is None else f" {version}"
        raise InputError(
            f"--adapter: no checkpoint of version{number} on disk; available: {available}"
        )
    _check_target(to)
    checkpoint = verified_data_folder(outputs[selected]) / CHECKPOINT
    to.mkdir(parents=True, exist_ok=True)
    write_adapter_folder(checkpoint, to, settings, str(base.expanduser().absolute()))
    write_atomic(to / CARD_FILE, model_card(run, selected, to.name, is_adapter=True))
    return selected


def _checkpoints(run: Run) -> dict[int, Path]:
    """Return the output folder with the checkpoint of each version on disk."""
    stage = flow_of(run.config).train_stage
    outputs = {}
    for version in range(1, run.config.iterations + 1):
        output = stage_folder(run.folder, stage, version - 1)
        if read_manifest(output) is not None and not is_pruned(output):
            outputs[version] = output
    return outputs


def _check_target(to: Path) -> None:
    """
    Raises:
        InputError: the target is a file, or a folder that is not empty.
    """
    if to.exists() and not to.is_dir():
        raise InputError(f"{to}: is a file; choose a new folder")
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")


def _copy_verified(source: str, target: str) -> None:
    copy_file(Path(source), Path(target))
