"""The installed torchvision, without its C++ library, which needs CUDA and does not load on a CPU.

SGLang imports torchvision for models with images. The operators of that library are missing, so
torchvision's registrations of their shapes are skipped.
"""

import sys
from pathlib import Path

import torch

_candidates = (Path(entry) / "torchvision" for entry in sys.path)
_installed = next(
    candidate
    for candidate in _candidates
    if (candidate / "__init__.py").is_file()
    and candidate.resolve() != Path(__file__).resolve().parent
)
_register_fake = torch.library.register_fake


def _register_other(op, *args, **options):  # type: ignore[no-untyped-def]
    if isinstance(op, str) and op.startswith("torchvision::"):
        return lambda function: function
    return _register_fake(op, *args, **options)


__path__ = [str(_installed)]
__file__ = str(_installed / "__init__.py")
torch.library.register_fake = _register_other  # type: ignore[assignment]
try:
    exec(compile((_installed / "__init__.py").read_text(), __file__, "exec"), globals())
finally:
    torch.library.register_fake = _register_fake
