"""Decoding: log-probs of the training stack, independence of the batch, right frequencies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import DeviceMemoryManager
from rlinf.engines.base import NO_HOOKS, RolloutHooks
from rlinf.engines.token_sampling import SamplingParams, sample_tokens
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig

CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, path)
    return path


def engine(folder: Path, **options: Any) -> TransformersEngine:
    made = TransformersEngine(TransformersConfig(**options), CausalLM, CONFIG)
    made.load(folder, 3)
    return made


def request(lengths: list[int], horizon: int = 10, temperature: float = 1.0) -> Record:
    random = np.random.default_rng(0)
    width = max(lengths)
    prompts = np.zeros((len(lengths), width), dtype=np.int64)
    for row, length in zip(prompts, lengths, strict=True):
        row[:length] = random.integers(2, 14, length)
    # Two samples of each prompt, as in a group.
    return Record(
        RecordId(0, 0),
        steps={
            "sample": np.arange(2 * len(lengths)),
            "prompt": prompts.repeat(2, axis=0),
            "prompt_length": np.array(lengths).repeat(2),
        },
        info={"horizon": horizon, "temperature": temperature},
    )


def channel_of(*requests: Record) -> LocalChannel:
    channel = LocalChannel()
    for wanted in requests:
        channel.put(wanted)
    channel.close()
    return channel


def rows(
    engine: TransformersEngine, wanted: Record, hooks: RolloutHooks = NO_HOOKS
) -> dict[int, dict[str, np.ndarray]]:
    found = {}
    for reply in engine.generate(channel_of(wanted), seed=7, stage="rollout", hooks=hooks):
        assert reply.info["version"] == 3
        for i, number in enumerate(reply.steps["sample"]):
            found[int(number)] = {name: array[i] for name, array in reply.steps.items()}
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_training_stack(folder: Path, temperature: float) -> None:
    wanted = request([3, 7, 5, 3], temperature=temperature)
    got = rows(engine(folder), wanted)
    for i, expected in expected_logprobs(folder, wanted, got, temperature).items():
        np.testing.assert_allclose(expected, got[i]["logprobs"][: len(expected)], atol=2e-5)


def expected_logprobs(
    folder: Path, wanted: Record, got: dict[int, dict[str, np.ndarray]], temperature: float
) -> dict[int, np.ndarray]:
    """Log-probs of every sample's tokens under the training stack."""
    policy = CausalLM.load(folder, CONFIG)
    records = []
    for number in sorted(got):
        length = int(got[number]["length"])
        prompt = wanted.steps["prompt"][number][: wanted.steps["prompt_length"][number]]
        records.append(
            Trajectory(
                identity=RecordId(0, number),
                actions=got[number]["tokens"][:length],
                prompt=prompt,
            )
        )
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate(records), temperature)
    return {i: outputs.logprobs[i, : len(record)].numpy() for i, record in enumerate(records)}


def test_a_stop_string_that_is_a_special_token_ends_samples(tmp_path: Path) -> None:
    """No decoded text shows it."""
    spec = {"alphabet": "0123456789+=", "special_tokens": ["<|eot|>"]}
    CausalLM.create(CONFIG, spec, 0, tmp_path)
    network = engine(tmp_path)
    (token,) = network.stop_ids(["<|eot|>", "1"])
    wanted = request([3, 5] * 8, horizon=24)
    plain, wanted.info["stop"] = rows(network, wanted), json.dumps(["<|eot|>"])
    cut = 0
    for number, row in rows(network, wanted).items():
        before = plain[number]["tokens"][: plain[number]["length"]].tolist()
        length = before.index(token) + 1 if token in before else len(before)
        assert row["tokens"][: row["length"]].tolist() == before[:length]
        assert row["stopped"] == (token in before or plain[number]["stopped"])
        cut += token in before[:-1]
    assert cut


@pytest.mark.parametrize("change", [1, 4, 9])
def test_samples_go_on_with_newer_weights_from_the_next_token_on(
    folder: Path, tmp_path: Path, change: int
) -> None:
    """Each token has the log-prob of the version that is said to have chosen it."""
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 1, tmp_path)
    num_requests = 0

    def newer() -> tuple[Path, int] | None:
        nonlocal num_requests
        num_requests += 1
        return (tmp_path, 4) if num_requests == change else None

    wanted = request([3, 7, 5, 3], horizon=12)
    going = engine(folder, ignore_eos=True)
    got = rows(going, wanted, RolloutHooks(newer_weights=newer))
    assert going.version == 4
    plain = rows(engine(folder, ignore_eos=True), wanted)
    old, new = (expected_logprobs(where, wanted, got, 1.0) for where in (folder, tmp_path))
    for number, row in got.items():
        assert row["version"].tolist() == [3] * change + [4] * (12 - change)
        np.testing.assert_array_equal(row["tokens"][:change], plain[number]["tokens"][:change])
        expected = np.concatenate([old[number][:change], new[number][change:]])
        np.testing.assert_allclose(expected, row["logprobs"], atol=2e-5)


def test_finished_rows_do_not_come_back_with_newer_weights(folder: Path, tmp_path: Path) -> None:
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 1, tmp_path)
    wanted, num_requests = request([3, 7, 5, 4, 6] * 8, horizon=40), 0

    def newer() -> tuple[Path, int] | None:
        nonlocal num_requests
        num_requests += 1
        return (tmp_path, 3) if num_requests == 20 else None

    going, still = engine(folder), engine(folder)
    got, plain = rows(going, wanted, RolloutHooks(newer_weights=newer)), rows(still, wanted)
    early = [number for number, row in plain.items() if row["length"] <= 20]
    assert 0 < len(early) < len(plain)
    for number in early:
        length = int(plain[number]["length"])
        assert got[number]["length"] == length
        np.testing.assert_array_equal(
            got[number]["tokens"][:length], plain[number]["tokens"][:length]
        )


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (1, {}),
        (5, {}),
        (5, {"max_num_seqs": 3}),
        (11, {}),
        (9, {"max_num_seqs": 4, "max_num_batched_tokens": 4}),
    ],
)
def test_another_engine_goes_on_with_what_one_gave_up(
    folder: Path, at: int, options: dict[str, int]
) -> None:
    """Handing samples over changes nothing: the randomness of a token is that of its place."""
    wanted = request([3, 7, 5, 4, 6] * 2, horizon=12)
    plain = rows(engine(folder, **options), wanted)
    first, requests = engine(folder, **options), list[int]()

    def gives_up(left: int, of: int) -> bool:
        assert of == 20
        requests.append(left)
        return len(requests) >= at

    got = rows(first, wanted, RolloutHooks(should_abort=gives_up))
    given_up = {number: row for number, row in got.items() if row.get("unfinished")}
    assert given_up.keys() <= {n for n, row in plain.items() if row["length"] >= 2}
    assert given_up, "the test hands something over"
    assert all(not row["stopped"] for row in given_up.values())
    assert requests == sorted(requests, reverse=True), "what is left of the whole request"
    numbers = np.array(sorted(given_up))
    width = max(int(row["length"]) for row in given_up.values())
    rest = Record(
        wanted.identity,
        steps={
            **{name: column[numbers] for name, column in wanted.steps.items()},
            "begun_length": np.array([given_up[n]["length"] for n in numbers]),
            "begun_tokens": np.array([given_up[n]["tokens"][:width] for n in numbers]),
            "begun_logprobs": np.array([given_up[n]["logprobs"][:width] for n in numbers]),
            "begun_version": np.full((len(numbers), width), 3),
        },
        info=wanted.info,
    )
    for number, row in (got | rows(engine(folder), rest)).items():
        length = int(plain[number]["length"])
        assert (row["length"], row["stopped"]) == (length, plain[number]["stopped"])
        assert "unfinished" not in row
        np.testing.assert_array_equal(row["tokens"][:length], plain[number]["tokens"][:length])
        np.testing.assert_allclose(
            row["logprobs"][:length], plain[number]["logprobs"][:length], atol=2e-6
        )


def test_a_sample_does_not_depend_on_its_neighbours(folder: Path) -> None:
    wanted = request([3, 7, 5, 4, 6])
    whole = rows(engine(folder), wanted)
    pieces = rows(engine(folder, max_num_seqs=3), wanted)
    assert whole.keys() == pieces.keys()
    for number in whole:
        length = int(whole[number]["length"])
        assert length == pieces[number]["length"]
        np.testing.assert_array_equal(
            whole[number]["tokens"][:length], pieces[number]["tokens"][:length]
        )


def test_a_prompt_that_ends_with_token_zero_is_not_taken_for_a_shorter_one(folder: Path) -> None:
    """0 fills prompts up, and is an ordinary token of many tokenizers."""
    both = Record(
        RecordId(0, 0),
        steps={
            "sample": np.arange(2),
            "prompt": np.array([[5, 9, 0], [5, 9, 0]]),
            "prompt_length": np.array([3, 2]),
        },
        info={"horizon": 6, "temperature": 1.0},
    )
    together = rows(engine(folder), both)
    for number in (0, 1):
        steps = {name: array[[number]] for name, array in both.steps.items()}
        alone = rows(engine(folder), Record(both.identity, steps, info=both.info))
        np.testing.assert_allclose(
            together[number]["logprobs"][:1], alone[number]["logprobs"][:1], atol=1e-5
        )
        assert together[number]["tokens"][0] == alone[number]["tokens"][0]


def test_rows_end_at_the_stop_token_and_leave_the_batch(folder: Path) -> None:
    got = rows(engine(folder), request([3] * 40, horizon=30))
    ended = [row for row in got.values() if row["stopped"]]
    assert ended, "with 14 tokens some of 80 samples end within 30 steps"
    for row in ended:
        tokens = row["tokens"][: row["length"]]
        assert tokens[-1] == 1
        assert 1 not in tokens[:-1]
    for row in got.values():
        if not row["stopped"]:
            assert row["length"] == 30


def test_finished_rows_are_no_longer_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = engine(folder), []
    forward = made.forward

    def counted(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(tokens))
        return forward(tokens, *rest)

    monkeypatch.setattr(made, "forward", counted)
    got = rows(made, request([3] * 40, horizon=30))
    for step, size in enumerate(sizes[1:], start=1):
        running = sum(int(row["length"]) > step for row in got.values())
        assert 0.75 * size < running <= size, "most of a batch still runs"
    assert sizes[-1] < 80


def test_the_first_samples_come_first_however_long_their_prompts_are(folder: Path) -> None:
    """Who works on parts of the batch beside the engine has the first ones early."""
    made = engine(folder, max_num_seqs=4, ignore_eos=True)
    replies = made.generate(channel_of(request([2, 3, 9, 4, 8, 7])), seed=7, stage="rollout")
    came = [int(sample) for reply in replies for sample in reply.steps["sample"]]
    assert [{*came[i : i + 4]} for i in (0, 4, 8)] == [{*range(i, i + 4)} for i in (0, 4, 8)]


def test_samples_of_a_prompt_share_its_forward_pass_and_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = engine(folder), []
    forward = made.forward

    def counted(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(tuple(tokens.shape))
        return forward(tokens, *rest)

    monkeypatch.setattr(made, "forward", counted)
    got = rows(made, request([4, 6, 5]))
    assert sizes[0] == (3, 6), "three prompts for six samples"
    assert any(not np.array_equal(got[2 * i]["tokens"], got[2 * i + 1]["tokens"]) for i in range(3))


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    chosen, logprobs = sample_tokens(logits, torch.rand(2), SamplingParams(1, 0.0))
    assert chosen.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_sampling_has_the_right_frequencies() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 40_000
    noise = torch.from_numpy(np.random.default_rng(0).random(count, dtype=np.float32))
    chosen, _ = sample_tokens(probabilities.log().expand(count, -1), noise, SamplingParams(1))
    shares = torch.bincount(chosen, minlength=4) / count
    torch.testing.assert_close(shares, probabilities, atol=0.01, rtol=0)


def test_a_noise_of_almost_one_stays_in_the_vocabulary() -> None:
    chosen, _ = sample_tokens(
        torch.zeros(1, 5), torch.tensor([np.nextafter(np.float32(1), 0)]), SamplingParams(1)
    )
    assert 0 <= int(chosen) < 5


def test_new_weights_are_read_into_the_loaded_model(folder: Path, tmp_path: Path) -> None:
    """The second version must be served, and be what a fresh engine would serve."""
    policy = CausalLM.load(folder, CONFIG)
    tensors = {name: tensor * 1.5 for name, tensor in policy.module.state_dict().items()}
    newer = tmp_path / "newer"
    newer.mkdir()
    policy.save(newer, tensors)
    wanted = request([3, 5])
    used, fresh = engine(folder), engine(newer)
    before = rows(used, wanted)
    module = used._module
    used.load(newer, 3)
    assert used._module is module
    after, expected = rows(used, wanted), rows(fresh, wanted)
    for number in expected:
        assert np.array_equal(after[number]["logprobs"], expected[number]["logprobs"])
        assert not np.array_equal(after[number]["logprobs"], before[number]["logprobs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_from_memory_serve_like_those_of_a_folder(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    policy = CausalLM.load(folder, CONFIG)
    tensors = {name: (1.5 * t).to(dtype) for name, t in policy.module.state_dict().items()}
    newer = tmp_path / "newer"
    newer.mkdir()
    policy.save(newer, tensors)
    wanted = request([3, 5])
    used, fresh = engine(folder), engine(newer)
    before = rows(used, wanted)
    used.load_state(tensors.items(), 4)
    assert used.version == 4
    used.version = 3
    after, expected = rows(used, wanted), rows(fresh, wanted)
    for number in expected:
        for name, values in expected[number].items():
            np.testing.assert_array_equal(after[number][name], values)
        assert not np.array_equal(after[number]["logprobs"], before[number]["logprobs"])


def test_weights_from_memory_need_not_bring_back_those_they_replace(folder: Path) -> None:
    wanted, used, fresh = request([3, 5]), engine(folder), engine(folder)
    tensors = {name: 1.5 * tensor for name, tensor in fresh._module.state_dict().items()}
    fresh.load_state(tensors.items(), 3)
    residency = DeviceMemoryManager(torch.device("cpu"), sys.maxsize)
    residency.acquire(used)
    residency.offload_all()
    residency.acquire(used, copy_data=False)
    for tensor in used.tensor_groups()["weights"]:
        tensor.fill_(torch.nan)  # whatever the memory holds
    used.load_state(tensors.items(), 3)
    for number, row in rows(fresh, wanted).items():
        for name, values in row.items():
            np.testing.assert_array_equal(rows(used, wanted)[number][name], values)


def test_tied_weights_may_lack(folder: Path) -> None:
    made = engine(folder)
    tensors = dict(made._module.state_dict())
    del tensors["lm_head.weight"]
    made.load_state(tensors.items(), 3)


def test_an_engine_given_weights_that_do_not_fit_has_none_until_it_is_loaded(folder: Path) -> None:
    made, wanted = engine(folder), request([3, 5])
    before = rows(made, wanted)
    good = {name: tensor * 2 for name, tensor in made._module.state_dict().items()}
    name = "model.norm.weight"
    for bad in (
        {key: tensor for key, tensor in good.items() if key != name},
        {**good, "stranger": torch.zeros(1)},
        {**good, name: torch.zeros(3)},
    ):
        with pytest.raises(DataError, match="do not fit"):
            made.load_state(bad.items(), 9)
        assert made.version == -1
    made.load(folder, 3)
    after = rows(made, wanted)
    for number in before:
        np.testing.assert_array_equal(after[number]["logprobs"], before[number]["logprobs"])


def test_a_model_of_another_size_is_loaded_anew(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    CausalLM.create(CONFIG.model_copy(update={"layers": 1}), {"alphabet": "0123456789+="}, 0, other)
    used = engine(folder)
    used.load(other, 3)
    assert len(used._module.model.layers) == 1
    rows(used, request([3]))


def test_an_engine_with_another_dtype_generates_the_same_however_weights_arrive(
    folder: Path, tmp_path: Path
) -> None:
    """From a folder or memory, as the trainer has them or as they are sent: rounded once."""
    policy = CausalLM.load(folder, CONFIG)
    newer = {name: 1.01 * tensor for name, tensor in policy.module.state_dict().items()}
    policy.save(tmp_path, newer)
    wanted = request([3, 5])
    replies = [rows(engine(tmp_path, dtype="bfloat16"), wanted)]
    for tensors in (newer, {name: tensor.bfloat16() for name, tensor in newer.items()}):
        used = engine(folder, dtype="bfloat16")
        used.load_state(tensors.items(), 3)
        assert {tensor.dtype for tensor in used.tensor_groups()["weights"]} == {torch.bfloat16}
        replies.append(rows(used, wanted))
    exact = rows(engine(tmp_path), wanted)
    for number, row in replies[0].items():
        for other in replies[1:]:
            np.testing.assert_array_equal(row["logprobs"], other[number]["logprobs"])
        assert not np.array_equal(row["logprobs"], exact[number]["logprobs"])
