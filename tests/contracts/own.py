"""Parts of the registry, and those of the examples, which are to keep the same contracts."""

from __future__ import annotations

import sys

from rlinf import package_paths
from rlinf.registry import Registry

EXAMPLES = {
    "algorithm": ["mylab.algorithm:LeaveOneOut", "mylab.preferences:Preferences"],
    "model": ["mylab.policy:Linear"],
}


def parts(registry: Registry) -> list[str]:
    """Names of all parts that are to be tried."""
    folder = str(package_paths.ROOT / "docs" / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return [*registry.names(), *EXAMPLES[registry.kind]]
