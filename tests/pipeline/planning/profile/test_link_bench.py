"""Links: the fit finds what made the times, and two jobs can measure theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.profile.measurement import load_trial
from pipeline.planning.profile.schema import MeasuredLink
from pipeline.planning.profile.stage_bench import SIZES_BYTES, fit_link

WHICH = {"backend": "gloo", "between": ("a",)}

JOB = """
import sys
from pathlib import Path
from types import SimpleNamespace
from pipeline.planning.profile import stage_bench
from pipeline.planning.profile.measurement import ProfileTask

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
(folder / str(rank)).mkdir()
task = ProfileTask(
    config=folder, initial=folder, key="k", kinds=("a", "b"), folder=folder / str(rank),
    nodes=1, processes=1, seconds=1, submitted=0, rank=rank,
)
config = SimpleNamespace(trainer=SimpleNamespace(model_extra={"device": "cpu"}))
stage_bench._measure_link_to_other_job(task, config)
"""


def times(
    latency_s: float, bandwidth: float, noise: tuple[float, ...] = (1.0,)
) -> list[list[float]]:
    return [[(latency_s + size / bandwidth) * n for n in noise] for size in SIZES_BYTES]


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_exact_times_give_back_latency_and_bandwidth(latency_s: float, bandwidth: float) -> None:
    link = fit_link(times(latency_s, bandwidth), SIZES_BYTES, **WHICH)
    assert link.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
    # Where latency is all there is, the bandwidth cannot be seen.
    if SIZES_BYTES[-1] / bandwidth > 0.01 * latency_s:
        assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)


@given(st.lists(st.lists(st.floats(0, 10), min_size=2, max_size=4), min_size=4, max_size=4))
def test_any_times_make_a_valid_link(seconds: list[list[float]]) -> None:
    link = fit_link(seconds, SIZES_BYTES, **WHICH)
    assert MeasuredLink.model_validate_json(link.model_dump_json()) == link


def test_two_jobs_meet_and_measure_the_link_between_them(tmp_path: Path) -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", JOB, tmp_path, str(r)]) for r in range(2)]
    assert [job.wait(200) for job in jobs] == [0, 0]
    trial = load_trial(tmp_path / "0" / "trial.json")
    assert trial is not None
    assert [link.between for link in trial.links] == [("a", "b")]
