"""Settings without what may be secret, for pages and trackers that other people read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not shown)"
WHOLE = frozenset({"env", "notify"})
"""Keys whose values are hidden one by one: variables of processes, and the words of a command."""
SECRET = re.compile(r"(?:^|[_\W])(?:token|secret|passw(?:or)?d|api_?key|credentials?)$", re.I)
"""Keys of texts that are secrets; a number under such a key is none."""
LOGIN = re.compile(r"(?<=://)[^/\s?#]+@")
QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:token|secret|password|key|signature)=)[^&#\s]+", re.I)


def redacted(value: Any, key: str = "") -> Any:
    """Return settings, or any plain value, with :data:`HIDDEN` in place of what may be secret.

    Hidden are the values of ``cluster.env`` and ``cluster.notify``, texts under keys that end in
    token, secret, password or api_key, and in each URL the login and such parts of its query.
    """
    if isinstance(value, Mapping):
        return {
            name: redacted(item, key if key in WHOLE else str(name)) for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(item, key) for item in value)
    if key in WHOLE and value is not None:
        return HIDDEN
    if not isinstance(value, str) or not value:
        return value
    if SECRET.search(key):
        return HIDDEN
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub(f"{HIDDEN}@", value))
