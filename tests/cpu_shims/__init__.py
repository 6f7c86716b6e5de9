"""Shims with which Megatron-Core and SGLang run on CPUs, where tests and benchmarks need them.

The product supports both on GPUs only. A folder here has the name of an environment and a script
``python``, which starts the interpreter of that environment with the shims on its path.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from rlinf.interpreters import ENVIRONMENTS_VARIABLE, INTERPRETERS_VARIABLE

FOLDER = Path(__file__).parent


def use_cpu_shims() -> None:
    """Let the names of the environments stand for the scripts here, unless there is a GPU.

    Processes that this one starts inherit it.
    """
    if torch.cuda.is_available():
        return
    environments = Path(os.environ.get(ENVIRONMENTS_VARIABLE, "~/.cache/rlinf/envs")).expanduser()
    scripts = {
        script.parent.name: str(script)
        for script in FOLDER.glob("*/python")
        if (environments / script.parent.name / "bin" / "python").exists()
    }
    os.environ.setdefault(INTERPRETERS_VARIABLE, json.dumps(scripts))
