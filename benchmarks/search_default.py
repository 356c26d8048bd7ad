"""The search for the default: which blocks, scalings, penalties and weights predict best at left-out development sites.

    python benchmarks/search_default.py blocks COHORT DECISIONS.npz [--targets SITE ...] [--device cuda]
    python benchmarks/search_default.py rules OUT.csv NAME=DECISIONS.npz ...

`blocks` fits every block of one cohort (one atlas) in every setting, each development site left out once, and keeps decisions:
of source subjects by fits without their site's fold, of the target by the fit on all of source. `rules` adds blocks up by each
rule of `RULES`, in which nothing is chosen but at left-out source sites, and writes the mean AUC of each rule in each set.
Sites of `UNTOUCHED` are only ever part of source: no decision is made at them. The reference of a tangent space is that of all
scans, without labels; the block of the default, `log_euclidean`, has none. Amplitudes outside of the range of source count as
they are, which a fitted method replaces. With 352 ROIs, `blocks` takes minutes on a GPU and hours without.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

from m2lgdg import Cohort, make
from m2lgdg.connectivity import amplitude_features, fc_features, log_features
from m2lgdg.methods.linear import (
    LOG_EUCLIDEAN,
    OF_SERIES,
    REFERENCE_SUBJECTS,
    REFERENCE_TOLERANCE,
    TANGENTS,
    VIEWS,
    standardised_block,
)
from m2lgdg.methods.solvers import association
from m2lgdg.methods.tables import table_weights
from m2lgdg.methods.within_sites import balance, mean_site_auc, source_folds
from m2lgdg.metrics import auc
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.scans import SERIES
from m2lgdg.tangent import geometric_mean, tangent_features

# Of ABIDE I, and of ABIDE II. All other sites with both classes are development sites, as are all of REST-meta-MDD.
UNTOUCHED = frozenset(
    {"NYU", "USM", "UM_1", "YALE"} | {f"ABIDEII-{one}" for one in ("NYU_1", "SDSU_1", "TCD_1", "UCD_1", "USM_1")}
)
CONFOUNDS = ("age", "sex")
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the mean squared feature norm
STEADY_Z = "steady_z"  # `steady`, standardised over the edges of each subject
BLOCKS = ("steady", "fc", "swings", "amplitude", "tangent", "tangent_pearson")


class Setting(NamedTuple):
    """How a block is fitted: the power of the association scaling (0 is plain ridge), and the penalty."""

    power: float
    penalty: float
    confounds: bool = False  # age and sex are regressed out
    within: bool = True  # features are centred by site, and classes balanced within sites


def grid(powers: Iterable[float], penalties: Iterable[float] = PENALTIES, *how: bool) -> tuple[Setting, ...]:
    return tuple(Setting(power, penalty, *how) for power in powers for penalty in penalties)


EVERY = grid((0, 1, 1.5, 2, 3), PENALTIES, True) + grid((0, 1, 2)) + grid((0,), PENALTIES, False, False)
SETTINGS = {name: EVERY for name in BLOCKS} | {LOG_EUCLIDEAN: grid((0, 1)), STEADY_Z: grid((1,), (1.0, 3.0, 10.0))}
ADAPTIVE = (Setting(1, 3.0),)  # that of the default


class Part(NamedTuple):
    """A block of a rule. Of several settings, the one with the best mean AUC at left-out source sites is taken."""

    block: str
    weight: float = 1.0
    settings: tuple[Setting, ...] = ADAPTIVE

    def title(self, weighted: bool) -> str:
        words = f"{self.block} {self.weight:g}" if weighted else self.block
        if self.settings == ADAPTIVE:
            return words
        powers = dict.fromkeys(one.power for one in self.settings)
        of = {power: [one.penalty for one in self.settings if one.power == power] for power in powers}
        named = {power: "all" if own == [*PENALTIES] else " ".join(f"{one:g}" for one in own) for power, own in of.items()}
        return f"{words} [{'; '.join(f'power {power:g}: {own}' for power, own in named.items())}]"


class Rule(NamedTuple):
    """A sum of blocks, and of phenotypes with the weight of their discriminant at left-out source sites."""

    parts: tuple[Part, ...]
    shrinkage: float | None = (
        None  # weights by the discriminant, its correlations shrunken to 0 by this; None: as they are given
    )
    confounds: bool = False
    within: bool = True
    phenotypes: bool = True

    @property
    def title(self) -> str:
        words = [" + ".join(part.title(weighted=self.shrinkage is None) for part in self.parts)]
        words += [] if self.shrinkage is None else [f"weights by discriminant with shrinkage {self.shrinkage:g}"]
        words += ["age and sex out"] * self.confounds + ["across sites"] * (not self.within)
        return "; ".join(words + ["without phenotypes"] * (not self.phenotypes))


STEADY, SWINGS, AMPLITUDE = Part("steady"), Part("swings", 0.3), Part("amplitude", 0.2)
FORMER = (STEADY, SWINGS, AMPLITUDE)  # the blocks of the former default, which regressed age and sex out of them


def tangent(weight: float = 0.5, powers: Iterable[float] = (0, 1), penalties: Iterable[float] = PENALTIES) -> Part:
    return Part("tangent_pearson", weight, grid(powers, penalties))


def plain(weight: float, powers: Iterable[float] = (0, 1), penalties: Iterable[float] = PENALTIES) -> Part:
    return Part("tangent", weight, grid(powers, penalties))


FIRST = (*FORMER, tangent())  # a tangent-space block, whose power and penalty are chosen
DEFAULT = Rule((*FORMER, Part(LOG_EUCLIDEAN, 0.5)))
LISTED = [
    DEFAULT,
    # each block alone
    *(
        Rule((Part(name, 1.0, (Setting(one.power, one.penalty),)),), None, one.confounds, one.within, False)
        for name, settings in SETTINGS.items()
        for one in settings
    ),
    # age and sex, phenotypes, and a tangent-space block
    *(Rule(parts, None, out, True, used) for parts in (FORMER, FIRST) for out in (True, False) for used in (True, False)),
    *(
        Rule((*FORMER, tangent(weight, powers, penalties)))
        for powers in ((0,), (1,), (2,), (0, 1), (0, 1, 2))
        for penalties in ((1.0,), (3.0,), (10.0,), PENALTIES)
        for weight in (0.5, 1.0)
    ),
    *(
        Rule((*FORMER, tangent(weight, powers, penalties)), confounds=True)
        for powers in ((0,), (1,), (0, 1))
        for penalties in ((1.0,), (3.0,), PENALTIES)
        for weight in (0.5, 1.0)
    ),
    *(
        Rule((*FORMER, tangent(weight, (0, 1), penalties)))
        for penalties in (PENALTIES, (0.1, 1.0, 10.0), (0.3, 3.0), (0.3, 3.0, 30.0), (1.0, 10.0), (0.1, 3.0))
        for weight in (0.3, 0.5, 0.7)
    ),
    # weights by the discriminant
    *(
        Rule(parts, shrinkage)
        for shrinkage in (0.0, 0.3, 0.5, 0.6, 1.0)
        for parts in ((*FORMER, tangent(1.0, (1,))), (*FORMER, tangent(1.0)), (STEADY, tangent(1.0)))
    ),
    # one thing changed
    *(
        Rule((steady, SWINGS, AMPLITUDE, tangent()))
        for steady in (
            Part("steady", 1.0, grid((0, 1, 2), (3.0,))),
            Part("steady", 1.0, grid((1, 2), (3.0,))),
            Part("steady", 1.0, grid((1,), (1.0, 3.0, 10.0))),
            Part("steady", 1.0, grid((2,), (3.0,))),
        )
    ),
    *(
        Rule((STEADY, other, Part("swings", 0.5), Part("amplitude", 0.4), tangent(1.0)))
        for other in (Part("steady", 1.0, grid((0,), (3.0,))), Part("steady", 1.0, grid((2,), (3.0,))), Part("fc"))
    ),
    Rule((STEADY, Part("swings", 0.3, grid((0,), (10.0,))), AMPLITUDE, tangent())),
    Rule((STEADY, AMPLITUDE, tangent())),
    Rule((STEADY, SWINGS, tangent())),
    Rule((STEADY, SWINGS, Part("amplitude", 0.2, grid((0,), (3.0,))), tangent())),
    *(
        Rule((*FORMER, tangent(weight, (0,), penalties), tangent(weight, (1,), penalties)))
        for weight, penalties in ((0.3, PENALTIES), (0.3, (1.0,)), (0.3, (3.0,)), (0.5, (1.0,)))
    ),
    Rule((*FORMER, plain(0.5))),
    Rule((*FORMER, tangent(0.4), plain(0.4))),
    Rule((*FORMER, tangent(0.4), plain(0.4, (0,), (3.0,)))),
    # tangent space or logarithms, and how they are chosen
    *(
        Rule((*FORMER, Part(name, 0.5, settings)))
        for name in ("tangent_pearson", LOG_EUCLIDEAN)
        for settings in (
            *(grid((power,), (penalty,)) for power, penalty in ((1, 3.0), (1, 1.0), (0, 0.3), (0, 1.0), (0, 3.0))),
            grid((0,)),
            grid((0,)) + ADAPTIVE,
            grid((0,), (0.3, 3.0)) + ADAPTIVE,
            grid((0,), (1.0,)) + ADAPTIVE,
            grid((0,), (0.3,)) + ADAPTIVE,
            grid((0, 1)),
        )
    ),
    *(
        Rule((*FORMER, Part(LOG_EUCLIDEAN, weight, settings)))
        for settings in (ADAPTIVE, grid((0,), (1.0,)), grid((0,), (0.3,)) + ADAPTIVE, grid((0, 1)))
        for weight in (0.3, 0.5, 0.7, 1.0)
    ),
]
RULES = tuple(dict.fromkeys(LISTED))


def refuse_untouched(sites: Iterable[str]) -> None:
    if kept := sorted(UNTOUCHED.intersection(sites)):
        raise SystemExit(f"{', '.join(kept)}: kept for the end, so no setting is compared there; name development sites only.")


def development_sites(cohort: Cohort) -> list[str]:
    """Sites that may be scored: not untouched, and of both classes."""
    both = [site for site in cohort.site_names if len(set(cohort.labels[cohort.sites == site].tolist())) == 2]
    return [site for site in both if site not in UNTOUCHED]


def features_of(block: str, cohort: Cohort) -> np.ndarray:
    """(subject, feature) of a block, in float32."""
    if block in VIEWS:
        return fc_features(cohort.scans, VIEWS[block])
    if block == STEADY_Z:
        edges = fc_features(cohort.scans, VIEWS["steady" if cohort.values == SERIES else "fc"])
        edges -= edges.mean(axis=1, keepdims=True)
        return edges / edges.std(axis=1, keepdims=True)
    if block == LOG_EUCLIDEAN:
        return log_features(cohort.scans)
    if block == "amplitude":
        return amplitude_features(cohort.series).astype(np.float32)
    matrices = TANGENTS[block](cohort.scans)
    some = REFERENCE_SUBJECTS if block == "tangent" else None  # of rows, the logarithms of all subjects
    reference = geometric_mean(matrices, tolerance=REFERENCE_TOLERANCE, first_step=some)
    return tangent_features(matrices, reference).astype(np.float32)


def product(a: np.ndarray, b: np.ndarray, device: str) -> np.ndarray:
    """(row of a, row of b) products, in float32 as in the package."""
    if device == "cpu":
        return (a @ b.T).astype(np.float64)
    import torch

    rows, columns = (torch.from_numpy(one).to(device) for one in (a, b))
    return (rows @ columns.T).cpu().numpy().astype(np.float64)


def ridge(trained, signs, weights, scored, penalties, device) -> np.ndarray:
    """(penalty, scored row) decisions of weighted ridge regressions of the signs, with an intercept."""
    relative, root = weights / weights.sum(), np.sqrt(weights)
    gram, mean = product(trained, trained, device), float(relative @ signs)
    along = gram @ relative  # products with the weighted mean
    centred = (gram + float(relative @ along) - along - along[:, None]) * root * root[:, None]
    dual = []
    for penalty in penalties:
        solution = root * cho_solve(cho_factor(centred + penalty * np.eye(len(gram))), root * (signs - mean))
        dual.append(solution - solution.sum() * relative)
    coefficients = np.array(dual)  # (penalty, trained row)
    return coefficients @ product(scored, trained, device).T + mean - (coefficients @ along)[:, None]


def decisions_of(features: np.ndarray, cohort: Cohort, target: str, settings: tuple[Setting, ...], device: str) -> np.ndarray:
    """(setting, subject) decisions with one site as target; those of source are held out, by folds of whole sites."""
    own, here = np.flatnonzero(cohort.sites != target), np.flatnonzero(cohort.sites == target)
    source, unseen = cohort.select(own), cohort.select(here)
    signs, folds = np.where(source.labels == 1, 1.0, -1.0), source_folds(source, 5, balance(source))
    result = np.empty((len(settings), len(cohort)), dtype=np.float32)
    for confounds, within in dict.fromkeys((one.confounds, one.within) for one in settings):
        weights = balance(source) if within else np.ones(len(source))
        scaler = PhenotypeScaler.fit(source, [name for name in CONFOUNDS if confounds and name in source.inputs])
        rows, centre, scale, slopes = standardised_block(features[own], source, weights, within, scaler.transform(source))
        scored = np.empty_like(features)  # as at an unseen site
        scored[own] = rows.trained + rows.shift[rows.site]
        scored[here] = (features[here] - (scaler.transform(unseen) @ slopes if slopes is not None else 0.0) - centre) / scale
        asked = {i: one for i, one in enumerate(settings) if (one.confounds, one.within) == (confounds, within)}
        # The fit on all first: a source site that is in no fold keeps its decisions.
        for train, test in [(np.arange(len(own)), np.arange(len(cohort))), *((train, own[test]) for train, test in folds)]:
            x = rows.trained[train]  # (training subject, feature)
            associations, squares = association(x, signs[train], weights[train]), np.einsum("ij,ij->j", x, x, dtype=np.float64)
            for power in dict.fromkeys(one.power for one in asked.values()):
                scales = associations**power
                scales = (scales * np.sqrt(squares.sum() / (squares @ scales**2))).astype(np.float32)
                at = [i for i, one in asked.items() if one.power == power]
                penalties = rows.mean_square * np.array([settings[i].penalty for i in at])
                solved = ridge(x * scales, signs[train], weights[train], scored[test] * scales, penalties, device)
                result[np.ix_(at, test)] = solved
    return result


def phenotype_decisions(cohort: Cohort, target: str) -> np.ndarray:
    """(subject,) decisions of phenotypes alone, of source held out."""
    here = cohort.sites == target
    fitted, result = make("phenotype-logistic").fit(cohort.select(~here)), np.empty(len(cohort))
    result[~here], result[here] = fitted.held_out_, fitted.decision(cohort.select(here))
    return result


def write_blocks(options: argparse.Namespace) -> None:
    cohort = Cohort.load(options.cohort)
    cohort = cohort.select(cohort.labels >= 0)
    refuse_untouched(options.targets or ())
    targets = options.targets or development_sites(cohort)
    if unknown := sorted(set(targets) - set(development_sites(cohort))):
        raise SystemExit(f"{', '.join(unknown)}: no site of {options.cohort} with patients and controls.")
    kept = {"sites": cohort.sites, "labels": cohort.labels, "targets": np.array(targets)}
    kept["phenotypes"] = np.stack([phenotype_decisions(cohort, target) for target in targets])  # (target, subject)
    for block, settings in SETTINGS.items():
        if cohort.values != SERIES and block in {"steady", *OF_SERIES}:
            continue
        features = features_of(block, cohort)
        kept[block] = np.stack([decisions_of(features, cohort, target, settings, options.device) for target in targets])
        kept[f"{block}.settings"] = np.array(settings)  # (setting, field)
        print(f"{block}: {features.shape[1]} features, {len(settings)} settings, {len(targets)} targets", flush=True)
    np.savez_compressed(options.out, **kept)


class Decisions:
    """The decisions of a set, one target after another."""

    def __init__(self, path: Path):
        arrays = dict(np.load(path))
        self.sites, self.labels, self.targets = arrays["sites"], arrays["labels"], arrays["targets"].tolist()
        refuse_untouched(self.targets)
        self.phenotypes = arrays["phenotypes"]
        self.blocks = {}  # name -> settings -> (target, subject)
        for block in (name.removesuffix(".settings") for name in arrays if name.endswith(".settings")):
            settings = (
                Setting(power, penalty, *map(bool, how)) for power, penalty, *how in arrays[f"{block}.settings"].tolist()
            )
            self.blocks[block] = dict(zip(settings, arrays[block].swapaxes(0, 1), strict=True))
        self.sources = []
        for target in self.targets:
            own = self.sites != target
            names = sorted(set(self.sites[own].tolist()))
            self.sources.append(SimpleNamespace(own=own, sites=self.sites[own], labels=self.labels[own], site_names=names))
        self.areas = {}  # mean AUC at left-out source sites

    def area(self, block: str, setting: Setting, i: int) -> float:
        if (key := (block, setting, i)) not in self.areas:
            source = self.sources[i]
            self.areas[key] = mean_site_auc(self.blocks[block][setting][i][source.own], source)
        return self.areas[key]

    def part(self, block: str, settings: list[Setting], i: int) -> np.ndarray:
        """(subject,) decisions in the best of these settings, in units of the sd of the held-out ones."""
        best = max(settings, key=lambda one: self.area(block, one, i)) if settings[1:] else settings[0]
        decision = self.blocks[block][best][i].astype(np.float64)
        return decision / decision[self.sources[i].own].std()

    def has(self, block: str) -> str | None:
        """The block that this set has: of connectomes, plain FC in place of frame-weighted FC, and none that needs series."""
        if block in self.blocks:
            return block
        return "fc" if block == "steady" else None if block in OF_SERIES else block


def discriminant(parts: np.ndarray, source: SimpleNamespace, shrinkage: float) -> np.ndarray:
    """(part,) weights of (subject, part) held-out decisions: the linear discriminant within sites, none negative."""
    difference, scatter = np.zeros(parts.shape[1]), np.zeros((parts.shape[1],) * 2)
    for site in source.site_names:
        patients, controls = (parts[(source.sites == site) & (source.labels == label)] for label in (1, 0))
        if len(patients) and len(controls):
            weight = len(patients) * len(controls) / (len(patients) + len(controls))
            difference += weight * (patients.mean(axis=0) - controls.mean(axis=0))
            scatter += sum((one - one.mean(axis=0)).T @ (one - one.mean(axis=0)) for one in (patients, controls))
    sd = np.sqrt(np.diag(scatter))
    correlation = (1 - shrinkage) * scatter / np.outer(sd, sd) + (shrinkage + 1e-9) * np.eye(len(sd))
    root = np.linalg.cholesky(correlation)
    return nnls(root.T, np.linalg.solve(root, difference / sd))[0] / sd


def decision_of(rule: Rule, kept: Decisions, i: int) -> np.ndarray:
    """(subject,) decisions of a rule with one site as target; those of source are held out."""
    source, how = kept.sources[i], {"confounds": rule.confounds, "within": rule.within}
    parts = [(name, part) for part in rule.parts if (name := kept.has(part.block))]
    columns = [kept.part(name, [one._replace(**how) for one in part.settings], i) for name, part in parts]
    decisions, weights = np.stack(columns, axis=1), np.array([part.weight for _, part in parts])  # (subject, part), (part,)
    if rule.shrinkage is not None and len(parts) > 1:
        found = discriminant(decisions[source.own], source, rule.shrinkage)
        weights = found if found.any() else weights
    total, added = decisions @ weights, kept.phenotypes[i]
    if rule.phenotypes and added[source.own].std() > 0:
        total = total + table_weights(total[source.own], [added[source.own]], source)[0] * added
    return total


def areas_of(rule: Rule, kept: Decisions) -> list[float]:
    """AUC in percent at each target; none if the set has none of the blocks."""
    if not any(kept.has(part.block) for part in rule.parts):
        return []
    at = [kept.sites == target for target in kept.targets]
    return [100 * auc(kept.labels[here], decision_of(rule, kept, i)[here]) for i, here in enumerate(at)]


def write_rules(options: argparse.Namespace) -> None:
    sets = {name: Decisions(Path(path)) for name, path in (one.split("=", 1) for one in options.decisions)}
    rows = []
    for rule in RULES:
        for name, kept in sets.items():
            if areas := areas_of(rule, kept):
                rows.append((rule.title, name, len(areas), np.mean(areas)))
    table = pd.DataFrame(rows, columns=["rule", "set", "sites", "AUC"])
    table.to_csv(options.out, index=False, float_format="%.2f")
    wide = table.pivot(index="rule", columns="set", values="AUC").dropna().assign(mean=lambda one: one.mean(axis=1))
    print(wide.sort_values("mean", ascending=False).head(20).round(2).to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    blocks = commands.add_parser("blocks")
    blocks.add_argument("cohort", type=Path)
    blocks.add_argument("out", type=Path)
    blocks.add_argument("--targets", nargs="*", help="of the development sites; all by default")
    blocks.add_argument("--device", default="cpu", help="cpu, or that of torch")
    blocks.set_defaults(run=write_blocks)
    rules = commands.add_parser("rules")
    rules.add_argument("out", type=Path)
    rules.add_argument("decisions", nargs="+", help="NAME=DECISIONS.npz")
    rules.set_defaults(run=write_rules)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
