"""Texts that sites print around Slurm's answers change nothing that is read from them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import SlurmError, SlurmUnresponsiveError
from slurm import client, discovery
from slurm import client as answers
from slurm.client import SlurmClient, classify_failure, command_environment
from slurm.requeue import parse_requeue_state
from slurm.stop_signals import parse_job_window
from tests.slurm.test_client import VERSIONS, sections
from tests.slurm.test_discovery import VERSIONS as SURVEYED
from tests.slurm.wrapped import BANNER, FOOTER, wrap, write_command

READERS: dict[str, Callable[[str], Any]] = {
    "squeue": answers.parse_queue,
    "sacct": answers.parse_accounting,
    "sinfo": answers.parse_partitions,
    "job": lambda text: (parse_requeue_state(text), parse_job_window(text)),
    "element": lambda text: (parse_requeue_state(text), parse_job_window(text)),
}
QOS = "normal|0|||||||cpu=8\nlow|5|normal|01:00:00|3|4|cpu=2||\n"
ASSOCIATIONS = "dev|team||normal,low|3|5|||gres/gpu=8|normal\ndev|other|gpu|low||||||\n"
WAITS = "gpu|2|2026-01-02T03:04:05|2026-01-02T03:05:05\n"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("question", READERS)
def test_the_answers_of_every_version(version: str, question: str) -> None:
    text, read = sections(version)[question], READERS[question]
    assert read(wrap(text)) == read(text)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_settings_keep_their_values(version: str) -> None:
    text = sections(version)["config"]
    found = answers.parse_settings(wrap(text))
    assert answers.parse_settings(text).items() <= found.items()


@pytest.mark.parametrize("version", SURVEYED)
def test_the_inventory_of_every_version(version: str) -> None:
    request = SURVEYED[version]
    now = datetime(2026, 1, 2, tzinfo=UTC)
    wrapped = discovery.SlurmOutput(
        request.version,
        *map(wrap, (request.nodes, request.partitions, request.usage, request.pending)),
    )
    plain = discovery.SlurmOutput(
        request.version, request.nodes, request.partitions, request.usage, request.pending
    )
    assert discovery.build_inventory(wrapped, now) == discovery.build_inventory(plain, now)


def test_limits_and_waits() -> None:
    assert discovery.parse_limits(wrap(QOS), wrap(ASSOCIATIONS)) == discovery.parse_limits(
        QOS, ASSOCIATIONS
    )
    assert set(discovery.parse_qos(QOS)) == {"normal", "low"}
    assert len(discovery.parse_associations(ASSOCIATIONS)) == 2
    assert (
        client.parse_past_waits(wrap(WAITS), "gpu") == client.parse_past_waits(WAITS, "gpu") != []
    )


@pytest.mark.parametrize("read", [*list(READERS.values())[:3], discovery.parse_pending])
def test_a_banner_alone_is_nothing(read: Callable[[str], Any]) -> None:
    assert not read(BANNER + FOOTER)


def test_a_banner_about_nodes_that_do_not_respond_is_no_silence() -> None:
    refusal = "sbatch: error: Batch job submission failed: Invalid qos specification"
    assert classify_failure(wrap(refusal)) is SlurmError
    silence = "squeue: error: Unable to contact slurm controller (connect failure)"
    assert classify_failure(wrap(silence)) is SlurmUnresponsiveError


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH for stand-ins of Slurm's commands."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


def test_the_version_and_marked_jobs(commands: Path) -> None:
    write_command(commands, "sinfo", f"cat <<'X'\n{wrap('slurm-wlm 22.05.8')}\nX")
    rows = "7|(null)\n8|mine rlinf-12\n9_[0-1]|rlinf-12\n"
    write_command(commands, "squeue", f"cat <<'X'\n{wrap(rows)}| a | rlinf-12\nX")
    assert SlurmClient().version() == "22.05.8"
    assert SlurmClient().find_by_comment("rlinf-12") == ["8", "9_0", "9_1"]


def test_a_version_that_is_not_told_is_an_error(commands: Path) -> None:
    write_command(commands, "sinfo", "echo Welcome")
    with pytest.raises(SlurmError, match="no version in 'Welcome'"):
        SlurmClient().version()


def test_commands_have_nothing_of_the_job_around_them(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_MEM_PER_CPU", "SBATCH_QOS", "SQUEUE_PARTITION", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("RLINF_OWN", "kept")
    path = write_command(commands, "squeue", "env")
    assert path.stat().st_mode & stat.S_IXUSR
    names = {line.partition("=")[0] for line in SlurmClient().run("squeue").splitlines()}
    assert {name for name in names if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_"))} == {
        "SLURM_CONF"
    }
    assert "RLINF_OWN" in names
    assert command_environment()["SLURM_CONF"] == "/etc/slurm.conf"
