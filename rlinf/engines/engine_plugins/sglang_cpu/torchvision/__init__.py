"""The installed torchvision, whose C++ library is for CUDA and does not load on a CPU.

SGLang imports it for models of images. What it says of the shapes of its operators is left out:
they are missing.
"""

import sys
from pathlib import Path

import torch

_places = (Path(entry) / "torchvision" for entry in sys.path)
_real = next(
    place
    for place in _places
    if (place / "__init__.py").is_file() and place.resolve() != Path(__file__).resolve().parent
)
_register = torch.library.register_fake


def _lenient(op, *args, **options):  # type: ignore[no-untyped-def]
    if isinstance(op, str) and op.startswith("torchvision::"):
        return lambda function: function
    return _register(op, *args, **options)


__path__ = [str(_real)]
__file__ = str(_real / "__init__.py")
torch.library.register_fake = _lenient  # type: ignore[assignment]
try:
    exec(compile((_real / "__init__.py").read_text(), __file__, "exec"), globals())
finally:
    torch.library.register_fake = _register
