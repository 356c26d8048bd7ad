"""The summary at the top of the report: cohort, findings about it, main result with its interval, best simple peer, warnings.

Made from the contents of a study; `page` prints it, and `sections` shows the chosen methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from m2lgdg.data.leakage import failure_sentences
from m2lgdg.findings import anonymous_sentences, is_duplicate, problems, summary
from m2lgdg.metrics import delong_interval
from m2lgdg.registry import SIMPLE
from m2lgdg.report.contents import Contents
from m2lgdg.report.operating import motion_of, motion_sentence, of_key
from m2lgdg.report.paper_tables import FEW, Key, chosen_among, constant_keys, label, what_was_seen
from m2lgdg.study.description import NOT_CHECKED
from m2lgdg.study.predictions import ADAPTED
from m2lgdg.study.stats import half_interval

MOST_FINDINGS = 5  # of the box on the data that are not collapsed
MOST_REASONS = 5
DROP = " Both subjects of a pair are in the results below; m2lgdg convert --drop-duplicates leaves duplicates out of a cohort."


@dataclass(frozen=True)
class Data:
    """The box on the data: how many findings, the most important ones, and the others, which are collapsed."""

    summary: str
    shown: list[str]
    folded: list[str]


@dataclass(frozen=True)
class Answer:
    """The main method, its simple peer, and the sentences at the top of the report."""

    main: Key
    peer: Key | None
    cohort: str
    data: Data | None
    answer: str
    warnings: list[str]
    comparison: str = ""
    motion: str = ""
    short: str = ""


def answer(contents: Contents) -> Answer:
    """Summary of the study's main method, of the headline method if it has none, else of the one with the highest AUC."""
    scores = contents.site_scores
    areas = scores[scores["metric"] == "AUC"].pivot(index="target", columns=["method", "variant"], values="mean")
    order = areas.mean().sort_values(ascending=False, kind="stable").dropna()
    order = order.loc[areas[order.index].count().sort_values(ascending=False, kind="stable").index]  # all sites before some
    keys = _candidates(contents, [(str(method), str(variant)) for method, variant in order.index])
    cohort, data, warnings = _cohort(contents), data_box(contents), _warnings(contents)
    if not keys:
        undefined = "No target site has both patients and controls, so no AUC is defined."
        return Answer(contents.keys[0], None, cohort, data, undefined, warnings)
    constant = constant_keys(contents.predictions)
    learned = [key for key in keys if key not in constant] or keys
    named = (contents.study.get("main"), *contents.with_role("headline"))  # before the results were known
    headline = next((key for name in named for key in keys if key == (name, "")), None)
    main = headline or learned[0]
    simple = contents.with_role(*SIMPLE)
    peers = [key for key in learned if key != main and key[0] in simple]
    comparison = ""
    if peers:
        role = "Next best simple peer" if main[0] in simple else "Best simple peer"
        several = f" (of {len(peers)} at these sites)" if len(peers) > 1 else ""
        comparison = f"{role}{several}: {label(*peers[0])} {_mean_area(contents, areas, peers[0])}."
        if main[0] not in simple and order[peers[0]] >= order[main]:
            warnings.insert(0, f"A simple model performs as well or better: {label(*peers[0])} compared with {label(*main)}.")
    sites = int(areas[main].count())
    where = f"Mean AUC over {sites} unseen sites" if sites > 1 else f"AUC at the unseen site {areas[main].dropna().index[0]}"
    sentence = f"{where}: {label(*main)} {_mean_area(contents, areas, main)}. Chance is 50 %."
    if headline is None and len(learned) > 1:
        sentence += f" {chosen_among(label(*main), len(learned))}."
    if 1 < sites < FEW:
        sentence += f" With only {sites} sites, performance at a further site is uncertain, whatever the interval."
    motion = motion_sentence(contents.mean, main, motion_of(contents.cohort))
    short = f"{where}: {label(*main)} {100 * areas[main].mean():.1f} %"
    peer = peers[0] if peers else None
    return Answer(main, peer, cohort, data, sentence, warnings, comparison, motion, short)


def _candidates(contents: Contents, keys: list[Key]) -> list[Key]:
    """Rows the summary may be about; not ablations and sweep values, because the best of many is also the luckiest."""
    complete = {method for method, variant in contents.keys if not variant}
    chosen = [key for key in keys if not contents.is_sweep(key) and (key[1] in ("", "phenotypes") or key[0] not in complete)]
    return chosen or keys


def _mean_area(contents: Contents, areas: pd.DataFrame, key: Key) -> str:
    """Mean AUC over sites with a t interval; for a single site its AUC with DeLong's interval."""
    values = areas[key].dropna()
    if len(values) > 1:
        half = half_interval(float(values.std(ddof=1)), len(values))
        low, high, how = values.mean() - half, values.mean() + half, "t over sites"
    else:
        own = of_key(contents.mean, key)
        own = own[own["target"] == values.index[0]]
        (low, high), how = delong_interval(own["label"].to_numpy(), own["proba"].to_numpy()), "DeLong"
    return f"{100 * values.mean():.1f} % (95 % interval {100 * max(low, 0):.1f} to {100 * min(high, 1):.1f}, {how})"


def data_box(contents: Contents) -> Data | None:
    """What the check of the cohort reported; None if it reported nothing."""
    if contents.findings is None:
        return Data(NOT_CHECKED, [], [])
    findings = problems(contents.findings)
    if not findings:
        return None
    pairs = [one for one in findings if is_duplicate(one)]
    groups = (pairs, findings[len(pairs) :])
    stored = [[{"kind": one.kind, "text": one.text} for one in group] for group in groups]
    sentences = [sentence for group in stored for sentence in anonymous_sentences(group)]
    cut = MOST_FINDINGS if len(sentences) > MOST_FINDINGS + 1 else MOST_FINDINGS + 1
    return Data(f"{summary(findings)}.{DROP if pairs else ''}", sentences[:cut], sentences[cut:])


def _cohort(contents: Contents) -> str:
    """Included subjects, and excluded ones with the reasons."""
    included, reasons = contents.included(), contents.exclusions()
    if not included:
        return f"{contents.predictions['subject'].nunique()} subjects were tested."
    sentence = f"{len(included)} subjects of {len({row['site'] for row in included})} sites"
    if contents.cohort is not None:
        labels = contents.cohort.labels
        sentence += f" ({(labels == 1).sum()} patients, {(labels == 0).sum()} controls)"
    if not reasons:
        return f"{sentence}; no subject was excluded."
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons[:MOST_REASONS])
    more = "; other reasons in inclusion.csv" if len(reasons) > MOST_REASONS else ""
    return f"{sentence}; {sum(count for _, count in reasons)} excluded: {listed}{more}."


def _warnings(contents: Contents) -> list[str]:
    sentences = failure_sentences(contents.checks)
    if contents.track == ADAPTED:
        seen = what_was_seen(contents.batch)
        sentences.append(f"Adapted track only: {seen}. The target was seen, so this is no strict test.")
    if missing := contents.missing():
        sentences.append(f"Not run yet: {', '.join(missing)}. Repeat m2lgdg run to continue.")
    return sentences
