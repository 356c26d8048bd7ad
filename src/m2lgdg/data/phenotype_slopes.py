"""What each phenotype says of the label at each site, and whether sites agree on it.

`check` reports phenotypes whose direction differs between sites, and those that tell sites better than labels; the report draws
the differences between patients and controls by site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.findings import Finding

Floats = npt.NDArray[np.float64]
FEWEST = 3  # patients, and controls, of a site
DRAWS = 1999  # permutations of the labels within sites
MANY = 100  # subjects of a site, from which on permuted differences are drawn from their normal limit
CHANCE = 0.05  # of a false alarm about any phenotype of a cohort
SURE = 0.01  # level of the test of a phenotype's differences between sites


class Slope(NamedTuple):
    """Patients minus controls of a site in units of the sd within sites and classes, with its 95 % interval.

    In a linear discriminant this is the log odds of the diagnosis per sd.
    """

    site: str
    value: float
    low: float
    high: float


class _Site(NamedTuple):
    name: str
    values: Floats  # sorted within each class: results do not depend on the order of subjects
    patient: npt.NDArray[np.bool_]

    @property
    def difference(self) -> float:
        return float(self.values[self.patient].mean() - self.values[~self.patient].mean())

    @property
    def information(self) -> float:
        return float(self.patient.sum() * (~self.patient).sum() / len(self.values))

    @property
    def variance(self) -> float:
        """Within the classes."""
        classes = (self.values[self.patient], self.values[~self.patient])
        return float(sum(((one - one.mean()) ** 2).sum() for one in classes) / (len(self.values) - 2))


def _sites(cohort: Cohort, column: str) -> list[_Site]:
    """Sites with some patients and controls whose values are known and not all the same."""
    values, found = cohort.phenotypes[column].to_numpy(dtype=np.float64), []
    for name in cohort.site_names:
        classes = [np.sort(values[(cohort.sites == name) & (cohort.labels == label) & ~np.isnan(values)]) for label in (1, 0)]
        together = np.concatenate(classes)
        if min(map(len, classes)) >= FEWEST and np.ptp(together) > 0:
            found.append(_Site(name, together, np.arange(len(together)) < len(classes[0])))
    return found


def slopes_by_site(cohort: Cohort, column: str) -> list[Slope]:
    """What a phenotype says of the label at each site where that can be told."""
    from scipy.special import stdtrit  # of Student's t; importing scipy.stats takes a second

    sites = _sites(cohort, column)
    freedom = sum(len(one.values) - 2 for one in sites)
    scale = np.sqrt(sum(one.variance * (len(one.values) - 2) for one in sites) / max(freedom, 1)) or 1.0
    result = []
    for one in sites:
        half = float(-stdtrit(len(one.values) - 2, 0.025)) * np.sqrt(one.variance / one.information)
        ends = (one.difference / scale, (one.difference - half) / scale, (one.difference + half) / scale)
        result.append(Slope(one.name, *map(float, ends)))
    return result


def heterogeneity(cohort: Cohort, column: str) -> float:
    """p value of Cochran's Q: whether the difference between patients and controls is the same at all sites.

    Labels are permuted within sites, after the common difference was taken out; so the level holds at small sites, whatever
    the distribution of the phenotype.
    """
    sites = _sites(cohort, column)
    if len(sites) < 2:
        return 1.0
    precision = np.array([one.information / (one.variance or np.var(one.values)) for one in sites])
    differences = np.array([one.difference for one in sites])
    common = float(precision @ differences / precision.sum())
    rng, drawn, spread = np.random.default_rng(0), [], []
    for one in sites:
        left = one.values - common * one.patient
        left = np.sort(left - left.mean())
        spread.append(float(left.var(ddof=1)) or 1.0)
        if len(left) >= MANY:
            drawn.append(rng.normal(0.0, np.sqrt(spread[-1] / one.information), DRAWS))
            continue
        permuted = rng.permuted(np.tile(left, (DRAWS, 1)), axis=1)  # (draw, subject)
        count = int(one.patient.sum())
        drawn.append(permuted[:, :count].mean(axis=1) - permuted[:, count:].mean(axis=1))
    precision = np.array([one.information for one in sites]) / np.array(spread)
    observed = _q(differences[None] - common, precision)[0]
    return float((1 + (_q(np.stack(drawn, axis=1), precision) >= observed).sum()) / (1 + DRAWS))


def _q(differences: Floats, precision: Floats) -> Floats:
    """(draw,) Cochran's Q of (draw, site) differences."""
    mean = differences @ precision / precision.sum()
    return np.asarray((differences - mean[:, None]) ** 2 @ precision)


def phenotype_findings(cohort: Cohort) -> Iterator[Finding]:
    """Inputs whose direction differs between sites, and a note if inputs tell sites better than labels."""
    p_values = {column: heterogeneity(cohort, column) for column in cohort.inputs}
    for rank, column in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[column] * (len(p_values) - rank) >= CHANCE:  # Holm
            break
        slopes = slopes_by_site(cohort, column)
        higher, lower = [one.site for one in slopes if one.low > 0], [one.site for one in slopes if one.high < 0]
        if higher and lower:
            yield Finding("direction by site", numbers={"column": column, "higher": higher, "lower": lower})
    yield from _telling_sites(cohort)


def _telling_sites(cohort: Cohort) -> Iterator[Finding]:
    """Sites differ in their proportion of patients, and an input tells the site better than the label."""
    rates = {site: cohort.labels[(cohort.sites == site) & (cohort.labels >= 0)] for site in cohort.site_names}
    counts = np.array([[(one == 1).sum(), (one == 0).sum()] for one in rates.values() if len(one)])
    if len(counts) < 2 or not counts.sum(axis=0).all():
        return
    if _rates_differ(counts) >= CHANCE:
        return
    told = {column: _variances(_sites(cohort, column)) for column in cohort.inputs}
    column = max(told, key=lambda name: told[name][0] - told[name][1], default=None)
    if column is None or told[column][0] <= told[column][1]:
        return
    percent, (between, label) = 100 * counts[:, 0] / counts.sum(axis=1), told[column]
    numbers = {"column": column, "between": 100 * between, "label": 100 * label}
    yield Finding("inputs tell sites", numbers=numbers | {"least": float(percent.min()), "most": float(percent.max())})


def _rates_differ(counts: npt.NDArray[np.int_]) -> float:
    """p value of the chi-squared test that (site, patients and controls) have one rate; of two, with Yates's correction."""
    from scipy.special import chdtrc

    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    distance = np.abs(counts - expected)
    if len(counts) == 2:
        distance = np.maximum(distance - 0.5, 0.0)
    return float(chdtrc(len(counts) - 1, (distance**2 / expected).sum()))


def _variances(sites: Sequence[_Site]) -> tuple[float, float]:
    """Parts of the variance of a phenotype between sites, and between the classes of a site (omega squared); 0 by chance."""
    if len(sites) < 2:
        return 0.0, 0.0
    from scipy.special import fdtrc

    n, together = sum(len(one.values) for one in sites), np.concatenate([one.values for one in sites])
    total, within = float(((together - together.mean()) ** 2).sum()), sum(len(one.values) * one.values.var() for one in sites)
    of_label = sum(one.information * one.difference**2 for one in sites)
    error = (within - of_label) / max(n - 2 * len(sites), 1) or 1e-300
    between, freedom = total - within, len(sites) - 1
    if fdtrc(freedom, n - 2 * len(sites), between / freedom / error) >= SURE:
        return 0.0, 1.0
    parts = ((between - freedom * error) / (total + error), (of_label - len(sites) * error) / (total + error))
    return max(parts[0], 0.0), max(parts[1], 0.0)
