"""One server on the GPUs of several processes: one of them asks it, the others wait for it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.channels.channel import LocalChannel
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.engines.base import RolloutHooks
from rlinf.engines.server import check_attention_heads, server_gpus
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from tests.contracts.test_engine import TOKENS, Tried
from tests.rlinf.engines.small_server import SmallConfig, SmallEngine
from tests.rlinf.trainers.run_components import run_components

HORIZON = 12


def rank(folder: Path, number: int) -> None:
    """A process of two: prints what it has done, and when."""
    policy = CausalLM.load(folder / "policy", TOKENS)
    engine: Any = SmallEngine(SmallConfig(step_s=0.05, sleeps=True), CausalLM, TOKENS)
    engine.log_folder = folder / "logs"
    engine.world = ProcessGroupInfo(
        number,
        2,
        number,
        rendezvous_file=folder / "channels" / "group-t.json",
        layout=ParallelLayout(tp=2),
    )
    tried = Tried(engine, "tokens", folder / "policy", policy)
    try:
        engine.load(folder / "policy", 3)
        first = engine.group_sizes()["server"]
        for version in (3, 4):
            if version == 4:
                engine.load_state(policy.module.state_dict().items(), version)
            if number:
                engine.run_follower(seed=7, stage="rollout")
            else:
                request = tried.request(range(4), horizon=HORIZON, min_tokens=HORIZON)
                channel = LocalChannel()
                channel.put(request)
                channel.close()
                given, last = 0, 0.0
                # What ends a batch follows its last reply, so the time is taken at each.
                for reply in engine.generate(
                    channel, seed=7, stage="rollout", hooks=RolloutHooks()
                ):
                    given, last = given + len(reply.steps["sample"]), time.time()
                assert given == 4
                print("answered", last)
            print("through", time.time())
            assert engine.group_sizes()["server"] == (0, first.on_device, 0), (
                "its memory is the others' now"
            )
            engine.onload(["server"], copy_data=version == 3)
            assert engine.version == version
        servers = [p for p in psutil.Process().children() if "small_server" in str(p.cmdline())]
        print("servers", len(servers))
    finally:
        engine.close()


def test_one_process_asks_and_the_other_goes_on_when_the_server_is_through(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "channels").mkdir()
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, tmp_path / "policy")
    program = "import sys; from pathlib import Path; "
    program += "from tests.rlinf.engines import test_tensor_parallel as divided; "
    program += "divided.rank(Path(sys.argv[1]), int(sys.argv[2]))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), outputs
    one, other = ([line.split() for line in out.splitlines()] for out, _ in outputs)
    assert [line[0] for line in one] == ["answered", "through"] * 2 + ["servers"]
    assert [line[0] for line in other] == ["through"] * 2 + ["servers"]
    assert (one[-1][1], other[-1][1]) == ("1", "0")
    for round_ in range(2):
        assert float(other[round_][1]) >= float(one[2 * round_][1]), "after the last answer"


def test_whatever_ends_a_batch_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stops reading, too, would leave them waiting."""
    engine: Any = SmallEngine(SmallConfig(), CausalLM, TOKENS)
    through = []
    monkeypatch.setattr(engine, "_finish_batch", lambda: through.append(1))

    class Broken:
        def __init__(self, *_: Any) -> None: ...

        def iter_replies(self) -> Any:
            yield 1
            raise ValueError("broken")

    monkeypatch.setattr("rlinf.engines.server.ResumableGeneration", Broken)
    left: Any = engine.generate(None, seed=0, stage="rollout", hooks=RolloutHooks())
    next(left)
    left.close()
    assert through == [1]
    with pytest.raises(ValueError, match="broken"):
        list(engine.generate(None, seed=0, stage="rollout", hooks=RolloutHooks()))
    assert through == [1, 1]


def test_each_server_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc,5,6")
    assert [server_gpus(0, 1, number, 2, 1) for number in range(2)] == ["3", "GPU-abc"]
    assert [server_gpus(rank, 4, 0, 1, 1) for rank in range(4)] == ["3", "GPU-abc", "5", "6"]
    assert [server_gpus(rank, 4, 0, 1, 2) for rank in (0, 2)] == ["3,GPU-abc", "5,6"]
    assert [server_gpus(1, 2, number, 2, 1) for number in range(2)] == ["5", "6"]
    with pytest.raises(ConfigError, match=r"1 processes .* 5 servers of 1 GPUs .* sees 4"):
        server_gpus(0, 1, 4, 5, 1)
    with pytest.raises(ConfigError, match=r"1 servers of 2 GPUs each need 4 GPUs.*sees 4"):
        server_gpus(3, 4, 0, 1, 2)
    with pytest.raises(ConfigError, match=r"6 processes on this node .* need 6 GPUs.*sees 4"):
        server_gpus(4, 6, 0, 1, 1)  # no two servers on one GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # each process is shown its own alone
    assert [server_gpus(rank, 3, 0, 1, 1) for rank in range(3)] == ["7"] * 3


@pytest.mark.parametrize(
    ("shared", "size", "able"),
    [
        (None, 4, None),
        (None, 5, "1, 2, 3, 4, 6, 12"),
        (4, 2, None),
        (2, 4, None),  # each head of keys and values is at two processes
        (4, 6, "1, 2, 4, 12"),
        (3, 4, "1, 3, 6, 12"),
    ],
)
def test_heads_that_cannot_be_divided_are_named(
    shared: int | None, size: int, able: str | None
) -> None:
    settings = SimpleNamespace(num_attention_heads=12, num_key_value_heads=shared)
    if able is None:
        check_attention_heads(settings, size)
        return
    with pytest.raises(ConfigError, match=rf"layout\.tp: {size} .* 12 attention heads.* {able}$"):
        check_attention_heads(settings, size)


def test_sizes_go_by_any_name_that_a_family_has(tmp_path: Path) -> None:
    """GPT-2's are n_head and n_positions."""
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, tmp_path)
    settings = GPT2Config(
        vocab_size=16, n_embd=32, n_layer=1, n_head=4, n_positions=64, eos_token_id=1
    )
    GPT2LMHeadModel(settings).save_pretrained(tmp_path)
    policy = CausalLM.load(tmp_path, TOKENS)
    engine: Any = SmallEngine(SmallConfig(), CausalLM, TOKENS)
    try:
        engine.load(tmp_path, 3)
        tried = Tried(engine, "tokens", tmp_path, policy)
        assert len(tried.answers(tried.request(range(4)))) == 4
        with pytest.raises(DataError, match="do not fit into 64"):
            tried.answers(tried.request(range(1), horizon=80))
    finally:
        engine.close()
    config = CausalLMConfig(path=tmp_path)
    with pytest.raises(ConfigError, match=r"key\.tp: 3 .* 4 attention heads"):
        run = run_components(config)
        SmallEngine.check_layout(SmallConfig(), run, ParallelLayout(tp=3), 3, "key")
