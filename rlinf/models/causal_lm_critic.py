"""Causal language models with a critic, which estimates the value of the state before each token.

Engines use only the language model. The policy folder is the folder of
:mod:`rlinf.models.causal_lm` with a subfolder for the critic's weights.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlinf.errors import DataError
from rlinf.models.base import ModelSpec
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.models.hf_folder import WEIGHTS_FILE
from rlinf.models.loading import load_weights
from rlinf.models.onednn_linear import use_onednn
from rlinf.registry import LANGUAGE_MODEL, VALUE_ESTIMATES
from rlinf.safetensors_io import StreamedState, save_tensors
from rlinf.sharded_tensors import local_shard
from rlinf.verified_io import copy_file

CRITIC_FOLDER = "critic"
"""Subfolder of a policy folder for the critic's weights."""
POLICY_PREFIX, CRITIC_PREFIX = "policy.", "critic."
"""Prefixes of the tensor names of policy and critic."""
CriticType = Literal["own", "shared"]


class CausalLMCriticConfig(CausalLMConfig):
    """Options of a language model with a critic."""

    critic: CriticType = "own"
    """``own``: a separate network, initialized from the language model; ``shared``: a value head on
    the last hidden states of the language model, whose weights the value loss also trains."""


class CausalLMActorCritic(nn.Module):
    """The language model (``policy``) and its critic.

    One call computes logits and values, because sharding gathers weights per call.
    The value head is initialized with zeros, so all initial values are 0.
    """

    def __init__(self, policy: Any, kind: CriticType) -> None:
        super().__init__()
        self.policy = policy
        self.has_separate_critic = kind == "own"
        create = _create_separate_critic if self.has_separate_critic else _create_value_head
        self.critic: Any = create(policy)
        """A separate network, or the value head of a shared critic."""

    @property
    def value_head(self) -> nn.Linear:
        """The last layer of the critic."""
        head: nn.Linear = (
            self.critic.get_output_embeddings() if self.has_separate_critic else self.critic
        )
        return head

    def forward(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, K, V]`` and values ``[B, K]`` of the positions in logits_to_keep."""
        if self.has_separate_critic:
            logits = self.policy(**inputs, use_cache=False).logits
            head = dict(self.value_head.named_parameters())
            # The values of a zero head are 0, so the critic need not run.
            if not torch.is_grad_enabled() and is_untrained(head):
                return logits, logits.new_zeros(logits.shape[:-1], dtype=torch.float32)
            return logits, self.critic(**inputs, use_cache=False).logits[..., 0].float()
        hidden_states: list[Tensor] = []
        lm_head = self.policy.get_output_embeddings()
        hook = lm_head.register_forward_pre_hook(lambda _, inputs: hidden_states.append(inputs[0]))
        try:
            logits = self.policy(**inputs, use_cache=False).logits
        finally:
            hook.remove()
        return logits, self.critic(hidden_states[0])[..., 0].float()


class CausalLMCritic(CausalLM):
    """A causal language model with a critic; each value depends only on earlier tokens."""

    Config = CausalLMCriticConfig
    provides = frozenset({LANGUAGE_MODEL, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    supports_lora = False
    module: CausalLMActorCritic

    @property
    def network(self) -> Any:
        return self.module.policy

    @property
    def networks(self) -> list[Any]:
        return (
            [self.network, self.module.critic]
            if self.module.has_separate_critic
            else [self.network]
        )

    @classmethod
    def create(cls, config: CausalLMConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        super().create(config, spec, seed, folder)
        if config.path is not None:
            source = config.path.expanduser() / CRITIC_FOLDER / WEIGHTS_FILE
            if source.is_file():
                (folder / CRITIC_FOLDER).mkdir()
                copy_file(source, folder / CRITIC_FOLDER / WEIGHTS_FILE)

    @classmethod
    def wrap_network(cls, network: Any, config: Any) -> nn.Module:
        return CausalLMActorCritic(network, config.critic)

    @classmethod
    def load(cls, folder: Path, config: CausalLMConfig) -> CausalLMCritic:
        policy = super().load(folder, config)
        assert isinstance(policy, CausalLMCritic)
        policy._load_critic(folder)
        return policy

    def load_weights(self, folder: Path | None = None) -> None:
        super().load_weights(folder)
        self._load_critic(folder or self._folder)

    def _load_critic(self, folder: Path) -> None:
        """Load the critic's weights; without them, initialize the critic from the language model.

        Raises:
            DataError: The weights belong to another kind of critic.
        """
        if (folder / CRITIC_FOLDER / WEIGHTS_FILE).is_file():
            load_weights(
                self.module.critic,
                folder / CRITIC_FOLDER,
                f"{folder / CRITIC_FOLDER} (model.critic)",
            )
        else:
            initialize_critic(self.module)

    def save_state(self, folder: Path, state: StreamedState) -> None:
        policy, critic = split_state(state)
        super().save_state(folder, policy)
        (folder / CRITIC_FOLDER).mkdir(exist_ok=True)
        path, head = folder / CRITIC_FOLDER / WEIGHTS_FILE, dict[str, Tensor]()
        stream = _capture(critic.stream, self._head_names(), head)
        critic = StreamedState(critic.templates, stream)
        save_tensors(path, critic, list(critic.templates), {"format": "pt"})
        if is_untrained(head):
            # Without a file, a critic gets a zero head again, so its values are 0, too.
            shutil.rmtree(folder / CRITIC_FOLDER)

    def _head_names(self) -> set[str]:
        """Return the names of the value head's tensors in the critic."""
        head = self.module.value_head
        modules = self.module.critic.named_modules()
        prefixes = [name for name, module in modules if module is head]
        prefix = f"{prefixes[0]}." if prefixes[0] else ""
        return {prefix + name for name, _ in head.named_parameters()}

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        logits, values = self.module(inputs)
        return logits, values

    def parameter_group(self, parameter: str) -> str:
        """Return ``value`` for the critic (or the shared critic's head), else ``policy``."""
        return "value" if parameter.startswith(CRITIC_PREFIX) else "policy"

    @classmethod
    def engine_weights(cls, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return (
            (name.removeprefix(POLICY_PREFIX), tensor)
            for name, tensor in tensors
            if name.startswith(POLICY_PREFIX)
        )


@torch.no_grad()
def initialize_critic(module: CausalLMActorCritic) -> None:
    """Initialize the critic from the policy; for sharded networks, the rows of this rank."""
    networks = (module.policy, module.critic)
    policy, critic = (network.state_dict(keep_vars=True) for network in networks)
    head_ids = {id(tensor) for tensor in module.value_head.parameters()}
    for name, tensor in critic.items():
        if id(tensor) in head_ids:
            local_shard(tensor).zero_()
        else:
            local_shard(tensor).copy_(local_shard(policy[name]))


def is_untrained(head: Mapping[str, Tensor]) -> bool:
    """Return whether a head is all zeros. Empty tensors (ZeRO 3) count as trained."""
    return all(tensor.numel() and not tensor.any() for tensor in head.values())


def split_state(state: StreamedState) -> tuple[StreamedState, StreamedState]:
    """Split a streamed state into the states of the language model and of the critic.

    While one is read, tensors of the other are buffered. No tensor is buffered if all tensors of
    the language model precede those of the critic and are read first.
    """
    buffered: dict[str, list[tuple[str, Tensor]]] = {POLICY_PREFIX: [], CRITIC_PREFIX: []}

    def select(prefix: str) -> StreamedState:
        templates = {
            n.removeprefix(prefix): t for n, t in state.templates.items() if n.startswith(prefix)
        }

        def stream() -> Iterator[tuple[str, Tensor]]:
            remaining = len({id(tensor) for tensor in templates.values()})
            while remaining:
                if buffered[prefix]:
                    name, tensor = buffered[prefix].pop(0)
                else:
                    name, tensor = next(state.stream)
                if name.startswith(prefix):
                    remaining -= 1
                    yield name.removeprefix(prefix), tensor
                else:
                    other_prefix = POLICY_PREFIX if prefix == CRITIC_PREFIX else CRITIC_PREFIX
                    buffered[other_prefix].append((name, tensor))
                del tensor

        return StreamedState(templates, stream())

    return select(POLICY_PREFIX), select(CRITIC_PREFIX)


def _capture(
    tensors: Iterable[tuple[str, Tensor]], names: set[str], captured: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, and store the ones with these names in ``captured``."""
    for name, tensor in tensors:
        if name in names:
            captured[name] = tensor
        yield name, tensor


def _create_value_head(model: Any) -> nn.Linear:
    """Create a value head for the hidden states that the language model's head reads.

    Raises:
        DataError: The language model has no linear head.
    """
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise DataError(
            f"model.critic: models of type {model.config.model_type!r} have no linear output head "
            "beside which a value head could be added"
        )
    # On the device of the weights, which may be meta.
    weight = lm_head.weight
    return nn.Linear(lm_head.in_features, 1, device=weight.device, dtype=weight.dtype)


def _create_separate_critic(model: Any) -> Any:
    """Copy the language model and replace its head by a value head."""
    critic, head = copy.deepcopy(model), _create_value_head(model)
    critic.config.tie_word_embeddings = False
    # A soft cap of logits would also cap values.
    if hasattr(critic.config, "final_logit_softcapping"):
        critic.config.final_logit_softcapping = None
    critic.set_output_embeddings(head)
    use_onednn(critic)
    return critic
