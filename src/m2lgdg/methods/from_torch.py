"""`from_torch`: a PyTorch module of one's own as a method, with the training loop, seeds and calibration of all networks.

Each module is a method with a name of its own, in the registry. `deep.py` trains it; here are its input, its logits, its first
weights, and what keys and model folders need to know that it is the same module.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, fisher_matrices
from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.fields import checked_fields, nearest, shown
from m2lgdg.method import ANY_SCAN, _model_class
from m2lgdg.preprocess import standardised_series
from m2lgdg.registry import METHODS
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError, one_line

INPUTS = {  # what the module sees of a scan, with the shape of one subject
    "fc": "(edge,)",
    "rows": "(ROI, ROI)",
    "series": "(ROI, time)",
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)  # of a call of a module
RESETS = ("reset_parameters", "_reset_parameters")  # the latter: nn.MultiheadAttention and nn.Transformer
SAVED = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
LOGITS = "return one logit for each subject, (subject,) or (subject, 1), or two, (subject, 2)"


class Definition(NamedTuple):
    """What `from_torch` was given: a module or what makes one, and the fields of the method."""

    name: str
    given: Any
    fields: Mapping[str, Any]
    home: str  # module of the class of the method: that of a plugin, or this one

    @property
    def same(self) -> tuple[Any, ...]:
        """What two equal definitions share, also in two processes."""
        made = self.given if not isinstance(self.given, nn.Module) else type(self.given)
        return self.name, made.__module__, made.__qualname__, dict(self.fields)


class Network(nn.Module):
    """The module of the user between a `Batch` and two logits."""

    def __init__(self, module: nn.Module, method: TorchMethod) -> None:
        super().__init__()
        self.module = module
        self.input, self.phenotypes, self.name = method.input, method.phenotypes, method.name

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits; those of one logit z are 0 and z."""
        output = self.module(batch[self.input], batch.phenotypes) if self.phenotypes else self.module(batch[self.input])
        if not isinstance(output, Tensor):
            raise InputError(f"method {self.name}: its module returned {type(output).__name__}, not a tensor; {LOGITS}.")
        count, shape = len(batch), tuple(output.shape)
        if shape == (count, 2):
            return output
        if shape not in ((count,), (count, 1)):
            raise InputError(f"method {self.name}: its module returned shape {shape} for {count} subject(s); {LOGITS}.")
        single = output.reshape(count)
        return torch.stack([torch.zeros_like(single), single], dim=1)


@dataclasses.dataclass
class TorchMethod(DeepMethod):
    """A PyTorch module of the user; source sites pooled.

    `from_torch` makes subclasses, one for each name.
    """

    input: Literal["fc", "rows", "series"] = "fc"
    phenotypes: bool = False
    keep_weights: bool = False  # start from the weights of the given object, instead of new ones
    architecture: str = ""  # hash of a given object, with its weights if they are kept

    takes = ANY_SCAN
    definition: ClassVar[Definition]

    def needs_series(self) -> str:
        """Series as input."""
        return f"method {self.name} with input series" if self.input == SERIES else ""

    def given_code(self) -> list[Any]:
        """Classes and functions that it was given in this process; a study refuses those without a file."""
        given = self.definition.given
        if not isinstance(given, nn.Module):
            return [given]
        parts = list(given.modules())
        functions = [value for part in parts for value in vars(part).values() if isinstance(value, FunctionType)]
        return [*dict.fromkeys(map(type, parts)), *functions]

    @property
    def only_here(self) -> bool:
        """Whether other processes do not know the method, because no plugin makes it."""
        return METHODS.plugin_of(self.name) is None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.definition, dict(vars(self)))

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        """What the module sees of the scans: (subject, edge), (subject, roi, roi) or (subject, roi, time)."""
        if self.input == SERIES:
            return {SERIES: torch.from_numpy(standardised_series(cohort.series, self.length))}
        of_scans = fc_features if self.input == "fc" else fisher_matrices
        return {self.input: torch.from_numpy(np.array(of_scans(cohort.scans), dtype=np.float32))}

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """As for all networks, if the module is the one that was given."""
        given = self.definition.given
        if isinstance(given, nn.Module) and digest(given, self.keep_weights) != self.architecture:
            kept = ", whose weights are kept; give weights that are the same in every process" * self.keep_weights
            raise InputError(f"method {self.name}: its module is not the one that from_torch was given{kept}.")
        super().learn(source, seed=seed, device=device, progress=progress)

    def build(self, shape: Shape) -> nn.Module:
        """The module between a batch and its logits, tried on one subject and on two."""
        edges = shape.n_rois * (shape.n_rois - 1) // 2
        one = {"fc": (edges,), "rows": (shape.n_rois, shape.n_rois), "series": (shape.n_rois, shape.length)}[self.input]
        network = Network(self._module(one, shape.n_inputs), self)
        first = next(network.parameters(), None)
        if first is None or not any(value.requires_grad for value in network.parameters()):
            raise InputError(f"method {self.name}: its module has no weights to train.")
        if "meta" not in (first.device.type, torch.get_default_device().type):  # where only the size is asked for
            self._try(network, one, shape.n_inputs, first.device)
            self._compare(digest(network.module))
        return network

    def _compare(self, now: str) -> None:
        """Keep the hash of the module of a fit, and refuse another one when the model predicts."""
        if self.facts_.setdefault("module", now) != now:
            raise InputError(
                f"method {self.name}: its module is not the one that the model was fitted with (other layers or settings)."
            )

    def _module(self, one: tuple[int, ...], n_inputs: int) -> nn.Module:
        """The given object with new weights, or what the given class or function makes of the shape of one subject."""
        given = self.definition.given
        if isinstance(given, nn.Module):
            try:
                module = copy.deepcopy(given)
            except Exception as error:  # a module may hold anything, and torch cannot copy LazyBatchNorm1d
                advice = "give the class or a function that makes it"
                raise InputError(
                    f"method {self.name}: its module cannot be copied ({one_line(error)[:100]}); {advice}."
                ) from None
            if not self.keep_weights:
                renew(module, self.name)
            return module
        needed, optional = arguments(given)
        made = given(*(one, n_inputs)[: len(needed)], **{name: getattr(self, name) for name in optional})
        if not isinstance(made, nn.Module):
            raise InputError(f"method {self.name}: {given.__name__} made {type(made).__name__}, not a torch.nn.Module.")
        return made

    def _try(self, network: Network, one: tuple[int, ...], n_inputs: int, device: torch.device) -> None:
        """Refuse a module that cannot take the input, or whose output for a subject is not its own."""
        draw = torch.Generator().manual_seed(0)
        scans, phenotypes = (torch.randn(2, *size, generator=draw) for size in (one, (n_inputs,)))
        batch = Batch(
            {self.input: scans.to(device)}, phenotypes.to(device), *torch.zeros(2, 2, dtype=torch.long, device=device)
        )
        rows = [torch.tensor(rows, device=device) for rows in ([0, 1], [0], [1])]
        network.eval()
        try:
            with torch.no_grad():
                together, *alone = [network(batch.take(some)).float() for some in rows]
        except FAILURES as error:
            more = f" and phenotypes of shape (2, {n_inputs})" if self.phenotypes else ""
            raise InputError(
                f"method {self.name}: its module cannot take input of shape {(2, *one)}{more} ({one_line(error)[:200]}); with "
                f'input="{self.input}" a subject has the shape {INPUTS[self.input]}.'
            ) from None
        if not torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-4, equal_nan=True):
            raise InputError(
                f"method {self.name}: the output of its module for a subject changes from call to call or with the other "
                "subjects of a batch, also in evaluation mode; functional.dropout needs training=self.training, and batch norm "
                "its running statistics."
            )
        network.train()
        for name, value in network.module.state_dict().items():
            if not isinstance(value, Tensor) or value.dtype not in SAVED:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"method {self.name}: {name} of its module is {kind}, which cannot be saved.")


def renew(module: nn.Module, name: str) -> None:
    """Draw the weights of all layers anew; refused if there are weights that cannot be drawn, or that are not trained."""
    advice = "give the class or a function that makes the module, or keep_weights=True"
    for place, part in reversed(list(module.named_modules())):  # nn.MultiheadAttention sets weights of the layer in it
        reset = next((getattr(part, one) for one in RESETS if hasattr(part, one)), None)
        own = list(part.parameters(recurse=False))
        where = f"{place or 'it'} ({type(part).__name__})"
        if own and reset is None:
            raise InputError(
                f"method {name}: no seed can draw the weights of {where}, which has no reset_parameters; {advice}."
            )
        if not all(value.requires_grad for value in own):
            raise InputError(f"method {name}: weights of {where} are frozen, but would be drawn anew; {advice}.")
        if reset is not None:
            reset()


def digest(module: nn.Module, weights: bool = False) -> str:
    """Hash of the layers of a module with their settings and the shapes of their weights, or with the weights."""
    texts = []
    for place, part in module.named_modules():
        kind, own = type(part), vars(part).keys() - OF_MODULES
        public = {key for key in own if not key.startswith("_")} if kind.__module__.startswith("torch.") else own
        settings = [f"{key}={_setting(getattr(part, key))}" for key in sorted(public)]
        texts.append(f"{place} {METHODS.plugin_stem(kind.__module__) or kind.__module__}.{kind.__qualname__} {settings}")
    for place, value in module.state_dict().items():
        if is_lazy(value) or not isinstance(value, Tensor):
            texts.append(f"{place} {type(value).__name__}")
            continue
        texts.append(f"{place} {tuple(value.shape)} {value.dtype}")
        if weights:
            texts.append(hashlib.sha256(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest())
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _setting(value: Any) -> str:
    """Text of a setting that is the same in every process."""
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return str([_setting(one) for one in value])
    if isinstance(value, dict):
        return str([(_setting(key), _setting(one)) for key, one in value.items()])
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def arguments(given: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of the arguments of a class or function without a default, and those whose default can be a field."""
    needed: list[str] = []
    optional: dict[str, Any] = {}
    for one in inspect.signature(given).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.default is not one.empty:
            optional |= {one.name: one.default} if _hint(one.default) and one.kind != one.POSITIONAL_ONLY else {}
        elif one.kind == one.KEYWORD_ONLY or len(needed) == 2:
            raise InputError(
                f"{given.__name__} has the argument {one.name} without a default; it is called with the shape of one subject "
                "and, if it takes it, the number of phenotypes."
            )
        else:
            needed.append(one.name)
    return needed, optional


def _hint(value: Any) -> Any:
    """Type of a field with this default; None if it can be no field."""
    if type(value) in (bool, int, float, str):
        return type(value)
    kinds = {type(one) for one in value} if isinstance(value, tuple) else set()
    return tuple[(kinds.pop(), ...)] if len(kinds) == 1 and kinds <= {bool, int, float, str} else None  # type: ignore[misc]


def define(definition: Definition) -> type[TorchMethod]:
    """Class of a method, not yet registered: arguments of what makes the module are fields, and given fields its defaults."""
    hints = typing.get_type_hints(TorchMethod)
    own = {} if isinstance(definition.given, nn.Module) else arguments(definition.given)[1]
    used = [*own, *["length"] * (definition.fields["input"] == SERIES)]
    unused = tuple(name for name in ("length", "dropout") if name not in used)

    def made(values: Mapping[str, Any]) -> type[TorchMethod]:
        annotations = {name: hints.get(name) or _hint(value) for name, value in values.items()}
        about: dict[str, Any] = {"__annotations__": annotations, "__doc__": TorchMethod.__doc__, "__module__": definition.home}
        about |= {"unused": unused, **values}
        cls: type[TorchMethod] = dataclasses.dataclass(type("TorchMethod", (TorchMethod,), about))
        cls.name, cls.definition = definition.name, definition
        return cls

    return made(own | checked_fields(made(own), definition.fields))


def _restored(definition: Definition, held: dict[str, Any]) -> TorchMethod:
    """A pickled method; a process that does not know it gets it with its definition."""
    known = METHODS.get(definition.name)
    if known is None or not issubclass(known, TorchMethod) or known.definition.same != definition.same:
        home = definition.home if definition.home in sys.modules else __name__
        known = define(definition._replace(home=home))
        if definition.name not in METHODS:
            METHODS[definition.name] = known
    method: TorchMethod = known.__new__(known)
    vars(method).update(held)
    return method


def from_torch(
    module: nn.Module | Callable[..., nn.Module],
    input: Literal["fc", "rows", "series"] = "fc",
    name: str | None = None,
    *,
    phenotypes: bool = False,
    keep_weights: bool = False,
    **fields: Any,
) -> Any:
    """A PyTorch module as a method for `fit`, studies, audit and reports.

    Parameters
    ----------
    module : callable, or torch.nn.Module
        A class or a function that makes the module. It is called with the shape of one subject, and with the number of
        phenotypes if it takes a second argument; arguments with a default become fields of the method. Or an object, whose
        weights each fit draws anew with its seed. The module returns one logit for each subject, or two.
    input : {"fc", "rows", "series"}
        What the module is called with: Fisher z of all edges (subject, edge), as a matrix with one row for each ROI
        (subject, ROI, ROI), or the standardised series (subject, ROI, time).
    name : str, optional
        Name of the method in studies and tables; by default from the module and its input.
    phenotypes : bool
        Whether the module is also called with the scaled phenotypes (subject, input).
    keep_weights : bool
        Whether every fit starts with the weights that the object has, such as those of a pretraining.
    **fields
        Defaults of the method's fields, such as `epochs` or `learning_rate`.

    Returns
    -------
    Model
        Not fitted. Its method is also in the registry under its name, so that study files can name it.

    Examples
    --------
    >>> import m2lgdg
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(66, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> method = m2lgdg.from_torch(net, input="fc", name="my-net", epochs=3, warmup=1)
    >>> fold = next(iter(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))))
    >>> method.fit(fold.source, seed=1).predict_proba(fold.target).shape
    (10, 2)
    """
    if input not in INPUTS:
        raise InputError(f"input {shown(input)} is not known{nearest(str(input), INPUTS)}")
    if not isinstance(module, nn.Module) and not (inspect.isroutine(module) or inspect.isclass(module)):
        raise InputError(f"{shown(module)} is not a torch.nn.Module, nor a class or function that makes one.")
    given_name = type(module).__name__ if isinstance(module, nn.Module) else module.__name__
    chosen = name or f"torch-{input}-{re.sub(r'[^a-z0-9_.-]', '', given_name.lower()) or 'module'}"
    if not NAME.fullmatch(chosen):
        raise InputError(f"{chosen[:100]} cannot be the name of a method; use letters, digits, dots, - and _.")
    if keep_weights and not isinstance(module, nn.Module):
        raise InputError("keep_weights=True is for an object; a class or function sets its weights itself.")
    home = METHODS.home(chosen, sys._getframe(1).f_globals.get("__name__", ""), __name__)
    own: dict[str, Any] = {"input": input, "phenotypes": phenotypes, "keep_weights": keep_weights}
    own["architecture"] = digest(module, keep_weights) if isinstance(module, nn.Module) else ""
    cls = define(Definition(chosen, module, fields | own, home))
    for field in fields:
        if field in cls.unused:
            raise InputError(f"method {chosen}, field {field}: this method does not use it; leave it out.")
    method = cls()
    method.check()
    METHODS[chosen] = cls
    return _model_class()(method)
