"""The registry: every method by its name, those of the package and those of a user's own files.

A file of `methods/` is imported when one of its methods is asked for, so that a linear model never waits for PyTorch.
`method` registers a class here; the study runner, the commands and the report look it up.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from m2lgdg.storage import InputError, one_line

if TYPE_CHECKING:
    from m2lgdg.method import Method

NAMED = re.compile(r"""^@method\(["'](.+?)["'](?:, role=["'](\w+)["'])?\)""", re.MULTILINE)
SIMPLE = ("peer", "phenotypes", "default")  # roles of the simple peers
PAPER = (  # the paper's method and those it is compared with, as its tables list them
    *("m2lgdg", "brainnetcnn", "cdann", "mixup", "mldg", "braingnn", "iib", "ibgnn-plus", "ufa-net", "genm", "msstan", "m2dc"),
    *("mm-gtunets", "metaexplainer"),
)


class Registry(MutableMapping[str, "type[Method]"]):
    """Methods by name; to ask for one is to import its file."""

    def __init__(self) -> None:
        self._there: dict[str, type[Method]] = {}

    @functools.cached_property
    def _declared(self) -> dict[str, tuple[str, str]]:
        """Name -> module and role, from the text of the package's files. Once a process: later files are not seen."""
        import m2lgdg.methods as package

        modules = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
        texts = {one: pkgutil.get_data(package.__name__, f"{one.rpartition('.')[2]}.py") or b"" for one in modules}
        return {name: (one, role) for one in modules for name, role in NAMED.findall(texts[one].decode())}

    @property
    def homes(self) -> dict[str, str]:
        """Name -> module of the package's methods, none of which is imported for it."""
        return {name: module for name, (module, _) in self._declared.items()}

    def with_role(self, *roles: str) -> list[str]:
        """Names of the methods that declare one of these roles (`Method.role`), without importing the package's own."""
        own = [name for name, (_, role) in self._declared.items() if role in roles]
        return own + [name for name, cls in self._there.items() if name not in self._declared and cls.role in roles]

    @property
    def default(self) -> str:
        """The method that `m2lgdg fit` uses unless another is named."""
        (name,) = (name for name, (_, role) in self._declared.items() if role == "default")
        return name

    def __getitem__(self, name: str) -> type[Method]:
        if name not in self._there and name in self.homes:
            importlib.import_module(self.homes[name])
        return self._there[name]

    def __setitem__(self, name: str, made: type[Method]) -> None:
        taken = self._there[name].__module__ if name in self._there else self.homes.get(name, made.__module__)
        if taken != made.__module__:
            raise InputError(f"method {name} is already registered by {taken}.")
        self._there[name] = made

    def __delitem__(self, name: str) -> None:
        del self._there[name]

    def __contains__(self, name: object) -> bool:
        return name in self._there or name in self.homes

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.homes, *self._there)))

    def __len__(self) -> int:
        return len(self.homes.keys() | self._there.keys())


METHODS = Registry()


def load_methods(plugins: tuple[str, ...] = ()) -> Registry:
    """Import the user's own files, then return the registry."""
    for plugin in plugins:
        _load_plugin(Path(plugin))
    return METHODS


def _load_plugin(path: Path) -> None:
    name = f"m2lgdg_plugin_{path.stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"plugin {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"plugin {path} cannot be imported ({type(error).__name__}: {one_line(error)}).") from None
