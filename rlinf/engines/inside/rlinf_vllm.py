"""What runs inside vLLM's worker processes: weights in place, and log-probabilities of the policy.

Imported by vLLM alone (``--worker-extension-cls``), under its interpreter; torch, safetensors and
vLLM, nothing of this package.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


class PolicySampler(Sampler):
    """Log-probabilities under softmax(z / temperature), whatever then cuts what can be drawn.

    vLLM has those of softmax(z), or those after the cut. Greedy rows count as temperature 1.
    """

    def forward(self, logits, sampling_metadata: SamplingMetadata, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._temperature = sampling_metadata.temperature
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = logits.to(torch.float32)
        if self._temperature is not None:
            by = self._temperature[:, None]
            logits = logits / torch.where(by < 1e-5, torch.ones_like(by), by)
        return logits.log_softmax(dim=-1)


class Extension:
    """Methods that a worker has besides its own, called by ``/collective_rpc``."""

    def rlinf_begin(self) -> None:
        """Once, before the first request."""
        sampler = self.model_runner.sampler  # type: ignore[attr-defined]
        if type(sampler) is not Sampler:
            raise RuntimeError(f"unknown sampler {type(sampler).__name__}")
        sampler.__class__ = PolicySampler

    def rlinf_update(self, folder: str) -> None:
        """Read the weights of a folder into the model that is loaded."""

        def tensors():  # type: ignore[no-untyped-def]
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no mapping
                        yield name, file.get_tensor(name)

        self.model_runner.reload_weights(weights_iterator=tensors())  # type: ignore[attr-defined]
        repack(self.model_runner.get_model())  # type: ignore[attr-defined]


def repack(model: nn.Module) -> None:
    """On CPUs products read a packed copy of a weight, which for a tied output head stays the old
    one when the weights are loaded again."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
