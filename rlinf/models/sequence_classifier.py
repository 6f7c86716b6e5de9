"""Sequence classifiers with one label from local folders in the Hugging Face format.

A reward model is such a classifier: a network that maps a text to one number
(``AutoModelForSequenceClassification``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from rlinf.errors import DataError
from rlinf.models.checkpoint_tensors import (
    add_base_prefix,
    check_tensors,
    checkpoint_names_differ,
    raise_tensor_mismatch,
    stored_shapes,
)
from rlinf.models.hf_folder import (
    HFFolder,
    check_checkpoint,
    check_vocabulary,
    check_weight_files,
    one_line,
    read_config_json,
)
from rlinf.models.loading import meta_parameters, read_weights
from rlinf.models.rotary import freeze_rotary


def check_classifier(folder: Path, key: str, limit: int | None = None) -> Any:
    """Check that a folder has a sequence classifier with one label, without reading its weights.

    Args:
        key: The configuration key of the folder, for error messages.
        limit: Largest number of tokens of a row, as in :func:`load_classifier`.

    Returns:
        The tokenizer.

    Raises:
        DataError: The folder is missing, has no classification head or several labels, its weights
            are incomplete, its rotary frequencies cannot be fixed for the length, or the tokenizer
            does not fit the model.
    """
    with _report_under_key(folder, key):
        check_checkpoint(folder, trust_remote_code=False)
        check_weight_files(folder)
        cls, settings = _class_and_config(folder)
        module = _check_head(folder, cls, settings)
        freeze_rotary(module, read_config_json(folder), limit, f"{key}: {folder}")
        hf_folder = HFFolder(folder)
        check_vocabulary(hf_folder)
        return hf_folder.raw_tokenizer


def load_classifier(
    folder: Path, dtype: torch.dtype, key: str, limit: int | None = None
) -> nn.Module:
    """Load the network of a classifier folder on the CPU.

    The network maps ``input_ids`` and ``attention_mask`` ``[B, T]`` to ``logits`` ``[B, 1]``.

    Args:
        dtype: The type of the weights.
        key: The configuration key of the folder, for error messages.
        limit: Largest number of tokens of a row, for length-dependent rotary frequencies.

    Raises:
        DataError: As :func:`check_classifier`, or tensors are missing or do not fit the network.
    """
    with _report_under_key(folder, key):
        cls, settings = _class_and_config(folder)
        # Read the weights first: transformers memory-maps files and would see later changes.
        module, info = cls.from_pretrained(
            None,
            config=settings,
            state_dict=read_weights(folder),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        missing, unexpected = info["missing_keys"], info["unexpected_keys"]
        raise_tensor_mismatch(f"{key}: {folder}", missing, unexpected, info["mismatched_keys"])
        freeze_rotary(module, read_config_json(folder), limit, f"{key}: {folder}")
    network: nn.Module = module.eval().requires_grad_(False)
    return network


def _class_and_config(folder: Path) -> tuple[Any, Any]:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(settings) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise DataError(
            f"model.path: {folder} is of type {settings.model_type!r}, of which transformers knows "
            "no sequence classifier; give the folder of a reward model"
        )
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(settings)], settings


def _check_head(folder: Path, cls: Any, settings: Any) -> Any:
    """Check the classification head and return the network with parameters on ``meta``."""
    with meta_parameters():
        module = cls._from_config(settings)
    prefix = f"{module.base_model_prefix}."
    head_names = sorted(name for name in module.state_dict() if not name.startswith(prefix))
    stored = add_base_prefix(stored_shapes(folder), module)
    missing = [name for name in head_names if name not in stored]
    if missing:
        raise DataError(
            f"model.path: {folder} has no head for sequence classification ({missing[0]} is not in "
            "its files): it is no reward model; its head would be random numbers"
        )
    if settings.num_labels != 1:
        raise DataError(
            f"model.path: {folder} has {settings.num_labels} labels (id2label in config.json); a "
            "reward model has one"
        )
    if not checkpoint_names_differ(module):
        check_tensors(f"model.path: {folder}", stored, module)
    return module


@contextlib.contextmanager
def _report_under_key(folder: Path, key: str) -> Iterator[None]:
    """Replace ``model.path`` in errors by the folder's configuration key, and silence warnings.

    The functions for checkpoint folders always report ``model.path``.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("model.path", key)) from None
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise DataError(f"{key}: {folder}: cannot load the model ({one_line(error)})") from None
    finally:
        logging.set_verbosity(verbosity)
