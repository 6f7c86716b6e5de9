"""What LeRobot's own pi-0 and pi-0.5 make of a folder: run by the interpreter of its environment.

    python lerobot_pi_reference.py FOLDER INPUTS.npz OUTPUTS.npz

Nothing of this package is imported. The sizes of a small folder stand where LeRobot has those of
the two published variants.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # noqa: F401 - before torchvision seems to be there
from lerobot_reference import Finder, likelihood
from safetensors.torch import load_file


def loaded(folder: Path) -> tuple[Any, Any]:
    """LeRobot's module and its policy with the weights of a folder."""
    settings = json.loads((folder / "config.json").read_text())
    kind, sizes = settings["type"], settings["sizes"]
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    # The build of transformers has another name, which LeRobot does not find.
    imports: Any = importlib.import_module("lerobot.utils.import_utils")
    imports._transformers_available = True
    module: Any = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    features: Any = importlib.import_module("lerobot.configs.types")
    gemma, paligemma = module.GemmaForCausalLM, module.PaliGemmaForConditionalGeneration

    def variant(name: str) -> Any:
        size = sizes["language" if name == "gemma_2b" else "expert"]
        return module.GemmaConfig(
            width=size["hidden_size"],
            depth=size["num_hidden_layers"],
            mlp_dim=size["intermediate_size"],
            num_heads=size["num_attention_heads"],
            num_kv_heads=size["num_key_value_heads"],
            head_dim=size["head_dim"],
        )

    def small_gemma(config: Any) -> Any:
        config.vocab_size = sizes["vocab_size"]
        return gemma(config=config)

    def small_paligemma(config: Any) -> Any:
        for name, value in sizes["vision"].items():
            setattr(config.vision_config, name, value)
        config.vision_config.projection_dim = sizes["language"]["hidden_size"]
        config.text_config.vocab_size = sizes["vocab_size"]
        return paligemma(config=config)

    module.get_gemma_config = variant
    module.GemmaForCausalLM, module.PaliGemmaForConditionalGeneration = small_gemma, small_paligemma
    policy_class = module.PI0Policy if kind == "pi0" else module.PI05Policy
    names = {field.name for field in dataclasses.fields(policy_class.config_class)}
    values = {name: value for name, value in settings.items() if name in names}
    for name in ("input_features", "output_features"):
        values[name] = {
            feature: features.PolicyFeature(
                features.FeatureType(entry["type"]), tuple(entry["shape"])
            )
            for feature, entry in values[name].items()
        }
    modes = values["normalization_mapping"].items()
    values |= {
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "device": "cpu",
        "image_resolution": tuple(values["image_resolution"]),
        "normalization_mapping": {n: features.NormalizationMode(mode) for n, mode in modes},
    }
    policy = policy_class(policy_class.config_class(**values))
    missing, unexpected = policy.load_state_dict(load_file(folder / "model.safetensors"), False)
    # It is tied to the embeddings.
    assert missing == ["model.paligemma_with_expert.paligemma.lm_head.weight"], missing
    assert not unexpected, unexpected
    policy.eval()
    return module, policy


@torch.no_grad()
def say(folder: Path, inputs: Path, outputs: Path) -> None:
    """Tokens, velocity by the cache, loss by the joint pass, sampler and likelihood."""
    module, policy = loaded(folder)
    kind = policy.name
    pipeline: Any = importlib.import_module("lerobot.processor")
    converters: Any = importlib.import_module("lerobot.processor.converters")
    importlib.import_module(f"lerobot.policies.{kind}.processor_{kind}")
    given = np.load(inputs)
    os.chdir(folder)
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
    model = policy.model
    known = [
        *policy._preprocess_images(batch),
        batch["observation.language.tokens"],
        batch["observation.language.attention_mask"].bool(),
    ]
    state = [policy.prepare_state(batch)] if kind == "pi0" else []
    hidden, there, blocks = model.embed_prefix(*known)
    language = model.paligemma_with_expert.paligemma.language_model
    language.config._attn_implementation = "eager"
    _, cache = model.paligemma_with_expert.forward(
        attention_mask=model._prepare_attention_masks_4d(module.make_att_2d_masks(there, blocks)),
        position_ids=torch.cumsum(there, 1) - 1,
        past_key_values=None,
        inputs_embeds=[hidden, None],
        use_cache=True,
    )

    def velocity(at: torch.Tensor, tau: Any) -> torch.Tensor:
        when = torch.as_tensor(tau, dtype=torch.float32).expand(len(at))
        found: torch.Tensor = model.denoise_step(*state, there, cache, at, when)
        return found

    noise = torch.tensor(given["noise"])
    tau = torch.tensor(given["tau"])
    chain = torch.tensor(given["chain"])
    actions = policy.prepare_action(batch)
    sampled = policy.predict_action_chunk(dict(batch), noise=noise)
    np.savez(
        outputs,
        tokens=known[2].numpy(),
        mask=known[3].numpy(),
        velocity=velocity(torch.tensor(given["points"]), tau).numpy(),
        losses=model.forward(*known, *state, actions, noise, tau).numpy(),
        actions=after(sampled).numpy(),
        logprobs=likelihood(velocity, chain, 0.6, None).numpy(),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(*(Path(path).resolve() for path in sys.argv[1:]))
