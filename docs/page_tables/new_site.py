"""Table of docs/results.md on the intercept of a new site: how many unlabelled scans it needs, and what a wrong share does.

No model is fitted: each target of the committed predictions is treated as a new hospital whose subjects have the intercept of n
of its other subjects, drawn at random many times.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_1samp

from m2lgdg.metrics import auc, calibration, logit, shrunken_platt, sigmoid
from m2lgdg.model.new_site import conformal_quantile
from m2lgdg.model.site_level import corrected_by_batches, prevalence_shift, rounded_counts, shift_of_counts
from m2lgdg.study.stats import holm
from page_tables.committed import predictions
from page_tables.writing import block, bullets, chance, interval, table

STUDY, METHOD = "all-sites/adapted", "connectome-adaptive"
SIZES, DRAWS, COVERAGE = (0, 5, 10, 20, 50), 20, 0.9
BATCH, SHARES = 10, (0.1, 0.9)  # subjects of a batch, so few that most sites have nine patients; parts that are patients
BATCHES = 100  # draws, of which the means have a standard error of 0.4 points at most
STUDENT = 2.0930  # of 20 sites
Floats = NDArray[np.float64]
Site = tuple[Floats, NDArray[np.int64], list[str]]  # logits, labels and ids


def sites() -> dict[str, Site]:
    """The strict predictions of the method, by site."""
    own = predictions(STUDY).query("method == @METHOD and variant == ''")
    parts = own.groupby("target", sort=False)
    return {site: (logit(part["proba"].to_numpy()), part["label"].to_numpy(), part["subject"].tolist()) for site, part in parts}


def share_elsewhere(known: dict[str, Site], site: str) -> float:
    """Share of patients at the other sites."""
    return float(np.concatenate([labels for other, (_, labels, _) in known.items() if other != site]).mean())


def with_intercept(known: dict[str, Site], size: int, seed: int) -> dict[str, Floats]:
    """Logits of each site with the intercept of `size` other subjects of it."""
    if not size:
        return {site: logits for site, (logits, _, _) in known.items()}
    return {
        site: logit(corrected_by_batches(sigmoid(logits), ids, share_elsewhere(known, site), seed, size))
        for site, (logits, _, ids) in known.items()
    }


def scores(known: dict[str, Site], decisions: dict[str, Floats]) -> Floats:
    """(site, 5): sensitivity, specificity, AUC, calibration intercept, and part inside conformal sets of the other sites."""
    rows = []
    for site, (_, labels, _) in known.items():
        others = [other for other in known if other != site]
        there, truth = (np.concatenate(parts) for parts in zip(*((decisions[o], known[o][1]) for o in others), strict=True))
        slope, offset = shrunken_platt(there, truth.astype(float))
        elsewhere, here = sigmoid(slope * there + offset), sigmoid(slope * decisions[site] + offset)
        limits = (
            conformal_quantile(elsewhere[truth == 0], COVERAGE),
            conformal_quantile(1 - elsewhere[truth == 1], COVERAGE),
        )
        covered = np.where(labels == 1, 1 - here <= limits[1], here <= limits[0]).mean()
        called = decisions[site] >= 0
        _, moved = calibration(labels, sigmoid(decisions[site]))
        rows.append((called[labels == 1].mean(), (~called[labels == 0]).mean(), auc(labels, decisions[site]), moved, covered))
    return np.array(rows)


@block("site-intercept")
def site_intercept() -> list[str]:
    """Decisions at 20 sites with the intercept of so many scans, and with a wrong share of patients."""
    known, rows, balanced = sites(), [], {}
    for size in SIZES:
        drawn = np.array([scores(known, with_intercept(known, size, seed)) for seed in range(DRAWS if size else 1)])
        balanced[size] = 50 * (drawn[..., 0] + drawn[..., 1])  # (draw, site)
        means, spreads = 100 * drawn.mean(axis=(0, 1)), 100 * drawn.std(axis=1, ddof=1).mean(axis=0)
        over_draws = f" ({balanced[size].mean(axis=1).std(ddof=1):.1f})" if size else ""
        rows.append(
            [
                str(size or "none"),
                f"{balanced[size].mean():.1f}{over_draws}",
                *(f"{means[i]:.1f} ± {spreads[i]:.1f}" for i in (0, 1)),
                f"{means[2]:.1f}",
                f"{spreads[3] / 100:.2f}",
                f"{means[4]:.1f} %, {100 * drawn[..., 4].min(axis=1).mean():.0f} %",
            ]
        )
    header = ["scans", "balanced accuracy", "sensitivity", "specificity", "AUC", "sd of the calibration intercept"]
    gains = {size: (balanced[size] - balanced[0]).mean(axis=0) for size in SIZES[1:]}
    adjusted = holm([float(ttest_1samp(own, 0).pvalue) for own in gains.values()])
    gain = gains[20]
    half = STUDENT * gain.std(ddof=1) / len(gain) ** 0.5
    return [
        *table([*header, "in 90 % set: mean, lowest site"], rows),
        "",
        *bullets(
            "Balanced accuracy with 20 scans minus without, 95 % interval over sites: "
            f"{interval(gain.mean(), gain.mean() - half, gain.mean() + half)}. It is above 0 at {(gain > 0).sum()} of "
            f"{len(gain)} sites. With Holm's correction over the four rows the smallest p is {chance(adjusted.min())}.",
            wrong_shares(known),
        ),
    ]


def wrong_shares(known: dict[str, Site]) -> str:
    """Sensitivity and specificity of the others if a batch has many more or fewer patients than source, assumed or given."""
    draw, told = np.random.default_rng(0), []
    for share in SHARES:
        rates = np.array([np.mean([*batches(known, share, draw)], axis=0) for _ in range(BATCHES)]).mean(axis=0)
        assumed, given = (f"{100 * rates[i]:.0f} and {100 * rates[i + 1]:.0f} %" for i in (0, 2))
        told.append(f"with {100 * share:.0f} % patients {assumed} if the share is assumed, {given} if it is given")
    return f"Sensitivity and specificity after batches of {BATCH}: {'; '.join(told)} (`--prevalence`)."


def batches(known: dict[str, Site], share: float, draw: np.random.Generator) -> Iterator[tuple[float, ...]]:
    """Sensitivity and specificity outside a batch with this share of patients, assumed and given, of each site with enough."""
    patients = round(share * BATCH)
    for site, (logits, labels, _) in known.items():
        pools = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
        if len(pools[0]) <= patients or len(pools[1]) <= BATCH - patients:
            continue
        counts = (patients, BATCH - patients)
        batch = np.concatenate([draw.choice(pool, count, replace=False) for pool, count in zip(pools, counts, strict=True)])
        rest, usual = np.setdiff1d(np.arange(len(labels)), batch), share_elsewhere(known, site)
        found: list[float] = []
        for stated in (usual, share):  # a given share moves the threshold, too
            shift = shift_of_counts(rounded_counts(logits[batch]), stated, usual)
            called = logits[rest] + shift >= prevalence_shift(stated, usual)
            found += [called[labels[rest] == 1].mean(), (~called[labels[rest] == 0]).mean()]
        yield tuple(found)
