"""Networks of checkpoint folders in the Hugging Face format: load, create on meta, and export.

:class:`CheckpointExporter` converts a network's tensors to the names and shapes of its checkpoints.
They differ if the model library joins tensors, for example all experts of a layer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rlinf.errors import DataError
from rlinf.models.base import weight_mismatch
from rlinf.models.causal_lm_config import hf_config
from rlinf.models.checkpoint_tensors import (
    add_base_prefix,
    check_tensors,
    has_own_checkpoint_names,
    network_class,
    raise_tensor_mismatch,
    to_checkpoint_tensors,
)
from rlinf.models.hf_folder import (
    check_checkpoint,
    non_weight_files,
    read_config_json,
    tensor_files,
)
from rlinf.models.onednn_linear import use_onednn
from rlinf.models.rotary import freeze_rotary, length_scaling
from rlinf.safetensors_io import SafetensorsReader, load_tensors
from rlinf.sharded_tensors import local_rows, local_shard
from rlinf.verified_io import verified_temporary_copy

if TYPE_CHECKING:
    from rlinf.models.causal_lm import CausalLMConfig

EAGER_ATTENTION_FAMILIES = {"gemma2"}
"""Families that may cap attention scores, which torch's fused attention does not support."""


def load_module(folder: Path, config: CausalLMConfig) -> Any:
    """The network of a checkpoint folder, whole.

    Raises:
        DataError: missing folder or files, tensors that are missing or not the network's, or model
            code without permission to run it.
    """
    with _reading(folder):
        cls, settings = _network(folder, config)
        # Read here, not by the library, which maps files and would see them change.
        module, found = cls.from_pretrained(
            None,
            config=settings,
            state_dict=read_weights(folder),
            dtype=getattr(torch, config.dtype),
            attn_implementation=_attention(settings),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    raise_tensor_mismatch(
        f"model.path: {folder}",
        found["missing_keys"],
        found["unexpected_keys"],
        found["mismatched_keys"],
    )
    freeze_rotary(module, read_config_json(folder), config.max_model_len, f"model.path: {folder}")
    use_onednn(module)
    return module


def load_meta_module(folder: Path, config: CausalLMConfig) -> Any:
    """The same with parameters that have no memory yet (on the ``meta`` device), for :func:`fill`.

    None where only the library knows how the tensors in the files make those of the network.

    Raises:
        DataError: as :func:`load_module`.
    """
    with _reading(folder):
        cls, settings = _network(folder, config)
        if "auto_map" in read_config_json(folder):
            return None
        module = _without_memory(cls, settings, config)
        if module is not None and has_own_checkpoint_names(module):
            return None
    if module is not None:
        freeze_rotary(
            module, read_config_json(folder), config.max_model_len, f"model.path: {folder}"
        )
        use_onednn(module)
    return module


def check_rotary(folder: Path, config: CausalLMConfig) -> None:
    """See that rotary frequencies that depend on a length can be those of the run.

    Raises:
        DataError: as :func:`rlinf.models.rotary.freeze_rotary`.
    """
    if length_scaling(read_config_json(folder)) is None:
        return
    with _reading(folder):
        cls, settings = _network(folder, config)
        with meta_parameters():
            module = cls._from_config(settings)
        freeze_rotary(
            module, read_config_json(folder), config.max_model_len, f"model.path: {folder}"
        )


def new_meta_module(config: CausalLMConfig) -> Any:
    """A new network of some sizes and a small vocabulary, parameters and buffers without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(config, vocabulary=2))  # type: ignore[no-untyped-call]


def text_config(config: CausalLMConfig) -> Any:
    """What is known of a language model before it is made: of its checkpoint, or as configured.

    By the names of transformers, whatever those of the family are.

    Raises:
        DataError: as :func:`load_module`.
    """
    if config.path is None:
        return SimpleNamespace(
            num_attention_heads=config.heads, num_key_value_heads=config.kv_heads
        )
    folder = config.path.expanduser()
    with _reading(folder):
        return _network(folder, config)[1].get_text_config()


def inspect_module(folder: Path, config: CausalLMConfig) -> Any:
    """A network with the names, shapes and types of that of :func:`load_module`, to be looked at.

    It takes no memory, of every family; but where some of its types are known by loading alone.

    Raises:
        DataError: as :func:`load_module`.
    """
    with _reading(folder):
        cls, settings = _network(folder, config)
        module = _without_memory(cls, settings, config)
    return load_module(folder, config) if module is None else module


@torch.no_grad()
def load_weights(module: nn.Module, folder: Path, where: str) -> None:
    """Read the weights in a folder into a network; of one that is sharded, this process's rows.

    Args:
        where: what errors call the folder.

    Raises:
        DataError: they are not this network's by name and shape; nothing has changed.
        SafetensorError: a file cannot be read.
        ArtifactError: one is committed and damaged; the network holds anything.
    """
    own = module.state_dict(keep_vars=True)
    for name, rows in iter_weights(module, folder, where, local_rows):
        local_shard(own[name]).copy_(rows)


def iter_weights(
    module: nn.Module | None,
    folder: Path,
    where: str,
    row_range: Callable[[Tensor], tuple[int, int]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Weights in a folder, one after another, by their names in a network.

    Args:
        module: the network; None: by their names in the files, whatever they are of.
        where: what errors call the folder.
        part: of a tensor of the network, which rows are wanted: begin and end.

    Raises:
        DataError: they are not this network's by name and shape; raised before the first.
        SafetensorError: a file cannot be read.
        ArtifactError: one is committed and damaged; raised after its last.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SafetensorsReader(path)) for path in tensor_files(folder)]
        found = {name: (file, name) for file in files for name in file.shapes}
        if module is None:
            for file in files:
                yield from file.tensors()
            return
        named = add_base_prefix(found, module)
        shapes = {own: file.shapes[name] for own, (file, name) in named.items()}
        check_tensors(where, shapes, module)
        own = module.state_dict(keep_vars=True)
        for file in files:
            names = {n: mine for mine, (one, n) in named.items() if one is file and mine in own}
            wanted = (
                None
                if row_range is None
                else {n: row_range(own[mine]) for n, mine in names.items()}
            )
            for name, tensor in file.tensors(names.keys() if wanted is None else wanted):
                yield names[name], tensor


def reload_weights(module: Any, folder: Path) -> bool:
    """Read the weights of another version of a loaded network into it.

    Returns false, having changed nothing, where the folder does not hold just these tensors.
    """
    try:
        load_weights(module, folder, str(folder))
    except DataError:
        return False
    return True


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What the library raises of a checkpoint is said of it; what it warns of is an error here."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        raise DataError(f"model.path: {folder}: cannot load the checkpoint ({error})") from None
    finally:
        logging.set_verbosity(verbosity)


def _network(folder: Path, config: CausalLMConfig) -> tuple[Any, Any]:
    """Class and settings of a checkpoint's network."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    trusted = config.trust_remote_code
    check_checkpoint(folder, trusted)
    with verified_temporary_copy(folder, non_weight_files(folder)) as small:
        settings = AutoConfig.from_pretrained(
            small, local_files_only=True, trust_remote_code=trusted
        )
        disable_dropout(settings)
        if own := getattr(settings, "auto_map", {}).get("AutoModelForCausalLM"):
            return get_class_from_dynamic_module(own, str(small)), settings
        return network_class(settings), settings


def _without_memory(cls: Any, settings: Any, config: CausalLMConfig) -> Any:
    """A network on the ``meta`` device; None where loading makes some of it of another type."""
    with meta_parameters():
        module = cls._from_config(
            settings, dtype=getattr(torch, config.dtype), attn_implementation=_attention(settings)
        )
    kept = config.dtype != "float32" and getattr(module, "_keep_in_fp32_modules_strict", None)
    return None if kept else module


def _attention(settings: Any) -> str | None:
    """What the library computes attention with, until packing or an engine sets its own.

    None: torch's fused attention where each part of the network has it, else the formula.
    """
    return "eager" if settings.model_type in EAGER_ATTENTION_FAMILIES else None


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Networks made here have parameters without memory; their buffers have what they should.

    Buffers are made by the network alone (rotary frequencies, say), in no file of a checkpoint.
    """
    plain, here = nn.Module.register_parameter, threading.get_ident()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == here:
            # What was allocated and never written to took no memory so far.
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        plain(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def disable_dropout(settings: Any) -> None:
    """Set every dropout of a model's configuration to zero.

    The ratio of an update compares the policy with itself: dropped units would be noise in it, and
    from a generator that no address fixes.
    """
    parts = (settings, settings.get_text_config(), getattr(settings, "vision_config", None))
    for part in filter(None, parts):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder.

    Raises as :class:`rlinf.safetensors_io.SafetensorsReader`.
    """
    found: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        found |= load_tensors(path)
    return found


class CheckpointExporter:
    """Of one network; of tied tensors the first alone."""

    def __init__(self, module: Any) -> None:
        """
        Args:
            module: of the library; nothing of its memory is kept.
        """
        first = dict[int, str]()
        own = module.state_dict(keep_vars=True)
        self._first = {name: first.setdefault(id(tensor), name) for name, tensor in own.items()}
        self._own: dict[str, Tensor] = {name: tensor.to("meta") for name, tensor in own.items()}
        self._module = module.to("meta")
        untied = {name: self._own[name] for name in self._first.values()}
        self._renames = has_own_checkpoint_names(module)
        self.meta_tensors = to_checkpoint_tensors(module, untied) if self._renames else untied
        """Every name, with a tensor of its shape and type that has no memory."""

    def export(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        device: torch.device | str = "cpu",
        *,
        copy: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """What is published of the network's own tensors, of the types that it has them in.

        They are taken one after another, unless the family's checkpoints have tensors that are made
        of several.

        Args:
            tensors: by the network's names, in any order; of tied ones any.
            copy: each in memory of its own.

        Raises:
            DataError: one is not the network's by name and shape; after the last: some are missing.
        """
        own = self._fitting(tensors, device, copy)
        if not self._renames:
            yield from own
        elif _one_by_one(self._module):
            for name, tensor in own:
                yield from to_checkpoint_tensors(self._module, {name: tensor}).items()
        else:
            yield from to_checkpoint_tensors(self._module, dict(own)).items()

    def _fitting(
        self, tensors: Iterable[tuple[str, Tensor]], device: torch.device | str, copy: bool
    ) -> Iterator[tuple[str, Tensor]]:
        lacking = set(self._first.values())
        for name, tensor in tensors:
            if name not in self._own or self._own[name].shape != tensor.shape:
                raise weight_mismatch(name, 1)
            if (first := self._first[name]) in lacking:
                lacking.discard(first)
                yield first, tensor.to(device, self._own[name].dtype, copy=copy)
        if lacking:
            raise weight_mismatch(min(lacking), len(lacking))


def _one_by_one(module: Any) -> bool:
    """Whether each published tensor is made of one of the network's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(module, add_legacy=False)
    return all(len(one.reverse_transform().source_patterns) == 1 for one in mapping)
