"""What may be secret is hidden, whatever holds it, and all else stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.redaction import HIDDEN, redacted


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"cluster": {"env": {"A": "x"}}}, {"cluster": {"env": {"A": HIDDEN}}}),
        ({"cluster": {"notify": ["curl", "x"]}}, {"cluster": {"notify": [HIDDEN, HIDDEN]}}),
        ({"wandb": {"api_key": "x"}}, {"wandb": {"api_key": HIDDEN}}),
        (
            {"hub": {"HF_TOKEN": "x", "b_password": "y"}},
            {"hub": {"HF_TOKEN": HIDDEN, "b_password": HIDDEN}},
        ),
        ({"secret": ["x", "y"]}, {"secret": [HIDDEN, HIDDEN]}),
        ({"url": "https://u:p@host:1/v1"}, {"url": f"https://{HIDDEN}@host:1/v1"}),
        ({"urls": ["http://t@h", "http://h"]}, {"urls": [f"http://{HIDDEN}@h", "http://h"]}),
        ({"url": "https://h/a?token=x&b=c"}, {"url": f"https://h/a?token={HIDDEN}&b=c"}),
    ],
)
def test_secrets_are_hidden(values: Any, wanted: Any) -> None:
    assert redacted(values) == wanted


@given(
    st.dictionaries(
        st.sampled_from(["max_tokens", "token_budget", "lr", "key_variable", "path", "url"]),
        st.none() | st.integers() | st.booleans() | st.sampled_from(["", "a@b", "https://h/a?b=c"]),
    )
)
def test_all_else_stays(values: dict[str, Any]) -> None:
    assert redacted({"section": values, "empty": {"env": {}, "notify": [], "token": None}}) == {
        "section": values,
        "empty": {"env": {}, "notify": [], "token": None},
    }
