"""Capabilities that the components of a run require and provide, checked before it begins.

A component lists in ``requires`` what other components must provide, and in ``provides`` what it
provides itself. The values are free text, so external components may require and provide others.
Error messages quote the values of the built-in components, which follow.
"""

from __future__ import annotations

from typing import ClassVar

PROMPTS = "prompts of text"
REFERENCE_ANSWERS = "reference answers"
OBSERVATIONS = "observation vectors"
STEP_REWARDS = "rewards given while an episode runs"
TURNS = "turns that are told apart (a dialogue)"
TURN_REWARDS = "a reward for each turn"
EPISODE_REWARDS = "one reward for each episode, at its end"
LANGUAGE_MODEL = "a causal language model"
VISION = "a model that reads images"
IMAGE_INPUTS = "an engine that takes images"
SINGLE_PASS_ACTIONS = "actions by one forward pass"
VALUE_ESTIMATES = "value estimates"
DEMONSTRATIONS = "demonstrations"
ACTION_VALUES = "values of actions"
TRANSITION_REPLAY = "transitions to replay (flow=off_policy, or flow=offline)"
REPLAY_ALGORITHM = "an algorithm that learns from transitions (sac, crossq, rlpd, iql, bc)"
NO_ROLLOUTS = "a flow that collects nothing (flow=offline)"
IMITATION_LOSS = "a loss of imitating actions"
EVAL_DEMONSTRATIONS = "held-out demonstrations"
STALE_ROLLOUTS = (
    "rollouts that go on during updates (rollout.staleness above 0, and a flow that has them)"
)
SAMPLE_GROUPS = "several samples of each start (rollout.group_size above 1)"


class Component:
    """Base of environments, policies, engines, rewards and algorithms."""

    requires: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that other components must provide."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that other components may require."""
