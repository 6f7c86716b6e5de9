"""Published models, tokenizers and templates: each loads, stops, generates as it trains, learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines.transformers import TransformersEngine
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from tests.rlinf.models import published_models, tiny
from tests.rlinf.models.vllm_lengths import vllm_accepts

MODELS = published_models.facts()
EACH = [
    pytest.param(one, id=one["name"], marks=[pytest.mark.slow] if one.get("slow") else [])
    for one in MODELS
]
TALK = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It is 4"}]


def test_there_are_enough_of_them() -> None:
    assert len(MODELS) >= 40
    assert len({one["model_type"] for one in MODELS}) >= 20


@pytest.mark.parametrize("known", EACH)
def test_a_published_model(tmp_path: Path, known: dict[str, Any]) -> None:
    config = published_models.write(tmp_path / "model", known)
    CausalLM.check_spec(config, {})
    published = HFFolder.from_config(config)
    assert published.context_length == known["context"]
    assert CausalLM.max_model_len(config) == known.get("run_length", known["context"])
    names = published.tokenizer.convert_ids_to_tokens(sorted(published.stop_token_ids))
    assert set(names) == set(known["stops"])
    bos = [known["tokenizer"]["bos"]] if known["tokenizer"]["adds_bos"] else []
    prefix = published.chat_format.bos_token_ids.tolist()
    assert published.tokenizer.convert_ids_to_tokens(prefix) == bos
    check_engine_and_trainer(config)
    check_tuning_teaches_to_stop(config, published, tmp_path / "tuned")


def check_engine_and_trainer(config: CausalLMConfig) -> None:
    """See that log-probabilities agree and that an update moves the weights."""
    request = tiny.requests([3, 11, 5], horizon=12, group=2)
    found = tiny.generate(tiny.engine(config), request)
    policy, records, outputs = tiny.assert_trainer_agrees(config, request, found)
    advantages = torch.tensor([1.0, -1.0] * 3)
    (-(advantages[:, None] * outputs.logprobs).sum()).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1e-2)
    assert 0 < float(norm) < torch.inf
    torch.optim.SGD(policy.module.parameters(), lr=0.1).step()
    with torch.no_grad():
        after = policy.evaluate(policy.collate(records), 1.0).logprobs
    better = (advantages[:, None] * (after - outputs.logprobs)).sum()
    assert float(better) > 0


def demonstration(published: HFFolder) -> Trajectory:
    """Return the token ids of a question and its answer, with what ends it."""
    chat, tokenizer = published.chat_format, published.tokenizer

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    if chat.template is None:
        prompt = [*chat.bos_token_ids.tolist(), *ids(TALK[0]["content"])]
        answer = ids(TALK[1]["content"])
    else:
        ((turn,),) = chat.assistant_turns([TALK], ["here"])
        prompt, answer = ids(turn.prompt), ids(turn.completion)
    # Without a template, and of GLM's, nothing stands behind the last answer.
    if answer[-1] != chat.end_of_turn_token_id and not published.stop_token_ids.intersection(
        answer
    ):
        answer.append(chat.end_of_turn_token_id)
    return Trajectory(identity=RecordId(0, 0), actions=np.array(answer), prompt=np.array(prompt))


def check_tuning_teaches_to_stop(config: CausalLMConfig, published: HFFolder, folder: Path) -> None:
    """See that a few steps of fine-tuning are repeated by the engine, which then stops."""
    assert config.path is not None
    policy, record = CausalLM.load(config.path, config), demonstration(published)
    answer = record.actions
    stop = next(i for i, t in enumerate(answer) if int(t) in published.stop_token_ids) + 1
    batch = policy.collate([record])
    optimizer = torch.optim.Adam(policy.module.parameters(), lr=0.01)
    for _ in range(200):
        loss = -policy.evaluate(batch, 1.0).logprobs.sum()
        if float(loss) < 0.5:
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    folder.mkdir()
    policy.save(folder, {n: t.detach() for n, t in policy.module.state_dict().items()})
    served = tiny.engine(config.model_copy(update={"path": folder}))
    (reply,) = greedy(served, record.prompt, horizon=stop + 6)
    length = int(reply.steps["length"][0])
    assert bool(reply.steps["stopped"][0])
    assert reply.steps["tokens"][0, :length].tolist() == answer[:stop].tolist()


def greedy(served: TransformersEngine, prompt: np.ndarray, horizon: int) -> list[Record]:
    """Return the replies to one prompt at temperature 0."""
    channel = LocalChannel()
    steps = {
        "sample": np.zeros(1, np.int64),
        "prompt": np.asarray(prompt, np.int64)[None],
        "prompt_length": np.array([len(prompt)]),
    }
    channel.put(Record(RecordId(0, 0), steps, info={"horizon": horizon, "temperature": 0.0}))
    channel.close()
    return list(served.generate(channel, seed=0, stage="evaluate"))


@pytest.mark.slow
def test_vllm_takes_the_same_lengths(tmp_path: Path) -> None:
    """Ask vLLM's own check: it takes the length, and more only where rlinf keeps to less."""
    lengths, wanted = [], {}
    for number, known in enumerate(MODELS):
        made = published_models.write(tmp_path / str(number), known)
        if (length := CausalLM.max_model_len(made)) is not None:
            lengths.append((str(made.path), length))
            wanted[known["name"]] = [True, "run_length" in known]
    assert dict(zip(wanted, vllm_accepts(lengths), strict=True)) == wanted
