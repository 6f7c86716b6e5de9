"""Patches for SGLang; runs instead of the server ``sglang.launch_server``.

SGLang spawns its processes, which import this file again, so the patches apply to all of them. This
file runs under SGLang's interpreter and imports only torch, uvicorn and SGLang.

- The server listens at the Unix socket in ``RLINF_SOCKET`` and at no port.
- A request's seed works without SGLang's deterministic mode, which needs other attention kernels.
- Log-probabilities are those of softmax(z / temperature) before truncation and token bans.
- top_k, top_p and min_p are applied one after the other and work with a seed. Each token uses one
  random number, which depends on seed and position.
- Stop tokens are banned for the first min_new_tokens of a response, also after a request was
  evicted from a full cache.
- If a checkpoint ties the output head to the embeddings, it is tied in mixtures of experts, too.
"""

import os
import runpy

import torch
import uvicorn
from sglang.srt.layers import sampler
from sglang.srt.model_loader import loader
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class UnixSocketConfig(uvicorn.Config):
    """A uvicorn configuration with the Unix socket."""

    def __init__(self, *args, **options):  # type: ignore[no-untyped-def]
        super().__init__(*args, uds=os.environ["RLINF_SOCKET"], **options)


def set_sampling_seeds(self, batch, vocab_size):  # type: ignore[no-untyped-def]
    """Set the seed of each row from its request."""
    # SGLang's own health requests have no seed.
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    self.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def save_plain_logits(self, logits):  # type: ignore[no-untyped-def]
    """Save the logits before stop tokens are banned and the sampler overwrites them."""
    self.plain_logits = logits.clone()
    sglang_apply_logits_bias(self, logits)


def sampler_forward(self, output, info, *args, **options):  # type: ignore[no-untyped-def]
    """Sample tokens. If all rows are greedy, divide the logits by the temperature first, because
    SGLang then ignores it."""
    logits = info.plain_logits
    info.plain_logits = None
    if info.is_all_greedy:
        logits = logits / info.temperatures
    return sglang_sampler_forward(
        self, output, info, *args, **{**options, "logprob_logits": logits}
    )


def sample_truncated(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions, **_):  # type: ignore[no-untyped-def]
    """Sample tokens ``[B]`` int32 from truncated probabilities ``[B, V]``."""
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    largest = sorted_probs[:, :1].clone()
    rank = torch.arange(sorted_probs.shape[-1], device=probs.device)
    allowed = sorted_probs.masked_fill(rank >= top_ks[:, None], 0.0)
    preceding = allowed.cumsum(-1) - allowed
    nucleus = top_ps[:, None] * allowed.sum(-1, keepdim=True)
    allowed = allowed.masked_fill(preceding >= nucleus, 0.0)
    if need_min_p:
        allowed = allowed.masked_fill(allowed < min_ps[:, None] * largest, 0.0)
    # Restore the vocabulary order of sample_full, so that both functions choose the same token:
    # SGLang decides for the whole batch which of the two runs.
    return sample_full(torch.zeros_like(allowed).scatter_(1, order, allowed), seeds, positions)


def sample_full(probs, sampling_seed, positions):  # type: ignore[no-untyped-def]
    """Sample tokens from full probabilities by inverting the cumulative distribution."""
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding up to the total would skip all tokens.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(hash_uniforms(sampling_seed, positions)[:, None] * total, below)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].to(torch.int32)


def hash_uniforms(seeds, positions):  # type: ignore[no-untyped-def]
    """Return numbers in [0, 1) ``[B]`` for seeds and positions: the finalizer of SplitMix64
    (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""

    def shifted(x, by):  # type: ignore[no-untyped-def]
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = seeds + (positions.long() + 1) * (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return shifted(x ^ shifted(x, 31), 11).double() * 2.0**-53


def prepare_min_tokens(self):  # type: ignore[no-untyped-def]
    """Count the tokens that a request already has; SGLang starts at zero."""
    sglang_prepare(self)
    counts = [[len(request.output_ids)] for request in self.orchestrator.reqs()]
    self.len_output_tokens += torch.tensor(counts, dtype=torch.int32).to(self.orchestrator.device)


def initialize_model(model_config, *args, **options):  # type: ignore[no-untyped-def]
    """Create the model and tie its output head to the embeddings if its configuration does.

    SGLang's mixtures of experts have a separate head, for which the checkpoint has no weights.
    """
    model = sglang_initialize_model(model_config, *args, **options)
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    if tied and head is not embeddings and hasattr(head, "weight") and embeddings is not None:
        head.weight = embeddings.weight
    return model


sglang_initialize_model = loader._initialize_model
sglang_prepare = BatchedMinNewTokensPenalizer._prepare
sglang_apply_logits_bias, sglang_sampler_forward = (
    SamplingBatchInfo.apply_logits_bias,
    sampler.Sampler.forward,
)
loader._initialize_model = initialize_model
BatchedMinNewTokensPenalizer._prepare = prepare_min_tokens
SamplingBatchInfo.adjusted_from_schedule_batch = set_sampling_seeds
SamplingBatchInfo.apply_logits_bias = save_plain_logits
sampler.Sampler.forward = sampler_forward
sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample_truncated
sampler.sampling_from_probs_torch = sample_full

if __name__ == "__main__":
    uvicorn.Config = UnixSocketConfig
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
