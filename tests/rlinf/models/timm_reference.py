"""What timm says of the two vision transformers that OpenVLA looks through.

    pip install --no-deps --target TIMM timm==1.0.31
    PYTHONPATH=TIMM python tests/rlinf/models/timm_reference.py [FILE]

writes FILE (``timm_reference.json`` beside this one): of small ones, with weights of our choice,
names and shapes of tensors and the features of the last block but one; of whole ones names and
shapes. Nothing of this package is imported.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

TOWERS = {
    "featurizer": "vit_large_patch14_reg4_dinov2",
    "fused_featurizer": "vit_so400m_patch14_siglip_224",
}
SMALL: dict[str, dict[str, Any]] = {
    "featurizer": {"img_size": (28, 42), "embed_dim": 12, "depth": 3, "num_heads": 2},
    "fused_featurizer": {"img_size": (28, 42), "embed_dim": 16, "depth": 4, "num_heads": 4},
}


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Standard normal, of the generator whose stream NumPy promises never to change."""
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Of tensors in the order of their names, such that everything has its part."""
    return {
        name: torch.from_numpy(0.3 * numbers(place, *shape))
        for place, (name, shape) in enumerate(sorted(shapes.items()))
    }


def pixels() -> torch.Tensor:
    return torch.from_numpy(numbers(1000, 2, 3, 28, 42))


class Named(type):
    """Classes that have whatever is asked of them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(types.ModuleType):
    """A package that timm imports and these networks never use: torchvision, whose builds for CPUs
    are on no package index."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder:
    """Finds :class:`Absent` packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def published(name: str) -> str:
    """OpenVLA's name of a tensor of timm's."""
    return name.replace(".gamma", ".scale_factor")


def shapes(module: torch.nn.Module) -> dict[str, list[int]]:
    return {published(name): list(t.shape) for name, t in module.state_dict().items()}


def main(target: Path) -> None:
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    import timm

    found: dict[str, Any] = {"timm": timm.__version__, "small": {}, "whole": {}}
    for tower, name in TOWERS.items():
        with torch.device("meta"):
            whole = timm.create_model(name, num_classes=0, img_size=224)
        found["whole"][tower] = shapes(whole)
        small = timm.create_model(name, num_classes=0, **SMALL[tower])
        chosen = weights(shapes(small))
        small.load_state_dict({n: chosen[published(n)] for n in small.state_dict()})
        with torch.no_grad():
            small.eval().double()
            last_but_one = {len(small.blocks) - 2}
            (outputs,) = small.get_intermediate_layers(pixels().double(), n=last_but_one)
        found["small"][tower] = {"shapes": shapes(small), "features": outputs.tolist()}
    target.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".json")))
