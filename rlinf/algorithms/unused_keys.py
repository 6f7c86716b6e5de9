"""Keys of the section ``algorithm`` that are set but never read by the algorithm.

An algorithm inherits the keys of its base class, and an override may leave some of them unread: a
subclass that overrides ``policy_loss`` no longer reads ``clip_ratio_low``. Such a key is rejected
before a run begins. The check starts at the methods that the ``train`` and ``reward`` stages call.
It follows their calls within the class, its modules and the user's other modules, and collects
attribute names. It follows an overridden method only if the override calls ``super()``.

Keys are matched by name, so a key may pass although the code that mentions it never runs. All keys
count as read if ``config``, or a variable to which it was assigned, is read as a whole
(``model_dump``, ``asdict``). If other code reads a key, such as an installed package, the class
lists the key in ``config_keys_read``.
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
"""Members that only describe the algorithm. A key that only they mention is not used."""
ALGORITHMS_PACKAGE = "rlinf.algorithms"
DUMP_MEMBERS = r"\.(?:model_dump|model_dump_json|model_copy|__dict__)\b"
"""Pattern of members that read a configuration as a whole, every key included."""
DUMP_FUNCTIONS = r"\.(?:vars|asdict|dict)"
"""Pattern of functions that read a configuration as a whole."""


def reject_unused_keys(algorithm: Algorithm, name: str) -> None:
    """Reject a configuration with a key that the algorithm never reads.

    Args:
        name: name of the algorithm in the configuration.

    Raises:
        ConfigError: a key is set and never read; the message names the key and the remedy.
    """
    config = algorithm.config
    unread = unused_keys(type(algorithm), config)
    if not unread:
        return
    key, *others = unread
    also = f" (nor {', '.join(others)})" if others else ""
    member = _overridden_reader(type(algorithm), key)
    why = f"; its own {member} replaces what does" if member else ""
    advice = "take it out of the configuration"
    if ":" in name:
        advice += (
            f", or read self.config.{key} in the class. Where an installed package reads it, "
            f'declare config_keys_read = frozenset({{"{key}"}}) in the class'
        )
    raise ConfigError(f"algorithm.{key}: {name} never reads it{also}{why}; {advice}")


def unused_keys(cls: type[Algorithm], config: Section) -> list[str]:
    """Return the keys that are set explicitly in ``config`` and that ``cls`` never reads. They are
    in the order of the fields of the configuration class."""
    collector = _NameCollector(cls, type(config))
    for member in ENTRY_POINTS:
        collector.follow_member(member)
    if collector.reads_all:
        return []
    return [
        key
        for key in type(config).model_fields
        if key in config.model_fields_set and key not in collector.names | cls.config_keys_read
    ]


def _overridden_reader(cls: type[Algorithm], key: str) -> str | None:
    """Return the name of a method that reads ``key`` in a base class and that ``cls`` overrides;
    None if there is none."""
    for base in cls.__mro__[1:]:
        for member, value in vars(base).items():
            if member in DESCRIPTIVE_MEMBERS or vars(base)[member] is inspect.getattr_static(
                cls, member
            ):
                continue
            if any(key in _names_in(function.__code__) for function in _functions(value)):
                return member
    return None


class _NameCollector:
    """Collects the names that the code of an algorithm mentions, member by member."""

    def __init__(self, cls: type[Algorithm], config: type[Section]) -> None:
        self.names: set[str] = set()
        self.reads_all = False
        """Whether the configuration is read as a whole somewhere."""
        self._cls, self._config = cls, config
        self._visited: set[Any] = set()
        self._packages = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"rlinf"}

    def follow_member(self, name: str, *, all_bases: bool = False) -> None:
        """Follow the class's member of this name, and the members that it overrides as long as each
        calls ``super()``. With ``all_bases``, follow all overridden ones."""
        if name in DESCRIPTIVE_MEMBERS:
            return
        for base in self._cls.__mro__:
            if name not in vars(base):
                continue
            functions = list(_functions(vars(base)[name]))
            for function in functions:
                self._follow_function(function)
            calls_base = any("super" in _names_in(f.__code__) for f in functions)
            if not all_bases and not calls_base:
                return

    def _follow_function(self, function: FunctionType, *, is_config_method: bool = False) -> None:
        """Follow a function. In a method of the configuration, ``self`` is the configuration."""
        if function in self._visited:
            return
        self._visited.add(function)
        names = _names_in(function.__code__)
        self.names |= names
        config_names = {"config", "self"} if is_config_method else {"config"}
        self.reads_all |= _reads_whole_config(function.__code__, config_names)
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in values if isinstance(value, ModuleType)]
        values += [vars(module)[n] for module in modules for n in names if n in vars(module)]
        # ``Base.loss(self, ...)`` calls the overridden method, as ``super()`` does.
        all_bases = "super" in names or any(
            value in self._cls.__mro__ for value in values if _is_class(value)
        )
        for name in names:
            if hasattr(self._cls, name):
                self.follow_member(name, all_bases=all_bases)
            for method in self._config_methods(name):
                self._follow_function(method, is_config_method=True)
        for value in values:
            if self._should_follow(value):
                self._follow(value)

    def _config_methods(self, name: str) -> Iterator[FunctionType]:
        """Yield the configuration's property or method of this name. An overridden one is included
        if ``super()`` calls it. Members that every section has are excluded."""
        for base in self._config.__mro__:
            if name not in vars(base) or base in Section.__mro__:
                continue
            methods = list(_functions(vars(base)[name]))
            yield from methods
            if not any("super" in _names_in(method.__code__) for method in methods):
                return

    def _follow(self, value: Any) -> None:
        """Follow a function, or all methods of a class."""
        if value in self._visited:
            return
        members = vars(value).values() if _is_class(value) else [value]
        if _is_class(value):
            self._visited.add(value)
        for member in members:
            for function in _functions(member):
                self._follow_function(function)

    def _should_follow(self, value: Any) -> bool:
        """Return whether a value is code of rlinf's algorithms or of the user. Algorithms and
        sections are excluded, because they are followed member by member."""
        if _is_class(value) and issubclass(value, Algorithm | Section):
            return False
        if not (_is_class(value) or isinstance(value, FunctionType)):
            return False
        module = value.__module__ or ""
        package = module.partition(".")[0]
        if package == "rlinf":
            return module.startswith(f"{ALGORITHMS_PACKAGE}.")
        if package in self._packages:
            return True
        file = getattr(sys.modules.get(module), "__file__", None) or "site-packages"
        return package not in sys.stdlib_module_names and "site-packages" not in file


def _is_class(value: Any) -> TypeGuard[type]:
    return inspect.isclass(value)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in a member of a class: itself, wrapped ones, or a property's getter."""
    if isinstance(value, property):
        wrapped = [value.fget]
    elif isinstance(value, cached_property | partial):
        wrapped = [value.func]
    elif isinstance(value, staticmethod | classmethod | MethodType):
        wrapped = [value.__func__]
    elif isinstance(value, FunctionType):
        yield value
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        wrapped = [content for content in cells if isinstance(content, FunctionType)]
    else:
        return
    for function in wrapped:
        yield from _functions(function)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in code and its nested functions. If the code
    calls ``getattr``, its strings are included, because they may be such names."""
    codes = list(_nested_codes(code))
    names = {name for nested in codes for name in nested.co_names}
    if not names.isdisjoint({"getattr", "attrgetter"}):
        names |= {text for nested in codes for text in _texts(nested.co_consts)}
    return names


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)


def _reads_whole_config(code: CodeType, config_names: set[str]) -> bool:
    """Return whether code reads the configuration, in a variable of these names, as a whole."""
    trail = "".join(map(_access_trail, _nested_codes(code)))
    names = "|".join(config_names)
    names = "|".join([*config_names, *re.findall(rf"\.(?:{names})=(\w+)", trail)])
    return bool(
        re.search(rf"\.(?:{names}){DUMP_MEMBERS}", trail)
        or re.search(rf"{DUMP_FUNCTIONS}(?:\.\w+)*\.(?:{names});", trail)
    )


def _access_trail(code: CodeType) -> str:
    """Return the names that code loads (``.name``) and stores (``=name``), in their order. Any
    other instruction is a semicolon."""
    trail = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("PUSH_NULL", "EXTENDED_ARG"):
            continue
        accesses = re.findall("LOAD|STORE", instruction.opname.replace("LOAD_CONST", ""))
        # In newer interpreters, one instruction may load or store two names.
        argument = instruction.argval
        names = argument if isinstance(argument, tuple) else (argument,)
        signs = ("=" if access == "STORE" else "." for access in accesses)
        trail += [f"{sign}{name}" for sign, name in zip(signs, names, strict=False)] or [";"]
    return "".join(trail)
