"""Episodes of a LeRobot data set as demonstrations of a simulator's task."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE, LeRobotDataset, LeRobotEpisode
from rlinf.data.trajectory import Trajectory
from rlinf.envs.observations import InvalidEnvConfig, encode_instruction
from rlinf.errors import DataError


class LeRobotDemonstrations:
    """The episodes of a LeRobot dataset as demonstrations of a task, read when they are used."""

    def __init__(
        self, folder: Path, camera_map: Mapping[str, str], instruction: bool | str
    ) -> None:
        """
        Args:
            folder: the dataset.
            camera_map: the task's camera for cameras of the dataset; empty: equal names.
            instruction: False: without instructions; True: those of the episodes; a text: itself.

        Raises:
            DataError: the folder is not a dataset, or is damaged.
        """
        self.dataset = LeRobotDataset(folder, all_successful=True)
        self._camera_map, self._instruction = dict(camera_map), instruction

    @functools.cached_property
    def _episodes(self) -> list[LeRobotEpisode]:
        return self.dataset.episodes()

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, index: int) -> Trajectory:
        """Return an episode.

        Raises:
            DataError: a file is missing or damaged, or the instruction is too long.
        """
        episode = self._episodes[index]
        demonstration = self.dataset.demonstration(episode)
        demonstration.images = {
            task_camera: demonstration.images[camera]
            for camera, task_camera in self._cameras.items()
        }
        if self._instruction is False:
            return demonstration
        text = episode.instruction if self._instruction is True else self._instruction
        try:
            row = encode_instruction(text)
        except InvalidEnvConfig as error:
            raise DataError(f"{self.dataset.folder}: episode {episode.index}: {error}") from None
        demonstration.instruction = np.repeat(row[None], episode.length, 0)
        return demonstration

    @property
    def _cameras(self) -> dict[str, str]:
        return self._camera_map or {name: name for name in self.dataset.cameras}

    def check(self, spec: Mapping[str, Any]) -> None:
        """Check that states, actions and images have the sizes of a task.

        Args:
            spec: the task's :meth:`rlinf.envs.base.Environment.model_spec`.

        Raises:
            DataError: a size differs, or a camera is missing.
        """
        dataset, where = self.dataset, f"task.demonstration_data: {self.dataset.folder}"
        if spec["action"]["kind"] != "box":
            raise DataError(f"{where}: its actions are vectors, and the task's are discrete")
        for key, name, size, wanted in (
            ("observation", STATE_FEATURE, dataset.state_size, spec["observation"]),
            ("action.size", ACTION_FEATURE, dataset.action_size, spec["action"]["size"]),
        ):
            if size != wanted:
                raise DataError(f"{where}: {name} has {size} numbers, and task.{key} is {wanted}")
        key, known = "task.demonstration_camera_map", ", ".join(sorted(dataset.cameras)) or "none"
        if unknown := sorted(self._camera_map.keys() - dataset.cameras.keys()):
            raise DataError(f"{key}: {dataset.folder} has no {unknown[0]}; its cameras: {known}")
        sources = {task_camera: camera for camera, task_camera in self._cameras.items()}
        for name, size in spec.get("images", {}).items():
            if name not in sources:
                raise DataError(
                    f"{key}: no camera of {dataset.folder} is mapped to {name} of task.images; "
                    f"its cameras: {known}"
                )
            if (found := list(dataset.image_size(sources[name]))) != list(size):
                raise DataError(
                    f"task.images.{name}: {list(size)}, and the images of {sources[name]} in "
                    f"{dataset.folder} are {found}; set it to {found}"
                )
