"""What the parts of a run need of each other: declared by each class, checked before a run begins.

A part says in ``needs`` what others must give, and in ``offers`` what it gives itself. The words
are free: a part from outside may bring its own, as long as another part offers it. Those of the
parts here follow; error messages quote them.
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
    """Base of environments, policies, engines, rewards and algorithms; flows have both too."""

    requires: ClassVar[frozenset[str]] = frozenset()
    """What other parts must offer."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """What other parts may need."""
