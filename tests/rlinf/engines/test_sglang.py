"""SGLang's settings, in its server and in process: nothing of it needs to be here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf.engines import engines
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM
from tests.contracts.test_engine import TOKENS


@pytest.mark.parametrize("name", ["sglang", "sglang_in_process"])
def test_a_sample_fits_into_its_cache(name: str, tmp_path: Path) -> None:
    """Else SGLang ends it early, as if it were through."""
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, tmp_path)
    cls = engines.get(name)

    def context(**settings: Any) -> int:
        engine = cls(cls.Config(**settings), CausalLM, TOKENS)
        engine._read_model(tmp_path)
        return int(engine._max_model_len)

    assert context() == context(max_total_tokens=520) == 512
    assert context(max_total_tokens=519) == 511
    assert context(max_total_tokens=408, max_model_len=400) == 400
    with pytest.raises(ConfigError, match=r"engine\.max_total_tokens: 407 .*sample of 400"):
        context(max_total_tokens=407, max_model_len=400)
