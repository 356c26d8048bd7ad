"""`make_cohort`: a synthetic multi-site cohort with known disease, site and phenotype effects.

Used in the demo, in benchmarks at the size of REST-meta-MDD, and in tests of whether a method finds the planted effects, which
are recorded in `Cohort.truth`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, Parcellation
from m2lgdg.data.atlases import regions
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """Parameters of a synthetic cohort; disease effects are in standard deviations between subjects (Cohen's d)."""

    sizes: dict[str, int]
    n_rois: int = 116
    lengths: tuple[int, int] = (140, 240)  # volumes, drawn for each site
    trs: tuple[float, ...] = (1.5, 2.0, 2.5, 3.0)  # seconds, drawn for each site
    patient_share: tuple[float, float] = (0.4, 0.6)  # drawn for each site
    networks: int = 7
    n_disease_rois: int = 6
    n_disease_edges: int = 12
    roi_effect: float = 0.8  # patients' mean shift in the slowness and amplitude of the disease ROIs
    edge_effect: float = 0.8  # patients' mean shift in the coupling of the disease edges
    phenotype_effect: float = 0.3  # patients' mean shift in age and education
    site_effect: float = 0.5  # variation between sites in connectivity, amplitude and spectrum
    subject_effect: float = 0.5  # the same between subjects
    missing: float = 0.03  # probability that age or education is missing
    further_atlas: str = ""  # an atlas in which the same scans are given as well
    restless_site: str = ""  # a site whose subjects move; with it, every subject has a mean framewise displacement
    duplicates: int = 0  # scans of the first site that are in the cohort again, as other subjects of the second site
    n_regions: int = 0  # of a table `thickness`, in the order of the Destrieux atlas; 0: the cohort has no table
    n_disease_regions: int = 2
    structure_effect: float = 0.8  # patients' mean shift in the thickness of the disease regions
    without_table: float = 0.0  # probability that a subject has no row in the table


# The paper's 22 sites; its targets have their real size, the other sites hold the rest of 2,269 subjects
REST_NUMBERS = (1, 2, 3, *range(6, 19), *range(20, 26))
REST_SIZES = (148, 60, 36, 29, 84, 150, 100, 93, 70, 65, 40, 92, 100, 52, 86, 42, 533, 156, 50, 62, 62, 159)
REST_SITES = {f"S{number}": size for number, size in zip(REST_NUMBERS, REST_SIZES, strict=True)}
DEMO_SITES = {"Aarhus": 70, "Bergen": 60, "Cork": 50, "Delft": 45, "Evora": 40, "Fermo": 35}
PRESETS = {
    "tiny": Recipe(
        sizes={"north": 16, "south": 14, "west": 12, "east": 10},
        n_rois=12,
        lengths=(60, 90),
        networks=3,
        n_disease_rois=2,
        n_disease_edges=3,
        roi_effect=1.5,
        edge_effect=2.0,
    ),
    "demo": Recipe(DEMO_SITES, n_disease_rois=48, roi_effect=3.0, edge_effect=1.0),
    "mild": Recipe(  # of the demo: as hard as real cohorts, and with flaws that `check` should report
        DEMO_SITES,
        n_disease_rois=12,
        n_disease_edges=80,
        roi_effect=0.3,
        edge_effect=0.5,
        phenotype_effect=0.4,
        further_atlas="ho",
        restless_site="Delft",
        duplicates=1,
    ),
    "rest-meta-mdd": Recipe(REST_SITES, patient_share=(0.44, 0.63), trs=(2.0, 2.5, 3.0)),
}


def make_cohort(preset: str | Recipe = "tiny", *, seed: int = 0, **changes: Any) -> Cohort:
    """Make a synthetic cohort with planted effects, which are in its attribute `truth`.

    Parameters
    ----------
    preset : {"tiny", "mild", "demo", "rest-meta-mdd"} or Recipe
    seed : int
        Seed of the random numbers.
    **changes
        Fields of `Recipe` that differ from those of the preset, such as `sizes`, `n_rois` or `edge_effect`.

    Returns
    -------
    Cohort

    Examples
    --------
    >>> import m2lgdg
    >>> m2lgdg.make_cohort("tiny", sizes={"Oslo": 6, "Rome": 8}, seed=1)
    Cohort tiny: 14 subjects (7 patients, 7 controls) of 2 sites, 12 ROIs (synthetic)
    """
    recipe = _recipe(preset, changes)
    world, *subject_seeds = np.random.SeedSequence(seed).spawn(1 + sum(recipe.sizes.values()))
    rng = np.random.default_rng(world)
    rois, atlas = _rois(recipe.n_rois)
    truth = _Truth(recipe, rng)
    protocols = {site: _Protocol(recipe, rng) for site in recipe.sizes}

    people: list[_Person] = []
    remaining = iter(subject_seeds)
    for site, size in recipe.sizes.items():
        protocol = protocols[site]
        patients = np.clip(round(size * protocol.patient_share), 1, size - 1) if size > 1 else 1
        order = rng.permutation(size) < patients
        for i in range(size):
            subject_rng = np.random.default_rng(next(remaining))
            label = int(order[i])
            series = _series(recipe, truth, protocol, label, subject_rng)
            phenotypes = _phenotypes(recipe, protocol, label, subject_rng)
            if recipe.restless_site:
                phenotypes["mean_fd"] = _move(series, site == recipe.restless_site, subject_rng)
            people.append(_Person(f"{site}-{i + 1:04d}", site, label, series, phenotypes, protocol.tr))
    people = sorted([*people, *_copies(recipe, people)], key=lambda person: person.subject)
    subjects = np.array([person.subject for person in people])
    series_of = [person.series for person in people]
    structure = _Structure(recipe, np.random.SeedSequence(seed).spawn(2 + len(subject_seeds))[-1])
    return Cohort(
        series=series_of,
        subjects=subjects,
        sites=np.array([person.site for person in people]),
        labels=np.array([person.label for person in people]),
        rois=rois,
        phenotypes=pd.DataFrame([person.phenotypes for person in people]).set_axis(subjects),
        inputs=("sex", "age", "education"),
        tr=np.array([person.tr for person in people]),
        atlas=atlas,
        parcellations={recipe.further_atlas: _further(recipe.further_atlas, atlas, series_of)} if recipe.further_atlas else {},
        tables={"thickness": structure.table(recipe, people)} if recipe.n_regions else {},
        name=preset if isinstance(preset, str) else "synthetic",
        notes=("synthetic data: no series belongs to a person",),
        truth={
            "seed": seed,
            "recipe": {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items()},
            "rois": [rois[i] for i in truth.rois],
            "edges": [[rois[i], rois[j]] for i, j in truth.edges],
            **({"regions": structure.disease} if recipe.n_regions else {}),
            "sites": {site: protocol.record() for site, protocol in protocols.items()},
        },
    )


class _Person(NamedTuple):
    """One subject of a synthetic cohort."""

    subject: str
    site: str
    label: int
    series: npt.NDArray[np.float32]
    phenotypes: dict[str, float]
    tr: float


def _recipe(preset: str | Recipe, changes: dict[str, Any]) -> Recipe:
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise InputError(f"preset {preset} is not known; choose one of {', '.join(PRESETS)}.")
        preset = PRESETS[preset]
    unknown = set(changes) - {field.name for field in fields(Recipe)}
    if unknown:
        raise InputError(f"a recipe has no field {min(unknown)}; it has {', '.join(field.name for field in fields(Recipe))}.")
    recipe = replace(preset, **changes)
    if recipe.n_disease_rois > recipe.n_rois or recipe.n_disease_edges > recipe.n_rois * (recipe.n_rois - 1) // 2:
        raise InputError(
            f"{recipe.n_rois} ROIs are too few for {recipe.n_disease_rois} disease ROIs and {recipe.n_disease_edges} edges."
        )
    most = len(_region_names())
    if not 0 <= recipe.n_regions <= most or recipe.n_disease_regions > recipe.n_regions > 0:
        raise InputError(
            f"a table has at most {most} regions, not {recipe.n_regions}, {recipe.n_disease_regions} of them with an effect."
        )
    return recipe


def _region_names() -> list[str]:
    """Columns as FreeSurfer names them."""
    known = regions("destrieux")
    assert known is not None
    return [f"{name[-1].lower()}h_{name[:-2]}_thickness" for name in known["name"]]


def _rois(count: int) -> tuple[tuple[str, ...], str]:
    known = regions("aal")
    assert known is not None
    if count == len(known):
        return tuple(known["name"]), "aal"
    return tuple(f"roi-{i + 1:03d}" for i in range(count)), "synthetic"


class _Truth:
    """Effects common to all sites: the network of each ROI, and the ROIs and edges of the disease."""

    def __init__(self, recipe: Recipe, rng: np.random.Generator) -> None:
        n = recipe.n_rois
        member = rng.permutation(np.arange(n) % recipe.networks)
        is_member = np.arange(recipe.networks) == member[:, None]  # (roi, network)
        self.loadings = np.where(is_member, rng.uniform(0.7, 1.1, is_member.shape), rng.normal(0, 0.25, is_member.shape))
        self.log_amplitude = rng.normal(0, 0.3, n)  # (roi,)
        self.rois = np.sort(rng.choice(n, recipe.n_disease_rois, replace=False))
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
        # Edges of disease ROIs come first, so that ROI and edge maps agree.
        touches = np.isin(pairs, self.rois).any(axis=1)
        order = np.argsort(rng.random(len(pairs)) - touches)
        self.edges = pairs[np.sort(order[: recipe.n_disease_edges])]  # (edge, 2)


class _Protocol:
    """Effects common to a site: scanner, scan protocol and recruitment."""

    def __init__(self, recipe: Recipe, rng: np.random.Generator) -> None:
        spread = recipe.site_effect
        self.tr = float(rng.choice(recipe.trs))
        self.length = int(rng.integers(recipe.lengths[0], recipe.lengths[1] + 1))
        self.patient_share = float(rng.uniform(*recipe.patient_share))
        self.slope = float(0.6 + 0.6 * spread * rng.normal())  # power falls as frequency ** -slope
        self.gain = float(np.exp(spread * rng.normal()))
        self.log_amplitude: Floats = 0.4 * spread * rng.normal(size=recipe.n_rois)
        self.loadings: Floats = 0.3 * spread * rng.normal(size=(recipe.n_rois, recipe.networks))
        self.age = (float(rng.uniform(22, 45)), float(rng.uniform(5, 12)))  # mean, sd
        self.education = (float(rng.uniform(9, 15)), float(rng.uniform(2, 4)))
        self.male_share = float(rng.uniform(0.3, 0.7))

    def record(self) -> dict[str, Any]:
        """Scalar parameters of the site, for `Cohort.truth`."""
        return {key: value for key, value in vars(self).items() if not isinstance(value, np.ndarray)}


def _series(recipe: Recipe, truth: _Truth, site: _Protocol, label: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """(time, roi) signal of a subject: ROI networks and noise, with slower ROIs and stronger coupling in patients."""
    n, k, e = recipe.n_rois, recipe.networks, len(truth.edges)
    spread = recipe.subject_effect
    slope = site.slope + 0.4 * spread * rng.normal()
    sources = _coloured(rng, site.length, k + n + e, site.tr, slope)  # (time, network + roi + edge)
    loadings = truth.loadings + site.loadings + 0.3 * spread * rng.normal(size=(n, k))
    signal = sources[:, :k] @ loadings.T + sources[:, k : k + n]  # (time, roi)
    signal /= signal.std(axis=0)
    slow = _coloured(rng, site.length, len(truth.rois), site.tr, slope + 2.0)  # (time, disease roi)
    severity = rng.normal(recipe.roi_effect * label, 1.0, len(truth.rois))
    _mix(signal, truth.rois, slow, np.clip(0.2 + 0.12 * severity, 0.0, 0.8))
    coupling = 0.25 * rng.normal(recipe.edge_effect * label, 1.0, e)
    for (i, j), common, strength in zip(truth.edges, sources[:, k + n :].T, coupling, strict=True):
        both = np.stack([common, np.sign(strength) * common], axis=1)  # (time, 2)
        _mix(signal, np.array([i, j]), both, np.minimum(abs(strength), 0.8))
    log_amplitude = truth.log_amplitude + site.log_amplitude + 0.3 * spread * rng.normal(size=n)
    log_amplitude[truth.rois] += 0.3 * spread * recipe.roi_effect * label
    return np.asarray(10 * site.gain * np.exp(log_amplitude) * signal, dtype=np.float32)


def _mix(signal: Floats, rois: npt.NDArray[np.int64], other: Floats, fraction: Floats) -> None:
    """Replace a fraction of the variance of some ROIs by `other`, in place."""
    signal[:, rois] = np.sqrt(1 - fraction) * signal[:, rois] + np.sqrt(fraction) * other


def _coloured(rng: np.random.Generator, length: int, count: int, tr: float, slope: float) -> Floats:
    """(time, count) noise with unit variance in the band 0.01-0.1 Hz; power falls as frequency ** -slope."""
    frequency = np.fft.rfftfreq(length, tr)  # Hz
    inside = (frequency >= 0.01) & (frequency <= 0.1)
    weight = np.where(inside, np.maximum(frequency, 1e-9) ** (-slope / 2), 0.0)
    spectrum = rng.normal(size=(len(frequency), count)) + 1j * rng.normal(size=(len(frequency), count))
    noise: Floats = np.fft.irfft(spectrum * weight[:, None], n=length, axis=0)
    return np.asarray(noise / noise.std(axis=0))


def _phenotypes(recipe: Recipe, site: _Protocol, label: int, rng: np.random.Generator) -> dict[str, float]:
    """Sex (1 male, 2 female), age and years of education; patients are older and less educated."""
    shift = recipe.phenotype_effect * label
    sex = 1.0 if rng.random() < site.male_share else 2.0
    age = max(float(rng.normal(site.age[0] + shift * site.age[1], site.age[1])), 12.0)
    education = max(float(rng.normal(site.education[0] - shift * site.education[1], site.education[1])), 0.0)
    missing = rng.random(2) < recipe.missing
    return {
        "sex": sex,
        "age": np.nan if missing[0] else round(age, 1),
        "education": np.nan if missing[1] else round(education),
    }


def _move(series: npt.NDArray[np.float32], restless: bool, rng: np.random.Generator) -> float:
    """Mean framewise displacement in mm; in restless subjects, sudden changes common to all ROIs are added to the series."""
    displacement = float(rng.lognormal(np.log(0.45 if restless else 0.1), 0.3))
    if restless:
        jumps = rng.random(len(series)) < 0.1 * displacement  # (time,)
        common = rng.normal(1.5, 0.3, series.shape[1]) * series.std(axis=0)  # (roi,)
        series[jumps] += (rng.normal(size=(jumps.sum(), 1)) * common).astype(np.float32)
    return round(displacement, 3)


class _Structure:
    """Cortical thickness (mm) and intracranial volume (mm3): thinner in patients, with age, and by site and head size.

    Its random numbers are its own, so that scans and phenotypes are the same with and without a table.
    """

    def __init__(self, recipe: Recipe, seed: np.random.SeedSequence) -> None:
        self.rng = np.random.default_rng(seed)
        self.names = _region_names()[: recipe.n_regions]
        chosen = self.rng.choice(max(len(self.names), 1), recipe.n_disease_regions * bool(self.names), replace=False)
        self.disease = [self.names[i] for i in np.sort(chosen)]
        self.usual: Floats = self.rng.normal(2.5, 0.3, len(self.names))  # (region,)
        self.at_site = {site: 0.2 * recipe.site_effect * self.rng.normal(size=len(self.names)) for site in recipe.sizes}

    def table(self, recipe: Recipe, people: list[_Person]) -> pd.DataFrame:
        """(subject, region) thickness, with the intracranial volume as the last column."""
        planted = np.isin(self.names, self.disease)
        rows = []
        for person in people:
            head = self.rng.normal(1.5e6, 1.2e5) + 1e5 * (person.phenotypes["sex"] == 1.0)
            age = 30.0 if np.isnan(person.phenotypes["age"]) else person.phenotypes["age"]
            common = 0.05 * self.rng.normal() - 0.004 * (age - 30) + 4e-7 * (head - 1.5e6)
            own = self.rng.normal(-recipe.structure_effect * person.label * planted)  # (region,)
            row = np.round([*(self.usual + self.at_site[person.site] + common + 0.12 * own), head], 3)
            rows.append(np.where(self.rng.random() < recipe.without_table, np.nan, row))
        return pd.DataFrame(rows, index=[person.subject for person in people], columns=[*self.names, "eTIV"])


def _copies(recipe: Recipe, people: list[_Person]) -> list[_Person]:
    """Scans of the first site as other subjects of the second, with another gain."""
    if not recipe.duplicates:
        return []
    first, second, *_ = recipe.sizes
    originals = [person for person in people if person.site == first][: recipe.duplicates]
    names = [f"{second}-{recipe.sizes[second] + i + 1:04d}" for i in range(recipe.duplicates)]
    return [
        person._replace(subject=name, site=second, series=np.float32(1.3) * person.series)
        for name, person in zip(names, originals, strict=True)
    ]


def _further(name: str, atlas: str, series: list[npt.NDArray[np.float32]]) -> Parcellation:
    """The scans in another atlas: each of its ROIs is the mean of the given ROIs nearby, weighted by distance."""
    given, wanted = regions(atlas), regions(name)
    if given is None or wanted is None:
        raise InputError(f"a further atlas needs ROI positions of both atlases, {atlas} and {name}.")
    centroids = [table[["x", "y", "z"]].to_numpy(dtype=np.float64) for table in (wanted, given)]
    distance = np.linalg.norm(centroids[0][:, None] - centroids[1], axis=2)  # (further roi, roi) mm
    weights = np.exp(-((distance / 12) ** 2) / 2) + 1e-6
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return Parcellation(tuple(wanted["name"]), [one @ weights.T for one in series])
