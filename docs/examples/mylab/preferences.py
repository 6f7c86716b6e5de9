"""DPO (arXiv 2305.18290, eq. 7) on the best and the worst answer of each group."""

from collections.abc import Iterable

import torch.nn.functional as F
from pydantic import Field

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.config import Section
from rlinf.data.batch import TrainingSample, build_step_batch
from rlinf.data.load_balancing import StepSpan
from rlinf.models.base import Batch, Policy
from rlinf.registry import SAMPLE_GROUPS
from rlinf.trainers.base import Loss


class PreferencesConfig(Section):
    """Keys of the section ``algorithm`` besides its name."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the implicit KL penalty toward the reference policy."""
    steps: int = Field(default=2, gt=0)
    """Optimizer steps on one batch."""


class Preferences(Algorithm):
    Config = PreferencesConfig
    requires = frozenset({SAMPLE_GROUPS})
    needs_reference = True

    def update(self, learner: Learner, chunks: Iterable[list[TrainingSample]]) -> None:
        samples = [sample for chunk in chunks for sample in chunk if sample.is_included]
        if not samples:
            return
        batch = build_step_batch(samples)
        scores = batch.rewards.sum(-1).tolist()
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.groups.tolist()):
            groups.setdefault(group, []).append(row)
        ranked = [sorted(rows, key=scores.__getitem__) for rows in groups.values()]
        unequal = [rows for rows in ranked if scores[rows[0]] < scores[rows[-1]]]
        # Even rows are the chosen answers, odd rows the rejected ones.
        pair_rows = [row for rows in unequal for row in (rows[-1], rows[0])]
        pairs = [[row, row + 1] for row in range(0, len(pair_rows), 2)]

        def loss(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Loss:
            logprobs = policy.evaluate(inputs, learner.temperature).logprobs
            batch_spans = [span._replace(row=pair_rows[span.row]) for span in spans]
            columns = batch.select_spans(batch_spans, logprobs.shape[1], logprobs.device)
            log_ratios = logprobs - columns.require("reference_logprobs")
            log_ratios = (log_ratios * columns.mask).sum(-1)
            margins = self.config.beta * (log_ratios[0::2] - log_ratios[1::2])
            accuracy = (margins.detach() > 0).sum() / len(pairs)
            return -F.logsigmoid(margins).sum() / len(pairs), {"accuracy": accuracy}

        for _ in range(self.config.steps if pairs else 0):
            learner.step([samples[row].trajectory for row in pair_rows], loss, row_groups=pairs)
