"""The keys of a run: made once in its directory, readable by its owner alone."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from rlinf.errors import InputError

FILE = "curve-keys.json"


class Keys(NamedTuple):
    """CURVE key pairs (https://rfc.zeromq.org/spec/26/) of the hosts and of the clients, Z85 text.

    Whoever can read the run directory may take part; a client must know the host's public key, and
    a host admits the run's client key alone.
    """

    host_public: str
    host_secret: str
    client_public: str
    client_secret: str


def run_keys(folder: Path) -> Keys:
    """The keys in a run's ``folder`` (made with mode 0700); the first caller makes them.

    Raises:
        InputError: folder or file belong to another user, others may change the folder or read the
            file, or the file is damaged.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022:
        raise InputError(
            f"{folder}: holds the run's keys, and others may put files there (owner "
            f"{info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}); it must be yours with mode "
            f"0700: delete it, or chmod 0700 if nobody else was there, and start the run again"
        )
    path = folder / FILE
    if not path.exists():
        _make(path)
    with os.fdopen(_open(path), encoding="utf-8") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise InputError(
                f"{path}: the run's keys must belong to you alone (mode 0600); "
                "they may be known to others, so delete the file and start the run again"
            )
        try:
            keys = Keys(**json.load(file))
            for key in keys:
                z85.decode(key)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: damaged ({error}); delete it and start again") from None
    return keys


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path}: is a link; delete it and start the run again") from None


def _make(path: Path) -> None:
    pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(Keys(*pairs)._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # Fails when another process was first: all use one set of keys.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
