"""Pages from the templates of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder; values are escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True)
    return environment.get_template(template).render(**values)
