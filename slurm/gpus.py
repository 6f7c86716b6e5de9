"""Data sheet values of common GPUs, looked up by the names that clusters give them.

They are used if a site file sets nothing. Rates are those of dense matrix products; a rate that a
data sheet prints "with sparsity" is twice as high.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True)
class GpuSpec:
    """Data sheet values of one variant of a GPU. Slurm counts each die of an MI250X as a GPU."""

    name: str
    family: str
    """The name that all variants of the GPU share: ``a100``."""
    memory_gib: float
    """Data sheets print GB but mean GiB. The usable memory is a few per cent smaller."""
    bf16_flops: float | None
    """Rate of dense bfloat16 matrix products, FLOP/s; None: the GPU has no units for them."""
    bandwidth_bytes_per_s: float
    """Memory bandwidth."""
    source: str
    form_factor: str = ""
    """``sxm``, ``pcie`` or ``nvl`` if the other values depend on it."""


def _gpu(
    name: str,
    family: str,
    memory_gib: float,
    bf16_tflops: float | None,
    gb_per_s: float,
    source: str,
    form_factor: str = "",
) -> GpuSpec:
    flops = None if bf16_tflops is None else bf16_tflops * TERA
    return GpuSpec(name, family, memory_gib, flops, gb_per_s * GIGA, source, form_factor)


_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (half of the rate with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (half of the rate with sparsity)"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet (125 TFLOP/s in float16)"

GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        # A name without details means the first variant of its family: the most common one of the
        # variants with the least memory, so that a plan never assumes too much memory.
        _gpu("a100-40gb", "a100", 40, 312, 1555, _A100),
        _gpu("a100-80gb-sxm", "a100", 80, 312, 2039, _A100, "sxm"),
        _gpu("a100-80gb-pcie", "a100", 80, 312, 1935, _A100, "pcie"),
        _gpu("h100-sxm", "h100", 80, 989.5, 3350, _H100, "sxm"),
        _gpu("h100-pcie", "h100", 80, 756.5, 2000, _H100, "pcie"),
        _gpu("h100-nvl", "h100", 94, 835.5, 3900, _H100, "nvl"),
        _gpu("h200-sxm", "h200", 141, 989.5, 4800, _H200, "sxm"),
        _gpu("h200-nvl", "h200", 141, 835.5, 4800, _H200, "nvl"),
        _gpu("b200", "b200", 180, 2250, 8000, "NVIDIA HGX B200 data sheet, an eighth of 8 GPUs"),
        _gpu("l40s", "l40s", 48, 362, 864, "NVIDIA L40S data sheet"),
        _gpu("a40", "a40", 48, 149.7, 696, "NVIDIA A40 data sheet"),
        _gpu("rtx-a6000", "a6000", 48, 154.8, 768, "NVIDIA Ampere GA102 white paper, RTX A6000"),
        _gpu(
            "rtx-6000-ada",
            "6000ada",
            48,
            364.2,
            960,
            "NVIDIA RTX 6000 Ada data sheet (a quarter of 1,457 TFLOP/s, float8 with sparsity)",
        ),
        _gpu("v100-16gb", "v100", 16, None, 900, _V100),
        _gpu("v100-32gb", "v100", 32, None, 900, _V100),
        # ROCm and Slurm count each of the two dies of an MI250X as a GPU: half of the data sheet.
        _gpu("mi250x", "mi250x", 64, 191.5, 1638, "AMD Instinct MI250X data sheet, one die"),
        _gpu("mi300x", "mi300x", 192, 1307.4, 5300, "AMD Instinct MI300X data sheet"),
    )
}

_START, _END = r"(?:^|-)", r"(?=$|-|sxm|pci)"
_FAMILIES = {
    family: re.compile(pattern)
    for family, pattern in {
        "6000ada": r"(?:6000-?ada|ada-?6000)",
        "a100": rf"{_START}a100{_END}",
        "h100": rf"{_START}h100(?=$|-|sxm|pci|nvl)",
        "h200": rf"{_START}h200(?=$|-|sxm|pci|nvl)",
        "b200": rf"{_START}b200{_END}",
        "l40s": rf"{_START}l40s(?=$|-)",
        "a40": rf"{_START}a40(?=$|-)",
        "a6000": rf"{_START}(?:rtx)?a6000(?=$|-)",
        "v100": rf"{_START}v100{_END}",
        # Clusters with an MI250X call it mi250 or mi250x.
        "mi250x": rf"{_START}mi-?250x?(?=$|-)",
        "mi300x": rf"{_START}mi-?300x(?=$|-)",
    }.items()
}
_MIG_SLICE = re.compile(r"(?:^|[_\-.])\d+g\.\d+gb")
_MEMORY = re.compile(r"(?:^|-|hbm|vram)(\d{2,3})g(?:i?b)?(?=$|-)")
_FORM_FACTOR = re.compile(r"(sxm|pci|nvl(?!ink))")
_VENDOR_WORDS = re.compile(r"(?:nvidia|tesla|quadro|geforce|amd|instinct|gpu)-")
_TOLERANCE_GIB = 1


@functools.lru_cache(maxsize=4096)
def find_gpu(name: str, features: tuple[str, ...] = ()) -> GpuSpec | None:
    """Return the GPU that a cluster calls ``name``: ``nvidia_a100_80gb_pcie``, ``a100-sxm4-80gb``.

    Returns None for an unknown GPU, for a memory size without a variant, and for a slice of a GPU
    (MIG: ``a100_1g.5gb``). Of several variants it is the first one.

    Args:
        features: features of the node, which resolve an ambiguous name (``hbm80g``).
    """
    return next(iter(matching_gpus(name, features)), None)


def matching_gpus(name: str, features: tuple[str, ...] = ()) -> list[GpuSpec]:
    """Return all variants that a name and features may mean; see :func:`find_gpu`."""
    if _MIG_SLICE.search(name.lower()):
        return []
    text = _normalized(name)
    family = next((key for key, pattern in _FAMILIES.items() if pattern.search(text)), None)
    if family is None:
        return []
    variants = [gpu for gpu in GPUS.values() if gpu.family == family]
    if size_match := _MEMORY.search(text):
        variants = _with_memory(variants, int(size_match[1]))
    hints = [_normalized(feature) for feature in features]
    for hint in hints:
        # A feature may describe something else, so a size that no variant has is ignored.
        if size_match := _MEMORY.search(hint):
            variants = _with_memory(variants, int(size_match[1])) or variants
    for description in (text, *hints):
        if form_match := _FORM_FACTOR.search(description):
            form_factor = form_match[1].replace("pci", "pcie")
            variants = [gpu for gpu in variants if gpu.form_factor in ("", form_factor)] or variants
    return variants


def is_gpu_feature(feature: str) -> bool:
    """Return True if a node's feature names a GPU or its memory, not a rack or a switch."""
    text = _normalized(feature)
    if any(pattern.search(text) for pattern in _FAMILIES.values()):
        return True
    size_match = _MEMORY.search(text)
    return size_match is not None and bool(_with_memory(list(GPUS.values()), int(size_match[1])))


def _normalized(name: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return _VENDOR_WORDS.sub("", text)


def _with_memory(variants: list[GpuSpec], memory_gib: int) -> list[GpuSpec]:
    return [gpu for gpu in variants if abs(gpu.memory_gib - memory_gib) <= _TOLERANCE_GIB]
