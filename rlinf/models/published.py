"""A network's tensors by the names and shapes that its checkpoints have.

Where the model library joins tensors (all experts of a layer in one, say) its names are its own.
Other projects read what is published, and may pass over a name that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlinf.models.base import misfit
from rlinf.models.fit import as_published, renames


class Published:
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
        self._renames = renames(module)
        self.like = as_published(module, untied) if self._renames else untied
        """Every name, with a tensor of its shape and type that has no memory."""

    def of(
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
                yield from as_published(self._module, {name: tensor}).items()
        else:
            yield from as_published(self._module, dict(own)).items()

    def _fitting(
        self, tensors: Iterable[tuple[str, Tensor]], device: torch.device | str, copy: bool
    ) -> Iterator[tuple[str, Tensor]]:
        lacking = set(self._first.values())
        for name, tensor in tensors:
            if name not in self._own or self._own[name].shape != tensor.shape:
                raise misfit(name, 1)
            if (first := self._first[name]) in lacking:
                lacking.discard(first)
                yield first, tensor.to(device, self._own[name].dtype, copy=copy)
        if lacking:
            raise misfit(min(lacking), len(lacking))


def _one_by_one(module: Any) -> bool:
    """Whether each published tensor is made of one of the network's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(module, add_legacy=False)
    return all(len(one.reverse_transform().source_patterns) == 1 for one in mapping)
