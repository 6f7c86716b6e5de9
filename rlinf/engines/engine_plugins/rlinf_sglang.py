"""SGLang as this package needs it; run in place of ``sglang.launch_server``, its server.

Its processes are spawned and import this file again, so that what is changed here is changed in all
of them. Under SGLang's interpreter: torch, uvicorn and SGLang, nothing of this package.

- A server takes requests at the socket of the file system that ``RLINF_SOCKET`` names, and at no
  port.
- A request's seed counts without SGLang's deterministic mode, which wants attention of other kinds.
- Log-probabilities are those of softmax(z / temperature) before anything is cut off or forbidden.
- top_k, top_p and min_p cut one after the other, and go with a seed; a token takes one number,
  which follows from seed and place.
- Stop tokens are forbidden for the first min_new_tokens of a response, also of one that was taken
  out of a full cache and goes on later.
- Where a checkpoint ties the output head to the embeddings, so it is in mixtures of experts too.
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
    """A server's settings, with the socket."""

    def __init__(self, *args, **options):  # type: ignore[no-untyped-def]
        super().__init__(*args, uds=os.environ["RLINF_SOCKET"], **options)


def set_sampling_seeds(self, batch, vocab_size):  # type: ignore[no-untyped-def]
    """Give each row the seed of its request."""
    # Those of SGLang's own checks have none.
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    self.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def save_plain_logits(self, logits):  # type: ignore[no-untyped-def]
    """Before stop tokens are forbidden, and before the sampler writes over them."""
    self.plain_logits = logits.clone()
    _bias(self, logits)


def sampler_forward(self, output, info, *args, **options):  # type: ignore[no-untyped-def]
    """Sample; a batch whose rows are all greedy forgets the temperature of those with top_k 1."""
    logits = info.plain_logits
    info.plain_logits = None
    if info.is_all_greedy:
        logits = logits / info.temperatures
    return _forward(self, output, info, *args, **{**options, "logprob_logits": logits})


def sample_truncated(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions, **_):  # type: ignore[no-untyped-def]
    """Tokens ``[B]`` int32 of probabilities ``[B, V]``, among what the settings ``[B]`` leave."""
    kept, order = probs.sort(dim=-1, descending=True, stable=True)
    most = kept[:, :1].clone()
    rank = torch.arange(kept.shape[-1], device=kept.device)
    kept = kept.masked_fill(rank >= top_ks[:, None], 0.0)
    before = kept.cumsum(-1) - kept
    kept = kept.masked_fill(before >= top_ps[:, None] * kept.sum(-1, keepdim=True), 0.0)
    if need_min_p:
        kept = kept.masked_fill(kept < min_ps[:, None] * most, 0.0)
    # In the order of the vocabulary, as where nothing is cut: rows beside it may decide which.
    return sample_full(torch.zeros_like(kept).scatter_(1, order, kept), seeds, positions)


def sample_full(probs, sampling_seed, positions):  # type: ignore[no-untyped-def]
    """The same without settings, by inverting the cumulative distribution."""
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1:]
    # Rounded up to the total it would pass by every token that can be drawn.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(hash_uniforms(sampling_seed, positions)[:, None] * total, below)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].to(torch.int32)


def hash_uniforms(seeds, positions):  # type: ignore[no-untyped-def]
    """Numbers in [0, 1) ``[B]`` of seeds and places in a sequence: the finalizer of SplitMix64
    (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""

    def shifted(x, by):  # type: ignore[no-untyped-def]
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = seeds + (positions.long() + 1) * (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return shifted(x ^ shifted(x, 31), 11).double() * 2.0**-53


def prepare_min_tokens(self):  # type: ignore[no-untyped-def]
    """Count the tokens that a request has already: SGLang begins at none."""
    _prepare(self)
    counts = [[len(request.output_ids)] for request in self.orchestrator.reqs()]
    self.len_output_tokens += torch.tensor(counts, dtype=torch.int32).to(self.orchestrator.device)


def initialize_model(model_config, *args, **options):  # type: ignore[no-untyped-def]
    """A network whose output head is its embeddings, where the checkpoint says so.

    SGLang's mixtures of experts have a head of their own, which no weights come for then.
    """
    model = _make(model_config, *args, **options)
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    if tied and head is not embeddings and hasattr(head, "weight") and embeddings is not None:
        head.weight = embeddings.weight
    return model


_make = loader._initialize_model
_prepare = BatchedMinNewTokensPenalizer._prepare
_bias, _forward = SamplingBatchInfo.apply_logits_bias, sampler.Sampler.forward
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
