"""The identity of a stage's output: a digest of its configuration, inputs and code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rlinf import __version__, package_paths
from rlinf.algorithms import algorithms
from rlinf.artifacts import SCHEMA, Manifest
from rlinf.config import LOCATION_KEYS, RunConfig, json_digest
from rlinf.engines import engines
from rlinf.envs import environments
from rlinf.envs.simulators import simulators
from rlinf.errors import CodeIdentityError, ConfigError
from rlinf.models import policies
from rlinf.registry import Registry
from rlinf.rewards import rewards
from rlinf.trainers import trainers
from stages.flow import EVALUATE, flow_of
from stages.layout import ACCEPTED_FILE, CODE_FILE


def program_version() -> list[str | int]:
    """Return the versions of program and file formats, which are part of profiles only."""
    return [__version__, SCHEMA]


def stage_key(
    config: RunConfig, stage: str, iteration: int, inputs: Mapping[str, str], code: str
) -> str:
    """Return the identity of a stage's output: a digest of configuration sections, inputs and code.

    The digest has no resources, paths and log options. It also lacks the configuration keys that an
    older program did not write into the frozen configuration: their defaults apply.

    Args:
        inputs: content digest of each input by name.
        code: digest of the stage's code (:func:`stage_code_digest`).
    """
    values = config.explicit_values()
    section_names = flow_of(config).all_stages[stage].config_sections
    sections = {name: values[name] for name in section_names if name in values}
    if EVALUATE in sections:
        # The interval between evaluations does not change their results.
        sections[EVALUATE] = {k: v for k, v in sections[EVALUATE].items() if k != "every"}
    return json_digest(
        {
            "stage": stage,
            "iteration": iteration,
            "config": sections,
            "inputs": dict(inputs),
            "code": code,
        }
    )


class AcceptedMismatch(BaseModel):
    """Results that one resume with ``--keep`` accepted although configuration or code differed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recorded_at: str
    """Date and time of the resume."""
    differences: tuple[str, ...]
    """Description of each difference, for users."""
    outputs: dict[str, str]
    """Identities of the accepted results, by ``stage/iteration``."""


class AcceptedMismatches(BaseModel):
    """All accepted mismatches of a run, oldest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entries: tuple[AcceptedMismatch, ...] = ()

    def accepts(self, manifest: Manifest) -> bool:
        """Return whether this result, whose identity differs, was accepted."""
        name = f"{manifest.stage}/{manifest.iteration}"
        return any(entry.outputs.get(name) == manifest.key for entry in self.entries)


def read_accepted_mismatches(run: Path) -> AcceptedMismatches:
    """Return the accepted mismatches of a run; empty if there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / ACCEPTED_FILE
    try:
        file_state = path.stat()
    except FileNotFoundError:
        return AcceptedMismatches()
    return _read_accepted(path, (file_state.st_mtime_ns, file_state.st_ino, file_state.st_size))


@lru_cache(maxsize=8)
def _read_accepted(path: Path, file_state: tuple[int, ...]) -> AcceptedMismatches:
    """Read the file; cached as long as its state (time, inode, size) is the same."""
    try:
        return AcceptedMismatches.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ConfigError(
            f"{path}: damaged ({reason}); remove it, and resume with --keep to keep what is there"
        ) from None


CLASS_REGISTRIES: Mapping[str, Registry] = {
    "task": environments,
    "model": policies,
    "engine": engines,
    "reward": rewards,
    "algorithm": algorithms,
    "trainer": trainers,
}
"""Sections of the configuration that name a class, and the registry of the class."""
DATA_FILE_SECTIONS = frozenset({"task", "reward", "algorithm", "evaluate"})
"""Sections that may name data files, whose content is part of the identity. ``model`` is
no such section, because a run has its own copy of the model's folder."""
FILE_PREFIX = "file:"
"""Prefix of a data file's name in a snapshot: ``file:section.key``."""
PRODUCT_PACKAGES = ("rlinf", "stages")
"""Packages that compute results; drivers, launchers and plans do not change a result."""


class _Strict:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class ModuleDigest(_Strict):
    """Digests of one module of the user."""

    file_digest: str
    """Digest of the bytes of its file."""
    ast_digest: str
    """Digest of its syntax tree without comments, docstrings and layout."""


@dataclass(frozen=True)
class CodeSnapshot(_Strict):
    """The code and the data files that each stage of a configuration depends on."""

    product: dict[str, str]
    """In a checkout: digest of each source file of rlinf, by path. Installed from a wheel: the
    version."""
    stages: dict[str, tuple[str, ...]]
    """Names by stage: classes of the configuration (``module:attribute``), modules of the user, and
    data files (``file:section.key``)."""
    modules: dict[str, ModuleDigest]
    """The user's modules by name."""
    files: dict[str, str] = field(default_factory=dict)
    """Digest of the content of each data file that the configuration names."""

    @classmethod
    def current(cls, config: RunConfig, *stage_names: str) -> CodeSnapshot:
        """Return a snapshot of the code of this process.

        Args:
            stage_names: stages to include; all by default.

        Raises:
            CodeIdentityError: a module cannot be read or parsed.
        """
        stages = {
            stage: tuple(sorted(_dependencies(config, stage)))
            for stage in stage_names or flow_of(config).all_stages
        }
        names = {name for names in stages.values() for name in names}
        modules = {name: _parse_module(name).digests for name in sorted(names) if ":" not in name}
        files = {
            n: _data_digest(data_file_path(config, n))
            for n in sorted(names)
            if n.startswith(FILE_PREFIX)
        }
        return cls(product_digests(), stages, modules, files)

    def digest(self, stage: str) -> str:
        """Return the digest of a stage's code, which is part of the identity of its output."""
        names = self.stages[stage]
        return json_digest([self.product, [[name, self._digest_of(name)] for name in names]])

    def changed_names(self, other: CodeSnapshot) -> list[str]:
        """Return the names of source files, modules, classes and data files that differ, sorted."""
        digests, other_digests = self._digests(), other._digests()
        names = digests.keys() | other_digests.keys()
        return sorted(name for name in names if digests.get(name) != other_digests.get(name))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def _digests(self) -> dict[str, str]:
        names = {name for names in self.stages.values() for name in names}
        return self.product | {name: self._digest_of(name) for name in names}

    def _digest_of(self, name: str) -> str:
        """Return the digest of a module or file; empty for a class, whose module has a digest."""
        module = self.modules.get(name)
        return self.files.get(name, "") if module is None else module.ast_digest


_ADAPTER = TypeAdapter(CodeSnapshot)


@cache
def product_digests() -> dict[str, str]:
    """Return the digest of each source file, by path; if installed from a wheel, its version."""
    if package_paths.IS_WHEEL:
        return {"rlinf": __version__}
    root = package_paths.ROOT
    files = [file for name in PRODUCT_PACKAGES for file in sorted((root / name).rglob("*.py"))]
    try:
        return {
            file.relative_to(root).as_posix(): xxhash.xxh3_128_hexdigest(file.read_bytes())
            for file in files
        }
    except OSError as error:
        raise CodeIdentityError(f"{error.filename}: {error.strerror}") from None


def read_code_snapshot(run: Path) -> CodeSnapshot | None:
    """Return the code that a run's driver recorded; None if no driver has recorded it yet.

    Raises:
        CodeIdentityError: the file is damaged.
    """
    path = run / CODE_FILE
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise CodeIdentityError(
            f"{path}: damaged ({reason}); remove it and resume the run, which writes it again"
        ) from None


def stage_code_digest(run: Path, config: RunConfig, stage: str) -> str:
    """Return the recorded digest of a stage's code; check that this process runs the same code.

    Raises:
        CodeIdentityError: this process runs other code; the checkout was edited during the run.
    """
    try:
        file_state = (run / CODE_FILE).stat()
    except FileNotFoundError:
        # A user runs the stage without a driver.
        return CodeSnapshot.current(config, stage).digest(stage)
    code = _verified_snapshot(
        run, stage, (file_state.st_mtime_ns, file_state.st_ino, file_state.st_size)
    )
    for name in code.stages.get(stage, ()):
        if name in code.files and _data_digest(data_file_path(config, name)) != code.files[name]:
            raise CodeIdentityError(
                f"{stage}: the file of {name.removeprefix(FILE_PREFIX)} has changed since "
                "this run was started. Nothing was written; put it back, or start the run again"
            )
    return code.digest(stage)


@lru_cache(maxsize=64)
def _verified_snapshot(run: Path, stage: str, file_state: tuple[int, ...]) -> CodeSnapshot:
    """Return the recorded code (cached by file state); raise if this process runs other code."""
    code = read_code_snapshot(run)
    assert code is not None
    current = product_digests()
    changed = [name for name in current if current[name] != code.product.get(name)]
    changed += sorted(code.product.keys() - current.keys())
    changed += [
        name
        for name in code.stages.get(stage, ())
        if name in code.modules
        and _module_file_digest(name) != code.modules[name].file_digest
        and _parse_module(name).digests.ast_digest != code.modules[name].ast_digest
    ]
    if changed:
        raise CodeIdentityError(
            f"{stage}: {changed[0]} differs from the code with which this run was started: it was "
            "edited, or this process is an old one. Nothing was written; start the run again"
        )
    return code


def _dependencies(config: RunConfig, stage: str) -> set[str]:
    """Return the classes, modules of the user and data files that a stage's results depend on."""
    flow = flow_of(config)
    targets = [
        CLASS_REGISTRIES[section].target(getattr(config, section).name)
        for section in flow.all_stages[stage].config_sections
        if section in CLASS_REGISTRIES
    ]
    names = {*targets, *_data_file_names(config, flow.all_stages[stage].config_sections)}
    pending = [flow.module_of(stage), *(target.partition(":")[0] for target in targets)]
    pending += _named_modules(config, flow.all_stages[stage].config_sections)
    simulator = (config.task.model_extra or {}).get("simulator")
    if "task" in flow.all_stages[stage].config_sections and isinstance(simulator, str):
        # Maybe only the simulator's process can import this module, so find it by name.
        module = simulators.target(simulator, "task.simulator").partition(":")[0]
        pending += [module] if _module_path(module) else []
    packages = {name.partition(".")[0] for name in pending}
    while pending:
        name = pending.pop()
        if name in names or name.partition(".")[0] in PRODUCT_PACKAGES:
            continue
        names.add(name)
        # Importing a module also runs its parent packages.
        parents = accumulate(name.split(".")[:-1], "{}.{}".format)
        pending += [
            other for other in {*_parse_module(name).imports, *parents} if _is_user(other, packages)
        ]
    return names


def _named_modules(config: RunConfig, sections: Iterable[str]) -> Iterator[str]:
    """Yield the modules that options name as ``module:attribute``, such as
    ``reward.function``."""
    for section in (CLASS_REGISTRIES.keys() | {"evaluate"}) & set(sections):
        for _, text in _text_options(_options(config, section)):
            if _TARGET.fullmatch(text) and _module_path(module := text.partition(":")[0]):
                yield module


_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Matches ``module:attribute``."""


def _data_file_names(config: RunConfig, sections: Iterable[str]) -> Iterator[str]:
    """Yield the names of a configuration's data files: their keys, not their paths.

    Classes are not imported here, so every text option that is the path of a file counts as a data
    file. A folder counts too if it is a saved data set or, in the algorithm section, any other one,
    because offline data may be one.
    """
    for section in DATA_FILE_SECTIONS.intersection(sections):
        for key, text in _text_options(_options(config, section)):
            if key.partition(".")[0] not in LOCATION_KEYS and _is_data_file(section, text):
                yield f"{FILE_PREFIX}{section}.{key}"


def _options(config: RunConfig, section: str) -> Mapping[str, Any]:
    """Return the options of a component, or those of the sets of evaluations."""
    if section == "evaluate":
        return {"sets": config.evaluate.model_dump(mode="json")["sets"]}
    return getattr(config, section).model_extra or {}


def _text_options(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield text options by key; keys of nested mappings are dotted, and items of lists have their
    index as the last part."""
    for key, value in values.items():
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list | tuple):
            yield from _text_options({f"{key}.{i}": item for i, item in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", text) for inner, text in _text_options(value))


def _is_data_file(section: str, text: str) -> bool:
    try:
        path = Path(text).expanduser()
        if not path.is_dir():
            return path.is_file()
        from rlinf.data.lerobot import is_lerobot_dataset  # few runs have folders of data
        from rlinf.data.tables import is_table

        is_data = section == "algorithm" or is_table(path) or is_lerobot_dataset(path)
        return bool(text) and is_data
    except (OSError, RuntimeError):  # too long for a path, or an unknown home
        return False


def data_file_path(config: RunConfig, name: str) -> Path:
    """Return the path of a data file, by its name in a snapshot (``file:section.key``)."""
    section, _, key = name.removeprefix(FILE_PREFIX).partition(".")
    return Path(dict(_text_options(_options(config, section)))[key]).expanduser()


def _data_digest(path: Path) -> str:
    """Return the content digest of a data file, or of a folder's files; empty if it is missing.

    Tables and videos of a LeRobot data set, which may have terabytes, count by name and size.
    """
    try:
        if path.is_dir():
            from rlinf.data.lerobot import is_lerobot_dataset  # few runs have folders of data

            is_dataset = is_lerobot_dataset(path)
            files = sorted(file for file in path.rglob("*") if file.is_file())
            names = [file.relative_to(path) for file in files]
            digests = [
                str(file.stat().st_size)
                if is_dataset and name.parts[0] != "meta"
                else _data_digest(file)
                for file, name in zip(files, names, strict=True)
            ]
            return json_digest([[str(name), d] for name, d in zip(names, digests, strict=True)])
        file_state = path.stat()
        return _hash_file(path, (file_state.st_mtime_ns, file_state.st_ino, file_state.st_size))
    except OSError:
        return ""


@lru_cache(maxsize=4096)
def _hash_file(path: Path, file_state: tuple[int, ...]) -> str:
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
    return content.hexdigest()


def _is_user(name: str, packages: set[str]) -> bool:
    """Return whether a module is the user's: not installed, or in one of ``packages``.

    The configuration names ``packages``. Other installed packages are not part of an identity.
    """
    path = _module_path(name)
    return path is not None and (name.partition(".")[0] in packages or not _is_installed(path))


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or any(path.is_relative_to(f) for f in _STANDARD_LIBRARY)


_STANDARD_LIBRARY = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}


@dataclass(frozen=True)
class _ParsedModule:
    digests: ModuleDigest
    imports: frozenset[str]
    """Names that may be modules; for ``from a import b`` both ``a`` and ``a.b``."""


@cache
def _parse_module(name: str) -> _ParsedModule:
    path = _module_path(name)
    if path is None:
        raise CodeIdentityError(f"{name}: no such module")
    try:
        raw = path.read_bytes()
        tree = ast.parse(raw)
    except (OSError, SyntaxError, ValueError) as error:
        raise CodeIdentityError(f"{path}: {error}") from None
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    ast_hash = xxhash.xxh3_128()
    for text in _ast_tokens(tree):
        ast_hash.update(text)
    digests = ModuleDigest(xxhash.xxh3_128_hexdigest(raw), ast_hash.hexdigest())
    return _ParsedModule(digests, frozenset(_imports(tree, package)))


@cache
def _module_file_digest(name: str) -> str:
    path = _module_path(name)
    return "" if path is None else xxhash.xxh3_128_hexdigest(path.read_bytes())


@cache
def _module_path(name: str) -> Path | None:
    """Return the file of a module, without importing it."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
        for part in rest:
            # The full name would import its parent packages.
            folders = None if spec is None else spec.submodule_search_locations
            if spec is None or folders is None:
                return None
            spec = PathFinder.find_spec(f"{spec.name}.{part}", folders)
    except (ImportError, ValueError):
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _imports(parsed: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*parents, *([module] if module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _ast_tokens(node: Any) -> Iterator[bytes]:
    """Yield the syntax tree as text, without docstrings, positions and empty fields.

    Empty fields are left out so that Python versions with more fields give the same text.
    """
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}".encode()
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list) and isinstance(node, _DOCSTRING_NODES):
                value = [part for part in value if not _is_text(part)]
            if value is None or value == [] or name in ("kind", "ctx"):
                continue
            yield f" {name}=".encode()
            yield from _ast_tokens(value)
        yield b")"
    elif isinstance(node, list):
        yield b"["
        for part in node:
            yield from _ast_tokens(part)
            yield b","
        yield b"]"
    else:
        yield repr(node).encode()


_DOCSTRING_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is the docstring of a module, class, function or attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
