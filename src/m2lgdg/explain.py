"""`explain`: which ROIs, edges and phenotypes the decisions of a fitted method rest on, as tables that can be saved.

Comes after training: networks are explained by integrated gradients, linear methods by activation patterns; `mean_over`
joins the explanations of several folds or seeds. A study explains each cell it is asked to, the report shows their mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.deep import Batch, DeepMethod, choose_device
from m2lgdg.method import Method
from m2lgdg.methods.linear import Linear
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.readers.atlas import regions
from m2lgdg.representation import MAP_COLUMNS, read_representation
from m2lgdg.storage import InputError, one_line, write_texts

Floats = npt.NDArray[np.float64]
TOGETHER = 4  # subjects explained at a time
AT_ONCE = 16  # points of their paths that pass a network at once: a large network holds 0.2 GB for each
LOOSE = 0.1  # relative completeness error above which a reader must be warned
BASELINE = "zero: the mean of a standardised series, no correlation, an average phenotype"
GRADIENTS = "integrated gradients of the patient's logit minus the control's; scores are mean absolute attributions"
PATTERNS = (
    "activation patterns (Haufe et al. 2014) of features in units of their sd; each block has mean 1 over edges, ROIs or "
    "phenotypes, times its share of the decision's variance"
)
ROI_COLUMNS = ("rank", "roi", "code", "x", "y", "z", "score", "sd")
EDGE_COLUMNS = ("roi", "other roi", "score", "direction")
PHENOTYPE_COLUMNS = ("phenotype", "score", "sd", "direction")
TABLES = {"roi": "rois", "edges": "edges", "phenotypes": "phenotypes", "gate": "gate", "map": "map"}  # file -> table
COMPLETENESS_COLUMNS = ("subject", "difference", "attributed", "absolute", "relative")


@dataclass(frozen=True, eq=False)
class Explanation:
    """What decisions rest on, as tables sorted by score; a score is the sum of the columns named after features or blocks.

    `rois`: rank, roi, code and MNI centroid where the atlas is known, score, its sd over subjects (a pattern has none).
    `edges`: every pair of ROIs, where the method sees connectivity. `direction` is signed: above 0 speaks for patient.
    `gate`: mean gate weights by site and label (-1 unknown), where the network has a gate.
    `completeness`: for each subject, how far the attributions are from the change of the decision that they should sum to.
    `map`: the network's representation in two dimensions, with site and label of each point and no id.
    """

    rois: pd.DataFrame
    edges: pd.DataFrame
    phenotypes: pd.DataFrame
    gate: pd.DataFrame
    completeness: pd.DataFrame
    map: pd.DataFrame
    about: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write roi.csv, edges.csv, phenotypes.csv, gate.csv, map.csv and explanation.json; no subject is named."""
        texts = {f"{name}.csv": getattr(self, held).to_csv(index=False, lineterminator="\n") for name, held in TABLES.items()}
        about = self.about | {"completeness": self.error()}
        texts["explanation.json"] = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return write_texts(folder, texts)

    @classmethod
    def load(cls, folder: str | Path) -> Explanation:
        """Read what `save` wrote; of `completeness` only the error over subjects is left."""
        folder = Path(folder)
        try:
            about = json.loads((folder / "explanation.json").read_text(encoding="utf-8"))
            tables = {held: _read_table(folder / f"{name}.csv") for name, held in TABLES.items()}
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} holds no explanation that can be read ({one_line(error)}).") from None
        return cls(**tables, completeness=pd.DataFrame(columns=list(COMPLETENESS_COLUMNS)), about=about)

    def error(self) -> dict[str, float] | None:
        """The completeness error over subjects: mean and largest absolute, median and largest relative; None for patterns."""
        if not len(self.completeness):
            return self.about.get("completeness")
        absolute, relative = self.completeness["absolute"], self.completeness["relative"].dropna()
        found = {"mean_absolute": float(absolute.mean()), "max_absolute": float(absolute.max())}
        if len(relative):
            found |= {"median_relative": float(relative.median()), "max_relative": float(relative.max())}
        return found


class _Found(NamedTuple):
    """What either way of explaining leaves for the tables; a pattern stands as if it were of one subject."""

    rois: dict[str, Floats]  # (subject, roi) by feature
    edges: dict[str, Floats]  # (2, roi, roi) by feature: size and direction
    phenotypes: Floats  # (subject, input), signed
    gate: Floats  # (subject, weight)
    change: Floats  # (subject, 2): of the decision from the baseline, and what is attributed of it


def explain(
    fitted: Method,
    cohort: Cohort,
    *,
    steps: int = 64,
    device: str = "cpu",
    source: Cohort | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Explain a fitted method's decisions on a cohort, best one of subjects it was not trained on.

    With the `source` it was trained on, the map of a network's representation shows both, and probes read the source's.

    A network that chooses by thresholds (windowed graphs, the strongest nodes) jumps along the path, and gradients do not
    see jumps: its `completeness` is bad, and no number of `steps` mends it.
    """
    fitted._check_target(cohort)
    if not len(cohort):
        raise InputError(f"cohort {cohort.name} has no subjects, there is nothing to explain.")
    if steps < 1:
        raise InputError(f"integrated gradients need at least one step, not {steps}.")
    # As for a prediction: no label, site or id can matter.
    seen = cohort.with_inputs(fitted.facts_["inputs"], allow_proxies=True).unlabelled()
    about: dict[str, Any] = {"method": fitted.name, "cohort": cohort.hash, "subjects": len(cohort)}
    points = pd.DataFrame(columns=list(MAP_COLUMNS))
    if isinstance(fitted, DeepMethod):
        found = _through_network(fitted, seen, steps, choose_device(device), progress)
        about |= {"scores": GRADIENTS, "steps": steps, "baseline": BASELINE}
        if hasattr(fitted.network(), "parts"):  # a method of a user's own may have none
            points, about["readability"] = read_representation(fitted, cohort, source)
    elif isinstance(fitted, Linear):
        found = _patterns(fitted, seen)
        about |= {"scores": PATTERNS, "steps": None, "baseline": None}
    else:
        raise InputError(f"method {fitted.name} has nothing to explain: it is neither a network nor a linear method.")
    return Explanation(
        rois=_roi_table(found.rois, cohort),
        edges=_edge_table(found.edges, cohort.rois),
        phenotypes=_phenotype_table(found.phenotypes, seen.inputs),
        gate=_gate_table(found.gate, cohort),
        completeness=_completeness_table(found.change, cohort),
        map=points,
        about=about,
    )


def _through_network(
    fitted: DeepMethod, cohort: Cohort, steps: int, place: torch.device, progress: Callable[[int, int], None] | None
) -> _Found:
    network = fitted.network().to(place).requires_grad_(False)
    scaler = PhenotypeScaler.restore(tuple(fitted.facts_["inputs"]), fitted.state_, "scaler")
    rois: dict[str, list[Floats]] = {}
    edges: dict[str, Floats] = {}
    phenotypes, gates, changes = [], [], []
    for start in range(0, len(cohort), TOGETHER):
        some = cohort.select(np.arange(start, min(start + TOGETHER, len(cohort))))
        batch = fitted._batch(some, scaler, place)
        attributed, change = integrated_gradients(network, batch, steps)
        values = {name: value.double().cpu().numpy() for name, value in attributed.items()}
        phenotypes.append(values.pop("phenotypes"))
        for name, value in values.items():
            matrices = _matrices(name, value, len(cohort.rois))
            if matrices is None:
                rois.setdefault(name, []).append(_over_time(name, value, len(cohort.rois)))
            else:
                rois.setdefault(name, []).append(_over_others(matrices[0]))
                edges[name] = edges.get(name, 0.0) + matrices.sum(axis=1) / len(cohort)
        gates.append(_gate(network, batch))
        changes.append(change.double().cpu().numpy())
        if progress:
            progress(start + len(some), len(cohort))
    parts = {name: np.concatenate(pieces) for name, pieces in rois.items()}
    return _Found(parts, edges, np.concatenate(phenotypes), np.concatenate(gates), np.concatenate(changes))


def integrated_gradients(network: nn.Module, batch: Batch, steps: int) -> tuple[dict[str, Tensor], Tensor]:
    """Attributions of the patient's logit minus the control's to every feature and to "phenotypes", from a baseline of zero.

    Turned by the sign of the prediction it would be the margin of the predicted class: no absolute value changes by that.
    Also returns, (subject, 2), the change of this decision from the baseline and the sum of the attributions.
    """
    from captum.attr import IntegratedGradients

    inputs = dict(batch.features) | ({"phenotypes": batch.phenotypes} if batch.phenotypes.shape[1] else {})

    def decision(*values: Tensor) -> Tensor:
        seen, count = dict(zip(inputs, values, strict=True)), len(values[0])
        phenotypes = seen.pop("phenotypes", batch.phenotypes.new_empty(count, 0))
        logits = network(Batch(seen, phenotypes, batch.label[:1].expand(count), batch.site[:1].expand(count)))
        # An input that the network does not use must have a gradient too, of zero.
        unused = torch.stack([value.flatten(1).sum(1) for value in values]).sum(0) * 0.0
        change: Tensor = logits[:, 1] - logits[:, 0] + unused
        return change

    given = tuple(value.float() for value in inputs.values())
    found = IntegratedGradients(decision).attribute(given, n_steps=steps, internal_batch_size=max(AT_ONCE, len(batch)))
    with torch.no_grad():
        change = decision(*given) - decision(*(torch.zeros_like(value) for value in given))
    attributed = {name: value.detach() for name, value in zip(inputs, found, strict=True)}
    total = torch.stack([value.flatten(1).sum(1) for value in attributed.values()]).sum(0)
    return {"phenotypes": torch.zeros_like(batch.phenotypes)} | attributed, torch.stack([change, total], dim=1)


def _matrices(name: str, values: Floats, n: int) -> Floats | None:
    """(2, subject, roi, roi) sizes and signed values of a connectivity feature, symmetric; None for another feature."""
    if values.shape[1:] == (n * (n - 1) // 2,):
        both = squares(values, n)
    elif name != "series" and values.shape[1:] == (n, n):  # series may be as long as there are ROIs
        both = values * (1 - np.eye(n))
    else:
        return None
    pair = np.stack([np.abs(both), both])
    return np.asarray((pair + pair.swapaxes(2, 3)) / 2)


def squares(edges: Floats, n: int) -> Floats:
    """(subject, edge) values above the diagonal, row by row -> (subject, roi, roi) symmetric, 0 on the diagonal."""
    rows, columns = np.triu_indices(n, 1)
    matrices = np.zeros((len(edges), n, n))
    matrices[:, rows, columns] = matrices[:, columns, rows] = edges
    return matrices


def _over_others(sizes: Floats) -> Floats:
    """(subject, roi, roi) -> (subject, roi): the mean over the other ROIs."""
    return np.asarray(sizes.sum(axis=2) / (sizes.shape[1] - 1))


def _over_time(name: str, values: Floats, n: int) -> Floats:
    """(subject, roi) or (subject, roi, time) -> (subject, roi): the mean size."""
    if values.ndim < 2 or values.shape[1] != n:
        raise InputError(f"feature {name} of shape {values.shape[1:]} cannot be put on {n} ROIs, so it cannot be explained.")
    return np.asarray(np.abs(values).reshape(len(values), n, -1).mean(axis=2))


def _gate(network: Any, batch: Batch) -> Floats:
    """(subject, weight) of the network's gate; no weights where it has none."""
    with torch.no_grad():
        parts = network.parts(batch) if hasattr(network, "parts") else {}
    return np.asarray(parts["gate"].double().cpu()) if "gate" in parts else np.empty((len(batch), 0))


def _patterns(fitted: Linear, cohort: Cohort) -> _Found:
    n = len(cohort.rois)
    features = {name: fitted._features(name, cohort) for name in fitted._weights()}
    parts = {name: values @ fitted.state_[f"{name}.weights"] for name, values in features.items()}  # but for intercepts
    decision = np.asarray(sum(parts.values()))
    if len(cohort) < 3 or decision.std() == 0:
        raise InputError(f"method {fitted.name} is explained by how subjects differ: at least three are needed who do.")
    rois, edges, phenotypes = {}, {}, np.zeros((1, len(cohort.inputs)))
    for name, values in features.items():
        pattern = activation_pattern(values, decision)
        if name == "tangent":  # without its diagonal; in units of the sd, the scale of the off-diagonal is gone already
            rows, columns = np.triu_indices(n)
            pattern = pattern[rows != columns]
        (_, common), (_, whole) = np.cov(parts[name], decision)
        pattern *= max(common / whole, 0.0) / (np.abs(pattern).mean() or 1.0)
        if name == "phenotypes":
            phenotypes = pattern[None]
        elif name == "amplitude":
            rois[name] = np.abs(pattern)[None]
        else:
            matrix = squares(pattern[None], n)
            rois[name], edges[name] = _over_others(np.abs(matrix)), np.concatenate([np.abs(matrix), matrix])
    return _Found(rois, edges, phenotypes, np.empty((len(cohort), 0)), np.empty((0, 2)))


def activation_pattern(features: Floats, decision: Floats) -> Floats:
    """(feature,) cov(feature, decision) / var(decision) of features in units of their sd; 0 where one does not vary.

    What a decision reads off the features it may weigh heavily only to cancel noise; its pattern is where its signal lies.
    """
    away, centred = decision - decision.mean(), features - features.mean(axis=0)
    spread = centred.std(axis=0)
    return np.asarray(away @ (centred / np.where(spread > 1e-12, spread, np.inf)) / (away @ away))


def _roi_table(parts: dict[str, Floats], cohort: Cohort) -> pd.DataFrame:
    n = len(cohort.rois)
    each = sum(parts.values(), np.zeros((1, n)))  # (subject, roi)
    table = pd.DataFrame({"roi": cohort.rois, "score": each.mean(axis=0), "sd": _spread(each)})
    known = regions(cohort.atlas)
    if known is not None:
        table = table.join(known.set_index("name")[["code", "x", "y", "z"]], on="roi")
    table = table.assign(**{name: values.mean(axis=0) for name, values in parts.items()})
    return _ranked(table)


def _ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Sorted by score, with ranks from 1; of equal scores the earlier ROI comes first."""
    table = _sorted(table).assign(rank=np.arange(1, len(table) + 1))
    first = [name for name in ROI_COLUMNS if name in table]
    return table[[*first, *(name for name in table if name not in first)]]


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def _spread(each: Floats) -> Floats:
    """The sd over subjects (ddof 1); none of a single one."""
    return np.asarray(each.std(axis=0, ddof=1)) if len(each) > 1 else np.full(each.shape[1], np.nan)


def _edge_table(parts: dict[str, Floats], names: Sequence[str]) -> pd.DataFrame:
    rows, columns = np.triu_indices(len(names) if parts else 0, 1)
    size, direction = sum(parts.values(), np.zeros((2, len(names), len(names))))[:, rows, columns]
    ends = np.array(names, dtype=object)
    table = pd.DataFrame(dict(zip(EDGE_COLUMNS, (ends[rows], ends[columns], size, direction), strict=True)))
    return _sorted(table.assign(**{name: matrices[0, rows, columns] for name, matrices in parts.items()}))


def _phenotype_table(signed: Floats, names: Sequence[str]) -> pd.DataFrame:
    size = np.abs(signed)
    columns = (list(names), size.mean(axis=0), _spread(size), signed.mean(axis=0))
    return _sorted(pd.DataFrame(dict(zip(PHENOTYPE_COLUMNS, columns, strict=True))))


def _gate_table(gate: Floats, cohort: Cohort) -> pd.DataFrame:
    """Mean weights by site and label, sites in natural order; the two weights of a gate are those of scan and phenotypes."""
    names = ["imaging", "phenotypes"] if gate.shape[1] == 2 else [f"weight {i + 1}" for i in range(gate.shape[1])]
    table = pd.DataFrame({"site": cohort.sites, "label": cohort.labels, "subjects": 1})
    if not names:
        return table.iloc[:0]
    groups = table.assign(**dict(zip(names, gate.T, strict=True))).groupby(["site", "label"], as_index=False)
    return _by_site(groups.agg({"subjects": "sum"} | dict.fromkeys(names, "mean")))


def _by_site(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("site", kind="stable", key=lambda column: column.map(natural_key), ignore_index=True)


def _completeness_table(change: Floats, cohort: Cohort) -> pd.DataFrame:
    difference, attributed = change.T
    absolute = np.abs(attributed - difference)
    moved = np.where(difference == 0, np.nan, np.abs(difference))  # relative to nothing there is no error
    columns = (cohort.subjects[: len(change)], difference, attributed, absolute, absolute / moved)
    return pd.DataFrame(dict(zip(COMPLETENESS_COLUMNS, columns, strict=True)))


def mean_over(explanations: Iterable[Explanation]) -> Explanation:
    """One explanation for several folds or seeds of a method, each counting the same, with `low` and `high` of each score.

    These are the 2.5 and 97.5 percentiles over the explanations, or the smallest and largest where there are fewer than five.
    """
    given = list(explanations)
    methods = sorted({one.about["method"] for one in given})
    if len(methods) != 1:
        raise InputError(f"a mean is over explanations of one method, not of {', '.join(methods) or 'none'}.")
    gate = pd.concat([one.gate for one in given]).groupby(["site", "label"], as_index=False).mean()
    return Explanation(
        rois=_ranked(_averaged([one.rois for one in given], ["roi", "code"], "ROIs")),
        edges=_sorted(_averaged([one.edges for one in given], ["roi", "other roi"], "edges")),
        phenotypes=_sorted(_averaged([one.phenotypes for one in given], ["phenotype"], "phenotypes")),
        gate=_by_site(gate),
        completeness=pd.concat([one.completeness for one in given], ignore_index=True),
        map=given[0].map.iloc[:0],  # maps of different trainings have nothing to do with each other
        about=given[0].about
        | _joined_about(given)
        | {
            "cohort": [one.about["cohort"] for one in given],
            "subjects": [one.about["subjects"] for one in given],
            "explanations": len(given),
            "interval": "2.5 and 97.5 percentiles over explanations" if len(given) >= 5 else "smallest and largest",
        },
    )


def _read_table(path: Path) -> pd.DataFrame:
    """A saved table; numbers are numbers in an empty one too."""
    names = dict.fromkeys(("roi", "other roi", "code", "phenotype", "site", "part"), str)
    table = pd.read_csv(path, dtype=names, keep_default_na=False, na_values=[""])
    return table if len(table) else table.astype({column: float for column in table if column not in names})


def _joined_about(given: list[Explanation]) -> dict[str, Any]:
    """Completeness errors and readabilities over explanations: largest of the largest, means of the others."""
    joined: dict[str, Any] = {}
    errors = [error for one in given if (error := one.error()) is not None]
    for name, each in (("completeness", errors), ("readability", [one.about.get("readability") or {} for one in given])):
        numbers = pd.DataFrame(each).select_dtypes("number")
        if numbers.size:
            joined[name] = {
                str(key): float(column.max() if str(key).startswith("max") else column.mean())
                for key, column in numbers.dropna(axis=1, how="all").items()
            }
    return joined


def _averaged(tables: list[pd.DataFrame], keys: list[str], what: str) -> pd.DataFrame:
    """The mean of every number by the keys, in the first table's order, and the interval of the score."""
    keys = [key for key in keys if key in tables[0]]
    if len({tuple(sorted(map(tuple, table.reindex(columns=keys).astype(str).to_numpy()))) for table in tables}) > 1:
        raise InputError(f"a mean is over explanations of the same {what}, these differ.")
    groups = pd.concat(tables).groupby(keys, sort=False, dropna=False)
    low, high = (0.025, 0.975) if len(tables) >= 5 else (0.0, 1.0)
    mean = groups.mean()
    at = list(mean.columns).index("score") + 1
    mean.insert(at, "low", groups["score"].quantile(low))
    mean.insert(at + 1, "high", groups["score"].quantile(high))
    return mean.reset_index()
