"""Keys of the section ``algorithm`` that are set but never read by the algorithm.

An algorithm inherits the keys of its base class, and an override may leave some of them unread: a
subclass that overrides ``policy_loss`` no longer reads ``clip_ratio_low``. Such a key is rejected
before a run begins. No declaration is needed. The check follows the code of an algorithm from the
methods that the ``train`` and ``reward`` stages call, through everything that they call in the
class, in its modules and in the user's other modules, and collects attribute names. It follows an
overridden method only if the override calls ``super()``.

Reads are matched by name, so a key may pass although the code that mentions it never runs. All keys
count as read where ``config``, or a variable that it was assigned to, is dumped. Where a key is
read elsewhere (in an installed package, for example), the class lists it in ``config_keys_read``.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from rlinf.algorithms.base import Algorithm
from rlinf.config import Section
from rlinf.errors import ConfigError

ENTRY_POINTS = ("__init__", "update", "select_samples", "trainable_groups", "replay_capacity")
"""Members of an algorithm that the stages use directly."""
DESCRIPTIVE_MEMBERS = frozenset(
    {
        "check",
        "uses_offline_data",
        "zero_gradient_rows",
        "minibatches",
        "needs_entropy",
        "needs_groups",
        "needs_old_logprobs",
        "needs_reference",
        "needs_values",
        "has_single_step",
        "supports_streaming",
        "needs_full_sequences",
    }
)
"""Members that only describe other members. A key that only they mention is not used."""
ALGORITHMS_PACKAGE = "rlinf.algorithms"
DUMPS = r"\.(?:model_dump|model_dump_json|model_copy|__dict__)\b"
"""Members that read a configuration as a whole, every key included."""
DUMPERS = r"\.(?:vars|asdict|dict)"
"""Functions that read a configuration as a whole."""


def reject_unused_keys(algorithm: Algorithm, name: str) -> None:
    """Reject a configuration with a key that the algorithm never reads.

    Args:
        name: of the algorithm, as in the configuration.

    Raises:
        ConfigError: there is such a key; names it and the remedy.
    """
    config = algorithm.config
    unread = unused_keys(type(algorithm), config)
    if not unread:
        return
    key, more = unread[0], unread[1:]
    others = f" (nor {', '.join(more)})" if more else ""
    owner = _overridden(type(algorithm), key)
    why = f"; its own {owner} replaces what does" if owner else ""
    advice = "take it out of the configuration"
    if ":" in name:
        advice += (
            f", or read self.config.{key} in the class. Where an installed package reads it, "
            f'declare config_keys_read = frozenset({{"{key}"}}) in the class'
        )
    raise ConfigError(f"algorithm.{key}: {name} never reads it{others}{why}; {advice}")


def unused_keys(cls: type[Algorithm], config: Section) -> list[str]:
    """Return the keys that are set in ``config``, not by default, and that ``cls`` never reads, in
    the order of the fields of the configuration class."""
    walk = _walk(cls, type(config))
    if walk.reads_all:
        return []
    return [
        key
        for key in type(config).model_fields
        if key in config.model_fields_set and key not in walk.names | cls.config_keys_read
    ]


def _walk(cls: type[Algorithm], config: type[Section]) -> _Walk:
    walk = _Walk(cls, config)
    for member in ENTRY_POINTS:
        walk.member(member)
    return walk


def _overridden(cls: type[Algorithm], key: str) -> str | None:
    """Return the method of ``cls`` whose override leaves ``key`` without a reader, if one does."""
    for base in cls.__mro__[1:]:
        for member, value in vars(base).items():
            if member in DESCRIPTIVE_MEMBERS or vars(base)[member] is inspect.getattr_static(
                cls, member
            ):
                continue
            if any(key in _mentioned(function.__code__) for function in _functions(value)):
                return member
    return None


class _Walk:
    """The names that code mentions, followed from one member of a class to the next."""

    def __init__(self, cls: type[Algorithm], config: type[Section]) -> None:
        self.names: set[str] = set()
        self.reads_all = False
        """Whether the configuration is read as a whole somewhere."""
        self._cls, self._config = cls, config
        self._visited: set[Any] = set()
        self._packages = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"rlinf"}

    def member(self, name: str, *, every: bool = False) -> None:
        """Follow the class's member of this name. Follow the members of its bases that it overrides
        if it calls ``super()``, or all of them with ``every``."""
        if name in DESCRIPTIVE_MEMBERS:
            return
        for base in self._cls.__mro__:
            if name not in vars(base):
                continue
            functions = list(_functions(vars(base)[name]))
            for function in functions:
                self._function(function)
            calls_base = any("super" in _mentioned(f.__code__) for f in functions)
            if not every and not calls_base:
                return

    def _function(self, function: FunctionType, *, of_config: bool = False) -> None:
        """Follow a function. With ``of_config``, its ``self`` is the configuration."""
        if function in self._visited:
            return
        self._visited.add(function)
        names = _mentioned(function.__code__)
        self.names |= names
        self.reads_all |= _dumps(function.__code__, {"config", "self"} if of_config else {"config"})
        known = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in known if isinstance(value, ModuleType)]
        known += [vars(module)[n] for module in modules for n in names if n in vars(module)]
        # ``Base.loss(self, ...)`` calls the overridden method, as ``super()`` does.
        every = "super" in names or any(value in self._cls.__mro__ for value in known if _is(value))
        for name in names:
            if hasattr(self._cls, name):
                self.member(name, every=every)
            for method in self._methods_of_config(name):
                self._function(method, of_config=True)
        for value in known:
            if self._is_readable(value):
                self._follow(value)

    def _methods_of_config(self, name: str) -> Iterator[FunctionType]:
        """Yield the property or method of this name in the configuration class or its bases, and
        those that it overrides and calls through ``super()``. Members of every section are
        excluded."""
        for base in self._config.__mro__:
            if name not in vars(base) or base in Section.__mro__:
                continue
            methods = list(_functions(vars(base)[name]))
            yield from methods
            if not any("super" in _mentioned(method.__code__) for method in methods):
                return

    def _follow(self, value: Any) -> None:
        """Follow a function, or all methods of a class."""
        if value in self._visited:
            return
        members = vars(value).values() if _is(value) else [value]
        if _is(value):
            self._visited.add(value)
        for member in members:
            for function in _functions(member):
                self._function(function)

    def _is_readable(self, value: Any) -> bool:
        """Return whether the value is code of this package's algorithms, or of the user's, that
        must be followed. Bases of an algorithm are followed member by member instead."""
        if _is(value) and issubclass(value, Algorithm | Section):
            return False
        if not (_is(value) or isinstance(value, FunctionType)):
            return False
        module = value.__module__ or ""
        package = module.partition(".")[0]
        if package == "rlinf":
            return module.startswith(f"{ALGORITHMS_PACKAGE}.")
        if package in self._packages:
            return True
        file = getattr(sys.modules.get(module), "__file__", None) or "site-packages"
        return package not in sys.stdlib_module_names and "site-packages" not in file


def _is(value: Any) -> TypeGuard[type]:
    return inspect.isclass(value)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions inside a member of a class: plain, wrapped, or of a property."""
    if isinstance(value, property):
        parts = [value.fget]
    elif isinstance(value, cached_property | partial):
        parts = [value.func]
    elif isinstance(value, staticmethod | classmethod | MethodType):
        parts = [value.__func__]
    elif isinstance(value, FunctionType):
        yield value
        parts = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        parts = [part for part in parts if isinstance(part, FunctionType)]
    else:
        return
    for part in parts:
        yield from _functions(part)


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _mentioned(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in code and its nested functions, and short
    strings where it calls ``getattr``, which may be such names."""
    codes = list(_codes(code))
    names = {name for each in codes for name in each.co_names}
    if not names.isdisjoint({"getattr", "attrgetter"}):
        names |= {text for each in codes for text in _texts(each.co_consts)}
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)


def _dumps(code: CodeType, configs: set[str]) -> bool:
    """Return whether code reads a configuration as a whole; ``configs`` are the names it has."""
    trail = "".join(map(_trail, _codes(code)))
    named = "|".join(configs)
    named = "|".join([*configs, *re.findall(rf"\.(?:{named})=(\w+)", trail)])
    return bool(
        re.search(rf"\.(?:{named}){DUMPS}", trail)
        or re.search(rf"{DUMPERS}(?:\.\w+)*\.(?:{named});", trail)
    )


def _trail(code: CodeType) -> str:
    """Return the names that code loads (``.name``) and stores (``=name``), in their order; any
    other instruction is a semicolon."""
    trail = []
    for step in dis.get_instructions(code):
        if step.opname in ("PUSH_NULL", "EXTENDED_ARG"):
            continue
        accesses = re.findall("LOAD|STORE", step.opname.replace("LOAD_CONST", ""))
        # One instruction of newer interpreters loads or stores two names.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        signs = ("=" if access == "STORE" else "." for access in accesses)
        trail += [f"{sign}{name}" for sign, name in zip(signs, names, strict=False)] or [";"]
    return "".join(trail)
