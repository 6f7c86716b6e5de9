"""Agreement of the math grader with labels that are correct by construction."""

from __future__ import annotations

from benchmarks.row import BenchmarkRow
from rlinf.rewards.math_grader import MathGrader
from tests.rlinf.rewards.labelled import agreement, gsm8k_answers, math_pairs


def measure() -> list[BenchmarkRow]:
    """Measure the lower agreement of two sets: 500 expression pairs, 320 answers in 40 forms."""
    grader = MathGrader(workers=2, timeout_s=30.0)
    shares, count = [], 0
    for labelled in (math_pairs(), gsm8k_answers()):
        grades = grader.grade([(item.response, item.answer) for item in labelled])
        shares.append(agreement(labelled, [grade.score for grade in grades]))
        count += len(labelled)
    grader.close()
    return [
        BenchmarkRow(
            "math_grader_agreement", round(min(shares), 4), "share", 0.995, "higher", count, 0
        )
    ]
