"""Registries of named components, and the capabilities that components require and provide.

Components are imported only when they are used. A registry maps a name in the configuration to
``module:attribute``. Listing the names imports nothing; :meth:`Registry.get` imports the module
behind a name. A name with ``:`` is itself a ``module:attribute``, such as
``reward.name=mypkg.rewards:Mine``, and needs no entry (docs/howto/own-parts.md).
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.errors import ConfigError, RlinfError, did_you_mean
from rlinf.renamed_keys import component_hint
from rlinf.user_code import register_user_component

if TYPE_CHECKING:
    from rlinf.config import RunConfig


class Registry:
    """Components of one kind by name."""

    def __init__(
        self, kind: str, entries: dict[str, str], base: str, *, instances: bool = False
    ) -> None:
        """
        Args:
            kind: word for a component in messages and keys: ``reward`` in ``reward.name``.
            entries: ``module:attribute`` of each component by name.
            base: ``module:class``, the base class of every component.
            instances: whether components are instances of the base class, not subclasses.
        """
        self.kind, self._instances = kind, instances
        self._entries = dict(entries)
        self._base = base

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._entries)

    def target(self, name: str, key: str | None = None) -> str:
        """Return ``module:attribute`` of the component ``name``; nothing is imported.

        Args:
            key: configuration key that has the name; ``kind.name`` by default.

        Raises:
            ConfigError: there is no such component; the message names the most similar one.
        """
        if ":" in name:
            return name
        if name not in self._entries:
            hint = component_hint(self.kind, name, self._entries)
            raise ConfigError(f"{key or self.kind + '.name'}: unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def get(self, name: str, key: str | None = None) -> Any:
        """Import and return the component ``name``.

        Args:
            key: as for :meth:`target`.

        Raises:
            ConfigError: there is no such component, its module cannot be imported, or it has the
                wrong type.
        """
        target = self.target(name, key)
        if ":" not in name:
            return _attribute(target)
        key = key or f"{self.kind}.name"
        module, _, attribute = target.partition(":")
        component = import_user_attribute(module, attribute, key)
        base, base_name = _attribute(self._base), self._base.replace(":", ".")
        if self._instances:
            if not isinstance(component, base):
                raise ConfigError(
                    f"{key}: {name} is no {self.kind} but of type {type(component).__name__}; "
                    f"expected a variable of type {base_name}"
                )
        elif not (inspect.isclass(component) and issubclass(component, base)):
            raise ConfigError(f"{key}: {name} is no {self.kind}: make it a subclass of {base_name}")
        elif missing := sorted(getattr(component, "__abstractmethods__", ())):
            raise ConfigError(
                f"{key}: {name} lacks {', '.join(missing)}, part of every {self.kind}; "
                f"see {base_name}"
            )
        return component


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_user_attribute(module: str, attribute: str, key: str) -> Any:
    """Import the attribute that a user's target names.

    Raises:
        ConfigError: the module cannot be imported, or does not have the attribute.
    """
    if not all(name.isidentifier() for name in (*module.split("."), attribute)):
        raise ConfigError(
            f"{key}: {module}:{attribute} names no class; expected MODULE:CLASS, such as "
            "mypkg.rewards:Mine"
        )
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _import_error(module, key, error) from error
        raise ConfigError(
            f"{key}: no module {error.name!r}; start in the folder that holds it, or name that "
            "folder in PYTHONPATH"
        ) from None
    except RlinfError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise _import_error(module, key, error) from error
    if not hasattr(imported, attribute):
        raise ConfigError(
            f"{key}: {imported.__file__} has no {attribute!r}"
            f"{did_you_mean(attribute, _public_names(imported))}"
        )
    component = getattr(imported, attribute)
    register_user_component(f"{key}: {module}:{attribute}", imported, component)
    return component


def _import_error(module: str, key: str, error: Exception) -> ConfigError:
    """Return the error for a module whose import fails, with the location of the failure."""
    if isinstance(error, SyntaxError):
        location, message = f"{error.filename}, line {error.lineno}", error.msg
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location, message = f"{frame.filename}, line {frame.lineno}", str(error)
    text = f"{type(error).__name__}: {message}".splitlines()[0]
    return ConfigError(f"{key}: importing {module} failed in {location}: {text}")


def _public_names(module: ModuleType) -> list[str]:
    """Return the public names that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


# Capabilities. Error messages contain these texts.
PROMPTS = "prompts of text"
REFERENCE_ANSWERS = "reference answers"
OBSERVATIONS = "observation vectors"
STEP_REWARDS = "rewards given while an episode runs"
TURNS = "separate turns (a dialogue)"
TURN_REWARDS = "a reward for each turn"
EPISODE_REWARDS = "one reward for each episode, at its end"
LANGUAGE_MODEL = "a causal language model"
VISION = "a model that reads images"
IMAGE_INPUTS = "an engine that takes images"
SINGLE_PASS_ACTIONS = "actions by one forward pass"
VALUE_ESTIMATES = "value estimates"
DEMONSTRATIONS = "demonstrations"
ACTION_VALUES = "values of actions"
TRANSITION_REPLAY = "transitions to replay (flow=off_policy, or flow=offline)"
REPLAY_ALGORITHM = "an algorithm that learns from transitions (sac, crossq, rlpd, iql, bc)"
NO_ROLLOUTS = "a flow that collects nothing (flow=offline)"
IMITATION_LOSS = "a loss of imitating actions"
EVAL_DEMONSTRATIONS = "held-out demonstrations"
STALE_ROLLOUTS = (
    "rollouts that go on during updates (rollout.staleness above 0, and a flow that has them)"
)
SAMPLE_GROUPS = "several samples of each start (rollout.group_size above 1)"


@dataclass(frozen=True)
class RunComponents:
    """All components of a run, which each component's :meth:`Component.check` compares with its
    own."""

    config: RunConfig
    classes: Mapping[str, Any]
    """Class of each component, by section of the configuration: ``task``, ``model``, ``engine``,
    ``trainer``, ``reward`` and ``algorithm``."""
    options: Mapping[str, Any]
    """Validated options of each component, by section."""
    provided: frozenset[str]
    """Capabilities that the components and the flow provide."""


class Component:
    """Base of environments, policies, engines, trainers, rewards and algorithms."""

    requires: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that other components must provide."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that other components may require."""

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        """Check, before a run is created, that the options fit the other components and settings.

        What :attr:`requires` can express has been checked before. Base classes check what holds for
        all components of their kind, so an override must call ``super().check(options, run)``.

        Args:
            options: validated options of this component.

        Raises:
            ConfigError: the run could not work; the message names the key.
            DataError: a file that the component reads is missing or malformed.
        """
