"""The extension of vLLM's workers: weight updates in place and log-probabilities of the policy.

Only vLLM imports this module (``--worker-extension-cls``), under its interpreter. It uses torch,
safetensors and vLLM. A worker is a process of a server or runs in the stage's process.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from vllm.platforms import current_platform
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


class PolicySampler(Sampler):
    """A sampler that returns log-probabilities of softmax(z / temperature) before truncation.

    vLLM itself offers those of softmax(z) or those after truncation. Greedy rows use temperature 1.
    So do prompts (``prompt_logprobs``), which are scored outside of :meth:`forward`.
    """

    _temperature = None

    def forward(self, logits, sampling_metadata: SamplingMetadata, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = logits.to(torch.float32)
        if self._temperature is not None:
            divisor = self._temperature[:, None]
            logits = logits / torch.where(divisor < 1e-5, torch.ones_like(divisor), divisor)
        return logits.log_softmax(dim=-1)


class GeneratorStateGuard:
    """A mixin for the model runner, so that chunked prefill uses up no random numbers of a request.

    After each chunk vLLM samples a token, discards it, and resets the offset of the request's
    random generator. Only GPU generators have an offset, so this class resets CPU generators.
    """

    def _sample(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()  # type: ignore[attr-defined]
        generators = self.input_batch.generators  # type: ignore[attr-defined]
        affected = {row: generators[row] for row in rows if row in generators}
        self._saved_states = {
            row: (generator, generator.get_state())
            for row, generator in affected.items()
            if generator.device.type == "cpu"
        }
        return super()._sample(*args, **kwargs)  # type: ignore[misc]

    def _bookkeeping_sync(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        generators = self.input_batch.generators  # type: ignore[attr-defined]
        for row, (generator, state) in self._saved_states.items():
            generator.set_state(state)
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            # A request has the same row until the next step is prepared.
            generators.update(
                {row: generator for row, (generator, _) in self._saved_states.items()}
            )


class WorkerExtension:
    """Additional methods of a worker, called with ``collective_rpc``."""

    def rlinf_setup(self) -> None:
        """Patch the model runner; called once before the first request."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if type(runner.sampler) is not Sampler:
            raise RuntimeError(f"unknown sampler {type(runner.sampler).__name__}")
        runner.sampler.__class__ = PolicySampler
        runner.__class__ = type("PolicyRunner", (GeneratorStateGuard, type(runner)), {})

    def rlinf_load_folder(self, folder: str) -> None:
        """Load the weights of a folder into the loaded model."""

        def tensors():  # type: ignore[no-untyped-def]
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no mapping
                        yield name, file.get_tensor(name)

        self.rlinf_load_weights(tensors())

    def rlinf_load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights, by their names in checkpoints, into the loaded model.

        vLLM buffers weights that it joins until all of them have arrived.

        Raises:
            RuntimeError: A parameter received no weights (vLLM only warns); its values are
                undefined.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        load, missing = model.load_weights, {name for name, _ in model.named_parameters()}

        def load_and_record(weights):  # type: ignore[no-untyped-def]
            loaded = load(weights)
            # None: the model does not report which weights it loaded.
            missing.difference_update(missing if loaded is None else loaded)
            return loaded

        model.load_weights = load_and_record
        reset_packed_experts(model)
        try:
            self.model_runner.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        if missing:
            raise RuntimeError(
                f"no weights for {min(missing)} and {len(missing) - 1} other parameters"
            )
        repack_linear_weights(model)


def reset_packed_experts(model: nn.Module) -> None:
    """Discard the expert kernels on CPUs. A kernel packs the weights only when it is created, and
    would read newer weights as if they were packed."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_linear_weights(model: nn.Module) -> None:
    """Pack linear weights again on CPUs. For a tied output head, vLLM would use the old packed copy
    after the weights are loaded again."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
