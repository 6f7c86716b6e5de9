"""What LeRobot's own WALL-OSS makes of a folder: run by the interpreter of its environment.

    python lerobot_wall_reference.py FOLDER INPUTS.npz OUTPUTS.npz

Nothing of this package is imported. The network computes in single precision, where LeRobot casts
a part to bfloat16, and images have their final size already.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lerobot_reference import Absent, Finder, likelihood
from safetensors.torch import load_file


def euler(step: Any, first: torch.Tensor, times: torch.Tensor, method: str) -> torch.Tensor:
    """Return all points of Euler's method, as torchdiffeq does."""
    points = [first]
    for begin, end in zip(times[:-1], times[1:], strict=True):
        points.append(points[-1] + (end - begin) * step(begin, points[-1]))
    return torch.stack(points)


def loaded(folder: Path) -> tuple[Any, Any]:
    """LeRobot's module and its policy with the weights of a folder."""
    settings = json.loads((folder / "config.json").read_text())
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    importlib.import_module("lerobot.policies")  # before these packages seem to be there
    for name in ("peft", "torchdiffeq", "qwen_vl_utils", "qwen_vl_utils.vision_process"):
        sys.modules[name] = Absent(name)
    peft: Any = sys.modules["peft"]
    peft.get_peft_model = None
    resize: Any = sys.modules["qwen_vl_utils.vision_process"]
    resize.smart_resize = lambda height, width, **_: (height, width)
    solver: Any = sys.modules["torchdiffeq"]
    solver.odeint = euler
    torch.bfloat16 = torch.float32
    module: Any = importlib.import_module("lerobot.policies.wall_x.modeling_wall_x")
    features: Any = importlib.import_module("lerobot.configs.types")
    vision: Any = importlib.import_module(
        "lerobot.policies.wall_x.qwen_model.configuration_qwen2_5_vl"
    )
    vision.Qwen2_5_VLVisionConfig.initializer_range = 0.02
    module.RESOLUTION = -1
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "vlm" / "tokenizer.json"), pad_token="<pad>"
    )
    images: Any = importlib.import_module(
        "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    ).Qwen2VLImageProcessor.from_pretrained(folder / "vlm", do_resize=False)
    processor = types.SimpleNamespace(tokenizer=tokenizer, image_processor=images)
    network_class = module.Qwen2_5_VLMoEForAction

    def build(**_: Any) -> Any:
        config = module.Qwen2_5_VLConfig.from_pretrained(folder / "vlm")
        config._attn_implementation = "eager"
        # The head is not used; this version cannot tie it with this version of transformers.
        config.tie_word_embeddings = False
        return network_class(config, processor=processor)

    network_class.from_pretrained = build
    names = ("chunk_size", "n_action_steps", "max_action_dim", "max_state_dim")
    values: dict[str, Any] = {name: settings[name] for name in names}
    for name in ("input_features", "output_features"):
        values[name] = {
            feature: features.PolicyFeature(
                features.FeatureType(entry["type"]), tuple(entry["shape"])
            )
            for feature, entry in settings[name].items()
        }
    policy = module.WallXPolicy(module.WallXConfig(device="cpu", **values))
    missing, unexpected = policy.load_state_dict(load_file(folder / "model.safetensors"), False)
    assert missing == ["model.lm_head.weight"], missing
    assert not unexpected, unexpected
    return module, policy.eval()


@torch.no_grad()
def say(folder: Path, inputs: Path, outputs: Path) -> None:
    """Tokens, velocity and loss by the pass over the whole sequence, sampler and likelihood."""
    _, policy = loaded(folder)
    pipeline: Any = importlib.import_module("lerobot.processor")
    converters: Any = importlib.import_module("lerobot.processor.converters")
    importlib.import_module("lerobot.policies.wall_x.processor_wall_x")
    given = np.load(inputs)
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
            # LeRobot cuts decimals off as it makes pixels of them.
            batch[name] = (torch.tensor(given[name]).permute(0, 3, 1, 2) + 0.5) / 255
    batch["observation.state"] = torch.tensor(given["observation.state"])
    batch["action"] = torch.tensor(given["action"])
    batch = before(batch)
    known, model = policy.preprocess_inputs(batch), policy.model
    head, actions = model.action_preprocessor, known["action_chunk"]
    velocities, losses = list[torch.Tensor](), list[torch.Tensor]()
    head.action_proj_back.register_forward_hook(lambda _, __, out: velocities.append(out))
    loss = head.flow_loss

    def keep(*arguments: Any) -> torch.Tensor:
        losses.append(loss(*arguments))
        return losses[-1]

    head.flow_loss = keep
    draw = torch.randn_like

    def full_pass(values: torch.Tensor, noise: torch.Tensor, tau: Any) -> torch.Tensor:
        """Of the training pass at given noise and times; velocities have the opposite sign."""
        when = torch.as_tensor(1 - tau, dtype=torch.float32).expand(len(values))
        head.sample_time = lambda *_: when
        torch.randn_like = lambda *_, **__: noise
        model(**{**known, "action_chunk": values}, mode="validate")
        torch.randn_like = draw
        return -velocities[-1].reshape(values.shape)

    def velocity(at: torch.Tensor, tau: Any) -> torch.Tensor:
        return full_pass(at, at, tau)

    noise, tau = torch.tensor(given["noise"]), torch.tensor(given["tau"])
    full_pass(actions, noise, tau)
    velocity_at_points = velocity(torch.tensor(given["points"]), tau)
    torch.randn = lambda *_, **__: noise
    sampled = model(
        **known,
        action_dim=noise.shape[2],
        pred_horizon=noise.shape[1],
        num_inference_timesteps=5,
        mode="predict",
        predict_mode="diffusion",
    )["predict_action"]
    chain = torch.tensor(given["chain"])
    np.savez(
        outputs,
        tokens=known["input_ids"].numpy(),
        mask=known["attention_mask"].numpy(),
        velocity=velocity_at_points.numpy(),
        losses=losses[0].reshape(actions.shape).numpy(),
        actions=after(sampled[..., : given["action"].shape[2]]).numpy(),
        logprobs=likelihood(velocity, chain, 0.6, None).numpy(),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    paths = [Path(path).resolve() for path in sys.argv[1:]]
    os.chdir(paths[0])
    say(*paths)
