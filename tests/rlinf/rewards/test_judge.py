"""A judge's verdicts become rewards; what it does not say is counted and written, and repeated
stages find what was said before."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import select_semantic, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.rewards.base import RewardResources
from rlinf.rewards.judge import JudgeConfig, JudgeReward, VerdictConfig, fill_template
from stages.layout import REWARD_CACHE_FOLDER
from tests.environments import need_environment
from tests.rlinf.rewards.chat_server import ChatServer, Reply, chat_server

ALONE = ProcessGroupInfo()
PROMPT = "Q: {prompt} A: {answer} R: {response} {unit} {not a field} {{"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def trajectories(*texts: str) -> list[Trajectory]:
    return [
        Trajectory(
            identity=RecordId(0, n),
            actions=np.zeros(2, np.int64),
            prompt_text="1+1=",
            text=text,
            answer="2",
            group=0,
            extra={"unit": "cm"},
        )
        for n, text in enumerate(texts)
    ]


def judge(
    server: ChatServer, folder: Path | None = None, world: ProcessGroupInfo = ALONE, **config: Any
) -> JudgeReward:
    endpoint = {
        "base_url": server.url,
        "initial_backoff_s": 0.01,
        "max_retries": 1,
        **config.pop("endpoint", {}),
    }
    values = {"endpoint": endpoint, "model": "tiny", "prompt": PROMPT, **config}
    return JudgeReward(
        validate(JudgeConfig, values, "reward"), RewardResources(world, folder=folder)
    )


def results_of(reward: JudgeReward, *texts: str) -> list[tuple[float, bool, str]]:
    found = reward.compute_results(trajectories(*texts), [])
    return [(float(np.sum(j.reward)), j.valid, j.failure) for j in found]


def by_length(question: str) -> Reply:
    """A verdict that follows from the response."""
    response = question.partition("R: ")[2].partition(" ")[0]
    return Reply(text=f"It is fine.\nScore: 0.{len(response)}")


def test_each_response_has_its_own_verdict(server: ChatServer) -> None:
    server.answer = by_length
    reward = judge(server, scale=2.0, offset=1.0, system_prompt="Be fair.", extra_body={"seed": 3})
    found = results_of(reward, "2", "two", "22", "2")
    assert [worth for worth, _, _ in found] == pytest.approx([1.2, 1.6, 1.4, 1.2])
    assert all(kept and not trouble for _, kept, trouble in found)
    assert len(server.requests) == 3, "equal questions are asked once"
    first = next(a for a in server.requests if "R: 2 " in a["messages"][1]["content"])
    assert first == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Q: 1+1= A: 2 R: 2 cm {not a field} {{"},
        ],
        "temperature": 0.0,
        "max_tokens": 256,
        "seed": 3,
    }


def test_what_a_response_says_is_no_template() -> None:
    (trajectory,) = trajectories("{answer} {unit.__class__} {0}")
    assert fill_template("{response}|{answer}", trajectory) == "{answer} {unit.__class__} {0}|2"


def test_a_field_that_is_not_there_is_named(server: ChatServer) -> None:
    with pytest.raises(DataError, match=r"reward.prompt: .*\{unti\}; did you mean 'unit'"):
        results_of(judge(server, prompt="{response} {unti}"), "2")
    assert not server.requests


@pytest.mark.parametrize(("fallback", "worth", "kept"), [("mask", 0.0, False), (-0.5, -0.5, True)])
def test_what_is_not_answered_has_the_fallback_and_says_why(
    server: ChatServer, fallback: Any, worth: float, kept: bool
) -> None:
    replies: dict[str, Reply] = {
        "a": Reply(status=503),
        "b": Reply(text="I cannot say."),
        "c": Reply(status=400, body=b"too long"),
        "d": Reply(),
    }
    server.answer = lambda question: replies[question.partition("R: ")[2][0]]
    found = results_of(judge(server, fallback=fallback), "a", "b", "c", "d")
    assert found == [
        (worth, kept, "unanswered"),
        (worth, kept, "unreadable"),
        (worth, kept, "refused"),
        (1.0, True, ""),
    ]
    assert {trouble for _, _, trouble in found} - {""} < set(JudgeReward.failure_kinds)


def test_a_repeated_stage_asks_for_nothing_that_was_answered(
    server: ChatServer, tmp_path: Path
) -> None:
    server.answer = by_length
    first = results_of(judge(server, tmp_path), "2", "two", "22")
    num_requests = len(server.requests)
    server.answer = lambda question: Reply(text="Score: 1")
    assert results_of(judge(server, tmp_path), "22", "2", "two") == [first[2], first[0], first[1]]
    assert len(server.requests) == num_requests == 3
    # Another question is another one: the model, its settings and the prompt are part of it.
    assert results_of(judge(server, tmp_path, model="other"), "2") == [(1.0, True, "")]
    assert results_of(judge(server, tmp_path, temperature=0.5), "2") == [(1.0, True, "")]
    assert len(server.requests) == 5


def test_a_stage_that_was_cut_short_asks_for_the_rest_alone(
    server: ChatServer, tmp_path: Path
) -> None:
    server.answer = lambda question: Reply(status=401) if "R: c" in question else Reply()
    with pytest.raises(ConfigError, match="status 401"):
        results_of(judge(server, tmp_path, endpoint={"max_concurrency": 1}), "a", "b", "c", "d")
    server.answer = lambda question: Reply()
    server.requests.clear()
    results_of(judge(server, tmp_path), "a", "b", "c", "d")
    assert len(server.requests) == 2


def test_what_a_run_may_spend_holds_over_its_starts(server: ChatServer, tmp_path: Path) -> None:
    budget = {"max_requests": 3, "max_concurrency": 1}
    found = results_of(judge(server, tmp_path, endpoint=budget), "a", "b")
    found += results_of(judge(server, tmp_path, endpoint=budget), "a", "b", "c", "d", "e")
    assert Counter(trouble for _, _, trouble in found) == {"": 5, "over_budget": 2}
    assert len(server.requests) == 3


def test_what_a_run_may_spend_holds_over_its_processes(server: ChatServer, tmp_path: Path) -> None:
    """Which are there from the beginning, and know of each other's requests by the folder alone."""
    ranks = [
        judge(
            server,
            tmp_path,
            ProcessGroupInfo(rank, 4),
            endpoint={"max_requests": 20, "max_concurrency": 2},
        )
        for rank in range(4)
    ]
    found = list[tuple[float, bool, str]]()

    def ask(rank: int) -> None:
        for turn in range(3):
            found.extend(results_of(ranks[rank], *(f"{rank}-{turn}-{n}" for n in range(10))))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 20
    assert Counter(trouble for _, _, trouble in found) == {"": 20, "over_budget": 100}


def test_starts_that_send_little_take_no_more_of_the_budget(
    server: ChatServer, tmp_path: Path
) -> None:
    """Each is a process of its own; the last question is tried twice."""
    server.answer = lambda question: Reply(status=503 if "R: d " in question else 200)
    for texts in (["a"], ["b", "c"], ["d"]):
        results_of(judge(server, tmp_path, endpoint={"max_requests": 5000}), *texts)
    blocks = [int(path.read_text()) for path in (tmp_path / "requests").iterdir()]
    assert sum(blocks) == len(server.requests) == 5


def test_what_was_sent_and_never_written_down_counts(server: ChatServer, tmp_path: Path) -> None:
    """As of a process that was killed before the answer came."""
    budget = {"max_requests": 5, "max_concurrency": 1, "max_retries": 0}
    results_of(judge(server, tmp_path, endpoint=budget), "a", "b", "c")
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    results_of(judge(server, tmp_path, endpoint=budget), "a", "b", "c", "d")
    assert len(server.requests) == 5


def test_tokens_of_other_processes_count_as_soon_as_they_are_known(
    server: ChatServer, tmp_path: Path
) -> None:
    budget = {"max_total_tokens": 25, "max_concurrency": 1}
    first, second = (
        judge(server, tmp_path, ProcessGroupInfo(rank, 2), endpoint=budget) for rank in range(2)
    )

    def answer(question: str) -> Reply:
        server.answer = lambda question: Reply()
        results_of(second, "c", "d", "e")
        return Reply()

    server.answer = answer
    assert [trouble for _, _, trouble in results_of(first, "a", "b")] == ["", "over_budget"]


def test_no_more_requests_are_under_way_than_allowed(server: ChatServer) -> None:
    server.answer = lambda question: Reply(wait_s=0.1)
    results_of(judge(server, endpoint={"max_concurrency": 3}), *map(str, range(9)))
    assert server.most == 3


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Score: 1", 1),
        ("score: 0.25 ", 0.25),
        ("I think so.\n**Score: 1**", 1),
        ("0", 0),
        ("Score: 0\nOn reflection:\nScore: 1", 1),
        ("Score: 7", None),
        ("Score: 1/10", None),
        ("Score: -1", None),
        ("of the 3 steps 1 is right", None),
        ("", None),
        ("Score: nan", None),
        ("1e400", None),
    ],
)
def test_a_number_counts_on_a_line_of_its_own_within_its_range(
    text: str, verdict: float | None
) -> None:
    assert VerdictConfig().parse(text) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Verdict: CORRECT", 1),
        ("Verdict: incorrect", 0),
        ("not correct", None),
        ("Verdict: maybe", None),
    ],
)
def test_words_count_as_they_are_given(text: str, verdict: float | None) -> None:
    config = VerdictConfig(
        pattern=r"(?i)verdict:\s*(\w+)", labels={"correct": 1.0, "incorrect": 0.0}
    )
    assert config.parse(text) == verdict


@given(st.text(max_size=60))
def test_any_answer_is_a_verdict_in_range_or_none(text: str) -> None:
    for config in (VerdictConfig(), VerdictConfig(pattern=r"(\S+)", min_value=-5, max_value=5)):
        verdict = config.parse(text)
        assert verdict is None or config.min_value <= verdict <= config.max_value


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"prompt": "{prompt}"}, r"reward.prompt: does not contain \{response\}"),
        ({"verdict": {"pattern": "("}}, "reward.verdict.pattern: is no regular expression"),
        ({"verdict": {"pattern": "a"}}, "reward.verdict.pattern: has 0 groups"),
        ({"verdict": {"pattern": "(a)(b)"}}, "reward.verdict.pattern: has 2 groups"),
        ({"verdict": {"min_value": 1.0}}, "reward.verdict: min_value 1 is not below max_value 1"),
        ({"verdict": {"labels": {"yes": 2.0}}}, "reward.verdict: labels.yes 2 is not within"),
        ({"extra_body": {"model": "x"}}, "reward.extra_body: holds model"),
        ({"fallback": "drop"}, "reward.fallback"),
        ({"fall_back": 0.0}, "'fallback'"),
        ({"endpoint": {"base_url": "http://far/v1"}}, "reward.endpoint: base_url"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], where: str) -> None:
    whole = {"endpoint": {"base_url": "https://host/v1"}, "model": "m", "prompt": "{response}"}
    with pytest.raises(ConfigError, match=where):
        validate(JudgeConfig, {**whole, **values}, "reward")


def test_where_the_judge_runs_changes_no_result() -> None:
    def reward(url: str, model: str) -> dict[str, Any]:
        return {"reward": {"name": "judge", "endpoint": {"base_url": url}, "model": model}}

    assert select_semantic(reward("https://a/v1", "m")) == select_semantic(
        reward("https://b/v1", "m")
    )
    assert select_semantic(reward("https://a/v1", "m")) != select_semantic(
        reward("https://a/v1", "n")
    )


def test_a_run_whose_judge_never_answers_has_a_status(
    server: ChatServer, compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from pipeline.commands.experiment import run_experiment
    from pipeline.commands.status import read_status

    server.answer = lambda question: Reply(text="Who knows")
    words = ["reward=judge", f"reward.endpoint.base_url={server.url}", "reward.model=tiny"]
    run_experiment(compose("iterations=1", *words, "evaluate.samples=2"))
    status = read_status(tmp_path / "tiny")
    assert status.reward is None
    assert any("no sample has a valid reward" in notice for notice in status.warnings)


def test_a_run_counts_and_records_what_was_not_judged(
    server: ChatServer, compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """From the configuration group to the metrics; then the stage is made again, for nothing."""
    from pipeline.commands.experiment import run_experiment
    from pipeline.metrics import read_metrics
    from tests.stages.test_reward import rewards_of

    lock, seen = threading.Lock(), list[str]()

    def answer(question: str) -> Reply:
        with lock:
            seen.append(question)
            return Reply(text=f"Score: {len(seen) % 2}" if len(seen) > 3 else "Who knows")

    server.answer = answer
    words = ["reward=judge", f"reward.endpoint.base_url={server.url}", "reward.model=tiny"]
    run_experiment(compose("iterations=1", *words, "evaluate.samples=2"))
    (row,) = read_metrics(tmp_path / "tiny")
    given = rewards_of(tmp_path / "tiny")
    troubles = Counter(str(record.failure) for record in given.values())
    assert row["reward/unreadable"] == troubles["unreadable"] >= 3
    assert row["reward/unanswered"] == row["reward/refused"] == row["reward/over_budget"] == 0
    assert all(not r.is_included for r in given.values() if r.failure)
    assert len(seen) == len(set(seen)), "no question was asked twice"
    (path,) = (tmp_path / "tiny" / REWARD_CACHE_FOLDER).iterdir()
    assert len(path.read_text().splitlines()) == len(seen)


def test_rewards_that_are_made_anew_are_asked_for_and_paid_for_anew(
    server: ChatServer, compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from pipeline.commands.experiment import run_experiment
    from pipeline.resume import OnMismatch

    requests = list[str]()

    def answer(question: str) -> Reply:
        requests.append(question)
        return Reply(text=f"Score: {len(question) % 2}")

    server.answer = answer
    words = ["iterations=1", "reward=judge", f"reward.endpoint.base_url={server.url}"]
    words += ["reward.model=tiny", "evaluate.samples=2", "reward.endpoint.max_requests=24"]
    run_experiment(compose(*words))
    first = sorted(requests)
    run_experiment(compose(*words, "optimizer.lr=0.5"), OnMismatch.RECOMPUTE)
    assert sorted(requests) == first, "the rewards did not depend on it"
    run_experiment(compose(*words, "reward.scale=2.0"), OnMismatch.RECOMPUTE)
    assert 12 < len(first) <= 24, "both together are more than the budget of one"
    assert sorted(requests) == sorted([*first, *first])
    (old,) = (tmp_path / "tiny" / "archive").glob("*/reward-cache/*.jsonl")
    assert len(old.read_text().splitlines()) == len(first)


@pytest.mark.slow
def test_a_vllm_server_is_asked(tmp_path: Path) -> None:
    """Its random model writes digits and signs; what it says is the verdict all the same."""
    from rlinf.engines.server_process import ServerProcess
    from rlinf.models.causal_lm import CausalLM
    from rlinf.shared_memory import new_segment_name
    from tests.contracts.test_engine import TOKENS

    python = need_environment("vllm")
    model = tmp_path / "model"
    model.mkdir()
    CausalLM.create(TOKENS, {"alphabet": "0123456789+= "}, 0, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = ServerProcess(
        python,
        "vllm.entrypoints.openai.api_server",
        [
            *("--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"),
            *("--port", str(port), "--dtype", "float32", "--max-model-len", "256"),
            *("--kv-cache-memory-bytes", str(2**28), "--enforce-eager", "--max-num-seqs", "8"),
        ],
        {
            "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": os.fspath(tmp_path) if len(str(tmp_path)) < 60 else "/tmp",
        },
        tmp_path / new_segment_name(),
        tmp_path / "log",
        60.0,
    )
    try:
        while True:
            assert process.is_alive, process.log_tail()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        config = {
            "endpoint": {"base_url": f"http://127.0.0.1:{port}/v1", "max_retries": 20},
            "model": "tiny",
            "prompt": "{prompt}{response}",
            "max_tokens": 12,
            "verdict": {"pattern": r"(\d)", "min_value": 0.0, "max_value": 9.0},
        }
        made = validate(JudgeConfig, config, "reward")
        texts = ["2", "3", "1+1", "22=", "0"]
        first = results_of(JudgeReward(made, RewardResources(folder=tmp_path / "a")), *texts)
        assert sum(not trouble for _, _, trouble in first) >= 3, process.log_tail()
        assert all(trouble in ("", "unreadable") for _, _, trouble in first)
        # Greedy: asked anew, without the answers, it says the same.
        assert (
            results_of(JudgeReward(made, RewardResources(folder=tmp_path / "b")), *texts) == first
        )
        lines = (tmp_path / "a").glob("*.jsonl")
        assert all(json.loads(x)["tokens"] > 0 for p in lines for x in p.read_text().splitlines())
    finally:
        process.close()
