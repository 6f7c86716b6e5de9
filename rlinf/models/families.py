"""Which families of the model library can be policies, and why others cannot."""

from __future__ import annotations

from typing import Any

from rlinf.errors import DataError

ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Families that are encoders unless their ``config.json`` has ``is_decoder`` true."""
DRAFTS = "it drafts tokens from the hidden states of another model and reads no text by itself"
SOUND = "its tokens are those of sound, several at each step"
REFUSED = {
    "blt": "it reads bytes in patches that a second network cuts",
    "cpmant": "its positions depend on the padding of its input",
    "dots3_note": "only its language model by itself (dots3_note_text) was tried",
    "emu3": "it writes images as well, whose tokens no task reads",
    "gemma4_assistant": DRAFTS,
    "gemma4_unified_assistant": DRAFTS,
    "moshi": SOUND,
    "musicgen": SOUND,
    "musicgen_melody": SOUND,
    "prophetnet": "each of its positions predicts several tokens from streams of their own",
    "reformer": "its attention draws random hashes and takes lengths of whole chunks only",
    "xlm": "it reads tokens in both directions",
    "xlnet": "it reads tokens in both directions",
}
"""Families that the library counts among causal language models, and why they cannot be trained as
policies of tokens."""


def check_causal(settings: Any, where: str) -> None:
    """See that each token of a model follows from the tokens before it alone.

    Args:
        settings: the library's configuration of the model.
        where: what an error calls its folder.

    Raises:
        DataError: it does not, so the model cannot be a policy.
    """
    family = settings.model_type
    why = REFUSED.get(family)
    if getattr(settings, "is_encoder_decoder", False):
        why = "it answers what an encoder has read (is_encoder_decoder in config.json)"
    elif family in ENCODERS and not settings.is_decoder:
        why = "it reads tokens in both directions (is_decoder is not true in config.json)"
    if why is not None:
        raise DataError(
            f"{where} is a {family!r} model, which cannot generate and be trained token by token: "
            f"{why}; choose a decoder such as Qwen3 or Llama"
        )
