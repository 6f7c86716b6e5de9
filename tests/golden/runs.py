"""The eight short runs whose bytes every reshaping of the code must keep."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.hydra_config import force_add
from tests.conftest import QUIET, TINY

HERE = Path(__file__).parent
DIGESTS = HERE / "digests.json"
CHAT = Path(__file__).parents[2] / "docs/examples/chat"

# Every stage of every run computes in these, so that its bytes do not depend on the processor:
# each library is held to instructions that all x86-64 processors have.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

SMALL_MODEL = [word for word in TINY if "model." in word]
SMALL_ROLLOUT = ["rollout.batch_size=4", "evaluate.samples=4", "evaluate.every=1", "iterations=2"]
SMALL_SFT = [
    "sft.max_steps=3",
    "sft.batch_size=16",
    "sft.eval_every=2",
]

RUNS: Mapping[str, list[str]] = {
    "arithmetic_grpo": ["experiment=arithmetic_grpo", *TINY],
    "arithmetic_ppo": [
        "experiment=arithmetic_ppo",
        *SMALL_MODEL,
        *SMALL_ROLLOUT,
        *SMALL_SFT,
        "rollout.horizon=6",
        "algorithm.minibatches=2",
        "algorithm.entropy_coeff=0.1",
        "algorithm.critic_warmup=1",
    ],
    "arithmetic_dapo": [
        "experiment=arithmetic_dapo",
        *TINY,
        "algorithm.filter_zero_variance_groups=true",
        "reward.overlong_penalty_start=2",
        "reward.overlong_penalty_end=6",
    ],
    "calculator_grpo": [
        "experiment=calculator_grpo",
        *SMALL_MODEL,
        *SMALL_ROLLOUT,
        *SMALL_SFT,
        "rollout.group_size=2",
        "algorithm.entropy_coeff=0.1",
    ],
    "cartpole_ppo": [
        "experiment=cartpole_ppo",
        *SMALL_ROLLOUT,
        "rollout.horizon=32",
        "algorithm.epochs=2",
        "algorithm.minibatches=2",
        "evaluate.horizon=16",
    ],
    "pendulum_sac": [
        "experiment=pendulum_sac",
        *SMALL_ROLLOUT,
        "rollout.batch_size=2",
        "rollout.horizon=40",
        "algorithm.learning_starts=40",
        "algorithm.batch_size=16",
        "evaluate.horizon=20",
        "model.hidden=[16, 16]",
        "model.critic_hidden=[16, 16]",
    ],
    "metaworld_vla": [
        "experiment=metaworld_openvla_oft",
        "iterations=2",
        "reward=environment",
        "task.demonstrations=2",
        "task.images={corner: [24, 24]}",
        *SMALL_MODEL,
        "model.vision_hidden=16",
        "model.patch_size=8",
        "model.vision_heads=2",
        "sft.max_steps=4",
        "sft.batch_size=1",
        "sft.lr=3e-3",
        "sft.lr_warmup_steps=0",
        "sft.eval_generation=false",
        "rollout.batch_size=2",
        "rollout.group_size=2",
        "rollout.horizon=3",
        "algorithm.minibatches=2",
        "evaluate.samples=2",
        "evaluate.horizon=2",
    ],
    "chat_sft": [
        "experiment=chat_sft",
        "model=small",
        *SMALL_MODEL,
        f"task.train={CHAT / 'train.jsonl'}",
        f"task.test={CHAT / 'test.jsonl'}",
        "sft.max_steps=6",
        "sft.batch_size=16",
        "sft.eval_every=3",
        "sft.eval_samples=12",
        "rollout.horizon=8",
        "evaluate.samples=4",
    ],
}

ON_POLICY = ["rollout", "reward", "inference", "train"]
OFF_POLICY = ["rollout", "reward", "train"]
WAYS: Mapping[str, list[str]] = {
    "process": ["cluster=inprocess"],
    "jobs": ["cluster=local"],
    "pools": ["cluster=local"],
}


def pool_plan(stages: list[str]) -> str:
    """A plan in which one resident worker executes all stages in turn, as an override."""
    pool = f"{{stages: [{', '.join(stages)}], devices: {{local: 1}}}}"
    return f"plan={{pools: [{pool}]}}"


def command(name: str, way: str, root: Path) -> list[str]:
    """The overrides of one run, below the folder ``root``."""
    stages = OFF_POLICY if name == "pendulum_sac" else ON_POLICY
    plan = [pool_plan(stages)] if way == "pools" else []
    words = [*RUNS[name], *WAYS[way], *plan, *QUIET, f"run.root={root}", "run.name=run"]
    return [force_add(word.removeprefix("++")) for word in words]


def environment() -> dict[str, str]:
    """The variables that a golden run's processes start with."""
    return {**os.environ, **PORTABLE}


def recorded() -> dict[str, dict[str, str]]:
    """The content digests on file for this processor's vendor: run, then stage folder."""
    found: dict[str, Any] = json.loads(DIGESTS.read_text())
    return found["runs"] | found["runs_of_vendors"].get(cpu_field("vendor_id"), {})


def cpu_field(name: str) -> str:
    """A field of ``/proc/cpuinfo``, such as ``model name``; "unknown" without it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def save(runs: Mapping[str, Mapping[str, str]]) -> None:
    """Write ``digests.json``, with the digest of all of them on its first line.

    On a processor of another vendor than the file's, only the runs that differ are added to
    ``runs_of_vendors``: torch rounds a few numbers of ``cartpole_ppo`` differently there, even with
    the same instructions.
    """
    vendor, vendors = cpu_field("vendor_id"), dict[str, Any]()
    source = {"recorded_on": cpu_field("model name"), "vendor": vendor}
    if DIGESTS.exists():
        found = json.loads(DIGESTS.read_text())
        vendors = found["runs_of_vendors"]
        if found["vendor"] != vendor:
            vendors[vendor] = {n: runs[n] for n in runs if runs[n] != found["runs"].get(n)}
            runs, source = found["runs"], {key: found[key] for key in source}
    whole = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()
    content = {"all": whole, **source, "runs": runs, "runs_of_vendors": vendors}
    DIGESTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
