"""`make_cohort`: a multi-site cohort with a known disease effect, site effects and phenotype effects.

It stands in for a release where none is at hand: in the demo, in tests that ask whether a method found the planted truth,
and at the size of REST-meta-MDD. What was planted is in `Cohort.truth`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import regions
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """What a synthetic cohort is made of; effects of the disease are in standard deviations between subjects (Cohen's d)."""

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
    site_effect: float = 0.5  # spread between sites of connectivity, amplitude and spectrum
    subject_effect: float = 0.5  # spread between subjects of the same
    missing: float = 0.03  # share of missing age and education


REST_SITES = {  # the paper's 22 sites; its target sites have their real size, the others share the rest of 2,269 subjects
    **{"S1": 148, "S2": 60, "S3": 36, "S6": 29, "S7": 84, "S8": 150, "S9": 100, "S10": 93, "S11": 70, "S12": 65, "S13": 40},
    **{
        "S14": 92,
        "S15": 100,
        "S16": 52,
        "S17": 86,
        "S18": 42,
        "S20": 533,
        "S21": 156,
        "S22": 50,
        "S23": 62,
        "S24": 62,
        "S25": 159,
    },
}
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
    "demo": Recipe(
        sizes={"Aarhus": 70, "Bergen": 60, "Cork": 50, "Delft": 45, "Evora": 40, "Fermo": 35},
        n_disease_rois=48,
        roi_effect=3.0,
        edge_effect=1.0,
    ),
    "rest-meta-mdd": Recipe(sizes=REST_SITES, patient_share=(0.44, 0.63), lengths=(140, 240), trs=(2.0, 2.5, 3.0)),
}


def make_cohort(preset: str | Recipe = "tiny", *, seed: int = 0, **changes: Any) -> Cohort:
    """A synthetic cohort of a preset (tiny, demo, rest-meta-mdd) or recipe, with any of the recipe's fields changed."""
    recipe = _recipe(preset, changes)
    world, *subject_seeds = np.random.SeedSequence(seed).spawn(1 + sum(recipe.sizes.values()))
    draw = np.random.default_rng(world)
    rois, atlas = _rois(recipe.n_rois)
    truth = _Truth(recipe, draw)
    protocols = {site: _Protocol(recipe, draw) for site in recipe.sizes}

    subjects, sites, labels, series, rows, tr = [], [], [], [], [], []
    remaining = iter(subject_seeds)
    for site, size in recipe.sizes.items():
        protocol = protocols[site]
        patients = np.clip(round(size * protocol.patient_share), 1, size - 1) if size > 1 else 1
        order = draw.permutation(size) < patients
        for i in range(size):
            own = np.random.default_rng(next(remaining))
            label = int(order[i])
            subjects.append(f"{site}-{i + 1:04d}")
            sites.append(site)
            labels.append(label)
            series.append(_series(recipe, truth, protocol, label, own))
            rows.append(_phenotypes(recipe, protocol, label, own))
            tr.append(protocol.tr)
    by_name = np.argsort(subjects)
    return Cohort(
        series=[series[i] for i in by_name],
        subjects=np.array(subjects)[by_name],
        sites=np.array(sites)[by_name],
        labels=np.array(labels)[by_name],
        rois=rois,
        phenotypes=pd.DataFrame(rows, columns=["sex", "age", "education"]).iloc[by_name].set_axis(np.array(subjects)[by_name]),
        inputs=("sex", "age", "education"),
        tr=np.array(tr)[by_name],
        atlas=atlas,
        name=preset if isinstance(preset, str) else "synthetic",
        notes=("synthetic: no person behind any series",),
        truth={
            "seed": seed,
            "recipe": {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items()},
            "rois": [rois[i] for i in truth.rois],
            "edges": [[rois[i], rois[j]] for i, j in truth.edges],
            "sites": {site: protocol.told() for site, protocol in protocols.items()},
        },
    )


def _recipe(preset: str | Recipe, changes: dict[str, Any]) -> Recipe:
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise InputError(f"preset {preset} is not known; it is one of {', '.join(PRESETS)}.")
        preset = PRESETS[preset]
    unknown = set(changes) - {field.name for field in fields(Recipe)}
    if unknown:
        raise InputError(f"a recipe has no field {min(unknown)}; it has {', '.join(field.name for field in fields(Recipe))}.")
    recipe = replace(preset, **changes)
    if recipe.n_disease_rois > recipe.n_rois or recipe.n_disease_edges > recipe.n_rois * (recipe.n_rois - 1) // 2:
        raise InputError(f"{recipe.n_rois} ROIs cannot hold {recipe.n_disease_rois} disease ROIs and their edges.")
    return recipe


def _rois(count: int) -> tuple[tuple[str, ...], str]:
    known = regions("aal")
    assert known is not None
    if count == len(known):
        return tuple(known["name"]), "aal"
    return tuple(f"roi-{i + 1:03d}" for i in range(count)), "synthetic"


class _Truth:
    """What is common to all: which network each ROI belongs to, and where the disease acts."""

    def __init__(self, recipe: Recipe, draw: np.random.Generator) -> None:
        n = recipe.n_rois
        member = draw.permutation(np.arange(n) % recipe.networks)
        own = np.arange(recipe.networks) == member[:, None]  # (roi, network)
        self.loadings = np.where(own, draw.uniform(0.7, 1.1, own.shape), draw.normal(0, 0.25, own.shape))
        self.log_amplitude = draw.normal(0, 0.3, n)  # (roi,)
        self.rois = np.sort(draw.choice(n, recipe.n_disease_rois, replace=False))
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
        # The edges touch the disease ROIs first, so that ROI and edge maps tell one story.
        touches = np.isin(pairs, self.rois).any(axis=1)
        order = np.argsort(draw.random(len(pairs)) - touches)
        self.edges = pairs[np.sort(order[: recipe.n_disease_edges])]  # (edge, 2)


class _Protocol:
    """What is common to a site: scanner, scan and recruitment."""

    def __init__(self, recipe: Recipe, draw: np.random.Generator) -> None:
        spread = recipe.site_effect
        self.tr = float(draw.choice(recipe.trs))
        self.length = int(draw.integers(recipe.lengths[0], recipe.lengths[1] + 1))
        self.patient_share = float(draw.uniform(*recipe.patient_share))
        self.slope = float(0.6 + 0.6 * spread * draw.normal())  # power falls as frequency ** -slope
        self.gain = float(np.exp(spread * draw.normal()))
        self.log_amplitude: Floats = 0.4 * spread * draw.normal(size=recipe.n_rois)
        self.loadings: Floats = 0.3 * spread * draw.normal(size=(recipe.n_rois, recipe.networks))
        self.age = (float(draw.uniform(22, 45)), float(draw.uniform(5, 12)))  # mean, sd
        self.education = (float(draw.uniform(9, 15)), float(draw.uniform(2, 4)))
        self.male_share = float(draw.uniform(0.3, 0.7))

    def told(self) -> dict[str, Any]:
        """The site's numbers for the record."""
        return {key: value for key, value in vars(self).items() if not isinstance(value, np.ndarray)}


def _series(recipe: Recipe, truth: _Truth, site: _Protocol, label: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """One subject's (time, roi) signal: networks of ROIs, own noise, and slowness and couplings that patients have more of."""
    n, k, e = recipe.n_rois, recipe.networks, len(truth.edges)
    spread = recipe.subject_effect
    slope = site.slope + 0.4 * spread * draw.normal()
    sources = _coloured(draw, site.length, k + n + e, site.tr, slope)  # (time, network + roi + edge)
    loadings = truth.loadings + site.loadings + 0.3 * spread * draw.normal(size=(n, k))
    signal = sources[:, :k] @ loadings.T + sources[:, k : k + n]  # (time, roi)
    signal /= signal.std(axis=0)
    slow = _coloured(draw, site.length, len(truth.rois), site.tr, slope + 2.0)  # (time, disease roi)
    severity = draw.normal(recipe.roi_effect * label, 1.0, len(truth.rois))
    _mix(signal, truth.rois, slow, np.clip(0.2 + 0.12 * severity, 0.0, 0.8))
    coupling = 0.25 * draw.normal(recipe.edge_effect * label, 1.0, e)
    for (i, j), common, strength in zip(truth.edges, sources[:, k + n :].T, coupling, strict=True):
        both = np.stack([common, np.sign(strength) * common], axis=1)  # (time, 2)
        _mix(signal, np.array([i, j]), both, np.minimum(abs(strength), 0.8))
    log_amplitude = truth.log_amplitude + site.log_amplitude + 0.3 * spread * draw.normal(size=n)
    log_amplitude[truth.rois] += 0.3 * spread * recipe.roi_effect * label
    return np.asarray(10 * site.gain * np.exp(log_amplitude) * signal, dtype=np.float32)


def _mix(signal: Floats, rois: npt.NDArray[np.int64], other: Floats, share: Floats) -> None:
    """Let `other` take over a share of the variance of some ROIs, in place."""
    signal[:, rois] = np.sqrt(1 - share) * signal[:, rois] + np.sqrt(share) * other


def _coloured(draw: np.random.Generator, length: int, count: int, tr: float, slope: float) -> Floats:
    """(time, count) noise of unit variance in the band 0.01-0.1 Hz with power falling as frequency ** -slope."""
    frequency = np.fft.rfftfreq(length, tr)  # Hz
    inside = (frequency >= 0.01) & (frequency <= 0.1)
    weight = np.where(inside, np.maximum(frequency, 1e-9) ** (-slope / 2), 0.0)
    spectrum = draw.normal(size=(len(frequency), count)) + 1j * draw.normal(size=(len(frequency), count))
    noise: Floats = np.fft.irfft(spectrum * weight[:, None], n=length, axis=0)
    return np.asarray(noise / noise.std(axis=0))


def _phenotypes(recipe: Recipe, site: _Protocol, label: int, draw: np.random.Generator) -> tuple[float, float, float]:
    """Sex (1 male, 2 female), age and years of education; patients are older and had less schooling."""
    shift = recipe.phenotype_effect * label
    sex = 1.0 if draw.random() < site.male_share else 2.0
    age = max(float(draw.normal(site.age[0] + shift * site.age[1], site.age[1])), 12.0)
    education = max(float(draw.normal(site.education[0] - shift * site.education[1], site.education[1])), 0.0)
    lost = draw.random(2) < recipe.missing
    return sex, np.nan if lost[0] else round(age, 1), np.nan if lost[1] else round(education)
