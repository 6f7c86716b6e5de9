"""What a job calls survives the way to its node."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.job import ModuleCall, set_rank_variables
from rlinf.channels.world import GROUP


@given(
    st.builds(
        ModuleCall,
        st.text(),
        st.lists(st.text()).map(tuple),
        st.lists(st.text()).map(tuple),
        st.text(),
        st.lists(st.tuples(st.text(), st.floats(0.1, 10))).map(tuple),
        st.booleans(),
    )
)
def test_a_call_as_json_is_the_same_call(call: ModuleCall) -> None:
    assert ModuleCall.load(call.dump()) == call


def test_ranks_agree_on_a_name_that_no_other_processes_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of another job, component or attempt."""
    monkeypatch.setattr(os, "environ", {"SLURM_NTASKS": "2"})
    names = []
    for job in ("7", "70"):
        for step in ("0", "1"):
            for restart in ("0", "1"):
                for rank in ("0", "1"):
                    slurm = {"JOB_ID": job, "STEP_ID": step, "RESTART_COUNT": restart}
                    for name, value in {**slurm, "PROCID": rank}.items():
                        os.environ[f"SLURM_{name}"] = value
                    assert set_rank_variables() == int(rank)
                    names.append(os.environ[GROUP])
    assert names[::2] == names[1::2]
    assert len(set(names)) == 8
