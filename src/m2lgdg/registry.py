"""The registry: all methods by name, from the package and from plugin files.

The decorator `method` registers classes here; studies, commands and reports look them up. A file of `methods/` is imported
only when one of its methods is requested, so that a linear model does not wait for PyTorch.
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
PAPER = (  # the paper's method and those it is compared with, in the order of its tables
    *("m2lgdg", "brainnetcnn", "cdann", "mixup", "mldg", "braingnn", "iib", "ibgnn-plus", "ufa-net", "genm", "msstan", "m2dc"),
    *("mm-gtunets", "metaexplainer"),
)


class Registry(MutableMapping[str, "type[Method]"]):
    """Mapping from method names to classes; looking up a method imports its file."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Method]] = {}

    @functools.cached_property
    def _declared(self) -> dict[str, tuple[str, str]]:
        """Name -> module and role, parsed from the package's files once per process; files added later are not seen."""
        import m2lgdg.methods as package

        modules = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
        texts = {module: pkgutil.get_data(package.__name__, f"{module.rpartition('.')[2]}.py") or b"" for module in modules}
        return {name: (module, role) for module in modules for name, role in NAMED.findall(texts[module].decode())}

    @property
    def modules(self) -> dict[str, str]:
        """Name -> module of the package's methods, without importing them."""
        return {name: module for name, (module, _) in self._declared.items()}

    def with_role(self, *roles: str) -> list[str]:
        """Names of the methods with one of these roles (`Method.role`), without importing those of the package."""
        names = [name for name, (_, role) in self._declared.items() if role in roles]
        return names + [name for name, cls in self._loaded.items() if name not in self._declared and cls.role in roles]

    @property
    def default(self) -> str:
        """Name of the method that `m2lgdg fit` uses by default."""
        (name,) = (name for name, (_, role) in self._declared.items() if role == "default")
        return name

    def __getitem__(self, name: str) -> type[Method]:
        if name not in self._loaded and name in self.modules:
            importlib.import_module(self.modules[name])
        return self._loaded[name]

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        owner = self._loaded[name].__module__ if name in self._loaded else self.modules.get(name, cls.__module__)
        if owner != cls.__module__:
            raise InputError(f"method {name} is already registered by {owner}.")
        self._loaded[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self.modules

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.modules, *self._loaded)))

    def __len__(self) -> int:
        return len(self.modules.keys() | self._loaded.keys())


METHODS = Registry()


def load_methods(plugins: tuple[str, ...] = ()) -> Registry:
    """Import the given plugin files and return the registry."""
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
