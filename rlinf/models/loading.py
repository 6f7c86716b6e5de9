"""Networks of checkpoint folders: load, create on the meta device, export, convert from GGUF.

:class:`CheckpointExporter` converts a network's tensors to the names and shapes of its checkpoints.
These differ if ``transformers`` joins tensors, for example all experts of a layer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rlinf.artifacts import sync_file
from rlinf.errors import DataError, require_package
from rlinf.models.base import weight_mismatch
from rlinf.models.causal_lm_config import CausalLMConfig, hf_config
from rlinf.models.checkpoint_tensors import (
    add_base_prefix,
    check_tensors,
    checkpoint_names_differ,
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

EAGER_ATTENTION_FAMILIES = {"gemma2"}
"""Families that may cap attention scores, which torch's fused attention does not support."""


def load_module(folder: Path, config: CausalLMConfig) -> Any:
    """Load the network of a checkpoint folder.

    Raises:
        DataError: The folder or a file is missing, tensors are missing or do not fit, or the folder
            has model code without permission to run it.
    """
    with _checkpoint_errors(folder):
        cls, settings = _class_and_config(folder, config)
        # Read the weights first: transformers memory-maps files and would see later changes.
        module, info = cls.from_pretrained(
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
        info["missing_keys"],
        info["unexpected_keys"],
        info["mismatched_keys"],
    )
    freeze_rotary(module, read_config_json(folder), config.max_model_len, f"model.path: {folder}")
    use_onednn(module)
    return module


def load_meta_module(folder: Path, config: CausalLMConfig) -> Any:
    """Create the network of a folder with parameters on ``meta``, for :func:`load_weights`.

    Return None if only ``transformers`` can convert the stored tensors to those of the network.

    Raises:
        DataError: As :func:`load_module`.
    """
    with _checkpoint_errors(folder):
        cls, settings = _class_and_config(folder, config)
        if "auto_map" in read_config_json(folder):
            return None
        module = _create_on_meta(cls, settings, config)
        if module is not None and checkpoint_names_differ(module):
            return None
    if module is not None:
        freeze_rotary(
            module, read_config_json(folder), config.max_model_len, f"model.path: {folder}"
        )
        use_onednn(module)
    return module


def check_rotary(folder: Path, config: CausalLMConfig) -> None:
    """Check that length-dependent rotary frequencies can be fixed for the run.

    Raises:
        DataError: As :func:`rlinf.models.rotary.freeze_rotary`.
    """
    if length_scaling(read_config_json(folder)) is None:
        return
    with _checkpoint_errors(folder):
        cls, settings = _class_and_config(folder, config)
        with meta_parameters():
            module = cls._from_config(settings)
        freeze_rotary(
            module, read_config_json(folder), config.max_model_len, f"model.path: {folder}"
        )


def new_meta_module(config: CausalLMConfig) -> Any:
    """Create a new network with a minimal vocabulary, entirely on the ``meta`` device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(config, vocabulary_size=2))  # type: ignore[no-untyped-call]


def text_config(config: CausalLMConfig) -> Any:
    """Return the text config of a language model, from its checkpoint or from the options.

    For new models it has only the numbers of attention and KV heads, named as in ``transformers``.

    Raises:
        DataError: As :func:`load_module`.
    """
    if config.path is None:
        return SimpleNamespace(
            num_attention_heads=config.heads, num_key_value_heads=config.kv_heads
        )
    folder = config.path.expanduser()
    with _checkpoint_errors(folder):
        return _class_and_config(folder, config)[1].get_text_config()


def inspect_module(folder: Path, config: CausalLMConfig) -> Any:
    """Return a network with the names, shapes and types of :func:`load_module`, for inspection.

    The network is on the ``meta`` device, unless some of its types are known only after loading.

    Raises:
        DataError: As :func:`load_module`.
    """
    with _checkpoint_errors(folder):
        cls, settings = _class_and_config(folder, config)
        module = _create_on_meta(cls, settings, config)
    return load_module(folder, config) if module is None else module


@torch.no_grad()
def load_weights(module: nn.Module, folder: Path, source: str) -> None:
    """Load the weights of a folder into a network; for a sharded one, the rows of this rank.

    Args:
        module: The network.
        folder: The checkpoint folder.
        source: The key and the folder, for error messages.

    Raises:
        DataError: A name or shape does not fit; the network is unchanged.
        SafetensorError: A file cannot be read.
        ArtifactError: A committed file is damaged; the network's weights are undefined.
    """
    state = module.state_dict(keep_vars=True)
    for name, rows in iter_weights(module, folder, source, local_rows):
        local_shard(state[name]).copy_(rows)


def iter_weights(
    module: nn.Module | None,
    folder: Path,
    source: str,
    row_range: Callable[[Tensor], tuple[int, int]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder by their names in a network.

    Args:
        module: The network; None: yield all tensors by their names in the files.
        source: The key and the folder, for error messages.
        row_range: Returns the start and end of the rows to read, for a tensor of the network.

    Raises:
        DataError: A name or shape does not fit; raised before the first tensor.
        SafetensorError: A file cannot be read.
        ArtifactError: A committed file is damaged; raised after its last tensor.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SafetensorsReader(path)) for path in tensor_files(folder)]
        by_stored_name = {stored: (file, stored) for file in files for stored in file.shapes}
        if module is None:
            for file in files:
                yield from file.tensors()
            return
        by_network_name = add_base_prefix(by_stored_name, module)
        shapes = {name: file.shapes[stored] for name, (file, stored) in by_network_name.items()}
        check_tensors(source, shapes, module)
        state = module.state_dict(keep_vars=True)
        for file in files:
            names = {
                stored: name
                for name, (source_file, stored) in by_network_name.items()
                if source_file is file and name in state
            }
            rows = (
                None
                if row_range is None
                else {stored: row_range(state[name]) for stored, name in names.items()}
            )
            for stored, tensor in file.tensors(names.keys() if rows is None else rows):
                yield names[stored], tensor


def reload_weights(module: Any, folder: Path) -> bool:
    """Load another version of the weights into a loaded network.

    Return False, without changes, if the folder does not have exactly the network's tensors.
    """
    try:
        load_weights(module, folder, str(folder))
    except DataError:
        return False
    return True


@contextlib.contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    """Convert exceptions of ``transformers`` to DataErrors for the folder; silence its warnings."""
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


def _class_and_config(folder: Path, config: CausalLMConfig) -> tuple[Any, Any]:
    """Return the class and the ``transformers`` configuration of a checkpoint's network."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    trusted = config.trust_remote_code
    check_checkpoint(folder, trusted)
    with verified_temporary_copy(folder, non_weight_files(folder)) as copied:
        settings = AutoConfig.from_pretrained(
            copied, local_files_only=True, trust_remote_code=trusted
        )
        disable_dropout(settings)
        if class_name := getattr(settings, "auto_map", {}).get("AutoModelForCausalLM"):
            return get_class_from_dynamic_module(class_name, str(copied)), settings
        return network_class(settings), settings


def _create_on_meta(cls: Any, settings: Any, config: CausalLMConfig) -> Any:
    """Create a network on ``meta``; None if loading changes the type of some parameters."""
    with meta_parameters():
        module = cls._from_config(
            settings, dtype=getattr(torch, config.dtype), attn_implementation=_attention(settings)
        )
    keeps_float32 = getattr(module, "_keep_in_fp32_modules_strict", None)
    return None if config.dtype != "float32" and keeps_float32 else module


def _attention(settings: Any) -> str | None:
    """Return the initial attention implementation, which packing or an engine may replace.

    None lets ``transformers`` choose fused attention if all parts support it, else eager attention.
    """
    return "eager" if settings.model_type in EAGER_ATTENTION_FAMILIES else None


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Create parameters on ``meta`` inside this context, but initialize buffers normally.

    Only the network's constructor computes buffers such as rotary frequencies; checkpoints do not
    have them.
    """
    original, thread = nn.Module.register_parameter, threading.get_ident()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == thread:
            # Allocated memory uses no physical memory before the first write.
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def disable_dropout(settings: Any) -> None:
    """Set all dropout rates of a model's configuration to zero.

    Dropout would add unseeded noise to the probability ratios of an update.
    """
    configs = (settings, settings.get_text_config(), getattr(settings, "vision_config", None))
    for config in filter(None, configs):
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder.

    Raises as :class:`rlinf.safetensors_io.SafetensorsReader`.
    """
    tensors: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        tensors |= load_tensors(path)
    return tensors


class CheckpointExporter:
    """Converts a network's tensors to those of its checkpoint, without copies of tied tensors."""

    def __init__(self, module: Any) -> None:
        """
        Args:
            module: A network of ``transformers``, which is moved to ``meta``.
        """
        first_names = dict[int, str]()
        state = module.state_dict(keep_vars=True)
        self._first_names = {
            name: first_names.setdefault(id(tensor), name) for name, tensor in state.items()
        }
        """The first of the tied names of a tensor, by each of its names."""
        self._templates: dict[str, Tensor] = {n: tensor.to("meta") for n, tensor in state.items()}
        self._module = module.to("meta")
        untied = {name: self._templates[name] for name in self._first_names.values()}
        self._names_differ = checkpoint_names_differ(module)
        self.meta_tensors = to_checkpoint_tensors(module, untied) if self._names_differ else untied
        """Each checkpoint tensor on ``meta``, with its shape and type."""

    def export(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        device: torch.device | str = "cpu",
        *,
        copy: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint tensors for the network's tensors, with the types of the network.

        Tensors are consumed one at a time, unless a checkpoint tensor consists of several tensors.

        Args:
            tensors: Tensors by the network's names, in any order; of tied tensors, at least one.
            device: The device of the results.
            copy: Whether to copy each tensor to new memory.

        Raises:
            DataError: A name or shape does not fit, or tensors are missing (raised at the end).
        """
        checked = self._check_each(tensors, device, copy)
        if not self._names_differ:
            yield from checked
        elif _converts_one_by_one(self._module):
            for name, tensor in checked:
                yield from to_checkpoint_tensors(self._module, {name: tensor}).items()
        else:
            yield from to_checkpoint_tensors(self._module, dict(checked)).items()

    def _check_each(
        self, tensors: Iterable[tuple[str, Tensor]], device: torch.device | str, copy: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor under the first of its tied names; raises as :meth:`export`."""
        missing = set(self._first_names.values())
        for name, tensor in tensors:
            if name not in self._templates or self._templates[name].shape != tensor.shape:
                raise weight_mismatch(name, 1)
            if (first := self._first_names[name]) in missing:
                missing.discard(first)
                yield first, tensor.to(device, self._templates[name].dtype, copy=copy)
        if missing:
            raise weight_mismatch(min(missing), len(missing))


def _converts_one_by_one(module: Any) -> bool:
    """Return whether each checkpoint tensor consists of a single tensor of the network."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(module, add_legacy=False)
    return all(len(rule.reverse_transform().source_patterns) == 1 for rule in mapping)


def check_new_folder(folder: Path) -> None:
    """Check that a folder does not exist.

    Raises:
        DataError: It does.
    """
    if folder.exists():
        raise DataError(f"{folder}: is there already; name another folder or remove it")


@contextlib.contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Create a folder whose files are written inside this context, to the folder that it yields.

    The folder appears only if there is no exception.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        written = Path(name) / "model"
        written.mkdir()
        yield written
        for path in written.iterdir():
            sync_file(path)
        sync_file(written)
        written.rename(folder)
    sync_file(folder.parent)


def find_gguf(source: str) -> Path:
    """Return the GGUF file at a path, or the only one in an installed package.

    The package is not imported.

    Args:
        source: The path of a ``.gguf`` file, or the name of a package.

    Raises:
        DataError: The file does not exist, or the package has none or several.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise DataError(f"{source}: no such file")
        return path
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{source}: neither a .gguf file nor an installed package that carries one")
    files = sorted(
        file for root in spec.submodule_search_locations for file in Path(root).glob("*.gguf")
    )
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise DataError(f"{source}: the package carries {names}; name one .gguf file by its path")
    return files[0]


def convert_gguf(source: str, folder: Path) -> None:
    """Convert the model of a GGUF file to a folder for ``model.path``.

    Quantized weights are dequantized to float32, so the model differs from the original one.

    Raises:
        DataError: See :func:`find_gguf`; the folder already exists; or ``transformers`` cannot read
            the file as a causal language model.
    """
    file = find_gguf(source)
    check_new_folder(folder)
    for package in ("gguf", "accelerate"):
        require_package(package, "gguf", f"{source}: reading GGUF files")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        raise DataError(f"{file}: cannot be read as a causal language model: {error}") from None
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    # A new model, because the loaded model is marked as quantized and cannot be saved.
    dequantized = type(model)(config)
    dequantized.load_state_dict(model.state_dict())
    with new_model_folder(folder) as written:
        dequantized.save_pretrained(written)
        tokenizer.save_pretrained(written)
