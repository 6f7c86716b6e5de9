"""The end of a job is known without the signal, and a wrong clock does no harm."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlinf.errors import SlurmError
from slurm import deadline
from slurm.deadline import MARGIN, Span, job_span, parse_span, stop_in
from slurm.ids import COMPONENT
from slurm.signals import StopFlag

HOUR = 3600.0


def job(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "12", **more}


def never_asked(command: list[str]) -> str:
    raise AssertionError(f"asked {command}")


def test_later_versions_state_the_span_in_the_environment() -> None:
    stated = job(SLURM_JOB_START_TIME="1000", SLURM_JOB_END_TIME="4600")
    assert job_span(stated, never_asked) == Span(1000, 4600)


def test_earlier_versions_are_asked_once_for_the_element_itself() -> None:
    asked = []

    def answer(command: list[str]) -> str:
        asked.append(command)
        return "JobId=14 StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T01:00:00 Deadline=N/A"

    element = job(SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    span = job_span(element, answer)
    assert asked == [["scontrol", "show", "job", "-o", "12_3"]]
    assert span.start is not None
    assert span.end == span.start + HOUR


def test_the_component_that_ends_first_ends_a_job_of_several() -> None:
    hours = {"12+1": 2, "12+2": 1}

    def answer(command: list[str]) -> str:
        return (
            f"JobId=14 StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T0{hours[command[-1]]}:00:00"
        )

    span = job_span(job(**{COMPONENT: "1,2"}), answer)
    assert span.start is not None
    assert span.end == span.start + HOUR


def test_other_ranks_leave_the_asking_to_the_first() -> None:
    assert job_span(job(SLURM_PROCID="1"), never_asked) == Span(None, None)


def test_outside_of_jobs_there_is_no_end() -> None:
    assert job_span({}, never_asked) == Span(None, None)
    assert stop_in({}) is None


def test_no_answer_is_no_error() -> None:
    def refuse(command: list[str]) -> str:
        raise SlurmError("the controller does not answer")

    assert job_span(job(), refuse) == Span(None, None)


@pytest.mark.parametrize("text", ["", "EndTime=Unknown", "EndTime=N/A StartTime=soon"])
def test_unknown_ends(text: str) -> None:
    assert parse_span(text) == Span(None, None)


@given(
    length=st.floats(1, 1e6),
    age=st.floats(0, 1e5),
    launch=st.floats(0, 1e3),
    late=st.floats(0, 1e6),
)
def test_a_late_clock_is_corrected_up_to_the_time_of_the_launch(
    length: float, age: float, launch: float, late: float
) -> None:
    """``launch``: from the start of the job to that of the process, which nobody tells us."""
    start = 1e9
    true_left = length - launch - age
    assume(true_left > 0)
    left = Span(start, start + length).left(start + launch + age - late, age)
    assert left is not None
    assert left <= true_left + min(late, launch) + 1e-3


@given(length=st.floats(1, 1e6), age=st.floats(0, 1e6), early=st.floats(0, 1e6))
def test_an_early_clock_never_makes_a_job_overrun(length: float, age: float, early: float) -> None:
    start = 1e9
    left = Span(start, start + length).left(start + age + early, age)
    assert left is not None
    assert left <= length - age + 1e-3


def test_an_end_that_seems_past_at_the_start_is_not_believed() -> None:
    """Else the job would be requeued at once, for ever."""
    assert Span(1000, 4600).left(now=9000, age_s=10) == 3590
    assert Span(None, 4600).left(now=9000, age_s=10) is None


def test_how_far_the_clock_is_off() -> None:
    assert Span(1000, 4600).skew(now=1010, age_s=5) == 0
    assert Span(1000, 4600).skew(now=800, age_s=5) == -205
    assert Span(1000, 4600).skew(now=5000, age_s=5) == 400


def test_work_stops_by_the_margin_and_a_short_job_gets_something_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "_BORN", time.monotonic())

    def left(length: float, **more: str) -> float:
        now = time.time()
        times = {"SLURM_JOB_START_TIME": f"{now:.0f}", "SLURM_JOB_END_TIME": f"{now + length:.0f}"}
        found = stop_in(job(**times, **more))
        assert found is not None
        return found

    assert left(HOUR) == pytest.approx(HOUR - deadline.MARGIN_S, abs=2)
    assert left(HOUR, **{MARGIN: "600"}) == pytest.approx(HOUR - 600, abs=2)
    assert left(HOUR, **{MARGIN: "soon"}) == pytest.approx(HOUR - deadline.MARGIN_S, abs=2)
    assert left(60, **{MARGIN: "600"}) == pytest.approx(30, abs=2)


def test_the_flag_is_set_when_time_is_nearly_up_and_no_signal_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "_BORN", time.monotonic())
    now = int(time.time())
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 3))
    monkeypatch.setenv(MARGIN, "2")
    with StopFlag() as stop:
        assert not stop.is_set()
        time.sleep(2.2)
        assert stop.is_set()
