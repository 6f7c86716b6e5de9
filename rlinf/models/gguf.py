"""Conversion of GGUF files to model folders: weights, configuration, tokenizer, chat template."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from rlinf.artifacts import sync_file
from rlinf.errors import DataError, require_package


def find_gguf(source: str) -> Path:
    """Return the GGUF file of a path, or of a package that has exactly one.

    The package is not imported.

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
        f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf")
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
    if folder.exists():
        raise DataError(f"{folder}: is there already; name another folder or remove it")
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
    # A new model, because the loaded one is marked as quantized and cannot be saved.
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        written = Path(name) / "model"
        plain.save_pretrained(written)
        tokenizer.save_pretrained(written)
        for path in written.iterdir():
            sync_file(path)
        sync_file(written)
        written.rename(folder)
    sync_file(folder.parent)
