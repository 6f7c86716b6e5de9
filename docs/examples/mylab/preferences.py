"""DPO (arXiv 2305.18290, eq. 7) on the best and the worst answer of each group."""

from collections.abc import Iterable

import torch.nn.functional as F
from pydantic import Field

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.capabilities import SAMPLE_GROUPS
from rlinf.config import Section
from rlinf.data.batch import TrainingSample, build_step_batch
from rlinf.data.load_balancing import StepSpan
from rlinf.models.base import Batch, Policy
from rlinf.trainers.base import Loss


class PreferencesConfig(Section):
    """Keys of the section ``algorithm`` besides its name."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held at the reference policy."""
    steps: int = Field(default=2, gt=0)
    """Optimizer steps on one batch."""


class Preferences(Algorithm):
    Config = PreferencesConfig
    requires = frozenset({SAMPLE_GROUPS})
    needs_reference = True

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        samples = [sample for part in parts for sample in part if sample.is_included]
        if not samples:
            return
        batch = build_step_batch(samples)
        scores = batch.rewards.sum(-1).tolist()
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.groups.tolist()):
            groups.setdefault(group, []).append(row)
        ranked = [sorted(rows, key=scores.__getitem__) for rows in groups.values()]
        unequal = [rows for rows in ranked if scores[rows[0]] < scores[rows[-1]]]
        chosen = [row for rows in unequal for row in (rows[-1], rows[0])]
        pairs = [[row, row + 1] for row in range(0, len(chosen), 2)]

        def loss(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Loss:
            logprobs = policy.evaluate(inputs, learner.temperature).logprobs
            own = [span._replace(row=chosen[span.row]) for span in spans]
            known = batch.select_spans(own, logprobs.shape[1], logprobs.device)
            gain = ((logprobs - known.require("reference_logprobs")) * known.mask).sum(-1)
            margin = self.config.beta * (gain[0::2] - gain[1::2])
            right = (margin.detach() > 0).sum() / len(pairs)
            return -F.logsigmoid(margin).sum() / len(pairs), {"right": right}

        for _ in range(self.config.steps if pairs else 0):
            learner.step([samples[row].trajectory for row in chosen], loss, row_groups=pairs)
