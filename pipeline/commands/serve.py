"""``rlinf serve``: an OpenAI-compatible endpoint of a model folder or of a run's weights."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeline.commands.experiment import compose_words
from pipeline.commands.results import resolve_weights
from pipeline.validate_config import SERVED_SECTIONS, check_served_model
from rlinf.artifacts import write_atomic
from rlinf.config import RunConfig, validate
from rlinf.data.cache_folder import cache_folder
from rlinf.errors import (
    ConfigError,
    InputError,
    RlinfError,
    require_package,
    translate_resource_errors,
)
from rlinf.hydra_config import to_override_value

if TYPE_CHECKING:  # imported when a model is served
    from rlinf.engines.base import Engine
    from rlinf.serving.engine_service import EngineService
    from rlinf.serving.openai_api import ServedModel

KEY_VARIABLE = "RLINF_API_KEY"
"""Environment variable with the API key; without it, a new key is written to a file."""
MIN_KEY_LENGTH = 16
DEFAULT_HOST = "127.0.0.1"
SHUTDOWN_TIMEOUT_S = 10
"""Longest time that running responses get when the server ends, seconds."""
log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class Address:
    """The address of an endpoint."""

    host: str = DEFAULT_HOST
    port: int = 8000
    """0: any free port."""


def serve_model(
    model: Path,
    overrides: Sequence[str],
    version: int | None = None,
    name: str | None = None,
    address: Address | None = None,
) -> None:
    """Serve a model until an interrupt, a termination signal, or an error of the engine.

    Args:
        model: a Hugging Face folder, or a run directory.
        overrides: overrides of the sections ``engine`` and ``model``.
        version: version of the weights, if ``model`` is a run; by default the best or the newest.
        name: name of the model in requests; by default that of the folder.
        address: where to listen.

    Raises:
        ConfigError, DataError, InputError: the model cannot be served.
        RlinfError: the engine failed.
    """
    require_package("starlette", "serve", "rlinf serve")
    require_package("uvicorn", "serve", "rlinf serve")
    folder, weights_version = resolve_weights(model, version)
    given_key = key_from_environment()
    with translate_resource_errors():
        config = serving_config(folder, overrides)
        with listen(address or Address()) as listener, stop_signals() as stop:
            engine, served = load_model(
                config, folder, weights_version, name or model.expanduser().absolute().name
            )
            try:
                with api_key(given_key, listener) as (key, key_file):
                    _serve(engine, served, listener, key, key_file, stop)
            finally:
                engine.close()


def serving_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of model and engine.

    Raises:
        ConfigError: an override belongs to another section, or is invalid.
    """
    for word in overrides:
        section = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if section not in SERVED_SECTIONS:
            raise ConfigError(
                f"{word}: an endpoint depends only on the sections {' and '.join(SERVED_SECTIONS)},"
                " such as engine=vllm or engine.max_num_seqs=64; clients choose the sampling"
            )
    path = f"model.path={to_override_value(str(folder))}"
    values = compose_words(["experiment=evaluation", "run.name=serve", path, *overrides])
    return validate(RunConfig, values)


def load_model(
    config: RunConfig, folder: Path, version: int, name: str
) -> tuple[Engine, ServedModel]:
    """Return an engine with the weights of a folder, and the description of the model.

    Raises:
        ConfigError, DataError: model and engine do not fit, or a file is damaged.
    """
    from rlinf import mkl_warmup
    from rlinf.models.chat_format import ChatFormat
    from rlinf.serving.openai_api import ServedModel

    run = check_served_model(config)
    policy_cls, options = run.classes["model"], run.options["model"]
    mkl_warmup.warm_up()
    engine: Engine = run.classes["engine"](run.options["engine"], policy_cls, options)
    log.info("loading %s", folder)
    try:
        engine.load(folder, version)
        limits = (policy_cls.max_model_len(options), engine.max_model_len)
        return engine, ServedModel(
            name,
            ChatFormat.from_tokenizer(policy_cls.processor(folder, options)),
            min((limit for limit in limits if limit is not None), default=None),
            version,
        )
    except BaseException:
        engine.close()
        raise


def key_from_environment() -> str | None:
    """Return the API key in :data:`KEY_VARIABLE`; None if it is not set.

    Raises:
        ConfigError: the key is too short, or has characters that no header can have.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{KEY_VARIABLE}: a key has at least {MIN_KEY_LENGTH} printable ASCII characters and no"
            " spaces; unset the variable to get a random one"
        )
    return key


@contextmanager
def api_key(given: str | None, listener: socket.socket) -> Iterator[tuple[str, Path | None]]:
    """Return the API key, and the private file of a generated one, which is removed at the end."""
    if given is not None:
        yield given, None
        return
    port = listener.getsockname()[1]
    path = cache_folder().parent / f"serve-{socket.gethostname()}-{port}.key"
    key = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, key, private=True)
    except OSError as error:
        raise InputError(
            f"{path}: the API key cannot be written ({error.strerror}); set {KEY_VARIABLE}, or "
            "XDG_CACHE_HOME to a folder that you can write to"
        ) from None
    try:
        yield key, path
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def listen(address: Address) -> Iterator[socket.socket]:
    """Return a listening socket.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        ((family, *_, resolved), *_) = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.create_server(resolved[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"--host {address.host} --port {address.port}: {error.strerror or error}; choose "
            "another port (0: any free one) or host"
        ) from None
    with listener:
        yield listener


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Return an event that SIGINT and SIGTERM set; a second signal has its usual effect."""
    event = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: object) -> None:
        event.set()
        signal.signal(number, previous[signal.Signals(number)])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve(
    engine: Engine,
    model: ServedModel,
    listener: socket.socket,
    key: str,
    key_file: Path | None,
    stop: threading.Event,
) -> None:
    """Serve requests until the stop event or an error of the engine."""
    import uvicorn

    from rlinf.serving.engine_service import EngineService
    from rlinf.serving.openai_api import create_app

    service: EngineService = EngineService(engine)
    settings = uvicorn.Config(
        create_app(service, model, key),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    server = uvicorn.Server(settings)
    # In another thread, uvicorn leaves the signals to this one.
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        typer.echo("\n".join(usage_lines(model, listener, key_file)))
        while not (stop.wait(0.2) or service.ended.is_set() or not thread.is_alive()):
            pass
    finally:
        server.should_exit = True
        service.close()
        thread.join(2 * SHUTDOWN_TIMEOUT_S)
    if not (stop.is_set() or service.error):
        raise RlinfError("the web server ended; its messages are above")
    if isinstance(service.error, RlinfError):
        raise service.error
    if service.error is not None:
        raise RlinfError(f"the engine failed: {service.error!r}") from service.error
    typer.echo("stopped")


def usage_lines(model: ServedModel, listener: socket.socket, key_file: Path | None) -> list[str]:
    """Return what a user needs to know to send requests."""
    host, port = listener.getsockname()[:2]
    is_local = host in ("127.0.0.1", "::1")
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    key = f"${KEY_VARIABLE}" if key_file is None else f"$(cat {key_file})"
    lines = [
        f"serving {model.name} (weights version {model.version}) at http://{shown}:{port}/v1",
        f"for clients: export OPENAI_BASE_URL=http://{shown}:{port}/v1 OPENAI_API_KEY={key}",
        "Ctrl-C ends the server",
    ]
    if not is_local:
        lines.append("requests and the key cross the network unencrypted; trust the network")
    return lines
