"""What policies for vector observations share: a folder of settings and weights, and batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf.checked import read_text
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.data.transitions import row_type
from rlinf.errors import DataError
from rlinf.models.action_box import ActionBox
from rlinf.models.base import Batch, Policy, Spec
from rlinf.models.fit import check_fit
from rlinf.tensors import load_tensors

WEIGHTS, SETTINGS = "model.safetensors", "config.json"


class VectorPolicy(Policy):
    """A policy whose steps are the actions of an episode, made of its ``settings`` alone: what the
    task is and what the configuration says."""

    Network: ClassVar[Any]
    """Makes the module of settings."""
    stepwise = True
    module: nn.Module

    def __init__(self, module: Any, settings: dict[str, Any]) -> None:
        self.module = module
        self.settings = settings
        self.box: ActionBox | None = None
        """How vectors are scaled, of policies whose configuration has ``action_scale``. Others act
        in the simulator's units; so do folders from before there was that key."""
        if settings["action"]["kind"] == "box" and "action_scale" in settings:
            self.box = ActionBox.of(settings["action"], settings["action_scale"])

    @classmethod
    def create(cls, config: Any, spec: Spec, seed: int, folder: Path) -> None:
        cls.check(config, spec)
        settings = {**spec, **config.model_dump(mode="json")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = cls.Network(settings)
        cls(module, settings).save(folder, dict(module.state_dict()))

    @classmethod
    def load(cls, folder: Path, config: Any) -> Self:
        """Read a policy folder; its own ``config.json`` says what the network is.

        Raises:
            DataError: files are missing, damaged, or do not belong together.
        """
        try:
            settings = json.loads(read_text(folder / SETTINGS))
            module = cls.Network(settings)
            tensors = load_tensors(folder / WEIGHTS)
            check_fit(str(folder), {name: t.shape for name, t in tensors.items()}, module)
            module.load_state_dict(tensors)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise DataError(f"{folder}: not a policy folder ({error})") from None
        return cls(module, settings)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        (folder / SETTINGS).write_text(json.dumps(self.settings, indent=1, sort_keys=True))
        save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, folder / WEIGHTS)

    @property
    def rows(self) -> np.dtype:
        return row_type(self.settings["observation"], self.settings["action"]["size"])

    def learned_actions(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` of transitions as they were carried out, in the policy's own
        coordinates: what critics see, and what is imitated."""
        return actions if self.box is None else self.box.normalised(self.box.carried_out(actions))

    def collate(self, records: Sequence[Record]) -> Batch:
        """``observations`` ``[B, T, D]``, ``actions`` ``[B, T]`` or, in the policy's own
        coordinates, ``[B, T, A]``, ``mask``."""
        length = max(len(record) for record in records)
        actions = [np.asarray(record.steps["actions"]) for record in records]
        if self.box is not None:
            actions = [self.box.normalised(column) for column in actions]
        return {
            "observations": pad([r.steps["observations"] for r in records], length),
            "actions": pad(actions, length),
            "mask": pad([np.ones(len(r), np.float32) for r in records], length),
        }
