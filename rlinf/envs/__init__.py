"""Environments produce the observations of a rollout; a text task is an environment with one-step
episodes."""

from rlinf.registry import Registry

environments = Registry(
    "task",
    {
        "arithmetic": "rlinf.envs.arithmetic:ArithmeticEnvironment",
        "calculator": "rlinf.envs.calculator:CalculatorEnvironment",
        "reasoning_gym": "rlinf.envs.reasoning_gym:ReasoningGymEnvironment",
        "search": "rlinf.envs.search:SearchEnvironment",
        "jsonl": "rlinf.envs.jsonl:JsonlEnvironment",
        "multiple_choice": "rlinf.envs.multiple_choice:MultipleChoiceEnvironment",
        "none": "rlinf.envs.suite:NoTask",
        "visual_questions": "rlinf.envs.visual_questions:VisualQuestionsEnvironment",
        "conversations": "rlinf.envs.conversations:ConversationsEnvironment",
        "gym": "rlinf.envs.gym:GymEnvironment",
    },
    base="rlinf.envs.base:Environment",
)
