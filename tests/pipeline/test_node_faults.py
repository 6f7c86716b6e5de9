"""A node that gives no more ends the run with one clear error, and the run goes on by resuming."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import drive, prepare_run
from pipeline.run import Run
from rlinf.errors import InputError
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
DRIVER = """
import resource, sys, yaml
from pipeline.commands.experiment import run_experiment
from rlinf import package_paths, threads
from rlinf.errors import RlinfError
package_paths.add_to_sys_path()
values = yaml.safe_load(sys.stdin)
import stages.rollout, stages.train, stages.sft, torch
LIMIT
try:
    run_experiment(values)
except RlinfError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
FILE_SIZE = "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, resource.RLIM_INFINITY))"
OPEN_FILES = """
import os
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, 4096))
"""
# Room for what is small, and not for the weights (60 MiB): libraries in Rust end their process
# where there is none for theirs. What a stage imports is imported before: an import that finds no
# memory ends with whatever error it happens on.
MEMORY = """
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
"""
LARGE = ("model.hidden=512", "model.intermediate=2048", "model.layers=4")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("limit", "words", "more"),
    [
        (FILE_SIZE, "largest size that this process may write", ()),
        (OPEN_FILES, "no more files can be opened", ()),
        (MEMORY, "no memory left", LARGE),
    ],
    ids=["file-size", "open-files", "memory"],
)
def test_a_limit_is_one_clear_error_and_the_run_goes_on(
    compose: Compose, tmp_path: Path, limit: str, words: str, more: tuple[str, ...]
) -> None:
    values = compose("iterations=1", *more)
    values["run"]["root"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.replace("LIMIT", limit)],
        input=yaml.safe_dump(values),
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    output = re.findall(r"^error: .*", done.stderr, re.MULTILINE)
    assert done.returncode == 65, done.stderr[-3000:]
    assert len(output) == 1, output
    assert words in output[0]
    assert "Traceback" not in done.stderr
    if (tmp_path / "tiny" / "run.json").exists():
        drive(Run.open(tmp_path / "tiny"))
        assert "it/0000/sync" in contents(tmp_path / "tiny")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a filesystem needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("undrawn")
def test_a_read_only_filesystem_is_one_clear_error_and_the_run_goes_on(
    compose: Compose, mounted: Path
) -> None:
    values = compose("iterations=1")
    values["run"]["root"] = str(mounted)
    run = prepare_run(values)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(InputError, match=r"[Rr]ead-only"):
        drive(run)
    subprocess.run(["mount", "-o", "remount,rw", str(mounted)], check=True)
    drive(run)
    assert "it/0000/sync" in contents(mounted / "tiny")
