"""Whose bytes a model folder holds: links that lead elsewhere are refused."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf.errors import DataError
from rlinf.private import places_of


def check_links(folder: Path) -> None:
    """See that the files of a checkpoint folder are its owner's and lie in it.

    A link may lead to a file in one of the folder's places, of the folder's owner, this user or
    root. Whoever may write to the place that another link leads to would choose what is trained.

    Raises:
        DataError: names the link and says what to do.
    """
    home, allowed = folder.resolve(), places_of(folder)
    owners = {home.stat().st_uid, os.getuid(), 0}
    for path in sorted(home.rglob("*")):
        if not path.is_symlink():
            continue
        target = path.resolve()
        name = f"model.path: {folder}: {path.relative_to(home)}"
        if not any(target.is_relative_to(place) for place in allowed):
            raise DataError(
                f"{name} is a link that leads out of the folder, to {target}; copy the file in its "
                f"place (cp -L), or give the folder that holds it"
            )
        if not target.exists():
            raise DataError(f"{name} is a link to {target}, which is not there; fetch it again")
        if target.stat().st_uid not in owners:
            raise DataError(
                f"{name} is a link to {target}, which belongs to another user "
                f"({target.stat().st_uid}) than the folder; copy the model to a folder of your own"
            )
