"""The registry: all methods by name, from the package and from plugin files.

The decorator `method` registers classes here; studies and commands look them up. A file of `methods/` is imported only when one
of its methods is requested, so that a linear model does not wait for PyTorch. A plugin is loaded by its content: an edited file
is loaded again, also in a process that lives on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from m2lgdg.fields import checked_fields, nearest, variant_fields
from m2lgdg.own_code import FINDER, PLUGIN, Source, imported_sources, refuse_not_covered, staying, use
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError, needing, one_line

NAMED = re.compile(r"""^@method\(["'](.+?)["'](?:, role=["'](\w+)["'])?\)""", re.MULTILINE)
SIMPLE = ("peer", "phenotypes", "default")  # roles of the simple peers
PAPER = (  # the paper's method and those it is compared with, in the order of its tables
    *("m2lgdg", "brainnetcnn", "cdann", "mixup", "mldg", "braingnn", "iib", "ibgnn-plus", "ufa-net", "genm", "msstan", "m2dc"),
    *("mm-gtunets", "metaexplainer"),
)

FC_NETWORK = ("erm", "cdann", "mixup", "mldg", "iib", "coral", "irm", "group-dro")  # algorithms on the network of erm.py
BY_ESTIMATOR = "sklearn_bridge.from_sklearn"  # defines methods by their field `estimator`; imported on request, as a plugin is


@dataclass(frozen=True)
class Declaration:
    """What tables and reports need to know of a method: its class attributes, and the default of each field."""

    fields: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    stochastic: bool
    summary: str = ""  # first line of the description
    reference: str = ""
    role: str = ""
    takes: Sequence[str] = (SERIES,)  # kinds of scans


@dataclass
class Plugin:
    """A plugin file as it was loaded: its module, the methods that it registered, and what it imports that is not installed.

    `hash` is that of the content of all these files.
    """

    path: str
    module: str
    hash: str
    sources: dict[str, Source]
    methods: dict[str, type[Any]] = field(default_factory=dict)
    modules: dict[str, ModuleType] = field(default_factory=dict)


class Registry(MutableMapping[str, type[Any]]):
    """Mapping from method names to classes; looking up a method imports its file."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Any]] = {}
        self._plugins: dict[str, Plugin] = {}  # module -> plugin, earlier versions of a file included
        self._current: dict[str, Plugin] = {}  # path -> its version that was loaded last
        self._wanted: tuple[str, ...] = ()  # modules of the plugins that are loaded together
        self._lock = threading.RLock()

    @functools.cached_property
    def _declared(self) -> dict[str, tuple[str, str]]:
        """Name -> module and role, parsed from the package's files once per process; files added later are not seen."""
        folder = Path(__file__).with_name("methods")
        texts = {f"m2lgdg.methods.{path.stem}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
        return {name: (module, role) for module, text in texts.items() for name, role in NAMED.findall(text)}

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

    def __getitem__(self, name: str) -> type[Any]:
        if name not in self._loaded and name in self.modules:
            with needing("networks", f"method {name} is a network, which"):
                importlib.import_module(self.modules[name])
        return self._loaded[name]

    def declaration(self, name: str) -> Declaration:
        """Declaration of a method, from its class."""
        cls = self[name]
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        defaults = {
            one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            for one in dataclasses.fields(cls)
            if (one.default, one.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        }
        return Declaration(defaults, cls.variants, cls.stochastic, summary, cls.reference, cls.role, cls.takes)

    def __setitem__(self, name: str, cls: type[Any]) -> None:
        owner = self._loaded[name].__module__ if name in self._loaded else self.modules.get(name, cls.__module__)
        plugin, other = self._plugins.get(cls.__module__), self._plugins.get(owner)
        replaces = plugin is not None and other is not None and owner not in self._wanted
        if owner != cls.__module__ and not replaces:
            raise InputError(f"method {name} is already registered by {other.path if other else owner}.")
        self._loaded[name] = cls
        if plugin is not None:
            plugin.methods[name] = cls

    def plugin_of(self, name: str) -> str | None:
        """Real path of the plugin that registered a method; None for all other methods."""
        plugin = self._plugins.get(self._loaded[name].__module__) if name in self._loaded else None
        return plugin.path if plugin else None

    def plugin_module(self, stem: str) -> str | None:
        """Module of the plugin whose file has this name without .py, as it was loaded last; None if there is none."""
        loaded = [plugin.module for plugin in self._current.values()]
        loading = [module for module in self._wanted if module in self._plugins]  # one that calls `from_sklearn`, for example
        return next((module for module in (*loaded, *loading)[::-1] if self.plugin_stem(module) == stem), None)

    def plugin_stem(self, module: str) -> str | None:
        """Name of the file of a plugin, without .py, by its module; None for any other module."""
        return Path(self._plugins[module].path).stem if module in self._plugins else None

    def home(self, name: str, caller: str, maker: str) -> str:
        """Module of a method that `maker` makes for a calling module: a plugin's own, so that loading it again replaces it.

        A name that another module registered is refused.
        """
        home = caller if self.plugin_stem(caller) else maker
        if name in self and self[name].__module__ not in (maker, home):
            raise InputError(f"there is another method {name}; give this one another name.")
        return home

    def define_estimator(self, name: str, fields: Mapping[str, Any], *, run: bool = True) -> None:
        """Register a method that its field `estimator` defines (`sklearn_bridge`); without it, or if it is known, do nothing.

        With `run`, the estimator is made once, to see whether its seed matters. A model folder is read without.
        """
        if "estimator" not in fields:
            return
        bridge = importlib.import_module(f"{__package__}.{BY_ESTIMATOR}")
        if run:
            bridge.define_from_study(name, fields)
        elif name not in self:
            self[name] = bridge.define(name, {})

    def plugin_hash(self, path: str | Path) -> str:
        """SHA-256 of a plugin with what it imports, as loaded last, or of the files if this process has not loaded it."""
        plugin = self._current.get(os.path.realpath(path))
        return (
            plugin.hash
            if plugin
            else _hash(content := Path(path).read_bytes(), imported_sources(content, folder=Path(path).absolute().parent))
        )

    def load_plugins(self, paths: tuple[str, ...]) -> None:
        """Load plugin files as they are now. Their methods replace those of earlier versions and of other plugins."""
        with self._lock:
            loaded, current, outer = dict(self._loaded), dict(self._current), self._wanted
            if not outer:
                FINDER.sources.clear()
            try:
                for path in dict.fromkeys(paths):
                    self._load_plugin(Path(path))
            except BaseException:  # all plugins or none; methods of the package that a plugin imported stay
                package = {name: cls for name, cls in self._loaded.items() if cls.__module__ == self.modules.get(name)}
                self._loaded, self._current = package | loaded, current
                raise
            finally:
                self._wanted = outer

    def _load_plugin(self, path: Path) -> None:
        if path.suffix != ".py" or not path.is_file():
            raise InputError(f"plugin {path} is not a Python file.")
        try:
            source = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read plugin {path}: {error.strerror}.") from None
        real, sources = os.path.realpath(path), imported_sources(source, folder=path.absolute().parent)
        digest = _hash(source, sources)
        where = hashlib.sha256(os.fsencode(real)).hexdigest()[:8]  # a plugin may read files next to it
        module = f"{PLUGIN}{path.stem}_{digest[:16]}_{where}"
        if module in self._wanted:
            return
        if real in self._current:  # the new version may not define all methods of the last one
            last = self._current[real].module
            self._loaded = {name: cls for name, cls in self._loaded.items() if cls.__module__ != last}
        self._wanted += (module,)
        use(sources, self._plugins[module].modules if module in self._plugins else {})
        if module in self._plugins:
            for name, cls in self._plugins[module].methods.items():
                self[name] = cls
        else:
            folders = {*sys.path}
            try:
                self._import(path, source, Plugin(real, module, digest, sources))
            except InputError:
                if {*sys.path} == folders:
                    raise
                self._wanted = self._wanted[:-1]
                self._loaded = {name: cls for name, cls in self._loaded.items() if cls.__module__ != module}
                self._load_plugin(path)  # it has added a folder with modules, which can be found now
                return
        self._current[real] = self._plugins[module]

    def _import(self, path: Path, source: bytes, plugin: Plugin) -> None:
        """Run the source that was hashed; Python's own import could take bytecode of an earlier version."""
        spec = importlib.util.spec_from_file_location(plugin.module, path.absolute())
        assert spec is not None  # because of the suffix
        module = importlib.util.module_from_spec(spec)
        before = {*sys.modules}
        sys.modules[plugin.module] = module
        self._plugins[plugin.module] = plugin
        try:
            with staying(method=False):
                exec(compile(source, str(path.absolute()), "exec", dont_inherit=True), module.__dict__)
            refuse_not_covered(before, "it")
            plugin.modules |= {name: sys.modules[name] for name in plugin.sources if name in sys.modules}
        except BaseException as error:  # a plugin may raise anything, or exit
            del sys.modules[plugin.module], self._plugins[plugin.module]
            if isinstance(error, KeyboardInterrupt):
                raise
            raise InputError(f"plugin {path} cannot be imported ({type(error).__name__}: {one_line(error)}).") from None

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self.modules

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.modules, *self._loaded)))

    def __len__(self) -> int:
        return len(self.modules.keys() | self._loaded.keys())


def _hash(content: bytes, sources: Mapping[str, Source]) -> str:
    """Hash of a plugin's content; of a plugin that imports modules, of these and their names too."""
    own = hashlib.sha256(content).hexdigest()
    imported = "".join(f"\n{name} {source.hash}" for name, source in sources.items())
    return hashlib.sha256(f"{own}{imported}".encode()).hexdigest() if imported else own


METHODS = Registry()


def load_methods(plugins: tuple[str, ...] = ()) -> Registry:
    """Load the given plugin files as they are now, and return the registry."""
    if plugins:
        METHODS.load_plugins(plugins)
    return METHODS


def find(name: str) -> type[Any]:
    """Class of a method, by its registered name."""
    if name not in METHODS:
        raise InputError(f"method {' '.join(name.split())[:100]} is not known{nearest(name, METHODS)}")
    return METHODS[name]


def create(name: str, variant: str | None = None, **fields: Any) -> Any:
    """A method that is not fitted, by its registered name; unknown names and invalid values are refused.

    `fields` differ from the defaults, or from the fields of the `variant`. `m2lgdg.make` returns a `Model` of it.
    """
    if name not in METHODS:
        METHODS.define_estimator(name, fields)
    cls = find(name)
    if variant is not None:
        fields = variant_fields(name, cls.variants, variant) | fields
    created = cls(**checked_fields(cls, fields))
    created.check()
    return created
