"""Images reach the right tokens: padded, packed, decoded and after newer weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlinf.channels.channel import LocalChannel
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.batch import pad_right
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory, context_fields
from rlinf.engines.base import NO_HOOKS, RolloutHooks
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.errors import ConfigError, DataError
from rlinf.models import causal_lm
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.images import pack_images
from rlinf.models.qwen2_5_vl import Qwen25VL, Qwen25VLConfig
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import loss

CONFIG = Qwen25VLConfig(
    hidden=64, layers=2, heads=2, kv_heads=1, intermediate=64, vision_hidden=16, vision_window=28
)
SPEC = {"alphabet": "0123456789+="}
CPU = torch.device("cpu")


def create(folder: Path, seed: int = 0) -> Path:
    Qwen25VL.create(CONFIG, SPEC, seed, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(tmp_path_factory.mktemp("vl"))


def policy(folder: Path, *, packed: bool = False) -> Qwen25VL:
    made = Qwen25VL.load(folder, CONFIG)
    assert isinstance(made, Qwen25VL)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in made.module.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    if packed:
        made.enable_packing(CPU, torch.float32)
    return made


def record(
    shapes: Sequence[tuple[int, int]], text: Sequence[int], steps: int, seed: int = 0
) -> Trajectory:
    """Images of so many tokens along height and width, each behind one of text."""
    random = np.random.default_rng(seed)
    token = 16  # behind pad, end, twelve characters, begin and end of an image
    prompt, images = [3], []
    for rows, columns in shapes:
        images.append(random.integers(0, 256, (28 * rows, 28 * columns, 3), dtype=np.uint8))
        prompt += [14, *[token] * (rows * columns), 15]
    context = {"prompt": np.array([*prompt, *text]), **(pack_images(images) if images else {})}
    actions = np.random.default_rng(steps).integers(2, 14, steps)
    return Trajectory(identity=RecordId(0, seed), actions=actions, **context_fields(context))


RECORDS = [
    record([(2, 2)], [4, 5], 4),
    record([(2, 2)], [4, 5], 6),  # the same image and question
    record([(2, 2)], [4, 5], 3, seed=1),  # the same tokens, another image
    record([(1, 3)], [4], 5, seed=2),
    record([(2, 1), (1, 2)], [6], 1, seed=3),
    record([], [5, 6], 4),
]


def test_log_probs_are_those_of_the_network_by_itself(folder: Path) -> None:
    """It finds positions by its own means, from the kinds of tokens, one record at a time."""
    made = policy(folder)
    with torch.no_grad():
        together = made.evaluate(made.collate(RECORDS), 1.0).logprobs
        for one, found in zip(RECORDS, together, strict=True):
            ids = torch.from_numpy(np.append(one.prompt, one.actions))[None]
            batch = made.collate([one])
            seen = {}
            if "patches" in batch:
                kinds = (ids == 16).int()
                seen = {"mm_token_type_ids": kinds, "pixel_values": batch["patches"]}
                seen["image_grid_thw"] = batch["grids"]
            logits = made.network(input_ids=ids, use_cache=False, **seen).logits[0]
            logits[:, list(made.image_processor(folder).suppressed_token_ids)] = -torch.inf
            begin, count = len(one.prompt), len(one)
            right = logits[begin - 1 : begin - 1 + count].log_softmax(-1)
            right = right.gather(1, ids[0, begin:, None])[:, 0]
            torch.testing.assert_close(found[:count], right, rtol=0, atol=1e-5)
        # Nothing would be learnt here if images had no say.
        other = made.evaluate(made.collate([RECORDS[2]]), 1.0).logprobs[0]
    assert float((together[0, :3] - other[:3]).abs().max()) > 1e-3


@pytest.mark.parametrize("whole", [1 << 25, 40])
def test_packed_rows_are_separate_rows(
    folder: Path, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", whole)
    found = []
    for made, parts in (
        (policy(folder, packed=True), [RECORDS]),
        (policy(folder), [[one] for one in RECORDS]),
    ):
        result = []
        for part in parts:
            out = made.evaluate(made.collate(part), 0.9, entropy=True)
            assert out.entropy is not None
            mask = made.collate(part)["mask"]
            (out.logprobs.sum() + (mask * out.entropy).square().sum()).backward()
            result += [
                torch.stack([out.logprobs[i, : len(one)], out.entropy[i, : len(one)]])
                for i, one in enumerate(part)
            ]
        found.append((result, {n: p.grad for n, p in made.module.named_parameters()}))
    (packed, ours), (alone, theirs) = found
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for name, gradient in theirs.items():
        given = ours[name]
        assert gradient is not None, name
        assert given is not None, name
        atol = 2e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(given, gradient, rtol=0, atol=atol, msg=name)


def test_a_prompt_is_shared_by_those_who_have_its_image_too(folder: Path) -> None:
    made = policy(folder, packed=True)
    batch = made.collate(RECORDS[:3])
    assert len(batch["grids"]) == 2
    assert (batch["tokens"] == 16).sum() == 8
    assert made.shared_prefix(RECORDS[0]) == made.shared_prefix(RECORDS[1])
    assert made.shared_prefix(RECORDS[0])[0] != made.shared_prefix(RECORDS[2])[0]


def test_an_answer_with_an_image_token_is_refused(folder: Path) -> None:
    bad = record([(1, 1)], [4], 3)
    bad.actions[1] = 16
    with pytest.raises(DataError, match="an answer has an image token"):
        policy(folder).collate([bad])


def request(records: Sequence[Trajectory], horizon: int, temperature: float = 1.0) -> Record:
    def column(name: str) -> np.ndarray:
        arrays = [getattr(one, name) for one in records]
        return pad_right(arrays, max(map(len, arrays))).numpy()

    steps = {
        "sample": np.arange(len(records)),
        "prompt": column("prompt"),
        "prompt_length": np.array([len(one.prompt) for one in records]),
        "pixels": column("pixels"),
        "image_sizes": column("image_sizes"),
    }
    return Record(RecordId(0, 0), steps, info={"horizon": horizon, "temperature": temperature})


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("newer", [False, True])
def test_the_engine_says_what_the_trainer_says(
    folder: Path, tmp_path: Path, rows: int, newer: bool
) -> None:
    """Rows that join and leave take their images' positions along; newer weights read them anew."""
    served, later = tmp_path / "served", tmp_path / "later"
    for path, seed in ((served, 0), (later, 1)):
        path.mkdir()
        create(path, seed)
    num_requests = 0

    def look() -> tuple[Path, int] | None:
        nonlocal num_requests
        num_requests += 1
        return (later, 1) if num_requests == 4 else None

    prompts = [one for one in RECORDS[:5] for _ in range(2)]
    settings = TransformersConfig(device="cpu", max_num_seqs=rows)
    engine = TransformersEngine(settings, Qwen25VL, CONFIG)
    engine.load(served, 0)
    channel = LocalChannel()
    channel.put(request(prompts, 12))
    channel.close()
    hooks = RolloutHooks(newer_weights=look) if newer else NO_HOOKS
    policies = [Qwen25VL.load(path, CONFIG) for path in (served, later)]
    count, versions = 0, set[int]()
    for reply in engine.generate(channel, seed=3, stage="rollout", hooks=hooks):
        for i, sample in enumerate(reply.steps["sample"].tolist()):
            length = int(reply.steps["length"][i])
            tokens = reply.steps["tokens"][i, :length]
            assert not np.isin(tokens, (16, 17)).any()
            record = replace(prompts[sample], identity=RecordId(0, sample), actions=tokens)
            made_by = reply.steps["version"][i, :length] if newer else np.zeros(length, np.int64)
            versions |= set(made_by.tolist())
            with torch.no_grad():
                outputs = [
                    p.evaluate(p.collate([record]), 1.0).logprobs[0].numpy() for p in policies
                ]
            right = np.where(made_by == 0, outputs[0], outputs[1])
            np.testing.assert_allclose(reply.steps["logprobs"][i, :length], right, atol=1e-5)
            count += 1
    assert count == len(prompts)
    assert versions == ({0, 1} if newer else {0})


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_training_moves_what_sees_and_what_speaks(
    folder: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    config = FSDPConfig.model_validate(
        {"device": "cpu", "max_tokens_per_microbatch": 40, **options}
    )
    made = FSDPTrainer(
        Qwen25VL.load(folder, CONFIG), config, OptimizerSection(lr=1e-2), ProcessGroupInfo()
    )
    before = {name: tensor.clone() for name, tensor in made.full_state_dict().items()}
    for _ in range(2):
        made.step(RECORDS[:5], loss, lr=1e-2)
    changed = {n for n, t in made.full_state_dict().items() if not torch.equal(t, before[n])}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    made.policy.save_state(tmp_path, made.stream_weights())
    again = Qwen25VL.load(tmp_path, CONFIG)
    with torch.no_grad():
        right = again.evaluate(again.collate(RECORDS[:5]), 1.0).logprobs
    for row, outputs in made.forward(RECORDS[:5], 1.0):
        count = len(RECORDS[row])
        torch.testing.assert_close(outputs.logprobs[:count], right[row, :count], rtol=0, atol=1e-5)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert names == set(file.keys())


@pytest.mark.parametrize("packing", [False, True])
def test_training_in_float16_is_close_to_float32(folder: Path, packing: bool) -> None:
    result = []
    for dtype in ("float32", "float16"):
        config = FSDPConfig.model_validate(
            {
                "device": "cpu",
                "max_tokens_per_microbatch": 40,
                "packing": packing,
                "param_dtype": dtype,
            }
        )
        made = FSDPTrainer(policy(folder), config, OptimizerSection(lr=1e-3), ProcessGroupInfo())
        result.append(made.step(RECORDS[:5], loss, lr=1e-3))
    right, half = result
    assert half["skipped_steps"] == 0.0
    for name in ("loss", "grad_norm"):
        assert half[name] == pytest.approx(right[name], rel=5e-3)


def test_a_context_beyond_the_positions_of_a_checkpoint_is_refused(folder: Path) -> None:
    config = Qwen25VLConfig(path=folder, max_model_len=512)
    Qwen25VL.check_spec(config, {})
    with pytest.raises(ConfigError, match=r"model.max_model_len: 513 tokens .* 512 .*config.json"):
        Qwen25VL.check_spec(config.model_copy(update={"max_model_len": 513}), {})


def test_folders_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    CausalLM.create(CausalLMConfig(hidden=32, layers=1, heads=2), SPEC, 0, tmp_path)
    with pytest.raises(DataError, match=r"'qwen2' model; model\.name=qwen2_5_vl takes"):
        Qwen25VL.check_spec(Qwen25VLConfig(path=tmp_path), {})
    with pytest.raises(DataError, match="'qwen2_5_vl' model, which is no causal language model"):
        CausalLM.check_spec(CausalLMConfig(path=folder), {})
    assert Qwen25VL.check_spec(Qwen25VLConfig(path=folder), {}).image_processor.token_side == 28


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"architecture": "llama"}, r"model\.architecture: qwen2_5_vl has one of its own"),
        ({"vision_hidden": 12}, r"model\.vision_heads: .* multiple of 4"),
        ({"vision_window": 30}, r"model\.vision_window: 30 is no multiple"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Qwen25VL.check_spec(Qwen25VLConfig.model_validate(given), SPEC)


RANKS = """
import sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.models.test_qwen2_5_vl import CONFIG, RECORDS, Qwen25VL
from tests.rlinf.trainers.test_threaded_data_parallel import loss

folder, rank = Path(sys.argv[1]), int(sys.argv[3])

def trained(world, load):
    config = FSDPConfig(device="cpu", max_tokens_per_microbatch=40, fsdp_wrap_min_mb=0)
    made = FSDPTrainer(load(folder, CONFIG), config, OptimizerSection(lr=1e-2, name="sgd"), world)
    made.step(RECORDS[:5], loss, lr=1e-2)
    return made

alone = trained(ProcessGroupInfo(), Qwen25VL.load).full_state_dict()
world = ProcessGroupInfo(rank, 2, rendezvous_file=Path(sys.argv[2]) / "group-v.json")
both = trained(world, Qwen25VL.meta_from_folder).full_state_dict()
for name, tensor in alone.items():
    torch.testing.assert_close(both[name], tensor, rtol=0, atol=1e-5, msg=name)
print("ok")
"""


def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    run_ranks(RANKS, 2, folder, tmp_path)
