"""Ids of jobs, of arrays and of their elements mean what Slurm means by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.jobs import HET_GROUPS_VARIABLE, current_job_id, expand_job_ids, parent_job_id


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[3]", ["12_3"]),
        ("12_[0-2]", ["12_0", "12_1", "12_2"]),
        ("12_[0-2%1]", ["12_0", "12_1", "12_2"]),
        ("12_[1,4-5,8-12:2%4]", ["12_1", "12_4", "12_5", "12_8", "12_10", "12_12"]),
        ("12_[1,3,...]", ["12_1", "12_3"]),
        ("12_[1-3,5-", ["12_1", "12_2", "12_3"]),
        ("12+1", ["12+1"]),
        ("12.batch", ["12.batch"]),
    ],
)
def test_forms_of_squeue_and_sacct(text: str, want: list[str]) -> None:
    assert expand_job_ids(text) == want


@given(st.sets(st.integers(0, 10_000), min_size=1))
def test_every_element_of_a_list_is_found_once(numbers: set[int]) -> None:
    text = f"7_[{','.join(map(str, sorted(numbers)))}]"
    assert expand_job_ids(text) == [f"7_{number}" for number in sorted(numbers)]


def test_the_whole_of_a_part() -> None:
    assert parent_job_id("12_3") == "12"
    assert parent_job_id("12+1") == "12"
    assert parent_job_id("12") == "12"


def test_a_part_names_itself_not_the_whole() -> None:
    last = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "7"}
    assert current_job_id(last) == "12_7"
    assert current_job_id({"SLURM_JOB_ID": "12", HET_GROUPS_VARIABLE: "1,2"}) == "12+1"
    assert current_job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert current_job_id({}) is None
