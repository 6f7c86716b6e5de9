"""Data-sheet times against published figures.

``python -m tests.pipeline.planning.cost.test_published`` prints them all.

The efficiencies of :mod:`pipeline.planning.cost.data_sheet` were chosen with :data:`FOUNDRY` in
view; the other tables were not used for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from pipeline.planning.cost.data_sheet import (
    CandidateLayout,
    GenerationWorkload,
    GpuDevice,
    StateBytes,
    TrainingWorkload,
    decode_step,
    stage_seconds,
)
from pipeline.planning.cost.model_shape import ModelShape
from pipeline.planning.cost.rates import DATA_SHEET_SPREAD
from pipeline.planning.cost.regression import Z
from tests.pipeline.planning.cost.shapes import A100, H100, LLAMA_2_7B, LLAMA_2_70B, gpt


class Row(NamedTuple):
    """A published figure and ours, both in seconds."""

    name: str
    published_s: float
    ours_s: float

    @property
    def ratio(self) -> float:
        return self.ours_s / self.published_s


MEGATRON = (
    # heads, hidden, layers, tp, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 32, 512, 137),
    (32, 3072, 30, 2, 64, 512, 138),
    (32, 4096, 36, 4, 128, 512, 142),
    (48, 6144, 40, 8, 256, 1024, 135),
)
"""Narayanan et al. 2021, arXiv 2104.04473, table 1, rows without pipeline parallelism; sequences of
2048, vocabulary 51,200."""

RECOMPUTATION = ((64, 6144, 48, 4, 4, 1.42, 1.10),)
"""Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5, row without pipeline parallelism;
tp 8, one replica: heads, hidden, layers, batch, micro-batch, seconds with full and selective
recomputation."""

FOUNDRY_SHAPES = {
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
FOUNDRY = (
    # device, model, sequence, GPUs, micro-batch, batch, recomputes, tokens per second and GPU
    (H100, "70b", 2048, 64, 8, 2048, True, 1039),
    (H100, "70b", 2048, 32, 2, 1024, True, 882),
    (H100, "30b", 2048, 32, 14, 1344, True, 2308),
    (H100, "30b", 2048, 8, 3, 504, True, 2002),
    (H100, "13b", 16384, 8, 3, 72, True, 2985),
    (H100, "13b", 4096, 8, 10, 240, True, 4717),
    (H100, "13b", 2048, 64, 2, 128, False, 4800),
    (H100, "13b", 2048, 8, 2, 16, False, 4792),
    (H100, "7b", 8192, 8, 8, 128, True, 6935),
    (H100, "7b", 2048, 8, 6, 48, False, 10643),
    (H100, "3b", 2048, 64, 6, 1152, False, 22525),
    (H100, "1b", 2048, 8, 14, 112, False, 45455),
    (A100, "70b", 2048, 64, 8, 2048, True, 410),
    (A100, "70b", 2048, 32, 2, 1024, True, 373),
    (A100, "30b", 4096, 8, 1, 168, True, 814),
    (A100, "30b", 2048, 8, 3, 504, True, 916),
    (A100, "13b", 16384, 8, 3, 72, True, 1431),
    (A100, "13b", 4096, 8, 10, 240, True, 2060),
    (A100, "13b", 2048, 8, 2, 48, False, 2262),
    (A100, "7b", 8192, 8, 8, 128, True, 3206),
    (A100, "7b", 2048, 8, 6, 96, False, 4641),
    (A100, "3b", 2048, 8, 10, 160, False, 10811),
    (A100, "1b", 2048, 8, 14, 448, False, 20513),
)
"""MosaicML LLM Foundry, ``scripts/train/benchmarking/README.md``: FSDP, bfloat16."""

ENGINE = (
    # model, requests at once, tp, prompt, response, generated tokens per second and GPU
    (LLAMA_2_7B, 384, 1, 128, 128, 5586),
    (LLAMA_2_7B, 60, 1, 128, 2048, 1928),
    (LLAMA_2_7B, 52, 1, 2048, 128, 591),
    (LLAMA_2_7B, 64, 2, 2048, 2048, 782),
    (LLAMA_2_70B, 1280, 4, 128, 128, 670),
    (LLAMA_2_70B, 240, 4, 128, 2048, 525),
    (LLAMA_2_70B, 120, 4, 2048, 128, 79),
)
"""TensorRT-LLM 0.6.1, ``docs/source/performance.md``: A100, float16."""

LMDEPLOY = (
    # requests at once, prompt, response, generated tokens per second
    (1, 128, 128, 102.21),
    (16, 128, 128, 1272.47),
    (16, 128, 2048, 1010.62),
    (16, 2048, 2048, 601.63),
    (32, 128, 128, 2125.47),
    (32, 128, 2048, 1462.12),
    (32, 2048, 2048, 733.34),
    (64, 128, 128, 3024.07),
    (64, 128, 2048, 1852.06),
)
"""LMDeploy 0.1.0a1, ``docs/en/benchmark/a100_fp16.md``: Llama 2 7B on one A100, float16."""

FP8 = (
    (64, 128, 128, 9193),
    (64, 128, 2048, 5367),
    (64, 2048, 128, 2058),
    (32, 2048, 2048, 2230),
)
"""TensorRT-LLM 0.5.0, ``docs/source/performance.md``: LLaMA 7B on one H100, FP8."""

ONE_REQUEST = (
    (LLAMA_2_7B, 1, 104.9),
    (LLAMA_2_7B, 2, 168.84),
    (LLAMA_2_7B, 4, 254.02),
    (LLAMA_2_7B, 8, 328.43),
    (LLAMA_2_70B, 2, 21.32),
    (LLAMA_2_70B, 4, 38.01),
    (LLAMA_2_70B, 8, 62.50),
)
"""gpt-fast, ``README.md``: model, tp, tokens per second of one request; A100."""


def train_s(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice = A100
) -> float:
    return float(stage_seconds(shape, layout, work, device).total)


def megatron() -> list[Row]:
    rows = []
    for heads, hidden, layers, tp, gpus, batch, tflops in MEGATRON:
        # Their equation 3, with everything recomputed.
        flops = 96 * batch * 2048 * layers * hidden**2
        flops *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        layout = CandidateLayout(tp, gpus // tp, recompute="full")
        ours = train_s(gpt(layers, hidden, heads), layout, TrainingWorkload(batch, 2048, zero=0))
        rows.append(Row(f"tp {tp}, hidden {hidden}", flops / (gpus * tflops * 1e12), ours))
    return rows


def recomputation() -> list[Row]:
    rows = []
    for heads, hidden, layers, batch, micro, full, selective in RECOMPUTATION:
        for how, published in (("full", full), ("selective", selective)):
            layout = CandidateLayout(8, 1, micro, how)
            ours = train_s(
                gpt(layers, hidden, heads), layout, TrainingWorkload(batch, 2048, zero=0)
            )
            rows.append(Row(f"hidden {hidden}, {how}", published, ours))
    return rows


def foundry(shortest: int = 0, longest: int = 4096) -> list[Row]:
    rows = []
    for device, name, tokens, gpus, micro, batch, recomputes, rate in FOUNDRY:
        if shortest <= tokens <= longest:
            shape = gpt(*FOUNDRY_SHAPES[name], vocab=50368)
            layout = CandidateLayout(
                dp=gpus, micro_batch=micro, recompute="full" if recomputes else "selective"
            )
            work = TrainingWorkload(batch, tokens, zero=3, state=StateBytes(2, 2, 16))
            ours = train_s(shape, layout, work, device)
            label = f"{device.name} {name}, {gpus} GPUs, {tokens}"
            rows.append(Row(label, batch * tokens / (gpus * rate), ours))
    return rows


def engine() -> list[Row]:
    rows = []
    for shape, batch, tp, prompt, response, rate in ENGINE:
        work = GenerationWorkload(np.array([float(response)]), batch, prompt, max_running=batch)
        ours = float(stage_seconds(shape, CandidateLayout(tp), work, A100).total)
        label = f"{shape.layers} layers, {batch} x {prompt} + {response}"
        rows.append(Row(label, batch * response / (tp * rate), ours))
    return rows


def of_7b(table: tuple[tuple[float, ...], ...], shape: ModelShape, device: GpuDevice) -> list[Row]:
    """Four rounds of as many requests as there are at once."""
    rows = []
    for batch, prompt, response, rate in table:
        count = 4 * int(batch)
        work = GenerationWorkload(np.array([response]), count, int(prompt), max_running=int(batch))
        ours = float(stage_seconds(shape, CandidateLayout(), work, device).total)
        rows.append(Row(f"{batch} x {prompt} + {response}", count * response / rate, ours))
    return rows


def lmdeploy() -> list[Row]:
    return of_7b(LMDEPLOY, LLAMA_2_7B, A100)


def fp8() -> list[Row]:
    """Half the bytes, and twice the rate of matrix products (NVIDIA H100 data sheet)."""
    return of_7b(FP8, replace(LLAMA_2_7B, dtype_bytes=1), replace(H100, flops=2 * H100.flops))


def one_request() -> list[Row]:
    return [
        Row(f"{shape.layers} layers, tp {tp}", 1 / rate, ours)
        for shape, tp, rate in ONE_REQUEST
        for ours in [float(decode_step(shape, tp, 1, 100, A100).total)]
    ]


TABLES = {
    "megatron": megatron,
    "recomputation": recomputation,
    "foundry": foundry,
    "foundry, long": lambda: foundry(8192, 16384),
    "engine": engine,
    "lmdeploy": lmdeploy,
    "fp8": fp8,
    "one request": one_request,
}


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Software of 2021 and early 2022: attention scores go through memory, which costs small
        # models most; ours is for fused attention.
        ("megatron", 0.68, 1.05),
        ("recomputation", 0.78, 1.1),
        ("foundry", 0.84, 1.2),
        # Attention kernels of 2023 were far from the peak, most of all on the H100.
        ("foundry, long", 0.7, 1.05),
        ("one request", 0.85, 1.1),
        ("lmdeploy", 0.8, 1.05),
        ("fp8", 0.75, 1.0),
    ],
)
def test_times_are_near_the_published_ones(table, low, high):
    for row in TABLES[table]():
        assert low <= row.ratio <= high, row


def test_generation_is_near_the_published_throughput_but_for_one_known_case():
    """240 requests of 2048 tokens with grouped-query attention on tp 4: 1.8 times too quick."""
    *near, odd = sorted(engine(), key=lambda row: -row.ratio)
    assert odd.ratio == pytest.approx(1 / 1.8, rel=0.1)
    for row in near:
        assert 0.9 <= row.ratio <= 1.1, row


def test_nine_in_ten_published_figures_lie_within_the_stated_interval():
    rows = [row for table in TABLES.values() for row in table()]
    inside = [abs(math.log(row.ratio)) <= Z * DATA_SHEET_SPREAD for row in rows]
    assert np.mean(inside) >= 0.9
    # The interval is not wider than it need be.
    assert np.mean([abs(math.log(row.ratio)) <= DATA_SHEET_SPREAD / 2 for row in rows]) < 0.9


if __name__ == "__main__":
    for title, made in TABLES.items():
        for entry in made():
            print(
                f"{title:14} {entry.name:30} {entry.published_s:9.4g} {entry.ours_s:9.4g} "
                f"{entry.ratio:6.2f}"
            )
