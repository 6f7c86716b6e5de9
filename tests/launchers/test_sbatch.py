"""The batch script of heterogeneous jobs says what is meant, whatever the words hold."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.base import Job
from launchers.job import ModuleCall
from launchers.sbatch import check_components, together_script
from rlinf.errors import PlanError
from slurm.jobs import Resources

ODD = """a 'b' "c" $HOME; `d` * \\n"""
A100 = Resources("a100", gpus_per_node=1, gpu_type="a100", env={"X": ODD}, setup=("module load x",))
CPU = Resources("cpu")


def job(folder: Path, *further: Resources) -> Job:
    return Job("pool/one", ("--name", ODD), folder / "o", folder / "l o", A100, "m", further)


def test_calls_and_settings_survive_the_shell(tmp_path: Path) -> None:
    script = together_script([job(tmp_path, CPU), job(tmp_path)])
    options, body = script.split("\n\n", 1)
    assert options.count("#SBATCH hetjob") == 2
    assert options.count("#SBATCH --gres=gpu:a100:1") == 2
    assert options.count("#SBATCH --gres=none") == 1, "of the one before it, it would have a GPU"
    starts = [shlex.split(part) for part in body.split("srun ")[1:]]
    assert [[w for w in words if w.startswith("--het-group")] for words in starts] == [
        ["--het-group=0", "--het-group=1"],
        ["--het-group=2"],
    ]
    steps = [words[i + 1] for words in starts for i, word in enumerate(words) if word == "-c"]
    assert len(steps) == 3
    for step, groups in zip(steps, ("0,1", "0,1", "2"), strict=True):
        *setup, last = step.split("\n")
        assert f"export RLINF_HET_GROUPS={groups}" in setup
        call = ModuleCall.load(shlex.split(last)[-1])
        assert (call.module, call.argv) == ("m", ("--name", ODD))
    assert f"export X={shlex.quote(ODD)}" in steps[0]
    assert "module load x" in steps[0]
    assert "module load x" not in steps[1]


@pytest.mark.parametrize(
    ("change", "option"),
    [({"time_min": 60}, "time"), ({"mem_mb": 300}, "mem"), ({"sbatch": {"nice": 7}}, "nice")],
)
def test_what_one_component_would_take_over_is_refused(
    change: dict[str, object], option: str
) -> None:
    more = replace(A100, **change)  # type: ignore[arg-type]
    check_components([("pools[0]", A100), ("pools[1]", CPU)])
    check_components([("pools[0]", A100), ("pools[1]", more)])
    with pytest.raises(PlanError, match=rf"pools\[0\] and pools\[1\].*--{option} "):
        check_components([("pools[0]", more), ("pools[1]", CPU)])
