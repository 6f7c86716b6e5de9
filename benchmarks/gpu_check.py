"""Check what runs on a GPU, and how fast: one JSON line per figure, in at most eight minutes.

``make gpu-check`` runs all checks, each in a process of its own with a time limit, so that one that
fails or hangs does not stop the others. ``--device cpu --tiny`` runs the same code at small sizes,
to test this script itself. Figures are printed as soon as they are measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks import gpu_training
from rlinf import package_paths
from rlinf.interpreters import ANY_TORCH_VARIABLE

CHECK_LIMITS_S = {
    "machine": 60,
    "tests": 120,
    "training": 120,
    "generation": 120,
    "offload": 90,
    "weight_sync": 60,
    "attention": 40,
    "nccl": 60,
    "pool": 90,
    "apart": 90,
    "demo": 90,
    "images": 90,
    "robot": 90,
    "cuda_ipc": 60,
}
"""Time limit of each check, seconds. A check for which no time is left fails, so the checks of what
runs of language models need come first."""
LIMIT_VARIABLE = "RLINF_GPU_CHECK_LIMIT_S"
"""Time limit of the process of one check, seconds."""
TINY_QWEN: dict[str, Any] = gpu_training.QWEN | {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
}


class Check:
    """A check that is running: its device, its sizes, and the output of its figures."""

    def __init__(self, name: str, device: str, tiny: bool) -> None:
        self.name, self.device, self.tiny = name, torch.device(device), tiny
        self.on_gpu = self.device.type == "cuda"
        self.qwen = TINY_QWEN if tiny else gpu_training.QWEN
        gpu_training.DEVICE = device

    def figure(self, name: str, **values: Any) -> None:
        """Print one figure."""
        print(json.dumps({"check": self.name, "figure": name, **values}), flush=True)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeat: int = 5, warm: int = 2) -> float:
        """Return the median seconds of ``repeat`` calls after ``warm`` other calls."""
        for _ in range(warm):
            work()
        found = []
        for _ in range(repeat):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - start)
        return float(np.median(found))

    def reset_memory(self) -> None:
        """Free unused memory and forget the peak."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.on_gpu else None

    def memory(self) -> dict[str, float]:
        """Return GiB allocated and reserved by this process, and free for other processes."""
        if not self.on_gpu:
            return {}
        values = {
            "allocated_gib": torch.cuda.memory_allocated(),
            "reserved_gib": torch.cuda.memory_reserved(),
            "free_for_others_gib": torch.cuda.mem_get_info()[0],
        }
        return {name: round(value / 2**30, 2) for name, value in values.items()}

    def network(self, dtype: torch.dtype) -> Any:
        """Return a Qwen2.5 with random weights."""
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        options = {name: value for name, value in self.qwen.items() if name != "model_type"}
        with self.device:
            return AutoModelForCausalLM.from_config(Qwen2Config(**options), dtype=dtype)


def check_machine(check: Check) -> None:
    """Versions, matmul rates, and copies between host and device."""
    import transformers

    check.figure(
        "versions",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        transformers=transformers.__version__,
        python=sys.version.split()[0],
        device=torch.cuda.get_device_name() if check.on_gpu else "cpu",
        cudnn=torch.backends.cudnn.version() if check.on_gpu else None,
        nccl=str(torch.cuda.nccl.version()) if check.on_gpu else None,
    )
    side = 512 if check.tiny else gpu_training.SIDE
    cases = (
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
    )
    for name, dtype, allow_tf32 in cases:
        left, right = (torch.randn(side, side, device=check.device, dtype=dtype) for _ in "ab")
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32

        def product(left: Any = left, right: Any = right) -> None:
            left @ right

        rate = 2 * side**3 / check.seconds(product)
        check.figure("matmul_tflops", dtype=name, value=round(rate / 1e12, 1))
    torch.backends.cuda.matmul.allow_tf32 = False
    nbytes = 1 << 22 if check.tiny else 1 << 30
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=check.device)
    for name, pinned in (("pageable", False), ("pinned", check.on_gpu)):
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)

        def to_device(host: Any = host) -> None:
            on_device.copy_(host)

        def to_host(host: Any = host) -> None:
            host.copy_(on_device)

        check.figure(
            "copy_gb_per_s",
            host=name,
            to_device=round(nbytes / check.seconds(to_device) / 1e9, 2),
            to_host=round(nbytes / check.seconds(to_host) / 1e9, 2),
        )


def check_training(check: Check) -> None:
    """Tokens per second, MFU and memory of a training step of 1.5 billion parameters."""
    from pipeline.planning.cost.model_shape import from_hf_config
    from rlinf.trainers.base import loss_from_steps

    rows, prompt, answer = (4, 16, 16) if check.tiny else (16, 512, 1536)
    budget = 64 if check.tiny else gpu_training.BUDGET
    shape = from_hf_config(check.qwen)
    flops = gpu_training.training_flops(shape, [prompt] * rows, [answer] * rows)
    rate = gpu_training.matrix_rate() if check.on_gpu else 1e12
    check.figure("matrix_rate_tflops", value=round(rate / 1e12, 1))
    loss = loss_from_steps(gpu_training.loss)

    def measure(
        variant: str, group: int = 1, repeat: int = 3, profiled: bool = False, **options: Any
    ) -> None:
        check.reset_memory()
        data = gpu_training.trajectories(
            np.random.default_rng(0), check.qwen["vocab_size"], rows, prompt, answer, group
        )
        settings = {"max_tokens_per_microbatch": budget, **options}
        try:
            learner = gpu_training.trainer(check.qwen, **settings)
            step = check.seconds(lambda: learner.step(data, loss, lr=1e-6), repeat, 2)

            def accumulate() -> None:
                learner.accumulate(data, loss)
                learner.discard_gradients()

            compute = check.seconds(accumulate, max(1, repeat - 1), 0)
        except torch.cuda.OutOfMemoryError as error:
            check.figure("training", variant=variant, error=f"out of memory: {error}"[:300])
            return
        # Of a shared prompt, the network reads less than these FLOPs.
        check.figure(
            "training",
            variant=variant,
            tokens_per_s=round(rows * (prompt + answer) / step),
            mfu=round(flops / step / rate, 3),
            step_s=round(step, 3),
            forward_backward_s=round(compute, 3),
            peak_gib=check.peak_gib(),
        )
        if profiled and check.on_gpu:
            print_profile(check, "a step", lambda: learner.step(data, loss, lr=1e-6))
        learner.close()

    measure("16 sequences, 16384 tokens per micro-batch", profiled=True)
    measure("8192 tokens per micro-batch", max_tokens_per_microbatch=min(budget, 8192))
    measure("groups of 8 share a prompt", group=2 if check.tiny else 8)
    measure("gradient checkpointing", gradient_checkpointing=True)
    measure("optimizer on the host", offload_optimizer=True, repeat=1)


def check_generation(check: Check) -> None:
    """Tokens per second of the transformers engine."""
    from rlinf.channels.channel import LocalChannel
    from rlinf.data.record import Record, RecordId
    from rlinf.engines.transformers import TransformersConfig, TransformersEngine
    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig

    folder = policy_folder(check)
    config = CausalLMConfig(path=folder, dtype="bfloat16")
    settings = TransformersConfig(device=check.device.type, ignore_eos=True)
    engine = TransformersEngine(settings, CausalLM, config)
    start = time.perf_counter()
    engine.load(folder, 0)
    check.synchronize()
    check.figure("load", seconds=round(time.perf_counter() - start, 2), **check.memory())
    prompt, horizon = (8, 8) if check.tiny else (256, 256)
    random = np.random.default_rng(0)

    def generate(rows: int, ragged: bool, horizon: int) -> int:
        lengths = random.integers(prompt // 2, prompt, rows) if ragged else np.full(rows, prompt)
        steps = {
            "sample": np.arange(rows),
            "prompt": random.integers(2, 12, (rows, prompt)),
            "prompt_length": lengths.astype(np.int64),
        }
        requests = LocalChannel()
        requests.put(Record(RecordId(0, 0), steps, info={"horizon": horizon, "temperature": 1.0}))
        requests.close()
        replies = engine.generate(requests, seed=0, stage="rollout")
        return sum(int(reply.steps["length"].sum()) for reply in replies)

    cases = ((1, False), (64, False), (64, True), (256, True))
    for rows, ragged in ((2, False), (2, True)) if check.tiny else cases:
        generate(rows, ragged, horizon)
        check.reset_memory()
        check.synchronize()
        start = time.perf_counter()
        count = generate(rows, ragged, horizon)
        check.synchronize()
        seconds = time.perf_counter() - start
        check.figure(
            "engine",
            rows=rows,
            ragged=ragged,
            tokens_per_s=round(count / seconds),
            ms_per_step=round(1e3 * seconds / horizon, 2),
            peak_gib=check.peak_gib(),
        )
    if check.on_gpu:
        print_profile(check, "12 tokens of 64 rows", lambda: generate(64, True, 12))


def print_profile(check: Check, name: str, work: Callable[[], Any]) -> None:
    """Print how long the GPU is busy, the kernel launches, and the slowest kernels."""
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        check.synchronize()
    wall = time.perf_counter() - start
    events = profiler.key_averages()
    on_gpu = [event for event in events if "CUDA" in str(event.device_type)]
    kernels = sorted(on_gpu, key=lambda event: -event.self_device_time_total)
    check.figure(
        "profile",
        work=name,
        wall_ms=round(1e3 * wall, 1),
        gpu_busy_ms=round(sum(event.self_device_time_total for event in on_gpu) / 1e3, 1),
        launches=sum(event.count for event in events if "LaunchKernel" in event.key),
        slowest=[
            (event.key[:60], event.count, round(event.self_device_time_total / 1e3, 2))
            for event in kernels[:12]
        ],
    )


def policy_folder(check: Check) -> Path:
    """Write a model folder with random weights and a character tokenizer."""
    from rlinf.models.character_tokenizer import write_character_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="qwen-"))
    write_character_tokenizer("0123456789+=", folder, None, ())
    check.network(torch.bfloat16).save_pretrained(folder)
    return folder


def check_offload(check: Check) -> None:
    """Move a trainer off the device and back; weights to the host and into an engine's module."""
    from rlinf.device_memory import DeviceMemoryManager
    from rlinf.models.base import copy_weights
    from rlinf.trainers.base import loss_from_steps

    budget, rows, prompt, answer = (64, 4, 16, 16) if check.tiny else (8192, 4, 512, 1536)
    learner = gpu_training.trainer(check.qwen, max_tokens_per_microbatch=budget)
    vocabulary = check.qwen["vocab_size"]
    data = gpu_training.trajectories(np.random.default_rng(0), vocabulary, rows, prompt, answer)
    loss = loss_from_steps(gpu_training.loss)
    learner.step(data, loss, lr=1e-6)
    check.figure("after_a_step", **check.memory())
    manager = DeviceMemoryManager(check.device, sys.maxsize)
    manager.acquire(learner)
    nbytes = sum(size.on_device for size in learner.group_sizes().values())
    for attempt in ("first, allocates pinned memory", "second", "third"):
        check.synchronize()
        start = time.perf_counter()
        manager.offload_all()
        check.synchronize()
        offload = time.perf_counter() - start
        offloaded = check.memory()
        start = time.perf_counter()
        manager.acquire(learner)
        check.synchronize()
        onload = time.perf_counter() - start
        check.figure(
            "offload",
            attempt=attempt,
            gib=round(nbytes / 2**30, 2),
            offload_s=round(offload, 3),
            onload_s=round(onload, 3),
            offload_gb_per_s=round(nbytes / offload / 1e9, 1),
            onload_gb_per_s=round(nbytes / onload / 1e9, 1),
            while_offloaded=offloaded,
        )
    metrics = learner.step(data, loss, lr=1e-6)
    check.figure("a_step_after_it", loss=metrics["loss"], grad_norm=metrics["grad_norm"])
    for attempt in ("first", "second"):
        start = time.perf_counter()
        state = learner.full_state_dict(copy=True)
        check.synchronize()
        seconds = time.perf_counter() - start
        nbytes = sum(tensor.nbytes for tensor in state.values())
        check.figure(
            "weights_to_host",
            attempt=attempt,
            seconds=round(seconds, 3),
            gb_per_s=round(nbytes / seconds / 1e9, 2),
        )
    start = time.perf_counter()
    learner.snapshot()
    check.figure("snapshot", seconds=round(time.perf_counter() - start, 3))
    module = check.network(torch.bfloat16)
    for attempt in ("first", "second"):
        start = time.perf_counter()
        copy_weights(module, state.items())
        check.synchronize()
        check.figure(
            "weights_into_engine", attempt=attempt, seconds=round(time.perf_counter() - start, 3)
        )


def check_attention(check: Check) -> None:
    """Which attention kernel serves the shapes of training and decoding, and how fast."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend

    heads, kv_heads, head_dim = 12, 2, 128
    rows, queries, keys = (2, 24, 40) if check.tiny else (8, 512, 1024)

    def tensor(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=check.device, dtype=torch.bfloat16, requires_grad=grad)

    shared = torch.ones(queries, keys, dtype=torch.bool, device=check.device)
    visible = torch.ones(rows, 1, 1, keys, dtype=torch.bool, device=check.device)
    query, one = tensor(rows, heads, queries, head_dim, grad=True), tensor(rows, heads, 1, head_dim)
    prompt = tensor(rows, kv_heads, queries, head_dim)
    in_rows = tensor(rows, kv_heads, keys, head_dim)
    in_columns = tensor(rows, kv_heads, head_dim, keys).transpose(2, 3)
    grouped = one.view(rows, kv_heads, heads // kv_heads, head_dim)
    gqa, causal = {"enable_gqa": True}, {"is_causal": True}
    mask = {"attn_mask": shared.tril(keys - queries)[None, None]}
    cases: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
        "training, causal": ((query, prompt, prompt), gqa | causal),
        "training, mask of a shared prompt": ((query, in_rows, in_rows), gqa | mask),
        "decoding, no mask, keys in columns": ((one, in_columns, in_rows), gqa),
        "decoding, no mask, keys in rows": ((one, in_rows, in_rows), gqa),
        "decoding, mask, keys in rows": ((one, in_rows, in_rows), gqa | {"attn_mask": visible}),
        "decoding, mask, heads grouped": ((grouped, in_rows, in_rows), {"attn_mask": visible}),
    }
    for name, (inputs, options) in cases.items():
        try:
            choose: Any = torch._fused_sdp_choice
            chosen = choose(*inputs, **{"dropout_p": 0.0, **options})
            backend = SDPBackend(int(chosen)).name
        except Exception as error:  # this function of torch is private
            backend = f"unknown: {error!r}"[:120]

        def work(inputs: Any = inputs, options: Any = options) -> None:
            output = F.scaled_dot_product_attention(*inputs, **options)
            if output.requires_grad:
                output.sum().backward()

        check.reset_memory()
        ms = round(1e3 * check.seconds(work, 3, 1), 3)
        check.figure("attention", case=name, backend=backend, ms=ms, peak_gib=check.peak_gib())
    lengths = itertools.count(queries - 1, -1)
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)

        def new_shape() -> None:
            states = prompt[:, :, : next(lengths)]
            F.scaled_dot_product_attention(
                query[:, :, : states.shape[2]], states, states, is_causal=True, enable_gqa=True
            ).sum().backward()

        ms = round(1e3 * check.seconds(new_shape, 5, 1), 1)
        check.figure("attention_of_a_new_shape", cudnn=enabled, ms=ms)


def check_nccl(check: Check) -> None:
    """Collectives of one process, and a process group of its own in a thread, as pools have."""
    import torch.distributed as dist

    from rlinf.channels.process_group import ProcessGroupInfo

    ProcessGroupInfo().init_process_group(check.device.type)
    tensor = torch.ones(1 << 20, device=check.device)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.zeros(1))  # a tensor of the host: by Gloo
    check.figure(
        "collectives",
        backends=str(dist.get_backend_config()),
        all_reduce_ms=round(1e3 * check.seconds(lambda: dist.all_reduce(tensor)), 3),
    )
    if not check.on_gpu:
        return
    from rlinf.weights.broadcast import WeightBroadcast
    from stages.worker.weight_transfer import create_process_group

    errors: list[str] = []

    def broadcast() -> None:
        try:
            from torch._C._distributed_c10d import HashStore

            group = create_process_group("nccl", HashStore(), 0, 1)
            sender = WeightBroadcast(group, 0, check.device)
            tensors = {f"w{i}": torch.randn(1 << 24) for i in range(8)}
            for attempt in ("first", "second"):
                start = time.perf_counter()
                sender.send(1, tensors, dtype=torch.bfloat16)
                seconds = time.perf_counter() - start
                rate = round(8 * (1 << 24) * 2 / seconds / 1e9, 2)
                check.figure("broadcast_from_host", attempt=attempt, gb_per_s=rate)
            sender.close()
        except BaseException:
            errors.append(traceback.format_exc()[-1500:])

    thread = threading.Thread(target=broadcast)
    thread.start()
    thread.join(40)
    passed = not errors and not thread.is_alive()
    check.figure("group_in_a_thread", passed=passed, error="".join(errors))
    dist.destroy_process_group()


SYNC_RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from benchmarks import gpu_training
from benchmarks.gpu_check import Check
from benchmarks.process_memory import proportional_bytes
from rlinf.models.base import copy_weights
from rlinf.weights.node_copy import collect_once_per_node

store, device, size, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
check = Check("weight_sync", device, size == "tiny")
trainer = gpu_training.trainer(check.qwen, param_dtype="float32")  # one process: not sharded
module = check.network(torch.bfloat16)
for attempt in ("first", "second"):
    before = proportional_bytes(os.getpid())
    dist.barrier()
    start = time.perf_counter()
    weights = collect_once_per_node(trainer.stream_weights, is_needed=True)
    collected = time.perf_counter() - start
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    copy_weights(module, weights.items())
    check.synchronize()
    loaded = time.perf_counter() - start - collected
    held = torch.tensor([proportional_bytes(os.getpid()) - before])
    dist.all_reduce(held)
    name, tensor = next(iter(weights.items()))
    passed = torch.equal(module.state_dict()[name].cpu(), tensor.to(torch.bfloat16))
    if rank == "0":
        times = {"collect_s": round(collected, 3), "load_s": round(loaded, 3)}
        ratio = round(int(held) / nbytes, 3)
        check.figure("node_copy", attempt=attempt, passed=passed, host_copies=ratio, **times)
    del weights, tensor
dist.barrier()
dist.destroy_process_group()
"""


def check_weight_sync(check: Check) -> None:
    """Two processes on one GPU: a trainer's weights reach the engines of both by one host copy.

    ``host_copies`` is the host memory of both processes over the bytes of the weights. The first
    attempt includes buffers that stay.
    """
    with tempfile.TemporaryDirectory() as folder:
        size = "tiny" if check.tiny else "full"
        command = [sys.executable, "-c", SYNC_RANK, f"{folder}/store", str(check.device), size]
        ranks = [
            subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True) for rank in "01"
        ]
        errors = [rank.communicate()[1][-1500:] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("\n".join(errors))


IPC_CLIENT = """
import sys, time, torch
from multiprocessing.connection import Client
connection = Client(sys.argv[1])
rebuild, arguments = connection.recv()
start = time.perf_counter()
shared = rebuild(*arguments)
opened = time.perf_counter() - start
own = torch.empty_like(shared)
for _ in range(2):
    torch.cuda.synchronize()
    start = time.perf_counter()
    own.copy_(shared)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
connection.send((float(own.float().mean()), opened, own.nbytes / seconds / 1e9))
connection.recv()
"""


def check_cuda_ipc(check: Check) -> None:
    """Whether two processes can share memory of the GPU, which rlinf does not use yet."""
    if not check.on_gpu:
        check.figure("skipped", reason="no GPU")
        return
    from multiprocessing.connection import Listener

    from torch.multiprocessing.reductions import reduce_tensor

    weights = torch.full((1 << 30,), 3.0, device=check.device, dtype=torch.bfloat16)
    check.synchronize()
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        client = subprocess.Popen(
            [sys.executable, "-c", IPC_CLIENT, f"{folder}/socket"],
            stderr=subprocess.PIPE,
            text=True,
        )
        connection = listener.accept()
        connection.send(reduce_tensor(weights))
        if connection.poll(45):
            mean, opened, rate = connection.recv()
            check.figure(
                "cuda_ipc", passed=mean == 3.0, open_s=round(opened, 3), gb_per_s=round(rate, 1)
            )
            connection.send("done")
        else:
            client.kill()
        errors = client.communicate(timeout=10)[1]
        if client.returncode:
            check.figure("cuda_ipc", passed=False, error=errors[-800:])


def check_demo(check: Check) -> None:
    """The demo in bfloat16: all stages in one process, as ``make demo`` runs them."""
    iterations, sft_steps = (2, 10) if check.tiny else (4, 150)
    run_experiment(
        check,
        f"iterations={iterations}",
        f"sft.max_steps={sft_steps}",
        "evaluate.every=4",
        "evaluate.samples=128",
        "experiment=arithmetic_grpo",
    )


def check_pool(check: Check) -> None:
    """Stages take turns on the GPU in a resident worker; each must make room for the next."""
    run_pools(check, ["rollout", "reward", "inference", "train"], words=["device_memory_gib=0.016"])


def check_apart(check: Check) -> None:
    """Rollout and training in workers of their own, which exchange weights and samples."""
    run_pools(check, ["rollout"], ["reward", "inference", "train"])


def run_pools(check: Check, *pools: list[str], words: Sequence[str] = ()) -> None:
    """Run a short experiment with one pool for each list of stages."""
    run_experiment(
        check,
        "iterations=3",
        f"sft.max_steps={20 if check.tiny else 100}",
        "rollout.batch_size=32",
        "evaluate.samples=64",
        "experiment=arithmetic_short",
        "cluster=local",
        *words,
        plan={"pools": [{"stages": stages, "devices": {"local": 1}} for stages in pools]},
    )


def check_images(check: Check) -> None:
    """GRPO of a small Qwen2.5-VL on questions about images."""
    sizes = (f"sft.max_steps={10 if check.tiny else 100}", "evaluate.samples=16")
    run_experiment(check, "iterations=2", "experiment=visual_grpo", *sizes, "rollout.batch_size=4")


def check_robot(check: Check) -> None:
    """PPO in MuJoCo with the policy on the GPU, and a picture rendered by EGL."""
    try:
        import gymnasium
    except ImportError as error:
        check.figure("skipped", reason=str(error))
        return
    try:
        environment: Any = gymnasium.make("HalfCheetah-v5", render_mode="rgb_array")
    except gymnasium.error.DependencyNotInstalled as error:
        check.figure("skipped", reason=str(error))
        return
    environment.reset(seed=0)
    environment.render()
    ms = 1e3 * check.seconds(environment.render, 20, 2)
    picture = np.asarray(environment.render())
    check.figure("render", ms=round(ms, 2), shape=picture.shape, std=round(float(picture.std()), 1))
    run_experiment(check, "iterations=2", "experiment=halfcheetah_ppo", half_precision=False)


def run_experiment(
    check: Check, *words: str, plan: dict[str, Any] | None = None, half_precision: bool = True
) -> None:
    """Run an experiment with the driver, and print its times and last metrics.

    Raises:
        RuntimeError: the run failed.
    """
    limit = float(os.environ.get(LIMIT_VARIABLE, CHECK_LIMITS_S[check.name]))
    name, dtypes = check.name, ("++trainer.param_dtype=bfloat16", "++engine.dtype=bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if plan:
            (root / "plan.yaml").write_text(yaml.safe_dump(plan))
            words += (f"plan={root}/plan.yaml",)
        command = [sys.executable, "-m", "rlinf.launch", f"run.name={name}", f"run.root={root}"]
        start = time.perf_counter()
        with (root / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, *words, *(dtypes if half_precision and check.on_gpu else ())],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(limit - 10)
            except subprocess.TimeoutExpired:
                process.terminate()  # the driver ends its stages
                code = process.wait()
        lines = (root / "log").read_text(errors="replace").splitlines()
        check.figure(
            "run",
            exit_code=code,
            seconds=round(time.perf_counter() - start, 1),
            log=lines[-12 if code == 0 else -40 :],
            metrics=list(run_metrics(root / name)),
        )
        manifests = list((root / name).rglob("manifest.json"))
        moved = sum('"onload"' in manifest.read_text() for manifest in manifests)
        check.figure("outputs", manifests=len(manifests), with_memory_moved=moved)
        if code:
            raise RuntimeError(f"the run ended with exit code {code}")


def run_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of the last iterations that a reader needs to judge a run."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    wanted = ("loss", "grad_norm", "reward", "rollout_logprob_diff", "exact_match", "tokens_per_s")
    for line in path.read_text().splitlines()[-3:]:
        row = json.loads(line)
        yield {key: value for key, value in row.items() if any(w in key for w in wanted)}


def check_tests(check: Check) -> None:
    """The tests that need a GPU, without the slow ones.

    Other checks run pools, and engines with packages of their own are rarely here.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs"]
    result = subprocess.run(
        [*command, "tests/gpu", "-m", "gpu and not slow"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (result.stdout + result.stderr).splitlines()
    check.figure("pytest", exit_code=result.returncode, output=lines[-40:])
    if result.returncode:
        raise RuntimeError("tests failed")


CHECKS: dict[str, Callable[[Check], None]] = {
    name: globals()[f"check_{name}"] for name in CHECK_LIMITS_S
}


def main() -> int:
    """Run the checks, or the one of ``--check`` in this process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("names", nargs="*", choices=[[], *CHECKS], help="default: all checks")
    parser.add_argument("--check", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this script")
    parser.add_argument("--limit", type=float, default=480, help="seconds of all checks together")
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    options = parser.parse_args()
    if options.check:
        return run_check(Check(options.check, options.device, options.tiny))
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here", file=sys.stderr)
        return 1
    failed = run_checks(options.names or list(CHECKS), options)
    return 1 if failed else 0


def run_check(check: Check) -> int:
    """Run one check in this process; returns the exit code."""
    try:
        CHECKS[check.name](check)
    except BaseException as error:
        check.figure(
            "failed",
            error=f"{type(error).__name__}: {error}"[:500],
            traceback=traceback.format_exc()[-1500:],
        )
        return 1
    return 0


def run_checks(names: list[str], options: argparse.Namespace) -> list[str]:
    """Run checks in processes of their own; returns the names of those that failed."""
    start, failed = time.monotonic(), list[str]()
    deadline = start + options.limit
    for name in names:
        if not run_process(name, options, deadline):
            failed.append(name)
    total = round(time.monotonic() - start, 1)
    emit(options, {"check": "all", "figure": "ended", "seconds": total, "failed": failed})
    return failed


def run_process(name: str, options: argparse.Namespace, deadline: float) -> bool:
    """Run a check in a process with a time limit; returns whether it passed."""
    ended: dict[str, Any] = {"check": name, "figure": "ended"}
    limit = min(CHECK_LIMITS_S[name], deadline - time.monotonic())
    if limit < 15:
        emit(options, ended | {"exit_code": None, "reason": "no time left"})
        return False
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "4",
        "MUJOCO_GL": "egl",
        ANY_TORCH_VARIABLE: "1",  # a machine that is lent may have any version
        **os.environ,
        LIMIT_VARIABLE: str(limit),
    }
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--check", name]
    command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=package_paths.ROOT,
            env=environment,
            start_new_session=True,
        )
        timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                emit(options, json.loads(text))
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        stderr = errors.read().splitlines()[-12:] if code else []
    seconds = round(time.monotonic() - began, 1)
    emit(options, ended | {"exit_code": code, "seconds": seconds, "stderr": stderr})
    return code == 0


def emit(options: argparse.Namespace, values: dict[str, Any]) -> None:
    """Print one figure, and append it to the output file."""
    line = json.dumps(values) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if options.output:
        with options.output.open("a") as stream:
            stream.write(line)


if __name__ == "__main__":
    sys.exit(main())
