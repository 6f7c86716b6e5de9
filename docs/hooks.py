"""Hooks of MkDocs: roles of docstrings become code."""

import re
from typing import Any

ROLE = re.compile(r":\w+:<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:class:`rlinf.x.Name``` as ``x.Name``, because the site has pages of the API alone."""
    return ROLE.sub(lambda match: f"<code>{'.'.join(match[1].split('.')[-2:])}</code>", html)
