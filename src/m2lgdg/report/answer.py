"""The top of the report, in words: who was studied, the answer with its interval, the best simple peer, and what is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from m2lgdg.metrics import delong_interval
from m2lgdg.registry import METHODS, SIMPLE
from m2lgdg.report.contents import Contents, Key
from m2lgdg.report.operating import over_seeds
from m2lgdg.report.tables import FEW, label
from m2lgdg.study.stats import half_interval


@dataclass(frozen=True)
class Answer:
    """The method in question, the simple peer beside it, and the sentences of the top."""

    main: Key
    peer: Key | None
    cohort: str
    answer: str
    beside: str
    warnings: list[str]


def answer(contents: Contents) -> Answer:
    """The question is about the headline method where it was run, else about the best."""
    scores = contents.site_scores
    areas = scores[scores["metric"] == "AUC"].pivot(index="target", columns=["method", "variant"], values="mean")
    order = areas.mean().sort_values(ascending=False, kind="stable").dropna()
    order = order.loc[areas[order.index].count().sort_values(ascending=False, kind="stable").index]  # all sites before some
    keys = _candidates(contents, [(str(method), str(variant)) for method, variant in order.index])
    warnings = _warnings(contents)
    if not keys:
        none = "No target site has both patients and controls, so no AUC is defined."
        return Answer(contents.keys[0], None, _cohort(contents), none, "", warnings)
    main = next((key for key in keys if not key[1] and key[0] in METHODS.with_role("headline")), keys[0])
    simple = METHODS.with_role(*SIMPLE)
    peers = [key for key in keys if key != main and key[0] in simple]
    peer = peers[0] if peers else None
    beside = ""
    if peer is not None:
        who = "Next to it" if main[0] in simple else "The best simple peer"
        beside = f"{who}: {label(*peer)} {_mean_area(contents.predictions, areas, peer)}."
        if main[0] not in simple and order[peer] >= order[main]:
            warnings.insert(0, f"A simple model does as well or better: {label(*peer)} against {label(*main)}.")
    sites = int(areas[main].count())
    where = f"Mean AUC over {sites} unseen sites" if sites > 1 else f"AUC at the unseen site {areas[main].dropna().index[0]}"
    told = f"{where}: {label(*main)} {_mean_area(contents.predictions, areas, main)}. 50 is chance."
    told += f" {sites} sites say little about the next one, however wide the interval." if 1 < sites < FEW else ""
    return Answer(main, peer, _cohort(contents), told, beside, warnings)


def _candidates(contents: Contents, keys: list[Key]) -> list[Key]:
    """Rows that an answer may be about: of many ablations or values of a sweep the highest is the luckiest too."""
    whole = {method for method, variant in contents.keys if not variant}
    own = [key for key in keys if not contents.is_sweep(key) and (key[1] in ("", "phenotypes") or key[0] not in whole)]
    return own or keys


def _mean_area(predictions: pd.DataFrame, areas: pd.DataFrame, key: Key) -> str:
    """The mean over sites with a t interval; of a single site its AUC with DeLong's."""
    values = areas[key].dropna()
    if len(values) > 1:
        half = half_interval(float(values.std(ddof=1)), len(values))
        low, high, how = values.mean() - half, values.mean() + half, "t over sites"
    else:
        mean = over_seeds(predictions)
        part = mean[(mean["method"] == key[0]) & (mean["variant"] == key[1]) & (mean["target"] == values.index[0])]
        low, high = delong_interval(part["label"].to_numpy(), part["proba"].to_numpy())
        how = "DeLong"
    return f"{100 * values.mean():.1f} (95 % interval {100 * max(low, 0):.1f} to {100 * min(high, 1):.1f}, {how})"


def _cohort(contents: Contents) -> str:
    """Who was studied, who was left out and why."""
    inclusion = pd.DataFrame(contents.inclusion, columns=["subject", "site", "status", "reason"])
    included, out = (inclusion[inclusion["status"] == status] for status in ("included", "excluded"))
    if not len(included):
        return f"{contents.predictions['subject'].nunique()} subjects were tested."
    told = f"{len(included)} subjects of {included['site'].nunique()} sites"
    if contents.cohort is not None:
        labels = Counter(contents.cohort.labels.tolist())
        told += f" ({labels[1]} patients, {labels[0]} controls)"
    if not len(out):
        return f"{told}; nobody was left out."
    reasons = Counter(out["reason"]).most_common(5)
    said = "; ".join(f"{count} {reason.rstrip('.')}" for reason, count in reasons)
    return f"{told}; {len(out)} left out: {said}{'; others in inclusion.csv' if len(set(out['reason'])) > 5 else ''}."


def _warnings(contents: Contents) -> list[str]:
    told = [f"Leakage check failed: {one['check']}. {one['detail']}" for one in contents.checks if not one.get("passed", True)]
    missing = contents.missing()
    if missing:
        told.append(f"Not run yet: {', '.join(missing)}. Run the study again to go on.")
    return told
