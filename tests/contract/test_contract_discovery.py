"""Finding speculators by decorator, entry point and dotted path, and reading a `speculative_config`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specround.contract import (
    ConfigError,
    SpeculatorConfig,
    discovery,
    find_speculator,
    known_methods,
    parse_speculative_config,
    register_speculator,
)

PLUGIN = """
from dataclasses import dataclass
from specround.contract import SpeculatorConfig

@dataclass(frozen=True, kw_only=True)
class PluginConfig(SpeculatorConfig):
    width: int
    depth: int = 3

NOT_A_CONFIG = 5
"""
ENTRY_POINTS = """
[specround.speculators]
plugin = acme_speculator:PluginConfig
not_a_config = acme_speculator:NOT_A_CONFIG
no_module = acme_missing:PluginConfig
no_class = acme_speculator:Missing
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered by a test are forgotten after it."""
    monkeypatch.setattr(discovery, "_registered", dict(discovery._registered))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that names speculators in the entry point group."""
    (tmp_path / "acme_speculator.py").write_text(PLUGIN)
    metadata = tmp_path / "acme_speculator-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-speculator\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("acme_speculator", None)


@dataclass(frozen=True, kw_only=True)
class Mine(SpeculatorConfig):
    width: int = 2


@dataclass(frozen=True, kw_only=True)
class Other(SpeculatorConfig):
    pass


def test_a_decorated_class_is_found_by_its_name() -> None:
    """The decorator returns the class itself, names it, and lists it among the known methods."""
    assert register_speculator("mine")(Mine) is Mine
    assert find_speculator("mine") is Mine
    assert Mine.method == "mine"
    assert "mine" in known_methods()
    assert list(known_methods()) == sorted(set(known_methods()))


def test_a_name_belongs_to_one_class() -> None:
    """Another class under the name is refused, naming the owner; the same class again (a reload) is not."""
    register_speculator("mine")(Mine)
    register_speculator("mine")(Mine)
    with pytest.raises(ConfigError, match=r"method='mine': .*not registered yet \(.*\.Mine has this one\)"):
        register_speculator("mine")(Other)
    assert find_speculator("mine") is Mine


@pytest.mark.parametrize("thing", [int, Mine(num_speculative_tokens=1), print, None])
def test_only_config_classes_are_registered(thing: object) -> None:
    """Instances, functions and other classes are refused by name."""
    with pytest.raises(ConfigError, match="method='mine': must be the name of a SpeculatorConfig subclass, not"):
        register_speculator("mine")(thing)
    assert "mine" not in known_methods()


@pytest.mark.parametrize("name", ["", None, Mine])
def test_a_name_is_a_string(name: object) -> None:
    """The decorator without parentheses would swallow the class in silence; it is an error instead."""
    with pytest.raises(ConfigError, match=r"must be a non-empty string, as in @register_speculator\('mine'\)"):
        register_speculator(name)


@pytest.mark.usefixtures("plugin")
def test_an_installed_entry_point_is_found() -> None:
    """A package that is only installed, never imported, provides its methods."""
    assert "plugin" in known_methods()
    assert "acme_speculator" not in sys.modules
    assert find_speculator("plugin").__name__ == "PluginConfig"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("not_a_config", "must be the name of a SpeculatorConfig subclass, not 5"),
        ("no_module", "must be loadable from its entry point 'acme_missing:PluginConfig' (No module named"),
        ("no_class", "must be loadable from its entry point 'acme_speculator:Missing' (module"),
    ],
)
def test_broken_entry_points_are_refused_by_name(method: str, message: str) -> None:
    """A plugin that cannot be loaded, or is something else, gives the project's error with the reason."""
    with pytest.raises(ConfigError) as caught:
        find_speculator(method)
    assert f"method={method!r}: {message}" in str(caught.value)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("path", ["acme_speculator:PluginConfig", "acme_speculator.PluginConfig"])
def test_a_dotted_path_names_a_class(path: str) -> None:
    """Both spellings import the module and take the class, registered or not."""
    assert find_speculator(path).__name__ == "PluginConfig"
    assert parse_speculative_config({"method": path, "num_speculative_tokens": 2, "width": 4}).width == 4


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("acme_nothing:PluginConfig", "importable (No module named 'acme_nothing')"),
        ("acme_speculator:Missing", "a class in module 'acme_speculator'"),
        ("acme_speculator:", "a class in module 'acme_speculator'"),
        ("acme_speculator:NOT_A_CONFIG", "a SpeculatorConfig subclass, not 5"),
        ("acme_speculator:PluginConfig.width", "a class in module 'acme_speculator'"),
        (".relative", "a dotted path 'package.module:Class'"),
        ("..relative", "a dotted path 'package.module:Class'"),
        (":PluginConfig", "a dotted path 'package.module:Class'"),
        ("a..b", "importable (No module named 'a')"),
    ],
)
def test_broken_paths_are_refused_with_the_reason(path: str, word: str) -> None:
    """Every malformed or dead path is a ConfigError on `method`, never an import machinery error."""
    with pytest.raises(ConfigError) as caught:
        find_speculator(path)
    assert caught.value.field == "method"
    assert f"method={path!r}: must be" in str(caught.value)
    assert word in str(caught.value)


BROKEN = {
    "syntax": ("def oops(:\n", "SyntaxError: "),
    "arithmetic": ("1 / 0\n", "ZeroDivisionError: division by zero"),
    "leaves": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "import": ("import acme_nothing\n", "No module named 'acme_nothing'"),
    "attribute": ("def __getattr__(name):\n    raise KeyError(name)\n", "KeyError: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_module_that_cannot_be_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a module does when it is imported is a ConfigError that names the method and the cause."""
    source, word = BROKEN[name]
    (tmp_path / "acme_broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_broken", raising=False)
    with pytest.raises(ConfigError, match=r"method='acme_broken:Config': must be importable \(") as caught:
        find_speculator("acme_broken:Config")
    assert word in str(caught.value)
    assert isinstance(caught.value.__cause__, (Exception, SystemExit))
    sys.modules.pop("acme_broken", None)


@pytest.mark.usefixtures("plugin")
def test_an_entry_point_whose_module_fails(tmp_path: Path) -> None:
    """An installed plugin that raises while it is imported is refused by name as well."""
    (tmp_path / "acme_speculator.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"method='plugin': must be loadable .*\(ZeroDivisionError: division"):
        find_speculator("plugin")


def test_what_a_module_refuses_itself_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ConfigError raised during the import, here for a name that is taken, already says what to change."""
    register_speculator("mine")(Mine)
    (tmp_path / "acme_taken.py").write_text(
        "from specround.contract import SpeculatorConfig, register_speculator\n"
        "@register_speculator('mine')\n"
        "class Config(SpeculatorConfig):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="method='mine': must be a name that is not registered yet"):
        find_speculator("acme_taken:Config")


def test_an_interrupt_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a module is imported is no error of the module."""
    (tmp_path / "acme_interrupted.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        find_speculator("acme_interrupted:Config")


def test_an_unknown_method_lists_the_known_ones_and_guesses() -> None:
    """A typo gets the closest name; a name like no other gets the list alone."""
    register_speculator("suffix_forest")(Mine)
    with pytest.raises(ConfigError) as caught:
        find_speculator("sufix_forest")
    assert str(caught.value).endswith("(did you mean 'suffix_forest'?)")
    assert all(name in str(caught.value) for name in known_methods())
    with pytest.raises(ConfigError) as caught:
        find_speculator("zzzzzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("method", [None, "", 3, ["ngram"]])
def test_a_method_is_a_name(method: object) -> None:
    """Values that cannot be a name are refused like unknown names."""
    with pytest.raises(ConfigError, match="must be one of"):
        find_speculator(method)


def test_a_config_mapping_becomes_the_methods_config() -> None:
    """Fields of the class and of the base are read; what is left out keeps its default."""
    register_speculator("mine")(Mine)
    config = parse_speculative_config({"method": "mine", "num_speculative_tokens": 5})
    assert config == Mine(num_speculative_tokens=5, width=2)
    assert parse_speculative_config({"method": "mine", "num_speculative_tokens": 5, "width": 7}).width == 7


def test_an_unknown_field_lists_the_fields_of_the_method() -> None:
    """A field that the method does not have is named with its value and every field it does have."""
    register_speculator("mine")(Mine)
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config({"method": "mine", "num_speculative_tokens": 5, "widht": 7})
    assert caught.value.field == "speculative_config.widht"
    assert str(caught.value) == (
        "speculative_config.widht=7: must be one of the fields of 'mine': "
        "num_speculative_tokens, num_speculative_tokens_per_batch_size, width"
    )


@pytest.mark.usefixtures("plugin")
def test_missing_fields_are_named() -> None:
    """A required field of the base or of the class that is not given is named; so is a missing method."""
    with pytest.raises(ConfigError, match=r"speculative_config.num_speculative_tokens=None: must be given for method"):
        parse_speculative_config({"method": "plugin", "width": 1})
    with pytest.raises(ConfigError, match=r"speculative_config.width=None: must be given for method 'plugin'"):
        parse_speculative_config({"method": "plugin", "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match=r"must be a mapping with 'method', one of .*plugin"):
        parse_speculative_config({"num_speculative_tokens": 1})


@pytest.mark.parametrize("config", [None, "ngram", 4, [("method", "ngram")]])
def test_a_config_is_a_mapping(config: object) -> None:
    """The shortcut of giving a bare name is refused with what is expected."""
    with pytest.raises(ConfigError, match="must be a mapping with 'method' and 'num_speculative_tokens'"):
        parse_speculative_config(config)


def test_values_are_checked_by_the_config() -> None:
    """Range errors of the class come through with field and value."""
    register_speculator("mine")(Mine)
    with pytest.raises(ConfigError, match="num_speculative_tokens=0: must be an integer >= 1"):
        parse_speculative_config({"method": "mine", "num_speculative_tokens": 0})
