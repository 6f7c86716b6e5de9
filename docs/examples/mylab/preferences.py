"""DPO (arXiv 2305.18290, eq. 7) on the best and the worst answer of each group."""

from collections.abc import Iterable

import torch.nn.functional as F
from pydantic import Field

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.capabilities import GROUPS
from rlinf.config import Section
from rlinf.data.batch import Sample, assemble
from rlinf.data.load_balancing import Span
from rlinf.models.base import Batch, Policy
from rlinf.trainers.base import Loss


class PreferencesConfig(Section):
    beta: float = Field(default=0.1, gt=0)
    """How dear it is to leave the policy that training began with."""
    steps: int = Field(default=2, gt=0)
    """Optimizer steps on one batch."""


class Preferences(Algorithm):
    Config = PreferencesConfig
    needs = frozenset({GROUPS})
    needs_reference = True

    def update(self, learner: Learner, parts: Iterable[list[Sample]]) -> None:
        samples = [sample for part in parts for sample in part if sample.kept]
        if not samples:
            return
        batch = assemble(samples)
        scores = batch.rewards.sum(-1).tolist()
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.groups.tolist()):
            groups.setdefault(group, []).append(row)
        ranked = [sorted(rows, key=scores.__getitem__) for rows in groups.values()]
        unlike = [rows for rows in ranked if scores[rows[0]] < scores[rows[-1]]]
        chosen = [row for rows in unlike for row in (rows[-1], rows[0])]
        pairs = [[row, row + 1] for row in range(0, len(chosen), 2)]

        def loss(policy: Policy, inputs: Batch, spans: list[Span]) -> Loss:
            said = policy.evaluate(inputs, learner.temperature).logprobs
            own = [span._replace(row=chosen[span.row]) for span in spans]
            known = batch.spans(own, said.shape[1], said.device)
            gain = ((said - known.require("reference_logprobs")) * known.mask).sum(-1)
            margin = self.config.beta * (gain[0::2] - gain[1::2])
            right = (margin.detach() > 0).sum() / len(pairs)
            return -F.logsigmoid(margin).sum() / len(pairs), {"right": right}

        for _ in range(self.config.steps if pairs else 0):
            learner.step([samples[row].trajectory for row in chosen], loss, together=pairs)
