"""vLLM's own check of a model's length, asked in vLLM's environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from tests.environments import need_environment

VLLM = """
import json, sys
from vllm.config.model import _get_and_verify_max_len
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

def accepts(folder, length):
    config = get_config(folder, False)
    text = config.get_text_config()
    known = ModelArchConfigConvertorBase(config, text).convert()
    try:
        _get_and_verify_max_len(text, known, None, length, False, None)
    except ValueError:
        return False
    return True

pairs = json.loads(sys.stdin.read())
print(json.dumps([[accepts(folder, n), accepts(folder, n + 1)] for folder, n in pairs]))
"""


def vllm_accepts(lengths: Sequence[tuple[str, int]]) -> list[list[bool]]:
    """Return, for each folder and length, whether vLLM takes that length, and one more."""
    python = need_environment("vllm")
    done = subprocess.run(
        [python, "-c", VLLM], input=json.dumps(lengths), capture_output=True, text=True, check=False
    )
    found: list[list[bool]] = json.loads(done.stdout.splitlines()[-1])
    return found
