"""How an engine samples: what a request says beside its prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rlinf.data.record import Scalar
from rlinf.errors import DataError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; its ``info`` has them by these names.

    With logits ``z`` the policy is ``softmax(z / temperature)``: the log-probability that an engine
    records of a token is taken under it, and so is the trainer's. ``min_tokens``, ``top_k``,
    ``top_p`` and ``min_p`` then cut what can be drawn, in this order, and do not change the
    recorded log-probability: where they cut, samples come from a narrower distribution than the
    one that is trained, which importance ratios do not see.
    """

    horizon: int
    """Most tokens."""
    temperature: float = 1.0
    """0: the most likely token; its log-probability is that at temperature 1."""
    top_k: int = 0
    """Draw among so many most likely tokens (more where they tie); 0: among all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this share of what top_k leaves."""
    min_p: float = 0.0
    """Draw among tokens with this share, or more, of the probability of the most likely one."""
    min_tokens: int = 0
    """No end before so many: stop tokens cannot be drawn, stop strings are not looked for."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample, wherever its tokens divide them. The token that completes one is
    the sample's last, so its text may go on after the stop string."""
    seed: int | None = None
    """Of the randomness, in place of the run's."""

    @property
    def truncates_distribution(self) -> bool:
        """Whether some tokens that the policy could choose cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def to_info(self) -> dict[str, Scalar]:
        """For a request's ``info``; what has its default is left out but the first two."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)[2:]}
        changed = {name: v for name, v in values.items() if defaults.get(name, ...) != v}
        return changed | ({"stop": json.dumps(self.stop)} if self.stop else {})

    @classmethod
    def from_info(cls, info: Mapping[str, Scalar]) -> SamplingParams:
        """What a request's ``info`` says.

        Raises:
            DataError: something is missing or out of its range.
        """
        try:
            values: dict[str, Any] = {f.name: info[f.name] for f in fields(cls) if f.name in info}
            if "stop" in values:
                values["stop"] = tuple(map(str, json.loads(values["stop"])))
            params = cls(**values)
            valid = params.horizon > 0 and params.temperature >= 0 and 0 <= params.min_p <= 1
            valid = valid and 0 < params.top_p <= 1 and params.top_k >= 0 and params.min_tokens >= 0
        except (TypeError, ValueError) as error:
            raise DataError(f"a request's sampling settings cannot be read: {error}") from None
        if not valid or "" in params.stop:
            raise DataError(f"a request asks for impossible sampling: {asdict(params)}")
        return params
