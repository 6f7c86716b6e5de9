"""What a run was made with: the versions, the machine and the commit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from socket import gethostname
from typing import Any

from rlinf import __version__, tree
from rlinf.artifacts import Manifest

PACKAGES = ("torch", "transformers", "numpy")
ASK_S = 5.0
SHOWN = 4


def made_with() -> dict[str, Any]:
    """What ``run.json`` says of the process that made the run, besides name and identity."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return {"host": gethostname(), "versions": versions, "commit": _commit()}


def _commit() -> str:
    """Of the checkout, with ``-dirty`` where it was changed; empty without one."""
    if not (tree.ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(tree.ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            timeout=ASK_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def facts(about: dict[str, Any], seed: int, manifests: Iterable[Manifest]) -> list[tuple[str, str]]:
    """Labels and values for a person; what a run of an earlier version did not record is left out.

    Args:
        about: the content of ``run.json``.
    """
    versions = about.get("versions", {})
    found = {
        "started": str(about.get("created", "")),
        "started on": str(about.get("host", "")),
        "seed": str(seed),
        "identity": str(about.get("id", "")),
        "rlinf": str(about.get("version", "")),
        "commit": str(about.get("commit", "")),
        "kept though different": "; ".join(about.get("kept", ())),
        **{name: str(version) for name, version in versions.items()},
    }
    if __version__ != found["rlinf"]:
        found["report made by rlinf"] = __version__
    hosts, jobs = dict[str, None](), dict[str, None]()
    for manifest in manifests:
        hosts[manifest.host] = None
        if manifest.job:
            jobs[manifest.job] = None
    found |= {"hosts": _some(hosts), "Slurm jobs": _some(jobs)}
    return [(label, value) for label, value in found.items() if value]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
