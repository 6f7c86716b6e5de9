"""What may be secret is hidden, whatever holds it, and all else stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config import REDACTED, redact


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"cluster": {"env": {"A": "x"}}}, {"cluster": {"env": {"A": REDACTED}}}),
        (
            {"cluster": {"notify_command": ["curl", "x"]}},
            {"cluster": {"notify_command": [REDACTED, REDACTED]}},
        ),
        ({"wandb": {"api_key": "x"}}, {"wandb": {"api_key": REDACTED}}),
        (
            {"hub": {"HF_TOKEN": "x", "b_password": "y"}},
            {"hub": {"HF_TOKEN": REDACTED, "b_password": REDACTED}},
        ),
        ({"secret": ["x", "y"]}, {"secret": [REDACTED, REDACTED]}),
        ({"url": "https://u:p@host:1/v1"}, {"url": f"https://{REDACTED}@host:1/v1"}),
        ({"urls": ["http://t@h", "http://h"]}, {"urls": [f"http://{REDACTED}@h", "http://h"]}),
        ({"url": "https://h/a?token=x&b=c"}, {"url": f"https://h/a?token={REDACTED}&b=c"}),
    ],
)
def test_secrets_are_hidden(values: Any, wanted: Any) -> None:
    assert redact(values) == wanted


@given(
    st.dictionaries(
        st.sampled_from(
            ["max_tokens", "max_tokens_per_microbatch", "lr", "api_key_env", "path", "url"]
        ),
        st.none() | st.integers() | st.booleans() | st.sampled_from(["", "a@b", "https://h/a?b=c"]),
    )
)
def test_all_else_stays(values: dict[str, Any]) -> None:
    assert redact(
        {"section": values, "empty": {"env": {}, "notify_command": [], "token": None}}
    ) == {
        "section": values,
        "empty": {"env": {}, "notify_command": [], "token": None},
    }
