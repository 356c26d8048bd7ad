"""Tables of docs/m2lgdg.md, methods.md, speed.md and explain.md: single methods and what their trainings did."""

import json

import numpy as np
import pandas as pd

from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.study.stats import half_interval
from m2lgdg.study.term_summary import pooled
from page_tables.committed import (
    METRICS,
    OWN_AT_TWENTY,
    PAPER,
    RESULTS,
    SLOW,
    TARGETS,
    as_in_paper,
    by_seed,
    changes,
    of_paper,
    published,
    records,
    scores_at,
)
from page_tables.results import ABLATED
from page_tables.writing import block, bullets, interval, name, number, spread, table

NETWORKS = (
    *("brainnetcnn", "braingnn", "ibgnn-plus", "msstan", "mm-gtunets", "ufa-net", "brainnet-transformer"),
    *("erm", "cdann", "mixup", "mldg", "iib", "genm", "m2dc", "metaexplainer"),
)
MAIN = ("ce", "query")  # the cross-entropy of a network's own classifier; `m2dc` has it at the meta-test site


@block("network-costs")
def network_costs() -> list[str]:
    """Seconds and peak memory of a training, over those without and with phenotypes."""
    rows = []
    for method in NETWORKS:
        models = [model for phenotypes in (False, True) if (model := of_paper(method, phenotypes))]
        own = [one for model in models for one in records(*model)]
        seconds = [record["seconds"] for record in own]
        peak = max(record["learned"]["peak_memory_gib"] for record in own)
        rows.append([name(method), f"{min(seconds):.0f} to {max(seconds):.0f}", f"{np.median(seconds):.0f}", number(peak, 2)])
    return table(["method", "seconds", "median", "peak GiB"], rows)


@block("m2dc-epochs")
def m2dc_epochs() -> list[str]:
    """AUC of `m2dc` at 16 other sites if any epoch can be kept, and if one of the second half."""
    watched = pd.read_csv(RESULTS / "searches" / "m2dc-epochs.csv")
    by_site = {}
    for first in (1, 31):
        candidates = watched[watched["epoch"] >= first].sort_values(["val_auc", "val_loss"], ascending=[False, True])
        by_site[first] = candidates.drop_duplicates(["fold", "seed", "site"]).groupby("site")["auc"].mean()
    difference = by_site[31] - by_site[1]
    half = half_interval(difference.std(), len(difference))
    return bullets(
        f"`m2dc` at {len(difference)} sites, two seeds: mean AUC {number(by_site[1].mean())} if any epoch can be kept, "
        f"{number(by_site[31].mean())} if one of the second half; difference "
        f"{interval(difference.mean(), difference.mean() - half, difference.mean() + half)} over sites."
    )


@block("ufa-net-epochs")
def ufa_net_epochs() -> list[str]:
    """How the trainings of `ufa-net` went on source, without and with phenotypes."""
    own = [record["learned"] for variant in ("", "phenotypes") for record in records(SLOW["ufa-net"], "ufa-net", variant)]
    kept = [100 * one["history"][one["best_epoch"] - 1]["val_auc"] for one in own]
    first, last = ([one["history"][epoch]["ce"] for one in own] for epoch in (0, -1))
    aligned = [epoch["alignment"] for one in own for epoch in one["history"] if "alignment" in epoch]
    return bullets(
        "In all trainings for NYU and USM, without and with phenotypes, the cross-entropy on source-training subjects falls "
        f"from {number(np.mean(first), 2)} to at most "
        f"{number(max(last), 3)} in the last of 120 epochs. On source-validation subjects the AUC of the kept epochs is "
        f"{min(kept):.0f} to {max(kept):.0f}, median {np.median(kept):.0f}: the networks memorise.",
        f"The alignment is 0 in {sum(value == 0 for value in aligned):,} of {len(aligned):,} epochs after the first twenty. "
        "There the means of the sites differ no more than by chance.",
    )


def acted(study: str, method: str, variant: str = "") -> tuple[str, str]:
    """Mean cross-entropy over epochs and trainings, and each other term of the loss beside it; empty without a record of them.

    A term has its mean in percent of the cross-entropy, and the share of epochs in which it is not zero if that is not all.
    """
    learned = [record["learned"] for record in records(study, method, variant)]
    terms = pooled(learned)
    main = next((term for term in MAIN if term in terms), None)
    if main is None:
        return "", ""
    beside = []
    for term, own in terms.items():
        if term == main or (learned[0]["losses"].get(term) or {}).get("weight") == 0:
            continue
        size, share = 100 * abs(own["mean"]) / terms[main]["mean"], 100 * own["acted"] / own["epochs"]
        text = f"{term} {f'{size:.0f}' if size >= 10 else f'{size:.2g}'} %"
        text += f", in {share:.0f} % of epochs" if share < 99.5 else ""
        if own["constant"]:
            text += ", constant" + (
                "" if own["constant"] == own["trainings"] else f" in {own['constant']} of {own['trainings']}"
            )
        beside.append(text if own["acted"] else f"{term} never")
    return number(terms[main]["mean"], 2), "; ".join(beside)


@block("acted-terms")
def acted_terms() -> list[str]:
    """Which terms of each network's loss acted, of those whose loss has more than one."""
    rows = []
    for method in ("m2lgdg", "m2lgdg-connectome", *NETWORKS):
        entropy, beside = acted(*(("paper/connectome", method) if method == "m2lgdg-connectome" else as_in_paper(method)))
        rows += [[name(method), entropy, beside]] if beside else []
    return table(["method", "cross-entropy", "other terms, in percent of it"], rows)


@block("margins")
def margins() -> list[str]:
    """AUC of M²LG-DG by the margin of its difference loss, and how often the loss acted."""
    study, rows = "sensitivity/margin", []
    for margin in (0.5, 1.0, 1.5, 2.0, 2.5):
        variant = "" if margin == 1 else f"margin={margin}"
        own = [record["learned"] for record in records(study, "m2lgdg", variant)]
        acted = [sum(epoch["difference"] > 0 for epoch in one["history"]) for one in own]
        total = sum(len(one["history"]) for one in own)
        change = changes(study, "m2lgdg").loc[variant] if variant else None
        row = (
            ""
            if change is None
            else interval(-change["mean"], -change["mean"] - change["half"], -change["mean"] + change["half"])
        )
        areas = [spread(scores_at((study, "m2lgdg", variant), target)) for target in TARGETS]
        rows.append([f"{margin}", f"{sum(acted)} of {total}", *areas, row])
    return table(["margin", "epochs with a loss above 0", *TARGETS, "minus the default, 1.0"], rows)


@block("sweeps")
def sweeps() -> list[str]:
    """Lowest and highest mean AUC of NYU and USM over the values of each swept field, beside trainings of the default."""
    study = "sensitivity/m2lgdg"
    about = json.loads((RESULTS / study / "study.json").read_text())

    def mean(variant: str) -> float:
        return float(np.mean([scores_at((study, "m2lgdg", variant), target)[0] for target in TARGETS]))

    rows, changed, default = [], {}, about["method"]["m2lgdg"]
    for field, values in about["sweep"]["m2lgdg"].items():
        others = {value: mean(f"{field}={value}") for value in values if value != default[field]}
        changed[field] = np.array(list(others.values()))
        ends = [f"{number(others[value])} ({value})" for value in (min(others, key=others.get), max(others, key=others.get))]
        rows.append([f"`{field}`", ", ".join(map(str, values)), f"{default[field]:g}", *ends])
    usual, (same, *seeds) = mean(""), by_seed(OWN_AT_TWENTY)[list(TARGETS)].mean(axis=1)
    length, mean_seed = changed.pop("length"), np.mean([same, *seeds])
    apart = np.concatenate(list(changed.values())) - usual
    return [
        *table(["field", "values", "default", "lowest of the other values", "highest of the other values"], rows),
        "",
        *bullets(
            f"The default has {number(usual)} here. The three seeds of the [study at 20 sites]"
            f"(results.md#networks-at-20-sites) have {number(same)} (the same seed), {' and '.join(map(number, seeds))}.",
            f"The {len(apart)} other values of the first four fields differ from it by "
            f"{number(np.sqrt((apart**2).mean()))} (root mean square): {(apart > 0).sum()} are higher, {(apart < 0).sum()} "
            "lower.",
            f"The other values of `length` are {number(min(usual - length))} to "
            f"{number(max(usual - length))} below the default of the same seed, and {number(min(mean_seed - length))} to "
            f"{number(max(mean_seed - length))} below the mean of its three seeds.",
        ),
    ]


@block("scan-alone")
def scan_alone() -> list[str]:
    """AUC of M2 in two precisions and with larger identity embeddings, one seed."""
    study = "paper/scan"
    settings = {"": "bf16, identity 0.02 (default)", "precision=fp32": "fp32", "identity_sd=1.0": "identity 1.0"}
    rows = []
    for variant, title in settings.items():
        learned = {record["target"]: record["learned"] for record in records(study, "m2lgdg", variant)}
        kept = [100 * learned[target]["history"][learned[target]["best_epoch"] - 1]["val_auc"] for target in TARGETS]
        areas = [number(scores_at((study, "m2lgdg", variant), target)[0]) for target in TARGETS]
        rows.append([title, *areas, ", ".join(number(value) for value in kept)])
    return table(["setting", *TARGETS, "validation AUC of the kept epochs (NYU, USM)"], rows)


@block("m2lgdg-abide")
def m2lgdg_abide() -> list[str]:
    """M²LG-DG with two decimals, its validation AUC, and the paper's AUC."""
    rows = []
    for target in TARGETS:
        values = [spread(scores_at((PAPER, "m2lgdg", ""), target, metric), 2) for metric in METRICS[:4]]
        learned = [record["learned"] for record in records(PAPER, "m2lgdg") if record["target"] == target]
        best = [100 * own["history"][own["best_epoch"] - 1]["val_auc"] for own in learned]
        validation = spread((float(np.mean(best)), float(np.std(best, ddof=1))))
        rows.append([target, *values, validation, f"{published()['m2lgdg', target, 'AUC']:.2f}"])
    return table(["target", *METRICS[:4], "validation AUC", "the paper's AUC"], rows)


@block("loss-terms")
def loss_terms() -> list[str]:
    """Terms of the loss, each times its weight, in the first and in the kept epoch of ten trainings."""
    learned = [[record["learned"] for record in records(study, method)] for study, method in ((PAPER, "m2lgdg"), ABLATED[1])]
    rows = []
    for term in learned[0][0]["losses"]:
        row = [term]
        for trained in learned:
            for epoch in ("first", "kept"):
                values = [own["losses"][term][epoch] for own in trained]
                low, high = (number(value, 4) if value else "0" for value in (min(values), max(values)))
                row.append(low if low == high else f"{low} to {high}")
        rows.append(row)
    header = ["term", "`m2lgdg`: first epoch", "kept epoch", "`m2lgdg-connectome`: first epoch", "kept epoch"]
    return table(header, rows)


def _explanations() -> list[Explanation]:
    return [Explanation.load(folder) for folder in sorted((RESULTS / PAPER / "explanations").iterdir())]


@block("regions")
def regions() -> list[str]:
    """The ten ROIs of M²LG-DG by the paper's rule, and how far the trainings agree."""
    each = _explanations()
    scored = pd.DataFrame({i: one.rois.set_index("roi")["score"] for i, one in enumerate(each)})
    mean = scored.mean(axis=1).sort_values(ascending=False)
    return bullets(
        f"Ten highest: {', '.join(mean.index[:10])}. The first is {100 * (mean.iloc[0] / mean.iloc[19] - 1):.0f} % above the "
        f"twentieth.",
        f"Highest score of a ROI, by training: {scored.max().min():.1e} to {scored.max().max():.1e}. Rank correlation of two "
        f"of the {len(each)} trainings, mean: {number(mean_over(each).about['agreement'], 2)}.",
    )


@block("explained")
def explained() -> list[str]:
    """Phenotypes, gate and probe of the explanations of M²LG-DG."""
    each = _explanations()
    gate = [float(np.average(one.gate["imaging"], weights=one.gate["subjects"])) for one in each]
    keys = ("site", "site_chance", "label", "label_chance")
    site, largest, label, frequent = (100 * np.mean([one.about["readability"][key] for one in each]) for key in keys)
    return bullets(
        f"Phenotypes by score: {', '.join(mean_over(each).phenotypes['phenotype'])}.",
        f"Weight of the scan in the gate: {number(np.mean(gate), 2)} on average, {number(min(gate), 2)} to "
        f"{number(max(gate), 2)} over {len(gate)} trainings.",
        f"A linear probe of the representation reads the source site of {site:.0f} % of subjects (largest site "
        f"{largest:.0f} %) and the label of {label:.0f} % (more frequent label {frequent:.0f} %).",
    )
