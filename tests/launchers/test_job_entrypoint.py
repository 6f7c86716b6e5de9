"""What a job calls survives the way to its node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.job_entrypoint import ModuleCall, set_torchrun_variables
from rlinf import package_paths
from rlinf.channels.process_group import GROUP_VARIABLE
from rlinf.errors import EXIT_REQUEUE


@given(
    st.builds(
        ModuleCall,
        st.text(),
        st.lists(st.text()).map(tuple),
        st.text(),
        st.lists(st.tuples(st.text(), st.floats(0.1, 10))).map(tuple),
        st.booleans(),
    )
)
def test_a_call_as_json_is_the_same_call(call: ModuleCall) -> None:
    assert ModuleCall.from_json(call.to_json()) == call


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
                    assert set_torchrun_variables() == int(rank)
                    names.append(os.environ[GROUP_VARIABLE])
    assert names[::2] == names[1::2]
    assert len(set(names)) == 8


SLOW = """
import os, signal, time
os.kill(os.getpid(), signal.{number})
time.sleep(20)
"""
CALL = """
import sys
from launchers.job_entrypoint import ModuleCall
ModuleCall("slow", (), sys.argv[1], allow_requeue=False)()
"""


@pytest.mark.parametrize("number", ["SIGUSR2", "SIGTERM"])
def test_a_warning_while_libraries_are_still_read_asks_for_another_start(
    tmp_path: Path, number: str
) -> None:
    """It used to be a failure, which counts: on a busy filesystem that takes half a minute."""
    (tmp_path / "slow.py").write_text(SLOW.format(number=number))
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(package_paths.ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(tmp_path)], env=env, timeout=15, check=False
    )
    assert done.returncode == EXIT_REQUEUE
    assert json.loads((tmp_path / "7.exit").read_text())["code"] == EXIT_REQUEUE
