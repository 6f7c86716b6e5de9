"""Questions about generated images: the number, colour and position of coloured shapes on a grid.

Seeded random numbers determine a scene. A hash of scene and question decides the split, so no
training prompt can be a test prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, context_fields
from rlinf.envs.arithmetic import is_test_question
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError
from rlinf.models.base import ModelSpec
from rlinf.models.images import ImageProcessor, pack_images
from rlinf.registry import IMAGE_INPUTS, VISION
from rlinf.seeding import generator

QuestionKind = Literal["count", "colour", "place"]
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUND_GREY = 245
ANSWER_PATTERN = re.compile(r"<answer>([^<>]*)</answer>\s*$")
MAX_SCENE_DRAWS = 10_000
"""Maximum number of scenes that are drawn for a question. One in eight is a test scene, and most
scenes allow a question of the drawn kind."""
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


class VisualQuestionsConfig(Section):
    """The scenes and the questions."""

    question_kinds: tuple[QuestionKind, ...] = get_args(QuestionKind)
    """Kinds of questions, equally likely."""
    image_size: int = Field(default=56, gt=0)
    """Side of an image, pixels; a model may enlarge it."""
    grid_size: int = Field(default=2, gt=0, le=8)
    """Rows and columns of the grid; a cell holds at most one shape."""
    max_objects: int = Field(default=4, gt=0)
    """Maximum number of shapes in a scene, which has at least one, and at most one in each cell."""
    instruction: str = ""
    """Text after each question that describes the format to a pretrained model."""
    format_reward: float = Field(default=0.1, ge=0, lt=1)
    """Reward of a wrong answer in the right format, ``<answer>...</answer>`` at the end; a right
    answer gets 1."""
    test_seed: int = Field(default=1234, ge=0)
    """Seed of the test questions; the run's seed does not change them."""

    @field_validator("question_kinds")
    @classmethod
    def _check_question_kinds(cls, value: tuple[QuestionKind, ...]) -> tuple[QuestionKind, ...]:
        if not value:
            raise ValueError("name at least one kind of question")
        return value


class SceneObject(NamedTuple):
    """A shape in a scene."""

    shape: str
    colour: str
    row: int
    column: int


@dataclass(frozen=True)
class Scene:
    """Shapes on a grid. Its ``repr`` determines the split, so names of fields must not change."""

    objects: tuple[SceneObject, ...]
    cells: int
    """Number of rows, and of columns, of the grid."""

    def render(self, size: int) -> np.ndarray:
        """Return the image, uint8 ``[size, size, 3]``; a pixel belongs to a shape if its centre is
        inside the shape."""
        image = np.full((size, size, 3), BACKGROUND_GREY, np.uint8)
        centres = (np.arange(size) + 0.5) * self.cells / size
        for item in self.objects:
            # Coordinates within the item's cell, from -1 to 1; y grows downwards.
            y = 2 * (centres - item.row)[:, None] - 1
            x = 2 * (centres - item.column)[None, :] - 1
            inside = {
                "circle": x**2 + y**2 <= 0.64,
                "square": np.maximum(abs(x), abs(y)) <= 0.7,
                "triangle": (y <= 0.75) & (2 * abs(x) <= (y + 0.8)),
            }[item.shape]
            image[inside] = COLOURS[item.colour]
        return image


@dataclass(frozen=True)
class VisualPrompt(Prompt):
    """A question about a scene, with the image as the model reads it."""

    image: np.ndarray
    image_tokens: int
    """Number of tokens that represent the image."""

    def extra_columns(self) -> Mapping[str, np.ndarray]:
        return self._columns

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return pack_images([self.image])

    @property
    def model_input(self) -> str:
        return f"{VISION_START}{IMAGE_PAD * self.image_tokens}{VISION_END}{self.text}"


class VisualQuestionsEnvironment(PromptEnvironment):
    """Questions about scenes. A response ends with ``<answer>WORD</answer>``, after any other
    text."""

    Config = VisualQuestionsConfig
    config: VisualQuestionsConfig
    requires = frozenset({VISION, IMAGE_INPUTS})
    uses_chat_template = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        images = getattr(processor, "images", None)
        if not isinstance(images, ImageProcessor):
            raise ConfigError(
                "task.name: visual_questions needs a model that reads images, such as "
                "model.name=qwen2_5_vl"
            )
        self._images = images

    @classmethod
    def model_spec(cls, config: VisualQuestionsConfig) -> ModelSpec:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789 ?</>\n"
        return {"alphabet": "".join(sorted({*letters, *config.instruction}))}

    @classmethod
    def task_size(cls, config: VisualQuestionsConfig, processor: Any) -> TaskSize:
        if processor is None:
            return TaskSize()
        environment = cls(config, processor)
        random = generator(0, "visual_questions", "extent")
        examples = environment.encode_prompts(
            [environment._draw_from_split(random, "train").model_input for _ in range(64)]
        )
        return TaskSize(max_prompt_tokens=max(map(len, examples)))

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        seed, iteration = request.seed, request.iteration
        if request.split == "test":
            seed, iteration = self.config.test_seed, 0
        key = ("visual_questions", request.split, iteration)
        return [
            self._draw_from_split(generator(seed, *key, int(group)), request.split)
            for group in request.group_ids
        ]

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        random = generator(seed, "visual_questions", "demonstration", step)
        prompts = [self._draw_from_split(random, "train") for _ in range(count)]
        questions = self.encode_prompts([prompt.model_input for prompt in prompts])
        replies = self.encode([f"<answer>{prompt.answer}</answer>" for prompt in prompts])
        return [
            Trajectory(
                identity=RecordId(step, i),
                actions=self.append_end_token(reply),
                prompt=question,
                **context_fields(prompt.extra_columns()),
            )
            for i, (question, reply, prompt) in enumerate(
                zip(questions, replies, prompts, strict=True)
            )
        ]

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of prompts, as user turns if the tokenizer has a chat template."""
        texts = [text + self.config.instruction for text in texts]
        if self.chat_format.template is not None:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            texts = self.chat_format.render_prompts(conversations)
        return super().encode_prompts(texts)

    def grade(self, response: str, answer: str) -> float:
        match = ANSWER_PATTERN.search(response)
        if match is None:
            return 0.0
        return 1.0 if match[1].strip() == answer else self.config.format_reward

    def _draw_from_split(self, random: np.random.Generator, split: str) -> VisualPrompt:
        """Draw questions until one belongs to the split.

        Raises:
            ConfigError: none of :data:`MAX_SCENE_DRAWS` scenes has a question of the split.
        """
        for _ in range(MAX_SCENE_DRAWS):
            scene = self._draw_scene(random)
            question = self._draw_question(scene, random)
            if question is None or is_test_question(f"{scene}{question[0]}") != (split == "test"):
                continue
            image = self._images.resize(scene.render(self.config.image_size))
            return VisualPrompt(*question, image, self._images.num_tokens(image))
        raise ConfigError(
            f"task.grid_size: {self.config.grid_size} with "
            f"task.question_kinds={list(self.config.question_kinds)} has no question of the "
            f"{split} split among {MAX_SCENE_DRAWS:,} scenes; draw more cells (2 or more)"
        )

    def _draw_scene(self, random: np.random.Generator) -> Scene:
        cells = self.config.grid_size
        count = int(random.integers(1, min(self.config.max_objects, cells**2) + 1))
        positions = random.permutation(cells**2)[:count]
        return Scene(
            tuple(
                SceneObject(
                    SHAPES[int(random.integers(len(SHAPES)))],
                    list(COLOURS)[int(random.integers(len(COLOURS)))],
                    int(position) // cells,
                    int(position) % cells,
                )
                for position in positions
            ),
            cells,
        )

    def _draw_question(self, scene: Scene, random: np.random.Generator) -> tuple[str, str] | None:
        """Return a question of a random kind and its answer; None if it would be ambiguous."""
        kind = self.config.question_kinds[int(random.integers(len(self.config.question_kinds)))]
        if kind == "count":
            shape = SHAPES[int(random.integers(len(SHAPES)))]
            return f"how many {shape}s?", str(sum(t.shape == shape for t in scene.objects))
        item = scene.objects[int(random.integers(len(scene.objects)))]
        if kind == "colour":
            matches = [t for t in scene.objects if t.shape == item.shape]
            return (f"what colour is the {item.shape}?", item.colour) if len(matches) == 1 else None
        matches = [t for t in scene.objects if (t.shape, t.colour) == (item.shape, item.colour)]
        if len(matches) > 1 or 2 * item.column + 1 == scene.cells:
            return None
        side = "left" if 2 * item.column + 1 < scene.cells else "right"
        return f"is the {item.colour} {item.shape} left or right?", side
