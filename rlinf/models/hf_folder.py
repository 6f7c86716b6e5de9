"""Model folders in the Hugging Face format, read in one place for all trainers, engines and tasks.

:class:`HFFolder` reads the configuration, context length, tokenizer, chat template and stop tokens.
Nothing here loads weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import ArtifactError, DataError, did_you_mean
from rlinf.verified_io import allowed_link_targets, copy_file, read_text, verified_temporary_copy

if TYPE_CHECKING:
    from rlinf.models.chat_format import ChatFormat

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""The file that maps each tensor to one of several weight files."""
GENERATION_CONFIG_FILE = "generation_config.json"
LEGACY_TEMPLATE_FILE = "chat_template.json"
"""File with the chat template of a multimodal model in older folders; tokenizers do not read it."""
LFS_POINTER = b"version https://git-lfs"
"""First bytes of a git-lfs pointer, the placeholder of a file that was not fetched."""
ADAPTER_FILE = "adapter_config.json"
MISTRAL_PREFIX = "consolidated"
"""Prefix of weight files in Mistral's format."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header of the safetensors format."""
QUANTIZED_DTYPES = {"I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}
"""Element types of quantized weights. Bool masks and int64 positions of older files are allowed."""
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys of the context length in the ``config.json`` of different families, as in vLLM."""
PREEXTENDED_ROPE_TYPES = {
    "llama3",
    "longrope",
    "su",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
}
"""Rotary scalings whose factor is already part of ``max_position_embeddings``."""


@dataclass(frozen=True)
class HFFolder:
    """A model folder in the Hugging Face format; each part is read on first access."""

    folder: Path
    trust_remote_code: bool = False
    """Whether Python code in the folder may run."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking``."""

    @classmethod
    def from_config(cls, config: Any, folder: Path | None = None) -> HFFolder:
        """Return the folder that a policy's configuration names.

        Args:
            config: Options with ``trust_remote_code`` and ``chat_template_kwargs``.
            folder: Replaces ``config.path``.
        """
        folder = config.path.expanduser() if folder is None else folder
        return cls(folder, config.trust_remote_code, config.chat_template_kwargs)

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """The values of ``config.json``; raises as :func:`read_config_json`."""
        return read_config_json(self.folder)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The values of ``generation_config.json``; empty without that file."""
        path = self.folder / GENERATION_CONFIG_FILE
        return read_json_object(path) if path.is_file() else {}

    @cached_property
    def hf_config(self) -> Any:
        """The ``transformers`` configuration of the network.

        Raises:
            DataError: ``transformers`` does not know the model type, or rejects a value.
        """
        from transformers import AutoConfig

        try:
            with verified_temporary_copy(self.folder, non_weight_files(self.folder)) as copied:
                return AutoConfig.from_pretrained(
                    copied, local_files_only=True, trust_remote_code=self.trust_remote_code
                )
        except ArtifactError:
            raise
        except Exception as error:  # transformers raises many types
            raise DataError(
                f"model.path: {self.folder / 'config.json'} cannot be used ({one_line(error)})"
            ) from None

    @cached_property
    def context_length(self) -> int | None:
        """The largest number of tokens of a sample; None: no limit (:func:`context_length`)."""
        return context_length(self.hf_config)

    def max_model_len(self, limit: int | None) -> int | None:
        """Return the largest number of tokens of a sample in a run; None: no limit.

        Args:
            limit: The limit of the run (``model.max_model_len``). None: the limit of the model; if
                its rotary frequencies depend on the length, the length without scaling (as vLLM).
        """
        from rlinf.models.rotary import length_scaling

        scaling = length_scaling(self.config_json)
        return limit or (self.context_length if scaling is None else scaling.original_length)

    @cached_property
    def vocabulary_size(self) -> int | None:
        """The vocabulary size of the model, if its configuration has it."""
        size = self.config_json.get("vocab_size")
        if size is None:
            size = next(
                (inner.get("vocab_size") for inner in _text_configs(self.config_json)), None
            )
        return size if isinstance(size, int) else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with a pad token and at most one chat template.

        Its ``chat_format`` is the :class:`~rlinf.models.chat_format.ChatFormat` of the folder.

        Raises:
            DataError: There is no tokenizer, it has no end-of-sequence token, or its chat templates
                have no default.
        """
        tokenizer = self.raw_tokenizer
        size = self.vocabulary_size
        # A tokenizer class may define an end token that the model does not have.
        if tokenizer.eos_token_id is None or (size and tokenizer.eos_token_id >= size):
            raise DataError(
                f"model.path: the tokenizer of {self.folder} has no end-of-sequence token, so no "
                "sample could ever end; set eos_token in its tokenizer_config.json"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        from rlinf.models.chat_format import ChatFormat

        tokenizer.chat_format = ChatFormat.from_tokenizer(
            tokenizer,
            template_kwargs=self.chat_template_kwargs,
            eos_token_ids=self._configured_eos_ids | {tokenizer.eos_token_id},
        )
        return tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """The chat format; see :class:`~rlinf.models.chat_format.ChatFormat`."""
        chat_format: ChatFormat = self.tokenizer.chat_format
        return chat_format

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids of tokens that end a response, equal for all engines.

        These are all ``eos_token_id`` of ``generation_config.json``, ``config.json`` and the
        tokenizer, and the token that ends the assistant's turn in the chat template.
        """
        eos_ids = self._configured_eos_ids | {self.tokenizer.eos_token_id}
        return frozenset(eos_ids | {self.chat_format.end_of_turn_token_id})

    @cached_property
    def _configured_eos_ids(self) -> frozenset[int]:
        configs = (self.generation_config, self.config_json, *_text_configs(self.config_json))
        ids = {token for config in configs for token in _token_ids(config.get("eos_token_id"))}
        size = self.vocabulary_size
        return frozenset(token for token in ids if size is None or token < size)

    @cached_property
    def raw_tokenizer(self) -> Any:
        """The tokenizer, which may have no end-of-sequence token.

        Raises:
            DataError: There is no tokenizer, or its chat templates have no default.
        """
        from transformers import AutoTokenizer

        check_checkpoint(self.folder, self.trust_remote_code)
        try:
            with verified_temporary_copy(self.folder, non_weight_files(self.folder)) as copied:
                tokenizer = AutoTokenizer.from_pretrained(
                    copied, local_files_only=True, trust_remote_code=self.trust_remote_code
                )
        except ArtifactError:
            raise
        except Exception as error:  # the tokenizer library raises plain Exception
            raise DataError(
                f"model.path: {self.folder}: cannot load a tokenizer ({one_line(error)})"
            ) from None
        tokenizer.chat_template = self._chat_template(tokenizer)
        return tokenizer

    def _chat_template(self, tokenizer: Any) -> str | None:
        """Return the tokenizer's chat template; of several templates, the default one."""
        template = tokenizer.chat_template
        if not template and (path := self.folder / LEGACY_TEMPLATE_FILE).is_file():
            template = read_json_object(path).get("chat_template")
        from rlinf.models.chat_format import select_chat_template

        return select_chat_template(template, f"model.path: {self.folder}")


def context_length(config: Any) -> int | None:
    """Return the context length of a model, or None if its configuration has no limit.

    This is the largest length that vLLM 0.32 accepts for the model (``_get_and_verify_max_len`` in
    ``vllm/config/model.py``). Most rotary scalings are already part of
    ``max_position_embeddings``; linear and dynamic ones multiply it by their factor.

    Args:
        config: The ``transformers`` configuration of the model.
    """
    text = config.get_text_config()
    values = [getattr(text, name, None) for name in LENGTH_KEYS]
    lengths = [length for length in values if isinstance(length, int)]
    if not lengths:
        return None
    length = getattr(text, "model_max_length", None) or min(lengths)
    if "gemma3" in text.model_type:  # its config has the extended length
        return int(length)
    factors = [
        rope.get("factor") or 1.0
        for rope in _rope_parameters(text)
        if rope.get("rope_type", "default") not in PREEXTENDED_ROPE_TYPES
    ]
    return int(length * max(factors, default=1.0))


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of a configuration, one per layer type if they differ."""
    rotary = getattr(text, "rope_parameters", None) or {}
    is_nested = rotary and all(isinstance(value, Mapping) for value in rotary.values())
    return [*rotary.values()] if is_nested else [rotary]


def _text_configs(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the language model's part of a multimodal model's ``config.json``, if there is one."""
    inner = settings.get("text_config")
    return [inner] if isinstance(inner, Mapping) else []


def _token_ids(value: Any) -> Iterable[int]:
    """Return the token ids of a value that is an id, a list of ids, or None."""
    values = value if isinstance(value, list) else [value]
    return (token for token in values if type(token) is int and token >= 0)


def one_line(error: BaseException, max_length: int = 200) -> str:
    """Return the message of an error on one line, truncated to ``max_length`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the values of ``config.json`` in a checkpoint folder.

    Raises:
        DataError: The folder is not a checkpoint of a trainable model.
    """
    path = folder / "config.json"
    settings = read_json_object(path)
    if not isinstance(settings.get("model_type"), str):
        raise DataError(f"model.path: {path} names no model_type; is it a checkpoint folder?")
    for config in (settings, *_text_configs(settings)):
        if config.get("quantization_config") or config.get("compression_config"):
            raise _quantized_error(
                f"{folder} holds quantized weights (quantization_config in {path.name})"
            )
    if (folder / ADAPTER_FILE).exists():
        raise DataError(
            f"model.path: {folder} has an adapter ({ADAPTER_FILE}) beside the weights, which "
            "would be ignored; merge it into them, or remove its files"
        )
    return settings


def _quantized_error(finding: str) -> DataError:
    return DataError(
        f"model.path: {finding}, which cannot be trained; use the original checkpoint, or one "
        "that transformers has dequantized and saved (dequantize=True of the "
        "quantization_config, or model.dequantize())"
    )


def check_weight_files(folder: Path) -> None:
    """Check by their headers that the weight files are complete.

    Raises:
        DataError: There are no files; one is missing, truncated or a git-lfs pointer; or the
            weights are quantized.
    """
    for path in tensor_files(folder):
        if not path.is_file():
            raise DataError(
                f"model.path: {folder} lacks {path.name}, which {INDEX_FILE} names; copy the "
                "folder again"
            )
        _check_file(path)


def _check_file(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise DataError(
                    f"model.path: {path} is a pointer of git-lfs, not the weights; fetch them: "
                    "git lfs pull"
                )
            file.seek(8)
            header_size = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 0 < header_size <= min(MAX_HEADER_BYTES, size - 8):
                raise DataError(f"model.path: {path} is cut off or no safetensors file")
            header = json.loads(file.read(header_size))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            quantized = sorted(
                name for name, entry in entries.items() if entry["dtype"] in QUANTIZED_DTYPES
            )
    except OSError as error:
        raise DataError(f"model.path: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DataError(f"model.path: {path} is cut off or no safetensors file") from None
    if not ends:
        raise DataError(f"model.path: {path} holds no tensors")
    expected_size = 8 + header_size + max(ends)
    if size != expected_size:
        raise DataError(
            f"model.path: {path} has {size} bytes, and {expected_size} by its header; copy it again"
        )
    if quantized:
        raise _quantized_error(f"{path} holds quantized weights ({quantized[0]})")


def read_json_object(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Read a JSON file with an object.

    Args:
        key: The configuration key, for error messages.

    Raises:
        DataError: The file cannot be read, or its content is not an object.
    """
    try:
        values = json.loads(read_text(path))
    except OSError as error:
        raise DataError(f"{key}: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key}: {path} is not JSON ({str(error)[:100]})") from None
    if not isinstance(values, dict):
        raise DataError(f"{key}: {path} holds no object")
    return values


def check_links(folder: Path) -> None:
    """Check that symbolic links in a checkpoint folder have allowed targets.

    Targets must be in one of :func:`rlinf.verified_io.allowed_link_targets` and belong to the
    folder's owner, this user or root. Otherwise another user could replace the weights.

    Raises:
        DataError: A link is not allowed; the message names it and the remedy.
    """
    root, allowed = folder.resolve(), allowed_link_targets(folder)
    owners = {root.stat().st_uid, os.getuid(), 0}
    for path in sorted(root.rglob("*")):
        if not path.is_symlink():
            continue
        target = path.resolve()
        name = f"model.path: {folder}: {path.relative_to(root)}"
        if not any(target.is_relative_to(location) for location in allowed):
            raise DataError(
                f"{name} is a link that leads out of the folder, to {target}; copy the file in its "
                f"place (cp -L), or give the folder that holds it"
            )
        if not target.exists():
            raise DataError(f"{name} is a link to {target}, which is not there; fetch it again")
        if target.stat().st_uid not in owners:
            raise DataError(
                f"{name} is a link to {target}, which belongs to another user "
                f"({target.stat().st_uid}) than the folder; copy the model to a folder of your own"
            )


def tensor_files(folder: Path) -> list[Path]:
    """Return the files with the tensors of a checkpoint folder.

    As in ``transformers``, ``model.safetensors`` has priority over the files in the index. Other
    files, such as ``consolidated.safetensors`` of Mistral's format, are ignored.

    Raises:
        DataError: There are no files, or the index cannot be read.
    """
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        return [folder / name for name in _files_in_index(folder / INDEX_FILE)]
    files = [
        p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(MISTRAL_PREFIX)
    ]
    if not files:
        raise DataError(_no_weights_message(folder))
    return files


def _files_in_index(index: Path) -> list[str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"model.path: {index} has no weight_map; copy the folder again")
    return sorted({str(name) for name in weight_map.values()})


def _no_weights_message(folder: Path) -> str:
    if any(folder.glob(f"{MISTRAL_PREFIX}*.safetensors")):
        return (
            f"model.path: {folder} has its weights in Mistral's own format alone "
            f"({MISTRAL_PREFIX}.safetensors); fetch {WEIGHTS_FILE}, or {INDEX_FILE} and the files "
            "that it names"
        )
    pickled = [path for kind in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(kind))]
    if not pickled:
        return f"model.path: {folder} has no *.safetensors; fetch its weights"
    return (
        f"model.path: {folder} has no *.safetensors, and pickled weights ({pickled[0].name}) are "
        "not loaded, because unpickling runs code; if you trust them, convert them: "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def check_checkpoint(folder: Path, trust_remote_code: bool) -> None:
    """Check that a folder has a model that this process may load.

    Raises:
        DataError: The folder has no model, or one with disallowed links or code.
    """
    if folder.is_file():
        raise DataError(f"model.path: {folder} is a file; give the folder it is in")
    if not folder.is_dir():
        parent = folder.parent
        siblings = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        hint = did_you_mean(folder.name, siblings) if siblings else ""
        raise DataError(f"model.path: no folder {folder}{hint}")
    check_links(folder)
    settings = folder / "config.json"
    if not settings.is_file():
        if (folder / ADAPTER_FILE).is_file():
            raise DataError(
                f"model.path: {folder} holds an adapter alone ({ADAPTER_FILE}); merge it into its "
                "base model (merge_and_unload of peft), save it, and give the folder of the result"
            )
        raise DataError(f"model.path: {folder} has no config.json; is it a checkpoint folder?")
    if not trust_remote_code and "auto_map" in read_config_json(folder):
        raise DataError(
            f"model.path: {folder} brings its own Python code (auto_map in config.json); "
            "to run it set model.trust_remote_code=true"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of :func:`tensor_files`, and the index if it is used.

    Raises:
        DataError: As :func:`tensor_files`.
    """
    files, index = tensor_files(folder), folder / INDEX_FILE
    return [*files, index] if index.exists() and files != [folder / WEIGHTS_FILE] else files


def non_weight_files(folder: Path) -> list[str]:
    """Return the names of all files except weights: configuration, tokenizer, templates, code."""
    suffixes = {".json", ".txt", ".model", ".jinja", ".py"}
    return [
        path.name
        for path in sorted(folder.iterdir())
        if path.suffix in suffixes
        and path.is_file()
        and not path.name.endswith(".safetensors.index.json")
    ]


def copy_non_weight_files(source: Path, folder: Path) -> None:
    """Copy all files except the weights."""
    for name in non_weight_files(source):
        copy_file(source / name, folder / name)


def check_vocabulary(hf_folder: HFFolder) -> None:
    """Check that the vocabulary of the model covers all tokens of its tokenizer.

    Raises:
        DataError: The tokenizer has token ids beyond the model's vocabulary.
    """
    size = hf_folder.vocabulary_size
    highest = max(hf_folder.raw_tokenizer.get_vocab().values(), default=0)
    if size is not None and highest >= size:
        raise DataError(
            f"model.path: the tokenizer of {hf_folder.folder} has tokens up to number {highest}, "
            f"the model knows {size} (vocab_size in config.json); they do not belong together"
        )
