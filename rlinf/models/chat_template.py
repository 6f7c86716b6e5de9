"""Rendering of chat templates in a subprocess with time and memory limits.

A template comes with a checkpoint and may be an untrusted program. Jinja's sandbox protects files
and Python internals, but does not limit time and memory; a subprocess does. One process renders all
conversations of a call and imports only Jinja. Templates can use what ``transformers`` provides:
trimmed blocks, loop controls, ``raise_exception``, ``tojson``, ``strftime_now``. The date is
constant, so that prompts do not change when a run is resumed on another day.
"""

from __future__ import annotations

import datetime
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.errors import DataError
from rlinf.package_paths import child_python_path

ChatMessage = Mapping[str, str]
"""A message with ``role`` and ``content``."""
FIRST_RENDER_S, RENDER_S = 10.0, 0.05
"""Time limit of a subprocess, and its increase per conversation, seconds."""
MEMORY_BYTES = 2 << 30
"""Memory limit of a subprocess."""
TEMPLATE_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""The date that ``strftime_now`` formats."""


def render_conversations(
    template: str,
    conversations: Sequence[Sequence[ChatMessage]],
    variables: Mapping[str, Any],
    key: str,
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    """Render conversations with a chat template.

    Args:
        template: The Jinja template.
        conversations: Messages of each conversation.
        variables: Further variables of the template, such as ``bos_token`` and arguments.
        key: The configuration key, for error messages.
        add_generation_prompt: Whether the text ends with the start of an assistant's answer.

    Raises:
        DataError: The template is malformed, rejects a conversation, or exceeds a limit.
    """
    if not conversations:
        return []
    limit_s = FIRST_RENDER_S + RENDER_S * len(conversations)
    request = {
        "template": template,
        "variables": dict(variables),
        "conversations": [list(map(dict, messages)) for messages in conversations],
        "limit_s": limit_s,
        "add_generation_prompt": add_generation_prompt,
    }
    texts: list[str] = _run_subprocess(request, key)["texts"]
    return texts


def template_variables(template: str, key: str) -> set[str]:
    """Return the names of all undeclared variables of a template.

    Raises:
        DataError: The template is malformed.
    """
    return set(_run_subprocess({"template": template, "limit_s": FIRST_RENDER_S}, key)["names"])


def _run_subprocess(request: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Run :func:`run_renderer` in a subprocess and return its result."""
    limit_s = float(request["limit_s"])
    try:
        process = subprocess.run(
            [
                sys.executable,
                "-c",
                "from rlinf.models.chat_template import run_renderer; run_renderer()",
            ],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
            timeout=limit_s,
            env={"PYTHONPATH": child_python_path(), "PATH": ""},
        )
    except subprocess.TimeoutExpired:
        raise DataError(_limit_message(key, limit_s)) from None
    if process.returncode < 0:
        raise DataError(_limit_message(key, limit_s))
    try:
        result = json.loads(process.stdout)
    except ValueError:
        tail = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(f"{key}: the chat template cannot be rendered ({tail[:200]})") from None
    if "error" in result:
        raise DataError(f"{key}: the chat template cannot be used: {result['error']}")
    return dict(result)


def _limit_message(key: str, limit_s: float) -> str:
    return (
        f"{key}: the chat template did not end within {limit_s:.0f} s and "
        f"{MEMORY_BYTES >> 30} GiB; use a checkpoint whose template you trust"
    )


def run_renderer() -> None:
    """Main function of the subprocess: read a request from stdin and write the result to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    limit_s = int(request["limit_s"]) + 1
    from jinja2.exceptions import TemplateError

    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        result: dict[str, Any] = _handle_request(request)
    except MemoryError:
        result = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        location = f" (line {line})" if line else ""
        result = {"error": f"{str(error)[:200]}{location}"}
    except Exception as error:  # templates may raise any exception
        result = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    sys.stdout.write(json.dumps(result))


def _handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    from jinja2 import meta

    jinja = jinja_environment()
    if "conversations" not in request:
        return {"names": sorted(meta.find_undeclared_variables(jinja.parse(request["template"])))}
    compiled = jinja.from_string(request["template"])
    texts = [
        compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=request["add_generation_prompt"],
            **request["variables"],
        )
        for messages in request["conversations"]
    ]
    return {"texts": texts}


def jinja_environment() -> Any:
    """Create the Jinja environment that chat templates expect."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag ``{% generation %}`` around assistant text; the text is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    jinja.filters["tojson"] = tojson
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return jinja
