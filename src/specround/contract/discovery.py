"""Finding speculators: by decorator, by entry point, or by dotted path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from specround.contract.errors import ConfigError
from specround.contract.speculator import SpeculatorConfig

ENTRY_POINT_GROUP = "specround.speculators"
"""Installed packages name their `SpeculatorConfig` subclasses in this entry point group."""

ConfigType = TypeVar("ConfigType", bound=type[SpeculatorConfig])

_registered: dict[str, type[SpeculatorConfig]] = {}


def register_speculator(name: str) -> Callable[[ConfigType], ConfigType]:
    """Class decorator that makes a `SpeculatorConfig` subclass known as `method`.

    Args:
        name: The method's name in `speculative_config`.

    Raises:
        ConfigError: The name is not a non-empty string, the class is not a `SpeculatorConfig`, or another class already
            has the name.

    Example::

        @register_speculator("mine")
        @dataclass(frozen=True, kw_only=True)
        class MyConfig(SpeculatorConfig): ...
    """
    if not isinstance(name, str) or not name:
        raise ConfigError("method", name, "a non-empty string, as in @register_speculator('mine')")

    def decorate(cls: ConfigType) -> ConfigType:
        _check_class(cls, name)
        known = _registered.get(name)
        same = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if known is not None and not same:
            taken = f"{known.__module__}.{known.__qualname__}"
            raise ConfigError("method", name, f"a name that is not registered yet ({taken} has this one)")
        _registered[name] = cls
        cls.method = name
        return cls

    return decorate


def known_methods() -> tuple[str, ...]:
    """Names of every registered or installed speculator, sorted."""
    installed = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted(installed | set(_registered)))


def find_speculator(method: str) -> type[SpeculatorConfig]:
    """The config class of a method.

    Args:
        method: A registered name, an installed entry point's name, or a dotted path `package.module:Class` (or
            `package.module.Class`).

    Raises:
        ConfigError: Nothing of that name exists, or it is not a `SpeculatorConfig`; lists the known methods.

    Example:
        >>> find_speculator("ngram").__name__
        'NgramConfig'
    """
    if not isinstance(method, str) or not method:
        raise ConfigError("method", method, _allowed_methods())
    if method in _registered:
        return _registered[method]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == method:
            return _check_class(_load_entry_point(point), method)
    if "." in method or ":" in method:
        return _check_class(_load_dotted(method), method)
    raise ConfigError("method", method, _allowed_methods(method))


def parse_speculative_config(config: Mapping[str, Any]) -> SpeculatorConfig:
    """A `speculative_config` mapping as the config object of its method.

    Args:
        config: `{"method": ..., "num_speculative_tokens": K, ...}`.

    Raises:
        ConfigError: The method or a field is unknown or missing, or a value is out of range.

    Example:
        >>> parse_speculative_config({"method": "ngram", "num_speculative_tokens": 4}).num_speculative_tokens
        4
    """
    if not isinstance(config, Mapping):
        raise ConfigError("speculative_config", config, "a mapping with 'method' and 'num_speculative_tokens'")
    if "method" not in config:
        raise ConfigError("speculative_config", dict(config), f"a mapping with 'method', {_allowed_methods()}")
    cls = find_speculator(config["method"])
    values = {key: value for key, value in config.items() if key != "method"}
    known = {field.name: field for field in fields(cls) if field.init}
    listed = ", ".join(sorted(known))
    for key, value in values.items():
        if key not in known:
            allowed = f"one of the fields of {config['method']!r}: {listed}"
            raise ConfigError(f"speculative_config.{key}", value, allowed)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"speculative_config.{name}", None, f"given for method {config['method']!r}")
    return cls(**values)


def _load_entry_point(point: EntryPoint) -> object:
    try:
        return point.load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        allowed = f"loadable from its entry point {point.value!r} ({_in_words(error)})"
        raise ConfigError("method", point.name, allowed) from error


def _load_dotted(path: str) -> object:
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or module_name.startswith("."):
        raise ConfigError("method", path, _allowed_methods(path))
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)
    except ConfigError:  # says what to change, for example a name that two classes register
        raise
    except ImportError as error:
        raise ConfigError("method", path, f"importable ({error}), or {_allowed_methods()}") from error
    except (Exception, SystemExit) as error:  # whatever the module does while it is imported
        raise ConfigError("method", path, f"importable ({_in_words(error)})") from error
    if found is None:
        raise ConfigError("method", path, f"a class in module {module_name!r}")
    return found


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"


def _check_class(cls: object, name: str) -> type[SpeculatorConfig]:
    if not (isinstance(cls, type) and issubclass(cls, SpeculatorConfig)):
        raise ConfigError("method", name, f"the name of a SpeculatorConfig subclass, not {cls!r}")
    return cls


def _allowed_methods(given: str | None = None) -> str:
    close = difflib.get_close_matches(given or "", known_methods(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"one of {', '.join(known_methods())}, or a dotted path 'package.module:Class'{hint}"
