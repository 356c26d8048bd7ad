"""The answer of a report: how well the main method works at unseen sites, at which of them it does not, and its simple peer.

Made from the contents of a study; `sections` puts it on top of the page, and `trust` asks whether to believe it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from m2lgdg.metrics import delong, delong_interval
from m2lgdg.registry import SIMPLE
from m2lgdg.report.contents import Contents
from m2lgdg.report.inputs import worded
from m2lgdg.report.operating import of_key
from m2lgdg.report.paper_tables import FEW, Key, chosen_among, constant_keys, flat_clauses, label, what_was_seen
from m2lgdg.study.predictions import ADAPTED
from m2lgdg.study.stats import class_counts, half_interval, min_per_class, paired_test

Verdict = Literal["above chance", "too few to tell", "not above chance", "not counted"]
VERDICTS: tuple[Verdict, ...] = ("above chance", "too few to tell", "not above chance", "not counted")
CHANCE = 0.5
LEAST_SITES = 5  # for an interval of a further site


class SiteResult(NamedTuple):
    """AUC of the main method at a target site (mean over seeds) with DeLong's interval, and what that says."""

    site: str
    patients: int
    controls: int
    area: float
    low: float  # NaN if every patient is above every control, or below
    high: float
    peer: float  # AUC of the best simple peer; NaN without one
    verdict: Verdict


class Mean(NamedTuple):
    """Mean AUC over the sites that count, its 95 % interval (NaN if there is none), and the mean of the peer."""

    area: float
    low: float
    high: float
    peer: float


@dataclass(frozen=True)
class Answer:
    """The main method, its simple peer, their AUC at each site, and the sentences at the top of the report.

    `mean` is the mean AUC over the sites that count with its interval and that of the peer, None without such sites.
    `warnings` forbid to believe the answer, `notes` limit it; `chosen` is the number of methods of which the main one has the
    highest AUC, if it was not named before, and `flat` has clauses on sites with uninformative decisions.
    """

    main: Key
    peer: Key | None
    answer: str
    warnings: list[str]
    comparison: str = ""
    structure: str = ""
    by_site: str = ""
    notes: list[str] = field(default_factory=list)
    sites: list[SiteResult] = field(default_factory=list)
    mean: Mean | None = None
    chosen: int = 0
    flat: list[str] = field(default_factory=list)
    peer_as_good: bool = False


def answer(contents: Contents) -> Answer:
    """Summary of the study's main method, of the headline method if it has none, else of the one with the highest AUC."""
    areas, least = contents.areas, min_per_class(contents.study)
    order = areas.mean().sort_values(ascending=False, kind="stable").dropna()
    order = order.loc[areas[order.index].count().sort_values(ascending=False, kind="stable").index]  # all sites before some
    keys = _candidates(contents, [(str(method), str(variant)) for method, variant in order.index])
    warnings = _warnings(contents)
    if not keys:
        undefined = f"No target site has at least {least} patients and {least} controls (min_per_class), so no mean AUC."
        return Answer(contents.keys[0], None, undefined, warnings, sites=site_results(contents, contents.keys[0], None))
    constant = constant_keys(contents.predictions)
    learned = [key for key in keys if key not in constant] or keys
    named = (contents.study.get("main"), *contents.with_role("headline"))  # before the results were known
    headline = next((key for name in named for key in keys if key == (name, "")), None)
    main = headline or learned[0]
    count = int(areas[main].count())
    where = f"Mean AUC over {count} unseen sites" if count > 1 else f"AUC at the unseen site {areas[main].dropna().index[0]}"
    mean, low, high, how = mean_area(contents, main)
    sentence = f"{where}: {label(*main)} {_with_interval(mean, low, high, how)}. Chance is 50 %."
    if low <= CHANCE <= high:
        sentence += " The interval includes chance."
    notes, chosen = [], len(learned) if headline is None and len(learned) > 1 else 0
    if chosen:
        notes.append(f"{chosen_among(label(*main), chosen)}.")
    if 1 < count < FEW:
        notes.append(f"With only {count} sites, performance at a further site is uncertain, whatever the interval.")
    if left := contents.predictions["target"].nunique() - len(contents.counted):
        notes.append(f"Not counted, with fewer than {least} patients or controls: {left} more site{'s' * (left > 1)}.")
    peers = _peers(contents, main, [key for key in learned if key != main])
    peer = peers[0] if peers else None
    as_good = peer is not None and main[0] not in contents.with_role(*SIMPLE) and bool(order[peer] >= order[main])
    sites = site_results(contents, main, peer)
    return Answer(
        main,
        peer,
        sentence,
        warnings,
        comparison=_against(contents, main, peers) if peers else "",
        by_site=sites_sentence(sites),
        notes=notes,
        sites=sites,
        mean=Mean(mean, low, high, math.nan if peer is None else float(areas[peer].mean())),
        chosen=chosen,
        flat=flat_clauses(contents.of_methods([main, *peers[:1]]).predictions, least),
        peer_as_good=as_good,
    )


def site_results(contents: Contents, main: Key, peer: Key | None) -> list[SiteResult]:
    """The main method at each target site that has an AUC: by verdict, then highest first.

    A site whose interval includes chance is too small to tell if the interval also includes the mean over the sites that
    count; if it is below that mean, the method is worse there than elsewhere.
    """
    scores = contents.site_scores[contents.site_scores["metric"] == "AUC"].set_index(["method", "variant", "target"])["mean"]
    own = {str(site): rows for site, rows in of_key(contents.mean, main).groupby("target", sort=False)}
    counts = class_counts(contents.predictions[contents.predictions["label"] >= 0])
    areas = {site: float(scores.get((*main, site), math.nan)) for site in own}
    mean = float(np.mean([areas[site] for site in contents.counted if not math.isnan(areas.get(site, math.nan))] or [CHANCE]))
    results = []
    for site, area in areas.items():
        if math.isnan(area):
            continue
        low, high = delong_interval(own[site]["label"].to_numpy(), own[site]["proba"].to_numpy())
        ends = (low, high) if not math.isnan(low) else (area, area)  # all patients are above all controls, or below
        patients, controls = (int(number) for number in counts.loc[site])
        verdict: Verdict = "above chance" if ends[0] > CHANCE else "not above chance" if ends[1] < mean else "too few to tell"
        verdict = verdict if site in contents.counted else "not counted"
        other = math.nan if peer is None else float(scores.get((*peer, site), math.nan))
        results.append(SiteResult(site, patients, controls, area, low, high, other, verdict))
    return sorted(results, key=lambda one: (VERDICTS.index(one.verdict), -one.area, one.site))


def sites_sentence(sites: list[SiteResult]) -> str:
    """At how many sites the method is above chance, and the names of those where that is not shown."""
    by_verdict = {verdict: [one.site for one in sites if one.verdict == verdict] for verdict in VERDICTS}
    counted = len(sites) - len(by_verdict["not counted"])
    if counted < 2:
        return ""
    words = [f"Above chance at {len(by_verdict['above chance'])} of {counted} sites"]
    if failed := by_verdict["not above chance"]:
        words.append(f"not above chance, and below the other sites, at {', '.join(failed)}")
    if unclear := by_verdict["too few to tell"]:
        words.append(f"too few subjects to tell at {', '.join(unclear)}")
    return f"{'; '.join(words)}."


def further_site(contents: Contents, main: Key) -> tuple[float, float] | None:
    """95 % prediction interval of the AUC at one more site like these; None with few sites.

    The variance between sites is that of their AUCs less the mean of DeLong's variances, but not below zero.
    """
    rows = of_key(contents.counted_mean, main)
    both = [(one["label"].to_numpy(), one["proba"].to_numpy()) for _, one in rows.groupby("target", sort=False)]
    found = [(float(area[0]), float(spread[0, 0])) for area, spread in (delong(*each) for each in both)]
    if len(found) < LEAST_SITES:
        return None
    areas, within = np.array(found).T  # (site,) each
    variance = float(areas.var(ddof=1))
    between = max(variance - float(within.mean()), 0.0)
    # Of a new site: the spread between sites, and the error of the mean over these.
    half = half_interval(math.sqrt(between + variance / len(areas)), len(areas)) * math.sqrt(len(areas))
    return max(float(areas.mean()) - half, 0.0), min(float(areas.mean()) + half, 1.0)


def _peers(contents: Contents, main: Key, others: list[Key]) -> list[Key]:
    """Simple models that see the same of a subject, highest first; without any, those that see less."""
    own, simple = contents.inputs_of(main), contents.with_role(*SIMPLE)
    peers = [key for key in others if key[0] in simple and contents.inputs_of(key) <= own]
    return [key for key in peers if contents.inputs_of(key) == own] or peers


def _against(contents: Contents, main: Key, peers: list[Key]) -> str:
    areas = contents.areas
    higher = int((areas[peers].mean() > areas[main].mean()).sum())
    sees = contents.inputs_of(peers[0])
    other = "" if sees == contents.inputs_of(main) else f" ({worded(sees)} only)"
    if len(peers) == 1:
        role = "A simple peer is higher" if higher else "Simple peer"
    else:
        verb = "is" if higher == 1 else "are"
        role = (
            f"{higher} of {len(peers)} simple peers {verb} higher, the best" if higher else f"Best of {len(peers)} simple peers"
        )
    sentence = f"{role}: {label(*peers[0])}{other} {_with_interval(*mean_area(contents, peers[0]))}."
    pairs = (areas[main] - areas[peers[0]]).dropna()
    difference, _, count, p = paired_test(areas[main], areas[peers[0]])
    if count < 2 or math.isnan(p):
        return sentence
    half = 100 * half_interval(float(pairs.std(ddof=1)), count)
    ends = f"95 % interval {100 * difference - half:+.1f} to {100 * difference + half:+.1f}, t over sites"
    return f"{sentence} {label(*main)} minus {label(*peers[0])}: {100 * difference:+.1f} points ({ends})."


def _candidates(contents: Contents, keys: list[Key]) -> list[Key]:
    """Rows the summary may be about; no ablation or sweep value, because the best of many is also the luckiest."""
    complete = {method for method, variant in contents.keys if not variant}
    chosen = [key for key in keys if not contents.is_sweep(key) and (key[1] in ("", "phenotypes") or key[0] not in complete)]
    return chosen or keys


def mean_area(contents: Contents, key: Key) -> tuple[float, float, float, str]:
    """Mean AUC over sites with a t interval; for a single site its AUC with DeLong's."""
    values = contents.areas[key].dropna()
    if len(values) > 1:
        half = half_interval(float(values.std(ddof=1)), len(values))
        return float(values.mean()), float(values.mean()) - half, float(values.mean()) + half, "t over sites"
    own = of_key(contents.mean, key)
    own = own[own["target"] == values.index[0]]
    return (float(values.mean()), *delong_interval(own["label"].to_numpy(), own["proba"].to_numpy()), "DeLong")


def _with_interval(mean: float, low: float, high: float, how: str) -> str:
    if math.isnan(low):
        return f"{100 * mean:.1f} % (no interval)"
    return f"{100 * mean:.1f} % (95 % interval {100 * max(low, 0):.1f} to {100 * min(high, 1):.1f}, {how})"


def _warnings(contents: Contents) -> list[str]:
    sentences = contents.failed_checks
    if contents.track == ADAPTED:
        seen = what_was_seen(contents.batch)
        sentences.append(f"Adapted track only: {seen}. The target was seen, so this is no strict test.")
    if missing := contents.missing():
        sentences.append(f"Not run yet: {', '.join(missing)}. Repeat m2lgdg run to continue.")
    return sentences
