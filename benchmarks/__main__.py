"""``python -m benchmarks [--name ROW]``: run benchmarks, print a table, write results.json."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from benchmarks.row import BenchmarkRow
from rlinf.errors import ConfigError
from tests.cpu_shims import use_cpu_shims

GPU = "gpu_training"
"""The module that needs a GPU. Without a GPU it runs only with ``--name``, and fails."""
RESULTS = Path(__file__).parent / "results.json"
ROWS = {
    "grpo_vs_trl": "grpo_vs_trl",
    "grpo_vs_trl_tail": "grpo_vs_trl",
    "grpo_tokens_per_s": "grpo_vs_trl",
    "engine_vs_generate": "engine_vs_generate",
    "engine_vs_generate_tail": "engine_vs_generate",
    "engine_tokens_per_cpu_s": "engine_vs_generate",
    "generate_tokens_per_cpu_s": "engine_vs_generate",
    "evaluate_vs_rollout": "evaluate_vs_rollout",
    "vllm_adapter_ratio": "engine_servers",
    "sglang_adapter_ratio": "engine_servers",
    "engine_update_vs_restart": "engine_servers",
    "vllm_start_s": "engine_servers",
    "sglang_start_s": "engine_servers",
    "trl_tokens_per_s": "grpo_vs_trl",
    "grpo_tail_tokens_per_s": "grpo_vs_trl",
    "trl_tail_tokens_per_s": "grpo_vs_trl",
    "stage_overhead_s": "slurm_jobs",
    "stage_imports_s": "slurm_jobs",
    "snakemake_job_s": "slurm_jobs",
    "doctor_wall_s": "partition_check",
    "driver_restart_s": "driver_restart",
    "dag_1000_s": "workflow_dry_run",
    "inventory_5000_nodes_s": "inventory",
    "plan_128x4_ms": "planning",
    "plan_4096x8_s": "planning",
    "plan_eight_stages_s": "planning",
    "plan_vs_exhaustive": "planning",
    "plan_public_case_s": "planning",
    "predict_error": "prediction",
    "predict_error_worst": "prediction",
    "predict_within_80": "prediction",
    "plan_rank_of_10": "placement",
    "plan_vs_next": "placement",
    "hetero_efficiency": "hetero_training",
    "hetero_apart": "hetero_training",
    "hetero_of_apart": "hetero_training",
    "hetero_equal_shares": "hetero_training",
    "hetero_speed_ratio": "hetero_training",
    "simulate_4096_s": "planning.measure_simulator",
    "delta_bytes_ratio": "weights",
    "delta_bytes_ratio_lr1e-6": "weights",
    "weight_sync_vs_memcpy": "weights",
    "weights_gloo_gb_s": "weights.measure_transfers",
    "weights_shared_memory_gb_s": "weights.measure_transfers",
    "shm_vs_memcpy": "channels",
    "shm_vs_memcpy_1mib": "channels",
    "shm_vs_memcpy_4mib": "channels",
    "shm_vs_memcpy_16mib": "channels",
    "shm_vs_memcpy_64mib": "channels",
    "records_per_s": "channels",
    "socket_vs_raw": "channels",
    "socket_vs_plain": "channels",
    "demo_exact_match": "demo",
    "demo_wall_s": "demo",
    "cartpole_return": "demo",
    "cartpole_wall_s": "demo",
    "embodied_overlap": "env_throughput.measure_overlap",
    "embodied_balance": "env_throughput.measure_overlap",
    "env_vs_gym": "env_throughput",
    "env_vs_gym_rendered": "env_throughput",
    "env_steps_per_s": "env_throughput",
    "gym_sync_steps_per_s": "env_throughput",
    "gym_async_steps_per_s": "env_throughput",
    "libero_vs_subproc": "libero_throughput",
    "libero_steps_per_s": "libero_throughput",
    "subproc_steps_per_s": "libero_throughput",
    "ppo_vs_sb3": "ppo_vs_sb3",
    "ppo_steps_per_s": "ppo_vs_sb3",
    "sb3_steps_per_s": "ppo_vs_sb3",
    "embodied_records_ratio": "rollout_memory",
    "noncompute_share": "pools",
    "pool_vs_jobs": "pools",
    "segment_iteration_s": "pools",
    "pipeline_speedup": "pools",
    "pipeline_balance": "pools",
    "pipeline_beside": "pools",
    "memory_10k_operations_mib": "memory_growth",
    "memory_200_iterations_mib": "memory_growth",
    "load_memory_ratio": "load_memory",
    "node_copy_memory_ratio": "node_copy_memory",
    "node_copy_buffers_mib": "node_copy_memory",
    "logprob_memory_ratio": "logprob_memory",
    "lora_memory_ratio": "lora_memory",
    "vla_step_memory_ratio": "vla_step_memory",
    "fsdp2_scaling": "scaling",
    "zero2_scaling": "scaling",
    "megatron_tp2_scaling": "scaling",
    "gpu_train_tokens_per_s": GPU,
    "gpu_train_mfu": GPU,
    "packing_speedup": "packing",
    "packing_vs_sorted": "packing",
    "shared_prefix_speedup": "packing",
    "owner_memory_ratio": "sharded_batch_memory",
    "scale_up_s": "elastic_pools",
    "loss_of_one_of_four": "elastic_pools",
    "loss_after_replacement": "elastic_pools",
    "helped_rollout_speedup": "rollout_tail",
    "switch_to_train_s": "rollout_tail",
    "switch_to_generate_s": "rollout_tail",
    "math_grader_agreement": "math_grader",
    "report_write_cpu_s": "report",
    "report_open_s": "report",
    "large_data_first_line_s": "large_data",
    "large_data_start_cpu_s": "large_data",
    "small_data_start_cpu_s": "large_data",
    "large_data_memory_mib": "large_data",
    "first_iteration_minutes": "first_run",
    "first_iteration_commands": "first_run",
    "first_model_start": "score_gain.measure_first_model",
    "first_model_gain_points": "score_gain.measure_first_model",
    "first_model_gain_lower": "score_gain.measure_first_model",
    "first_model_minutes": "score_gain.measure_first_model",
    "first_model_lora_start": "score_gain.measure_first_model_lora",
    "first_model_lora_gain_points": "score_gain.measure_first_model_lora",
    "first_model_lora_gain_lower": "score_gain.measure_first_model_lora",
    "first_model_lora_minutes": "score_gain.measure_first_model_lora",
    "vla_start": "score_gain.measure_vla",
    "vla_gain_points": "score_gain.measure_vla",
    "vla_gain_lower": "score_gain.measure_vla",
    "vla_minutes": "score_gain.measure_vla",
    "smolvla_start": "score_gain.measure_smolvla",
    "smolvla_gain_points": "score_gain.measure_smolvla",
    "smolvla_gain_lower": "score_gain.measure_smolvla",
    "smolvla_minutes": "score_gain.measure_smolvla",
    "world_model_start": "world_model",
    "world_model_gain_inside": "world_model",
    "world_model_gain_real": "world_model",
    "world_model_false_positive_share": "world_model",
}
"""Module that measures each row, with the function if it is not ``measure``. A function may return
several rows."""


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    import os

    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def main() -> int:
    """Measure all rows, or those of ``--name``; other rows keep their last results."""
    use_cpu_shims()
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "--name", choices=sorted(ROWS), help="measure only this row and the others of its function"
    )
    row_name = parser.parse_args().name
    modules = [ROWS[row_name]] if row_name else list(dict.fromkeys(ROWS.values()))
    if not row_name and not torch.cuda.is_available():
        modules.remove(GPU)
    console = Console()
    this_machine = machine()
    for module in modules:
        console.print(f"measuring {module} ...")
        start = time.monotonic()
        try:
            name, _, function = module.partition(".")
            measure = getattr(importlib.import_module(f"benchmarks.{name}"), function or "measure")
            rows: list[BenchmarkRow] = measure()
        except ConfigError as error:  # this machine cannot measure the row
            console.print(str(error))
            return error.exit_code
        console.print(f"  {time.monotonic() - start:.0f} s")
        # Write after each module, so that a later failure loses no results.
        all_rows = keep({row.name: {**asdict(row), "machine": this_machine} for row in rows})
    console.print(table([row_of(values) for values in all_rows]))
    return 0


def keep(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace rows of ``results.json`` by measured ones; returns all rows.

    Rows that are not in :data:`ROWS` come last.
    """
    rows_by_name: dict[str, Any] = {}
    if RESULTS.exists():
        rows_by_name = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    rows_by_name.update(rows)
    ordered = [
        rows_by_name[name] for name in dict.fromkeys([*ROWS, *rows_by_name]) if name in rows_by_name
    ]
    RESULTS.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")
    return ordered


def row_of(values: dict[str, Any]) -> BenchmarkRow:
    """Return the benchmark row of an entry of ``results.json``, without its machine."""
    return BenchmarkRow(**{name: value for name, value in values.items() if name != "machine"})


def table(rows: list[BenchmarkRow]) -> Table:
    """Return the rows as a table for the terminal."""
    out = Table(Column("row", no_wrap=True), "value", "unit", "goal", "reached", "n", "spread")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        goal = "" if row.goal is None else f"{sign} {row.goal:g}"
        reached = {True: "yes", False: "no", None: ""}[row.reached_goal]
        out.add_row(
            row.name, f"{row.value:g}", row.unit, goal, reached, str(row.n), f"{row.spread:g}"
        )
    return out


if __name__ == "__main__":
    raise SystemExit(main())
