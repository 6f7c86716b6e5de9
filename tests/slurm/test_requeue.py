"""A job is run again by the first rank that stops, unless somebody ended it."""

from __future__ import annotations

import pytest

from rlinf.errors import SlurmError
from slurm.records import parse_job
from slurm.requeue import requeue

JOB = "JobId=1 JobName=Restarts=9 UserId=a(1) JobState={} Reason={} Requeue=1 Restarts={} Command=x"


class Controller:
    """Tells of a job and takes requests; ``answer``: what it says to them."""

    def __init__(
        self, state: str, reason: str = "None", restarts: int = 0, answer: str = ""
    ) -> None:
        self.job = JOB.format(state, reason, restarts)
        self.answer = answer
        self.requeued: list[str] = []

    def __call__(self, command: list[str]) -> str:
        if command[1] == "show":
            return self.job
        self.requeued.append(command[-1])
        if self.answer:
            raise SlurmError(self.answer)
        return ""


@pytest.mark.parametrize(
    ("controller", "accepted", "is_requested"),
    [
        (Controller("RUNNING"), True, True),
        (Controller("COMPLETING", "TimeLimit"), True, True),
        (Controller("COMPLETING"), False, False),
        (Controller("CANCELLED"), False, False),
        (Controller("COMPLETING", restarts=1), True, False),
        (Controller("RUNNING", answer="Job is pending execution for job 12"), True, True),
        (Controller("RUNNING", answer="Requested operation is presently disabled"), False, True),
    ],
)
def test_what_is_asked_for(controller: Controller, accepted: bool, is_requested: bool) -> None:
    assert requeue({"SLURM_JOB_ID": "12"}, controller) is accepted
    assert controller.requeued == (["12"] if is_requested else [])


def test_a_job_that_ran_before_is_not_taken_for_one_that_will() -> None:
    controller = Controller("RUNNING", restarts=1)
    assert requeue({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, controller)
    assert controller.requeued == ["12"]


def test_a_job_of_a_strange_name_is_read() -> None:
    job = parse_job(JOB.format("RUNNING", "None", 2))
    assert (job.state, job.reason, job.restarts) == ("RUNNING", "None", 2)
    with pytest.raises(SlurmError, match="cannot read"):
        parse_job("slurm_load_jobs error")
