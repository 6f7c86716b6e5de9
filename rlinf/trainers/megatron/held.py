"""What of a network's tensors a process holds, by the names that transformers and PEFT have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlinf.trainers.megatron import names
from rlinf.trainers.megatron.memory import Memory


class Held:
    """Parts of tensors, in the stretches of Megatron's parameters that a process has."""

    def __init__(
        self, memory: Memory, shares: Mapping[int, names.Share], order: Sequence[str]
    ) -> None:
        """
        Args:
            shares: what each parameter holds, by its ``id``.
            order: the names of all tensors.
        """
        self._trained = memory.fragments
        self._stretches = [*memory.fragments, *memory.still]
        stretches = [
            (
                shares[id(each.parameter)],
                tuple(each.parameter.shape),
                each.start,
                each.flat.numel(),
            )
            for each in self._stretches
        ]
        number = {name: number for number, name in enumerate(order)}
        found = names.parts(stretches, number.__getitem__)
        self.parts = {part.name: part for part in found}
        # Those of one part are all trained, or none of them is.
        self.trained = [part for part in found if part.copies[0][0] < len(self._trained)]
        """What checkpoints hold: parts of all weights, or of adapters alone."""

    def speaks(self, part: names.Part) -> bool:
        """Whether this process is the first of those that have a part."""
        return all(self._stretches[number].first for number, *_ in part.copies)

    def weights(self) -> list[Tensor]:
        """The elements of each stretch, in one dimension."""
        return [each.flat for each in self._stretches]

    def moments(self, optimizer: Optimizer, name: str) -> list[Tensor]:
        """The same of a moment, of those that are trained."""
        return [optimizer.state[each.main][name].view(-1) for each in self._trained]

    def take(self, name: str, whole: Tensor) -> None:
        """Keep this process's part of a tensor, if it has one."""
        if (part := self.parts.get(name)) is not None:
            put(self.weights(), part, part.place.take(whole))

    def whole(self, name: str, like: Tensor, device: torch.device, processes: int) -> Tensor:
        """A tensor whole; collective. What others hold is zero here, and bytes are added up."""
        found = torch.zeros(like.shape, dtype=like.dtype, device=device)
        part = self.parts.get(name)
        if part is not None and self.speaks(part):
            part.place.put(found, own(self.weights(), part).to(like.dtype))
        if processes > 1:
            torch.distributed.all_reduce(found.view(-1).view(torch.uint8))
        return found


def own(flats: Sequence[Tensor], part: names.Part) -> Tensor:
    """A part's elements, of those of the stretches."""
    return torch.cat([flats[n][first : first + count] for n, first, count in part.copies])


def put(flats: Sequence[Tensor], part: names.Part, elements: Tensor) -> None:
    """Write a part's elements to where the stretches have them."""
    at = 0
    for number, first, count in part.copies:
        flats[number][first : first + count] = elements[at : at + count]
        at += count
