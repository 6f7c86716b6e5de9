"""Decoding of any causal language model, in cohorts: rows whose contexts have one length.

Padding is harmless where attention is all that joins tokens. Recurrent layers (Mamba, linear
attention, short convolutions), positions by bias (ALiBi) and attention in chunks would read it. A
cohort has no padding, so a sample follows from its own tokens alone, whatever the family. What was
read is kept in the library's own cache classes, or read again for each token where a family has
none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.models.fit import SEEING
from rlinf.models.packed import APART

REREAD = {
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("minimax", "recurrent_gemma", "xlstm"),
}
"""Families that count positions by the tokens that are no padding, and families that keep what they
read elsewhere than in the library's common cache classes."""
KINDS = {"full_attention", "sliding_attention"}
"""Layers that the engine's own cache can serve."""


def shares_padding(settings: Any) -> bool:
    """Return whether rows of several lengths can be decoded side by side, padded on the left."""
    text = settings.get_text_config()
    return (
        settings.model_type in APART | SEEING
        and set(getattr(text, "layer_types", None) or ()) <= KINDS
    )


@dataclass
class Cohort:
    """Rows of one length.

    ``rows`` ``[n]`` are their places in the batch, ``tokens`` ``[n, L]`` what they have read.
    """

    rows: Tensor
    tokens: Tensor
    cache: Any

    def keep(self, which: Tensor, rows: Tensor) -> None:
        """Keep (or repeat) some of its rows, ``[m]`` numbers, at other places of the batch."""
        self.rows, self.tokens = rows, self.tokens[which]
        if self.cache is not None:
            self.cache.reorder_cache(which)


class Cohorts:
    """The cache of a batch of rows of any lengths; its ``length`` is that of the longest."""

    def __init__(self, cohorts: list[Cohort], size: int, length: int) -> None:
        self._size, self.length = size, length
        self.cohorts = cohorts

    def select(self, rows: Tensor) -> None:
        """Keep rows ``[n]``, each once at most."""
        place = torch.full((self._size,), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for cohort in self.cohorts:
            places = place[cohort.rows]
            which = (places >= 0).nonzero()[:, 0]
            if len(which) < len(places):
                cohort.keep(which, places[which])
            else:
                cohort.rows = places
        self.cohorts = [cohort for cohort in self.cohorts if len(cohort.rows)]
        self._size = len(rows)

    def join(self, other: Cohorts, skip: int, room: int) -> None:
        """Add the rows of another batch below; of this one ``skip`` leading columns are void."""
        for cohort in other.cohorts:
            cohort.rows = cohort.rows + self._size
        self.cohorts += other.cohorts
        self._size += other._size
        self.length = max(self.length - skip, other.length)

    def advance(self, count: int) -> None:
        """Count ``count`` more columns."""
        self.length += count


class CohortNetwork:
    """A network that reads rows in cohorts."""

    def __init__(self, module: Any) -> None:
        self._module = module
        names = inspect.signature(module.forward).parameters
        held = [name for name in ("past_key_values", "cache_params") if name in names]
        kind = module.config.model_type
        self._cache_name = held[0] if held and kind not in REREAD else None
        self._keeps = "logits_to_keep" in names
        self._places = "position_ids" in names

    def read(self, contexts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Cohorts]:
        """Read each distinct context once.

        Args:
            contexts: token ids of each row.

        Returns:
            Logits ``[B, V]`` float32 of the next tokens, and the cache.
        """
        by_length: dict[int, dict[bytes, list[int]]] = {}
        for i, context in enumerate(contexts):
            same = by_length.setdefault(len(context), {})
            same.setdefault(np.ascontiguousarray(context, np.int64).tobytes(), []).append(i)
        cohorts, found, order = list[Cohort](), list[Tensor](), list[int]()
        for distinct in by_length.values():
            tokens = np.stack([np.frombuffer(key, np.int64) for key in distinct])
            rows = [i for numbers in distinct.values() for i in numbers]
            which = [k for k, numbers in enumerate(distinct.values()) for _ in numbers]
            places = torch.tensor(rows, device=device)
            cohort = Cohort(places, torch.from_numpy(tokens).to(device), self._new_cache())
            logits = self._run(cohort, cohort.tokens)
            chosen = torch.tensor(which, device=device)
            cohort.keep(chosen, places)
            cohorts.append(cohort)
            found.append(logits[chosen])
            order += rows
        logits = torch.empty_like(torch.cat(found))
        logits[torch.tensor(order, device=device)] = torch.cat(found)
        return logits, Cohorts(cohorts, len(contexts), max(map(len, contexts)))

    def step(self, tokens: Tensor, cache: Cohorts) -> Tensor:
        """Return logits ``[B, V]`` float32 after one more token of each row, ``[B, 1]``."""
        logits: Tensor | None = None
        for cohort in cache.cohorts:
            new = tokens[cohort.rows]
            cohort.tokens = torch.cat([cohort.tokens, new], dim=1)
            part = self._run(cohort, new if cohort.cache is not None else cohort.tokens)
            if logits is None:
                logits = part.new_zeros(len(tokens), part.shape[1])
            logits[cohort.rows] = part
        assert logits is not None
        cache.advance(1)
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return None if self._cache_name is None else DynamicCache(config=self._module.config)

    def _run(self, cohort: Cohort, tokens: Tensor) -> Tensor:
        """Logits ``[n, V]`` float32 after the last of ``tokens`` ``[n, L]``."""
        options: dict[str, Any] = {"use_cache": cohort.cache is not None}
        if self._cache_name is not None:
            options[self._cache_name] = cohort.cache
            if self._places and cohort.cache is not None:
                # Some families count from 0 in each call.
                stop = cohort.tokens.shape[1]
                places = torch.arange(stop - tokens.shape[1], stop, device=tokens.device)
                options["position_ids"] = places.expand(len(tokens), -1)
        if self._keeps:
            options["logits_to_keep"] = 1
        logits: Tensor = self._module(input_ids=tokens, **options).logits[:, -1].float()
        return logits
