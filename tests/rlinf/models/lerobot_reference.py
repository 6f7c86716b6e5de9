"""What LeRobot's own SmolVLA makes of a folder: run by the interpreter of its environment.

    python lerobot_reference.py make FOLDER
    python lerobot_reference.py say FOLDER INPUTS.npz OUTPUTS.npz

Inputs have chains by the temperature they were drawn at: of Flow-SDE (``sde0.6``), and of
Flow-Noise (``learned0.6``) with the standard deviations of their steps (``std0.6``).

Nothing of this package is imported: the likelihood of a chain is written here once more.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # before torchvision seems to be there


class Absent(types.ModuleType):
    """A package that is imported and never used: torchvision, which has no CPU build."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})
        return importlib.import_module(f"{self.__name__}.{name}")


class Finder:
    """Finds :class:`Absent` packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def placed(self: Any, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
    """Patches of whole pictures, each with its own position.

    From 4.55.1 up to version 5, transformers gives nearly all the position before their own where
    it computes in single precision (its issue 41190).
    """
    patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return patches + self.position_embedding.weight


def library() -> Any:
    """LeRobot's module of this policy."""
    tower: Any = importlib.import_module("transformers.models.smolvlm.modeling_smolvlm")
    tower.SmolVLMVisionEmbeddings.forward = placed
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    pair: Any = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")
    # Of the processor it wants two tokens that it does not use here.
    words = types.SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
    made = types.SimpleNamespace(tokenizer=words)
    pair.AutoProcessor = types.SimpleNamespace(from_pretrained=lambda name: made)
    return importlib.import_module("lerobot.policies.smolvla.modeling_smolvla")


def make(folder: Path) -> None:
    """Save a policy with random weights; ``vlm`` in the folder above has a tokenizer already."""
    smolvla = library()
    feature: Any = importlib.import_module("lerobot.configs.types")
    processors: Any = importlib.import_module("lerobot.policies.smolvla.processor_smolvla")
    torch.manual_seed(0)
    os.chdir(folder.parent)
    words = json.loads(Path("vlm/tokenizer.json").read_text())["model"]["vocab"]
    transformers.SmolVLMConfig(
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 48,
            "patch_size": 8,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "vocab_size": len(words),
            "head_dim": 8,
            "pad_token_id": 0,
            "rope_theta": 100_000,
        },
        scale_factor=2,
        image_token_id=0,
        pad_token_id=0,
    ).save_pretrained("vlm")
    picture, state, action = (
        feature.FeatureType.VISUAL,
        feature.FeatureType.STATE,
        feature.FeatureType.ACTION,
    )
    settings = smolvla.SmolVLAConfig(
        vlm_model_name="vlm",
        device="cpu",
        chunk_size=6,
        n_action_steps=4,
        num_steps=5,
        num_vlm_layers=3,
        max_state_dim=7,
        max_action_dim=5,
        resize_imgs_with_padding=(48, 48),
        empty_cameras=1,
        input_features={
            "observation.images.camera1": feature.PolicyFeature(picture, (3, 40, 30)),
            "observation.images.camera2": feature.PolicyFeature(picture, (3, 40, 30)),
            "observation.state": feature.PolicyFeature(state, (4,)),
        },
        output_features={"action": feature.PolicyFeature(action, (3,))},
    )
    policy = smolvla.SmolVLAPolicy(settings)
    policy.save_pretrained(folder)
    random = np.random.default_rng(0)
    statistics = {
        name: {
            "mean": torch.tensor(random.normal(size=size), dtype=torch.float32),
            "std": torch.tensor(random.uniform(0.5, 2, size), dtype=torch.float32),
        }
        for name, size in (("observation.state", 4), ("action", 3))
    }
    for processor in processors.make_smolvla_pre_post_processors(settings, statistics):
        processor.save_pretrained(folder)


def likelihood(
    velocity: Any,
    chain: torch.Tensor,
    temperature: float,
    stds: torch.Tensor | None,
    level: float = 0.5,
) -> torch.Tensor:
    """Of chains ``[n, N + 1, C, A]`` (arXiv 2510.25889), step by step, ``[n, C, A]``: by Flow-Noise
    with standard deviations ``[n, N, C, A]``, by Flow-SDE without."""
    steps = chain.shape[1] - 1
    total = torch.zeros(chain.shape[0], *chain.shape[2:], dtype=torch.float64)
    for k in range(steps):
        tau, delta = 1 - k / steps, 1 / steps
        speed = velocity(chain[:, k], tau).double()
        point = chain[:, k].double()
        action, noise = point - speed * tau, point + speed * (1 - tau)
        sigma = level * temperature * (tau / (1 - tau if k else delta)) ** 0.5
        mean = action * (1 - tau + delta)
        mean = mean + noise * (tau - delta - sigma**2 * delta / (2 * tau))
        std = torch.full_like(mean, sigma * delta**0.5)
        if stds is not None:
            mean, std = point - delta * speed, stds[:, k].double()
        step = torch.distributions.Normal(mean, std)
        total += step.log_prob(chain[:, k + 1].double())
    return total


@torch.no_grad()
def say(folder: Path, inputs: Path, outputs: Path) -> None:
    """Tokens, velocity, loss, sampler and likelihood, for given noise, times and chains."""
    smolvla = library()
    pipeline: Any = importlib.import_module("lerobot.processor")
    converters: Any = importlib.import_module("lerobot.processor.converters")
    importlib.import_module("lerobot.policies.smolvla.processor_smolvla")
    given = np.load(inputs)
    os.chdir(folder)
    policy = smolvla.SmolVLAPolicy.from_pretrained(folder, strict=True)
    before = pipeline.PolicyProcessorPipeline.from_pretrained(folder, "policy_preprocessor.json")
    after = pipeline.PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_postprocessor.json",
        to_transition=converters.policy_action_to_transition,
        to_output=converters.transition_to_policy_action,
    )
    batch: dict[str, Any] = {"task": [str(text) for text in given["task"]]}
    for name in given.files:
        if name.startswith("observation.images."):
            batch[name] = torch.tensor(given[name]).permute(0, 3, 1, 2) / 255
    batch["observation.state"] = torch.tensor(given["observation.state"])
    batch["action"] = torch.tensor(given["action"])
    batch = before(batch)
    noise, points = torch.tensor(given["noise"]), torch.tensor(given["points"])
    model, length = policy.model, policy.config.chunk_size
    known = policy.prepare_images(batch)
    words = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    state = policy.prepare_state(batch)
    hidden, there, blocks = model.embed_prefix(*known, *words, state=state)
    _, cache = model.vlm_with_expert.forward(
        attention_mask=smolvla.make_att_2d_masks(there, blocks),
        position_ids=torch.cumsum(there, 1) - 1,
        past_key_values=None,
        inputs_embeds=[hidden, None],
        use_cache=True,
        fill_kv_cache=True,
    )

    def velocity(at: torch.Tensor, tau: Any) -> torch.Tensor:
        """Of as many actions as are given; those that follow are seen by none of them."""
        whole = torch.zeros(len(at), length, at.shape[2])
        whole[:, : at.shape[1]] = at
        when = torch.as_tensor(tau, dtype=torch.float32).expand(len(at))
        found: torch.Tensor = model.denoise_step(there, cache, whole, when)
        return found[:, : at.shape[1]]

    tau = torch.tensor(given["tau"])
    actions = policy.prepare_action(batch)
    sampled = policy.predict_action_chunk(dict(batch), noise=noise)
    logprobs = {}
    for name in given.files:
        kind, temperature = name.rstrip("0123456789."), name.lstrip("abcdefghijklmnopqrstuvwxyz")
        if kind in ("sde", "learned"):
            stds = torch.tensor(given[f"std{temperature}"]) if kind == "learned" else None
            chain = torch.tensor(given[name])
            logprobs[name] = likelihood(velocity, chain, float(temperature), stds).numpy()
    np.savez(
        outputs,
        tokens=words[0].numpy(),
        velocity=velocity(points, tau).numpy(),
        losses=model.forward(*known, *words, state, actions, noise, tau).numpy(),
        actions=after(sampled).numpy(),
        **logprobs,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    task, *paths = sys.argv[1:]
    {"make": make, "say": say}[task](*(Path(path).resolve() for path in paths))
