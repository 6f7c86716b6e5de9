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
from slurm import discovery, records
from slurm.client import SlurmClient, classify_failure, command_environment
from tests.slurm.test_client import VERSIONS, sections
from tests.slurm.test_discovery import VERSIONS as SURVEYED
from tests.slurm.wrapped import BANNER, FOOTER, wrap, write_command

READERS: dict[str, Callable[[str], Any]] = {
    "squeue": records.parse_queue,
    "sacct": records.parse_accounting,
    "job": records.parse_job,
    "element": records.parse_job,
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
    found = records.parse_settings(wrap(text))
    assert records.parse_settings(text).items() <= found.items()


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
    assert records.parse_limits(wrap(QOS), wrap(ASSOCIATIONS)) == records.parse_limits(
        QOS, ASSOCIATIONS
    )
    assert set(records.parse_qos(QOS)) == {"normal", "low"}
    assert len(records.parse_associations(ASSOCIATIONS)) == 2
    assert (
        records.parse_past_waits(wrap(WAITS), "gpu") == records.parse_past_waits(WAITS, "gpu") != []
    )


@pytest.mark.parametrize("read", [*list(READERS.values())[:2], records.parse_pending])
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


def test_hosts_are_told_from_what_a_wrapper_of_scontrol_prints() -> None:
    """A word of a banner would be a host, and every rank after it have another's speed."""
    text = "Welcome\n-----\na100-7\na100-8\ncpu-1\nbye-bye\n"
    assert records.parse_hostnames(text, "a100-[7-8],cpu-1") == ["a100-7", "a100-8", "cpu-1"]
    node = "new h100 nodes\nNodeName=a100-7 Gres=gpu:a100:4 Features=fast,x\n"
    words = records.parse_node_words(node)
    assert {"a100", "fast"} <= words
    assert "h100" not in words
