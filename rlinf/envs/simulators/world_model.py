"""A learned world model in the place of a simulator.

``rlinf world-model`` trains it on the recorded episodes of a run
(:mod:`rlinf.envs.simulators.world_model_network`). An episode begins with a recorded first frame;
the seed of a reset, and so the group, selects it. Evaluations use held-out first frames. The camera
returns predicted frames, and the state is zero. The task is solved, and the episode ends, when the
classifier's probability of success reaches 0.9. The reward is the increase of that probability,
times 5 (as in WoVR, arXiv 2602.13977). An episode is truncated after as many steps as the longest
recorded one has.

A world model may call a frame solved that is not. Policies exploit this, so evaluate them in the
real simulator too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

PACKAGES = ("torch", "safetensors")
INSTALL = "pip install torch safetensors"
ASSETS = {"model": "the file of a world model, which rlinf world-model RUN FILE writes"}
REWARD_SCALE = 5.0


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is the recorded task's id (``handle-press-v3``), ``kwargs["model"]`` the file of the
    world model.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import torch

    from .world_model_network import load_world_model

    for key in kwargs.keys() - ASSETS.keys():
        raise ValueError(f"kwargs.{key}: there is no such key, but model")
    model, spec, *starts = load_world_model(str(kwargs.get("model")))
    if id != spec.id:
        raise ValueError(f"{kwargs['model']} imitates {spec.id!r}, not {id!r}; set task.id to it")
    # More threads would be slower for one frame, and would round differently.
    torch.set_num_threads(1)
    return WorldModelEnv(model, spec, *starts)


class WorldModelEnv:
    """One episode at a time, so that its frames do not depend on the number of environments."""

    def __init__(self, model: Any, spec: Any, starts: np.ndarray, test_starts: np.ndarray) -> None:
        self._model, self._spec = model, spec
        self._starts, self._test_starts = starts, test_starts
        self.cameras, self.num_initial_states = (spec.camera,), len(test_starts)
        self.action_space = _box(model.action_low.numpy(), model.action_high.numpy())
        self._state = np.zeros(spec.state_size, np.float32)
        self.observation_space = _box(self._state, self._state)
        self._hidden: Any = None
        self._frame, self._probability, self._steps = starts[:1], 0.0, 0

    def reset(self, seed: int, initial_state: int | None = None) -> Any:
        from .world_model_network import to_float

        starts, index = self._test_starts, initial_state
        if index is None:
            starts = self._starts
            index = int(np.random.default_rng(seed).integers(len(starts)))
        self._hidden = self._model.begin(to_float(starts[index : index + 1]))
        self._steps = 0
        self._show(starts[index : index + 1])
        return self._state, {}

    def step(self, action: Any) -> Any:
        import torch

        from .world_model_network import SUCCESS_PROBABILITY, to_uint8

        inputs = torch.from_numpy(np.asarray(action, np.float32)[None])
        self._hidden = self._model.advance(self._hidden, inputs)
        before = self._probability
        self._show(to_uint8(self._model.decode(self._hidden)))
        self._steps += 1
        solved = self._probability >= SUCCESS_PROBABILITY
        reward = REWARD_SCALE * (self._probability - before)
        truncated = self._steps >= self._spec.max_steps
        return self._state, reward, solved, truncated, {"success": solved}

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return the predicted frame, uint8 ``[H, W, 3]``.

        Raises:
            ValueError: another size is configured than the recorded one.
        """
        frame: np.ndarray = self._frame[0]
        if (height, width) != frame.shape[:2]:
            raise ValueError(
                f"images.{camera}: its frames are {list(frame.shape[:2])}, as they were recorded"
            )
        return frame

    def close(self) -> None:
        self._hidden = None

    def _show(self, frame: np.ndarray) -> None:
        """Set the current frame ``[1, H, W, 3]`` and its probability of success."""
        import torch

        from .world_model_network import to_float

        logits = self._model.success_logits(to_float(frame))
        self._frame, self._probability = frame, float(torch.sigmoid(logits)[0])


def _box(low: np.ndarray, high: np.ndarray) -> Any:
    """Return a space of vectors within bounds, with the attributes of Gymnasium's ``Box``."""
    return SimpleNamespace(low=low, high=high, shape=low.shape, dtype=low.dtype)
