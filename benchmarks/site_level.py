"""How many unlabelled scans does the level of a site need, and what if the assumed share of patients is wrong?

Works on the predictions of a finished study (no model is fitted): each target is treated as a new hospital at the level of n of
its other subjects, drawn at random many times. Then batches of ten with 10 to 90 % patients are drawn from each target, while
the share of the other targets is assumed, or given as it is.

Usage: python benchmarks/site_level.py STUDY_FOLDER [--method NAME] [--variant NAME] [--without NYU]
Prints two Markdown tables.
"""

import argparse

import numpy as np
import pandas as pd

from m2lgdg.metrics import auc, calibration, logit, shrunken_platt, sigmoid
from m2lgdg.model.new_site import conformal_quantile
from m2lgdg.model.site_level import corrected_by_batches, prevalence_shift, rounded_counts, shift_of_counts
from m2lgdg.study.predictions import by_track, read_predictions

SIZES = (0, 5, 10, 20, 50)
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
BATCH = 10  # of the second table: small enough for nine patients at most sites
COVERAGE = 0.9
COLUMNS = (
    *("bacc", "sen", "sen_sd", "spe", "spe_sd", "auc", "slope", "slope_median", "intercept_sd"),
    *("covered", "lowest", "inside", "single"),
)
HEADER = (
    *("scans", "balanced accuracy", "sensitivity", "specificity", "AUC", "slope: mean, median", "sd of the intercept"),
    *("in 90 % set: mean, lowest site", "sites with 80 to 98 %", "one class"),
)


def read_sites(options):
    """Site -> logits, labels and ids."""
    table = by_track(read_predictions(options.folder))["strict"]
    table = table[(table["method"] == options.method) & (table["variant"] == options.variant) & (table["label"] >= 0)]
    table = table[(table["seed"] == table["seed"].min()) & ~table["target"].isin(options.without)]
    parts = table.groupby("target", sort=False)
    return {site: (logit(part["proba"].to_numpy()), part["label"].to_numpy(), part["subject"].tolist()) for site, part in parts}


def share_elsewhere(sites, site):
    return float(np.concatenate([labels for other, (_, labels, _) in sites.items() if other != site]).mean())


def levelled(sites, size, seed):
    """Site -> logits at the level of `size` other subjects."""
    if not size:
        return {site: x for site, (x, _, _) in sites.items()}
    return {
        site: logit(corrected_by_batches(sigmoid(x), ids, share_elsewhere(sites, site), seed, size))
        for site, (x, _, ids) in sites.items()
    }


def scores(sites, logits):
    """One row per site: sensitivity, specificity, AUC, slope, intercept, coverage; as a model calibrated at other sites."""
    rows = []
    for site, (_, labels, _) in sites.items():
        others = [other for other in sites if other != site]
        x, y = (np.concatenate([part[other] for other in others]) for part in (logits, {s: v[1] for s, v in sites.items()}))
        slope, offset = shrunken_platt(x, y.astype(float))
        there, here = sigmoid(slope * x + offset), sigmoid(slope * logits[site] + offset)
        limits = [conformal_quantile(there[y == 0], COVERAGE), conformal_quantile(1 - there[y == 1], COVERAGE)]
        covered = np.where(labels == 1, 1 - here <= limits[1], here <= limits[0])
        single = (here <= limits[0]) != (1 - here <= limits[1])
        patient = logits[site] >= 0
        rows.append(
            (
                *(patient[labels == 1].mean(), (~patient[labels == 0]).mean(), auc(labels, logits[site])),
                *calibration(labels, sigmoid(logits[site])),
                *(covered.mean(), single.mean()),
            )
        )
    return pd.DataFrame(rows, columns=["SEN", "SPE", "AUC", "slope", "intercept", "covered", "single"], index=list(sites))


def by_size(sites, draws):
    rows = []
    for size in SIZES:
        parts = []
        for seed in range(draws if size else 1):
            at = scores(sites, levelled(sites, size, seed))
            inside = at["covered"].between(0.8, 0.98)
            parts.append(
                (
                    50 * (at["SEN"] + at["SPE"]).mean(),
                    *(100 * at["SEN"].mean(), 100 * at["SEN"].std(), 100 * at["SPE"].mean(), 100 * at["SPE"].std()),
                    *(100 * at["AUC"].mean(), at["slope"].mean(), at["slope"].median(), at["intercept"].std()),
                    *(100 * at["covered"].mean(), 100 * at["covered"].min(), inside.sum(), 100 * at["single"].mean()),
                )
            )
        rows.append((size, *np.mean(parts, axis=0), np.std([part[0] for part in parts])))
    return pd.DataFrame(rows, columns=["n", *COLUMNS, "bacc_sd"])


def by_share(sites, draws):
    """Sensitivity and specificity of subjects outside of a batch with this share of patients; a row per share."""
    draw, rows = np.random.default_rng(0), []
    for share in SHARES:
        patients = round(share * BATCH)
        results = {"assumed": [], "given": []}
        for _ in range(draws):
            rates = {name: [] for name in results}
            for site, (x, y, _) in sites.items():
                pools = np.flatnonzero(y == 1), np.flatnonzero(y == 0)
                if len(pools[0]) <= patients or len(pools[1]) <= BATCH - patients:
                    continue
                chosen = zip(pools, (patients, BATCH - patients), strict=True)
                batch = np.concatenate([draw.choice(pool, count, replace=False) for pool, count in chosen])
                rest = np.setdiff1d(np.arange(len(y)), batch)
                usual = share_elsewhere(sites, site)
                for name, stated in (("assumed", usual), ("given", share)):  # a given share moves the threshold, too
                    shift = shift_of_counts(rounded_counts(x[batch]), stated, usual)
                    called = x[rest] + shift >= prevalence_shift(stated, usual)
                    rates[name].append((called[y[rest] == 1].mean(), (~called[y[rest] == 0]).mean()))
            for name, values in rates.items():
                results[name].append((*np.mean(values, axis=0), len(values)))
        row = [share]
        for values in results.values():
            sen, spe, count = np.mean(values, axis=0)
            row += [100 * sen, 100 * spe, 50 * (sen + spe)]
        rows.append((*row, count))
    columns = ["share", *(f"{kind}_{name}" for kind in results for name in ("sen", "spe", "bacc")), "sites"]
    return pd.DataFrame(rows, columns=columns)


def print_tables(sizes, shares):
    print(f"| {' | '.join(HEADER)} |")
    print("|---" * len(HEADER) + "|")
    for row in sizes.itertuples():
        spread = f" ({row.bacc_sd:.1f})" if row.n else ""
        cells = [f"{row.n or 'none'}", f"{row.bacc:.1f}{spread}"]
        cells += [f"{row.sen:.1f} ± {row.sen_sd:.1f}", f"{row.spe:.1f} ± {row.spe_sd:.1f}", f"{row.auc:.1f}"]
        cells += [f"{row.slope:.2f}, {row.slope_median:.2f}", f"{row.intercept_sd:.2f}"]
        cells += [f"{row.covered:.1f} %, {row.lowest:.0f} %", f"{row.inside:.1f}", f"{row.single:.0f} %"]
        print(f"| {' | '.join(cells)} |")
    print("\n| patients in the batch | sites | share assumed: sensitivity, specificity, balanced | share given |")
    print("|---|---|---|---|")
    for row in shares.itertuples():
        assumed = f"{row.assumed_sen:.0f}, {row.assumed_spe:.0f}, {row.assumed_bacc:.1f}"
        given = f"{row.given_sen:.0f}, {row.given_spe:.0f}, {row.given_bacc:.1f}"
        print(f"| {100 * row.share:.0f} % | {row.sites:.0f} | {assumed} | {given} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--method", default="connectome-adaptive")
    parser.add_argument("--variant", default="")
    parser.add_argument("--without", nargs="*", default=[], help="targets to leave out")
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args()
    sites = read_sites(options)
    sizes, shares = by_size(sites, options.draws), by_share(sites, options.draws)
    print(f"{options.method} {options.variant}: {len(sites)} sites, {options.draws} draws\n")
    print_tables(sizes, shares)


if __name__ == "__main__":
    main()
