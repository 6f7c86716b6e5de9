"""Tasks with a fixed set of problems: questions or conversations, each with an answer.

A task defines where problems come from (:meth:`ProblemSetEnvironment.load_problems`) and how a
response is scored. This module renders the prompts: template, few-shot examples, system message,
and the tokenizer's chat template.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.json_lines import count_overlap
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import ProblemSetSize, RolloutRequest, TaskSize
from rlinf.envs.chat_problems import (
    PROMPT_PLACEHOLDER,
    ChatProblem,
    format_transcript,
    question_text,
)
from rlinf.envs.problem_mixture import ProblemMixture
from rlinf.envs.rendered_dataset import LengthLimit, RenderedDataset
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError, name_key_in_memory_errors
from rlinf.models.chat_format import split_thought
from rlinf.models.chat_template import ChatMessage
from rlinf.rewards.math_extraction import ReasoningTags
from rlinf.seeding import generator

Split = Literal["train", "test"]


class ProblemSetConfig(Section):
    """The settings that turn problems into prompts."""

    prompt_template: str = "{prompt}"
    """Text of the user's (last) message; ``{prompt}`` is replaced by the problem."""
    system_prompt: str = ""
    """System message of conversations without one, for tokenizers with a chat template."""
    num_fewshot: int = Field(default=0, ge=0)
    """Number of training problems that precede each question, with their answers, as few-shot
    turns. They are always the same, and are not trained on. For tokenizers with a chat template."""
    max_prompt_length: int = Field(default=1024, gt=0)
    """Maximum number of tokens of a prompt; longer prompts are left out. Another problem is drawn
    instead."""
    allow_train_test_overlap: bool = False
    """Train even if every test problem is a training problem too."""

    @field_validator("prompt_template")
    @classmethod
    def _check_prompt_template(cls, value: str) -> str:
        if PROMPT_PLACEHOLDER not in value:
            raise ValueError("does not contain {prompt}, so no problem would be in the prompt")
        return value


@dataclass(frozen=True)
class RenderedProblem(Prompt):
    """A problem and its rendered prompt."""

    rendered: str
    """The text that the model receives."""
    demonstration: str
    """The answer for supervised fine-tuning: the assistant's message in the row, or the first
    reference answer."""
    num_tokens: int
    """Number of tokens of ``rendered``."""
    conversation: tuple[ChatMessage, ...]
    """The messages that ``rendered`` was built from."""
    location: str
    """File and line, for error messages."""

    @property
    def model_input(self) -> str:
        return self.rendered


@dataclass(frozen=True)
class ProblemSet:
    """One of the sets that training problems are drawn from."""

    problems: Sequence[ChatProblem]
    key: str
    """Configuration key that names the set."""
    weight: float = 1.0
    """Relative frequency of its problems."""


class ProblemSetEnvironment(PromptEnvironment):
    """A task with a fixed set of problems."""

    Config: ClassVar[type[ProblemSetConfig]] = ProblemSetConfig
    config: ProblemSetConfig
    uses_chat_template = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        training = self.training_sets(config)
        first = next(iter(training), "")
        examples = training[first].problems[: config.num_fewshot] if training else ()
        self._fewshot_messages = [
            message
            for problem in examples
            for message in (
                *problem.with_template(config.prompt_template).messages,
                {"role": "assistant", "content": problem.reply},
            )
        ]
        self._training: dict[str, RenderedDataset[RenderedProblem]] = {}
        """Training problems by the name of their set."""
        for name, training_set in training.items():
            problems = training_set.problems
            if name == first:
                problems = problems[config.num_fewshot :]
            if len(training_set.problems) or config.num_fewshot:
                self._training[name] = self._load(problems, training_set.key)
        self._mixture: ProblemMixture | None = None
        """The order of training problems; None: the task is only for evaluation."""
        if self._training:
            sizes = {name: len(dataset) for name, dataset in self._training.items()}
            self._mixture = ProblemMixture(sizes, {n: part.weight for n, part in training.items()})
        self._test = self._load(self.load_problems(config, "test"), "task.test")

    @classmethod
    def training_sets(cls, config: Any) -> dict[str, ProblemSet]:
        """Return the sets of training problems by name; by default one without a name. A task that
        is only for evaluation has none, or an empty one.

        Raises:
            DataError: as :meth:`load_problems`.
        """
        return {"": ProblemSet(cls.load_problems(config, "train"), "task.train")}

    @classmethod
    @abstractmethod
    def load_problems(cls, config: Any, split: Split) -> Sequence[ChatProblem]:
        """Return all problems of a split, in a fixed order. A task that is only for evaluation has
        no training problems.

        Raises:
            DataError: there are no test problems, or a problem is malformed.
        """

    @classmethod
    def train_test_overlap(cls, config: Any) -> tuple[int, int]:
        training = [training_set.problems for training_set in cls.training_sets(config).values()]
        return count_overlap(training, cls.load_problems(config, "test"), question_text)

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        environment = cls(config, processor)
        return TaskSize(
            sum(map(len, environment._training.values())),
            len(environment._test),
            environment.longest_prompt,
            environment.problem_set_sizes(),
        )

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        return int(config.max_prompt_length) + horizon

    def num_test_problems(self) -> int:
        """Return the number of test problems whose prompts are within the limit."""
        return self._test.count()

    @property
    def longest_prompt(self) -> int:
        """Upper bound of the number of tokens of a prompt: that of the longest one, or the limit if
        not all were counted."""
        return max(prompts.max_tokens for prompts in (*self._training.values(), self._test))

    def prompt_sets(self) -> list[RenderedDataset[RenderedProblem]]:
        """Return the sets of problems, training sets first."""
        return [*self._training.values(), self._test]

    def problem_set_sizes(self) -> tuple[ProblemSetSize, ...]:
        """Return the sizes of :meth:`prompt_sets`."""
        shares = self._mixture.shares() if self._mixture is not None else {}
        return tuple(
            ProblemSetSize(
                dataset.key,
                len(dataset.problems),
                share,
                dataset.num_measured,
                dataset.num_omitted,
                dataset.longest,
            )
            for dataset, share in zip(self.prompt_sets(), [*shares.values(), None], strict=True)
        )

    def final_answer(self, trajectory: Trajectory) -> str | None:
        """Return the final answer of a response in a normalised form, so that equal answers are
        equal texts and responses can vote. None: the response has no answer, or the task has no
        such form."""
        return None

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        """Return training problems without replacement, in a new order for each epoch of their set
        (:class:`rlinf.envs.problem_mixture.ProblemMixture`), or the first test problems."""
        if request.split == "test":
            return self._test.first(request.group_ids)
        start = request.iteration * request.num_groups
        return self._draw(request.seed, [start + group for group in request.group_ids])

    def _draw(self, seed: int, draws: Sequence[int]) -> list[RenderedProblem]:
        """Return the training problems of some draws (see :meth:`ProblemMixture.locate`). If there
        are several sets, ``info`` has the name of the problem's set, ``task``."""
        assert self._mixture is not None, "a run without training problems is rejected"
        places = {draw: self._mixture.locate(seed, draw) for draw in draws}
        problems: dict[int, RenderedProblem] = {}
        for name, dataset in self._training.items():
            indices = {draw: index for draw, (chosen, index) in places.items() if chosen == name}
            for draw, problem in dataset.draw(indices, seed).items():
                info = {**problem.info, "task": name} if name else problem.info
                problems[draw] = replace(problem, info=info)
        return [problems[draw] for draw in draws]

    def reasoning_tags(self) -> ReasoningTags:
        """Return the tags of reasoning in responses. The chat template may already have written the
        opening tag."""
        tags = ReasoningTags()
        prompt = self._test.first([0])[0].rendered
        return replace(tags, starts_open=tags.ends_with_open_tag(prompt))

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        draws = range(step * count, (step + 1) * count)
        if "" in self._training:
            problems = self._training[""]
            # The address is "jsonl" for all tasks, so that older runs give the same results.
            random = generator(seed, "jsonl", "demonstration", step)
            indices = random.integers(len(problems), size=count).tolist()
            found = problems.draw(dict(zip(draws, indices, strict=True)), seed)
            prompts = [found[draw] for draw in draws]
        else:
            prompts = self._draw(seed, draws)
        questions = self.encode_prompts([prompt.model_input for prompt in prompts])
        replies = self.encode(self._demonstration_texts(prompts))
        end_token = self.chat_format.end_of_turn_token_id
        actions = [
            ids if len(ids) and ids[-1] == end_token else self.append_end_token(ids)
            for ids in replies
        ]
        return [
            Trajectory(identity=RecordId(step, i), actions=reply, prompt=question)
            for i, (question, reply) in enumerate(zip(questions, actions, strict=True))
        ]

    def _demonstration_texts(self, prompts: Sequence[RenderedProblem]) -> list[str]:
        """Return the demonstrations of the prompts, as the chat template renders them."""
        if self.chat_format.template is None:
            return [prompt.demonstration for prompt in prompts]
        conversations = [
            [*prompt.conversation, {"role": "assistant", "content": prompt.demonstration}]
            for prompt in prompts
        ]
        turns = self.chat_format.assistant_turns(
            conversations, [prompt.location for prompt in prompts], last_only=True
        )
        return [turn.completion for (turn,) in turns]

    def _load(self, problems: Sequence[ChatProblem], key: str) -> RenderedDataset[RenderedProblem]:
        """Return the prompts of problems.

        Raises:
            DataError: no prompt is within the limit; a problem or setting needs a chat template;
                the template fails, or drops a message.
        """
        if not problems:
            raise DataError(
                f"{key}: no problem is left beside task.num_fewshot={self.config.num_fewshot}"
            )
        with name_key_in_memory_errors(key):
            return RenderedDataset(
                problems,
                key,
                lambda chunk: list(enumerate(self._render_problems(chunk, key))),
                lambda prompt: prompt.num_tokens,
                LengthLimit("task.max_prompt_length", self.config.max_prompt_length),
            )

    def _render_problems(self, problems: Sequence[ChatProblem], key: str) -> list[RenderedProblem]:
        """Render the prompts of problems.

        Raises:
            DataError: a prompt has no tokens, or as :meth:`_load`.
        """
        problems = [problem.with_template(self.config.prompt_template) for problem in problems]
        model_inputs = self._model_inputs(problems, key)
        encoded = self.encode(model_inputs)
        for problem, ids in zip(problems, encoded, strict=True):
            if not len(ids):
                raise DataError(f"{key}: {problem.location}: the prompt has no tokens")
        lengths = [len(ids) for ids in self.begin_prompts(encoded)]
        return [
            RenderedProblem(
                format_transcript(problem.messages),
                problem.answer,
                text,
                problem.reply,
                length,
                tuple(self._prompt_messages(problem)),
                problem.location,
                info=problem.info,
            )
            for problem, text, length in zip(problems, model_inputs, lengths, strict=True)
        ]

    def _model_inputs(self, problems: Sequence[ChatProblem], key: str) -> list[str]:
        """Return the texts that the model receives."""
        if self.chat_format.template is None:
            if self.config.system_prompt or self.config.num_fewshot:
                system = "system_prompt", "a system message"
                name, content = system if self.config.system_prompt else ("num_fewshot", "turns")
                raise ConfigError(
                    f"task.{name}: the tokenizer of model.path has no chat template to put "
                    f"{content} into; write it into task.prompt_template"
                )
            for problem in problems:
                if len(problem.messages) > 1:
                    raise DataError(
                        f"{key}: {problem.location}: several messages need a tokenizer with a chat "
                        "template, and that of model.path has none"
                    )
            return [problem.messages[0]["content"] for problem in problems]
        conversations = [self._prompt_messages(problem) for problem in problems]
        texts = self.chat_format.render_prompts(conversations)
        for problem, messages, text in zip(problems, conversations, texts, strict=True):
            # Templates may trim messages, and drop the reasoning of earlier answers.
            for message in messages:
                if self._required_text(message) not in text:
                    raise DataError(
                        f"model.path: the chat template leaves out the {message['role']} message "
                        f"of {problem.location}; use a checkpoint (or a tokenizer_config.json) "
                        "whose template keeps it"
                    )
        return texts

    def _required_text(self, message: ChatMessage) -> str:
        """Return the part of a message that must appear in a prompt."""
        if message["role"] != "assistant":
            return message["content"].strip()
        return split_thought(message["content"], self.chat_format.thinking_marks)[1]

    def _prompt_messages(self, problem: ChatProblem) -> list[ChatMessage]:
        """Return the messages of a prompt: system message, few-shot examples, and the problem."""
        opening, messages = list[ChatMessage](), problem.messages
        if messages[0]["role"] == "system":
            opening = [{"role": "system", "content": messages[0]["content"]}]
            messages = messages[1:]
        elif self.config.system_prompt:
            opening = [{"role": "system", "content": self.config.system_prompt}]
        return [*opening, *self._fewshot_messages, *messages]
