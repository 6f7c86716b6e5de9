"""Scenes show what their answers say, the same each time, and held-out ones are others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.envs.base import RolloutRequest
from rlinf.envs.visual_questions import (
    BACKGROUND_GREY,
    COLOURS,
    SHAPES,
    Scene,
    SceneObject,
    VisualPrompt,
    VisualQuestionsConfig,
    VisualQuestionsEnvironment,
)
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.qwen2_5_vl import Qwen25VL, Qwen25VLConfig


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vl")
    config = Qwen25VLConfig(hidden=32, layers=1, heads=2, kv_heads=1, vision_hidden=16)
    Qwen25VL.create(
        config, VisualQuestionsEnvironment.model_spec(VisualQuestionsConfig()), 0, folder
    )
    return Qwen25VL.processor(folder, config)


def task(processor: Any, **options: Any) -> VisualQuestionsEnvironment:
    return VisualQuestionsEnvironment(VisualQuestionsConfig(**options), processor)


def draw_prompts(
    made: VisualQuestionsEnvironment, split: Any = "train", seed: int = 0, count: int = 40
) -> Any:
    return made.prompts(RolloutRequest(seed, 3, split, range(count), count, 1, 8, 1.0))


def looked_at(image: np.ndarray, cells: int) -> list[SceneObject]:
    """The shapes of a picture, by its pixels alone: told by how much of their box they fill."""
    side, found = image.shape[0] // cells, []
    for row, column in np.ndindex(cells, cells):
        cell = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        inside = (cell != BACKGROUND_GREY).any(-1)
        if not inside.any():
            continue
        colour = next(n for n, rgb in COLOURS.items() if (cell[inside] == rgb).all())
        rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
        filled = inside.sum() / (len(rows) * len(columns))
        shape = "square" if filled > 0.95 else "circle" if filled > 0.65 else "triangle"
        found.append(SceneObject(shape, colour, row, column))
    return found


@settings(max_examples=40)
@given(st.integers(1, 4), st.data())
def test_a_picture_shows_each_shape_where_it_is(cells: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, cells**2 - 1), min_size=1, max_size=4, unique=True))
    things = [
        SceneObject(
            data.draw(st.sampled_from(SHAPES)),
            data.draw(st.sampled_from(list(COLOURS))),
            *divmod(place, cells),
        )
        for place in sorted(places)
    ]
    assert looked_at(Scene(tuple(things), cells).render(28 * cells), cells) == things


def test_answers_are_what_the_pictures_show(processor: Any) -> None:
    seen = set()
    for prompt in draw_prompts(task(processor), count=120):
        things = looked_at(prompt.image, 2)
        words = prompt.text.rstrip("?").split()
        seen.add(words[0])
        if words[0] == "how":
            right = str(sum(f"{thing.shape}s" == words[-1] for thing in things))
        elif words[0] == "what":
            (one,) = [thing for thing in things if thing.shape == words[-1]]
            right = one.colour
        else:
            (one,) = [t for t in things if [t.colour, t.shape] == words[2:4]]
            right = "right" if one.column else "left"
        assert prompt.answer == right, prompt.text
    assert seen == {"how", "what", "is"}


def test_prompts_hold_a_token_for_each_square_of_the_image(processor: Any) -> None:
    made = task(processor, image_size=84, grid_size=3)
    (prompt,) = draw_prompts(made, count=1)
    (ids,) = made.encode_prompts([prompt.model_input])
    assert prompt.image.shape == (84, 84, 3)
    assert (ids == processor.image_processor.image_token_id).sum() == 9
    positions = processor.image_processor.rope_positions(ids, np.array([[84, 84]]))
    # The image begins at 1; what stands behind it is further than its last row and column.
    assert positions[:, [9, 10]].tolist() == [[1, 4], [3, 4], [3, 4]]


def test_a_chat_template_puts_the_question_into_a_turn(processor: Any) -> None:
    made = task(processor, instruction=" think first")
    (prompt,) = draw_prompts(made, count=1)
    (plain,) = made.encode_prompts([prompt.model_input])
    assert processor.decode(plain[-5:]) == "first"
    other = copy.deepcopy(processor)
    other.image_processor = processor.image_processor
    other.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    (turn,) = task(other, instruction=" think first").encode_prompts([prompt.model_input])
    assert turn.tolist() == [*processor.encode("user\n"), *plain, *processor.encode("\n")]


def test_the_same_numbers_give_the_same_bytes_and_others_do_not(processor: Any) -> None:
    def contents_of(prompts: list[VisualPrompt]) -> list[tuple[str, str, bytes]]:
        return [(p.text, p.answer, p.image.tobytes()) for p in prompts]

    one, again = (contents_of(draw_prompts(task(processor))) for _ in range(2))
    assert one == again
    assert contents_of(draw_prompts(task(processor), seed=1)) != one
    assert contents_of(draw_prompts(task(processor), "test")) == contents_of(
        draw_prompts(task(processor), "test", seed=1)
    )
    held_out = {
        (text, image) for text, _, image in contents_of(draw_prompts(task(processor), "test"))
    }
    assert not held_out & {(text, image) for text, _, image in one}


def test_demonstrations_are_right_and_have_their_images(processor: Any) -> None:
    made = task(processor)
    for record in made.demonstrations(0, 2, 8):
        text = processor.decode(record.actions, skip_special_tokens=True)
        answer = text.removeprefix("<answer>").removesuffix("</answer>")
        assert made.grade(text, answer) == 1
        assert record.actions[-1] == processor.eos_token_id
        assert record.image_sizes.tolist() == [[56, 56]]
        assert record.pixels.shape == (56 * 56 * 3,)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>red</answer>", 1.0),
        ("a circle in red <answer> red </answer>\n", 1.0),
        ("<answer>blue</answer><answer>red</answer>", 1.0),
        ("<answer>blue</answer>", 0.1),
        ("<answer>red</answer> or so", 0.0),
        ("<answer>red", 0.0),
        ("red", 0.0),
    ],
)
def test_exact_answers_and_their_format_are_rewarded(
    processor: Any, response: str, score: float
) -> None:
    assert task(processor).grade(response, "red") == score


def test_a_model_that_does_not_see_is_refused(tmp_path: Path) -> None:
    config = CausalLMConfig(hidden=32, layers=1, heads=2)
    CausalLM.create(config, {"alphabet": "abc"}, 0, tmp_path)
    with pytest.raises(ConfigError, match="needs a model that reads images"):
        task(CausalLM.processor(tmp_path, config))


def test_scenes_without_a_question_are_refused(processor: Any) -> None:
    """One cell is neither left nor right: drawing until there is one would never end."""
    with pytest.raises(ConfigError, match=r"task\.grid_size: 1 .*'place'.*train split"):
        draw_prompts(task(processor, grid_size=1, question_kinds=("place",)))
