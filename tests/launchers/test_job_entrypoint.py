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

from launchers.job_entrypoint import (
    ModuleCall,
    expand_hostlist,
    node_attributes,
    set_torchrun_variables,
)
from rlinf import package_paths
from rlinf.channels.process_group import GROUP_VARIABLE
from rlinf.errors import EXIT_REQUEUE
from tests.slurm.wrapped import write_command


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


def test_hosts_are_told_from_what_a_wrapper_of_scontrol_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of a banner would be a host, and every rank after it have another's speed."""
    message = "printf 'Welcome\\n-----\\na100-7\\na100-8\\ncpu-1\\nbye-bye\\n'"
    node = "echo 'new h100 nodes'; echo 'NodeName=a100-7 Gres=gpu:a100:4 Features=fast,x'"
    write_command(tmp_path, "scontrol", f'[ "$2" = hostnames ] && {message} || {{ {node}; }}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert expand_hostlist("a100-[7-8],cpu-1") == ["a100-7", "a100-8", "cpu-1"]
    words = node_attributes("a100-7")
    assert {"a100", "fast"} <= words
    assert "h100" not in words
