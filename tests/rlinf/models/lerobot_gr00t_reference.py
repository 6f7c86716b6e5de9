"""What LeRobot's own action head of GR00T N1.5 makes of a folder: run by the interpreter of its
environment. For N1.7, its parts are put together here as that version does.

    python lerobot_gr00t_reference.py FOLDER INPUTS.npz OUTPUTS.npz

Nothing of this package is imported. The features of the vision-language model are inputs, because
that model needs flash attention. LeRobot does not mask padding, so each row is computed alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # noqa: F401 - before torchvision seems to be there
from lerobot_reference import Finder, likelihood
from safetensors.torch import load_file

PREFIX = "action_head."


def loaded(folder: Path) -> tuple[Any, Any, bool]:
    """LeRobot's action head with the weights of a folder, its class of inputs, and whether it is
    that of N1.5."""
    stored = json.loads((folder / "config.json").read_text())
    is_n15 = "action_head_cfg" in stored
    settings = stored.get("action_head_cfg", stored)
    if not is_n15:
        settings["action_dim"] = settings["max_action_dim"]
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    # The build of transformers has another name, which LeRobot does not find.
    imports: Any = importlib.import_module("lerobot.utils.import_utils")
    imports._transformers_available = True
    for name in ("lerobot.policies", "lerobot.policies.groot"):
        # Their own code imports all policies.
        package = type(sys)(name)
        spec: Any = importlib.machinery.PathFinder.find_spec(name, _path_of(name))
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
    module: Any = importlib.import_module(
        "lerobot.policies.groot.action_head.flow_matching_action_head"
    )
    settings["diffusion_model_cfg"] |= {
        "cross_attention_dim": settings["backbone_embedding_dim"],
        "dropout": 0.2,
        "final_dropout": True,
    }
    settings["vl_self_attention_cfg"] |= {"dropout": 0.2, "final_dropout": True}
    head = module.FlowmatchingActionHead(module.FlowmatchingActionHeadConfig(**settings))
    tensors = load_file(folder / "model.safetensors")
    weights = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    if not is_n15:
        weights["future_tokens.weight"] = head.future_tokens.weight.detach()
    head.load_state_dict(weights)
    return head.eval(), module.BatchFeature, is_n15


def _path_of(name: str) -> list[str]:
    parent = name.rpartition(".")[0]
    return list(importlib.import_module(parent).__path__)


def outputs_of(
    head: Any, hidden: torch.Tensor, known: torch.Tensor, when: torch.Tensor, is_image: Any
) -> Any:
    """Of the diffusion transformer. That of N1.7 attends to text and images in turn."""
    if is_image is None:
        return head.model(hidden_states=hidden, encoder_hidden_states=known, timestep=when)
    model, condition = head.model, head.model.timestep_encoder(when)
    for index, block in enumerate(model.transformer_blocks):
        if index % 2:
            hidden = block(hidden, temb=condition)
        else:
            mask = is_image if index % 4 else ~is_image
            hidden = block(hidden, attention_mask=mask, encoder_hidden_states=known, temb=condition)
    shift, scale = model.proj_out_1(torch.nn.functional.silu(condition)).chunk(2, dim=1)
    hidden = model.norm_out(hidden) * (1 + scale[:, None]) + shift[:, None]
    return model.proj_out_2(hidden)


@torch.no_grad()
def say(folder: Path, inputs: Path, outputs: Path) -> None:
    """Velocity, sampler and likelihood of rows of given features."""
    head, feature, is_n15 = loaded(folder)
    given = {name: torch.tensor(column) for name, column in np.load(inputs).items()}
    embodiment = given["embodiment"][None]
    result: dict[str, list[np.ndarray]] = {"velocity": [], "actions": [], "logprobs": []}
    for row, length in enumerate(given["lengths"].tolist()):
        features = given["features"][row : row + 1, :length]
        known = head.process_backbone_output(feature({"backbone_features": features}))
        known = known.backbone_features
        is_image = None if is_n15 else given["is_image"][row : row + 1, :length]
        state = head.state_encoder(given["state"][row : row + 1, None], embodiment)
        before = torch.cat([state, head.future_tokens.weight[None]], 1) if is_n15 else state

        def velocity(
            at: torch.Tensor,
            tau: Any,
            before: Any = before,
            known: Any = known,
            is_image: Any = is_image,
        ) -> Any:
            """In the direction of noise, at a fraction of noise."""
            bucket = (1 - torch.as_tensor(tau).reshape(1)) * head.num_timestep_buckets
            when = (bucket + 1e-3).long()
            actions = head.action_encoder(at, when, embodiment)
            actions = actions + head.position_embedding(torch.arange(at.shape[1]))
            output = outputs_of(head, torch.cat([before, actions], 1), known, when, is_image)
            return -head.action_decoder(output, embodiment)[:, -at.shape[1] :]

        noise = given["noise"][row : row + 1]
        if is_n15:
            torch.randn = lambda *_, noise=noise, **__: noise  # type: ignore[method-assign]
            shown = {"state": given["state"][row : row + 1, None], "embodiment_id": embodiment}
            acted = head.get_action(feature({"backbone_features": features}), feature(shown))
            result["actions"].append(acted["action_pred"].numpy())
        else:
            for step in range(5):
                noise = noise - velocity(noise, 1 - step / 5) / 5
            result["actions"].append(noise.numpy())
        result["velocity"].append(
            velocity(given["points"][row : row + 1], given["tau"][row]).numpy()
        )
        chain = given["chain"][row : row + 1]
        result["logprobs"].append(likelihood(velocity, chain, 0.6, None).numpy())
    np.savez(outputs, **{name: np.concatenate(rows) for name, rows in result.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(*(Path(path).resolve() for path in sys.argv[1:]))
