"""A small world model: its network, its file, and its training on recorded episodes.

An encoder maps the first frame of a camera to a hidden state, a GRU updates the state by each
action, and a decoder maps the state to the next frame. This is the deterministic part of the model
of PlaNet (arXiv 1811.04551). As in WoVR (arXiv 2602.13977), a classifier of frames says whether the
task is solved. It reads frames only, so that it can be checked on frames of the real simulator.

The simulator process imports this module, so it imports only torch, safetensors and numpy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

CHANNELS = (32, 64, 64)
"""Channels after each convolution of the encoder, which halves height and width."""
SIZE_FACTOR = 2 ** len(CHANNELS)
"""Height and width of a frame must be multiples of this number."""
HIDDEN = 512
SUCCESS_PROBABILITY = 0.9
"""The task counts as solved from this probability on, as in WoVR."""
WINDOW = 64
"""Number of steps that a training sample predicts from one frame."""
FRAMES_PER_WINDOW = 8
"""Number of decoded frames per training sample; decoding all of them would take most of the
time."""
BATCH_SIZE, LEARNING_RATE, CLIP_GRAD = 8, 1e-3, 10.0
METADATA_KEY = "world_model"
TRAIN_STARTS, TEST_STARTS = "starts.train", "starts.test"


@dataclass(frozen=True)
class WorldModelSpec:
    """The recorded task of a world model."""

    id: str
    """``task.id`` of the recorded run."""
    camera: str
    height: int
    width: int
    state_size: int
    """Length of the task's state vector, which the world model does not predict."""
    max_steps: int
    """Number of steps of the longest recorded episode."""


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode of the real simulator, from its reset on."""

    frames: np.ndarray
    """Frames before each action, uint8 ``[T, H, W, 3]``."""
    actions: np.ndarray
    """Executed actions, float32 ``[T, A]``."""
    success: np.ndarray
    """Whether the task was solved after each action, bool ``[T]``."""

    def labels(self) -> np.ndarray:
        """Return whether each frame shows the solved task, float32 ``[T]``."""
        return np.append(False, self.success[:-1]).astype(np.float32)


class WorldModel(nn.Module):
    """Predicts frames and success. Frames are float32 ``[n, 3, H, W]`` from 0 to 1, hidden states
    ``[n, HIDDEN]``."""

    action_low: Tensor
    action_high: Tensor
    mean_frame: Tensor
    frame_std: Tensor
    """Standard deviation of all pixels around ``mean_frame``, ``[]``; networks see frames in units
    of it, because most pixels hardly change."""

    def __init__(self, spec: WorldModelSpec, action_size: int) -> None:
        """
        Raises:
            ValueError: height or width is no multiple of :data:`SIZE_FACTOR`.
        """
        super().__init__()
        if spec.height % SIZE_FACTOR or spec.width % SIZE_FACTOR:
            raise ValueError(
                f"images.{spec.camera}: height and width must be multiples of {SIZE_FACTOR}, and "
                f"they are {spec.height} and {spec.width}; record smaller or larger images"
            )
        self.register_buffer("action_low", torch.full((action_size,), -1.0))
        self.register_buffer("action_high", torch.ones(action_size))
        self.register_buffer("mean_frame", torch.zeros(3, spec.height, spec.width))
        self.register_buffer("frame_std", torch.ones(()))
        grid = (CHANNELS[-1], spec.height // SIZE_FACTOR, spec.width // SIZE_FACTOR)
        features = int(np.prod(grid))
        self.encoder = nn.Sequential(*_convolutions(CHANNELS), nn.Linear(features, HIDDEN))
        self.dynamics = nn.GRUCell(action_size, HIDDEN)
        layers: list[nn.Module] = [nn.Linear(HIDDEN, features), nn.Unflatten(1, grid)]
        sizes = (*reversed(CHANNELS), 3)
        for inputs, outputs in zip(sizes[:-1], sizes[1:]):  # noqa: B905 - on Python 3.9
            layers += [nn.ReLU(), nn.ConvTranspose2d(inputs, outputs, 4, 2, 1)]
        self.decoder = nn.Sequential(*layers)
        few = tuple(channels // 2 for channels in CHANNELS)
        self.classifier = nn.Sequential(
            *_convolutions(few), nn.Linear(features // 2, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def begin(self, frames: Tensor) -> Tensor:
        """Return the hidden state of episodes that begin with these frames."""
        return torch.tanh(self.encoder(self._standardize(frames)))

    def advance(self, hidden: Tensor, actions: Tensor) -> Tensor:
        """Return the hidden state after actions ``[n, A]`` in the simulator's units."""
        span = self.action_high - self.action_low
        return self.dynamics(2 * (actions - self.action_low) / span - 1, hidden)

    def decode(self, hidden: Tensor) -> Tensor:
        """Return frames; values may be slightly outside 0 to 1."""
        return self.mean_frame + self.frame_std * self.decoder(hidden)

    def success_logits(self, frames: Tensor) -> Tensor:
        """Return the logits ``[n]`` of the probability that frames show the solved task."""
        return self.classifier(self._standardize(frames))[:, 0]

    def _standardize(self, frames: Tensor) -> Tensor:
        return (frames - self.mean_frame) / self.frame_std


def _convolutions(channels: Sequence[int]) -> list[nn.Module]:
    """Return convolutions that halve height and width, flattened at the end."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *channels[:-1]), channels):  # noqa: B905 - on Python 3.9
        layers += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.ReLU()]
    return [*layers, nn.Flatten()]


def to_float(frames: np.ndarray) -> Tensor:
    """Convert frames uint8 ``[n, H, W, 3]`` to the network's form."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255


def to_uint8(frames: Tensor) -> np.ndarray:
    """Convert frames of the network to uint8 ``[n, H, W, 3]``, as a camera returns them."""
    rounded = (frames.clamp(0, 1) * 255).round().to(torch.uint8)
    return rounded.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def save_world_model(
    file: str, model: WorldModel, spec: WorldModelSpec, starts: np.ndarray, test_starts: np.ndarray
) -> None:
    """Write a world model to a file, which appears when it is complete.

    Args:
        starts, test_starts: first frames of training and held-out episodes, uint8 ``[n, H, W, 3]``.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    tensors[TRAIN_STARTS] = torch.from_numpy(np.array(starts, order="C"))
    tensors[TEST_STARTS] = torch.from_numpy(np.array(test_starts, order="C"))
    save_file(tensors, f"{file}.part", {METADATA_KEY: json.dumps(asdict(spec))})
    os.replace(f"{file}.part", file)  # noqa: PTH105 - as the other files of a simulator process


def load_world_model(file: str) -> tuple[WorldModel, WorldModelSpec, np.ndarray, np.ndarray]:
    """Return the world model of a file, its task, and its training and test starts.

    Raises:
        ValueError: the file is missing, damaged, or no world model.
    """
    try:
        with safe_open(file, "pt") as opened:
            spec = WorldModelSpec(**json.loads((opened.metadata() or {})[METADATA_KEY]))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        starts, test_starts = (tensors.pop(name).numpy() for name in (TRAIN_STARTS, TEST_STARTS))
        model = WorldModel(spec, len(tensors["action_low"]))
        model.load_state_dict(tensors)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"kwargs.model: {file} is not a world model ({type(error).__name__}: {error}); rlinf "
            "world-model RUN FILE writes one"
        ) from None
    return model.eval().requires_grad_(requires_grad=False), spec, starts, test_starts


def fit_world_model(
    spec: WorldModelSpec,
    bounds: tuple[np.ndarray, np.ndarray],
    episodes: Sequence[RecordedEpisode],
    *,
    steps: int,
    seed: int,
    report: Callable[[int, dict[str, float]], Any],
) -> WorldModel:
    """Train a world model. Equal arguments give equal weights on a CPU with as many threads.

    Args:
        bounds: lower and upper bound of each component of an action, finite ``[A]``.
        steps: number of optimizer steps.
        report: is called with the number of each step, from 1, and its losses.

    Raises:
        ValueError: the size of the frames is unsuitable.
    """
    random = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WorldModel(spec, len(bounds[0]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.mean_frame, model.frame_std = _pixel_statistics(episodes)
    model.action_low, model.action_high = (torch.from_numpy(bound).float() for bound in bounds)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        losses = _losses(model, *_draw_windows(episodes, random, device))
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        schedule.step()
        report(step, {name: float(loss.detach()) for name, loss in losses.items()})
    return model.cpu().eval()


def _pixel_statistics(episodes: Sequence[RecordedEpisode]) -> tuple[Tensor, Tensor]:
    """Return the mean of each pixel ``[3, H, W]``, and the standard deviation of all ``[]``."""
    count = sum(len(episode.frames) for episode in episodes)
    total: Any = sum(episode.frames.sum(0, np.float64) for episode in episodes)
    squares: Any = sum(np.square(e.frames, dtype=np.float64).sum(0) for e in episodes)
    mean = total / count
    variance = (squares / count - mean**2).mean()
    std = torch.tensor(max(variance, 1.0)).sqrt()
    return torch.from_numpy(mean).permute(2, 0, 1).float() / 255, std.float() / 255


def _draw_windows(
    episodes: Sequence[RecordedEpisode], random: np.random.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw windows of episodes, one half of them from the reset on.

    Returns:
        First frames ``[B, 3, H, W]``, actions ``[W, B, A]``, times ``[B, K]`` from the first frame
        on, and the frames ``[B * K, 3, H, W]`` and success labels ``[B * K]`` at these times.
    """
    rows, first, later, times, labels = [], [], [], [], []
    for row in range(BATCH_SIZE):
        episode = episodes[int(random.integers(len(episodes)))]
        length = len(episode.frames)
        start = 0 if row % 2 else int(random.integers(max(length - 1, 1)))
        positions = np.minimum(start + np.arange(WINDOW), length - 1)
        drawn = random.integers(min(WINDOW, length - start), size=FRAMES_PER_WINDOW)
        drawn[0] = 0
        rows.append(episode.actions[positions])
        first.append(episode.frames[start])
        later.append(episode.frames[start + drawn])
        labels.append(episode.labels()[start + drawn])
        times.append(drawn)
    actions = torch.from_numpy(np.stack(rows, 1).astype(np.float32))
    tensors = (
        *(to_float(np.stack(first)), actions, torch.from_numpy(np.stack(times))),
        *(to_float(np.concatenate(later)), torch.from_numpy(np.concatenate(labels))),
    )
    first_frames, actions, all_times, frames, solved = (tensor.to(device) for tensor in tensors)
    return first_frames, actions, all_times, frames, solved


def _losses(
    model: WorldModel,
    first_frames: Tensor,
    actions: Tensor,
    times: Tensor,
    frames: Tensor,
    labels: Tensor,
) -> dict[str, Tensor]:
    """Return the squared error of predicted frames (1: that of the mean frame), and the
    cross-entropy of success on real and on predicted frames."""
    states = [model.begin(first_frames)]
    for action in actions[: int(times.max())]:
        states.append(model.advance(states[-1], action))
    rows = torch.arange(len(times), device=times.device)[:, None]
    hidden = torch.stack(states, 1)[rows, times].flatten(0, 1)
    predicted = model.decode(hidden)
    # The gradient of the classifier must not change the frames.
    logits = model.success_logits(torch.cat([frames, predicted.detach().clamp(0, 1)]))
    return {
        "frames": F.mse_loss(predicted, frames) / model.frame_std.square(),
        "success": F.binary_cross_entropy_with_logits(logits, labels.repeat(2)),
    }


@torch.no_grad()
def measure_world_model(model: WorldModel, episodes: Sequence[RecordedEpisode]) -> dict[str, float]:
    """Compare a world model with real episodes, each predicted from its first frame on.

    Returns:
        ``frame_rmse``: root mean square error of predicted frames, in grey levels (0 to 255);
        ``still_rmse``: that of repeating the first frame. ``false_positive_share``: share of real
        unsolved frames that the classifier calls solved; ``true_positive_share``: share of real
        solved frames; ``predicted_*``: the same on predicted frames. NaN: no such frames.
    """
    errors = np.zeros(2)
    found: dict[str, list[np.ndarray]] = {"": [], "predicted_": []}
    labels = np.concatenate([episode.labels() for episode in episodes]) > 0
    for episode in episodes:
        states = [model.begin(to_float(episode.frames[:1]))]
        for action in episode.actions[:-1].astype(np.float32):
            states.append(model.advance(states[-1], torch.from_numpy(action)[None]))
        predicted = to_uint8(model.decode(torch.cat(states)))
        real = episode.frames.astype(np.float64)
        for index, other in enumerate((predicted, episode.frames[:1])):
            errors[index] += np.square(real - other).sum()
        for name, frames in (("", episode.frames), ("predicted_", predicted)):
            probabilities = torch.sigmoid(model.success_logits(to_float(frames))).numpy()
            found[name].append(probabilities >= SUCCESS_PROBABILITY)
    count = sum(episode.frames.size for episode in episodes)
    metrics = dict(zip(("frame_rmse", "still_rmse"), np.sqrt(errors / count).tolist()))  # noqa: B905
    for name, parts in found.items():
        is_positive = np.concatenate(parts)
        for kind, rows in (("false", ~labels), ("true", labels)):
            share = float(is_positive[rows].mean()) if rows.any() else float("nan")
            metrics[f"{name}{kind}_positive_share"] = share
    return metrics
