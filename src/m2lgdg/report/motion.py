"""AUC adjusted for head motion: how well a method separates patients from controls who moved as much.

A model that reads motion looks better than it is where patients move more. Made from the predictions and the motion column of
the cohort, for the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc, delong_interval, logit
from m2lgdg.report.tables import Table, label
from m2lgdg.study.description import motion_column
from m2lgdg.study.stats import half_interval

Floats = npt.NDArray[np.float64]
Key = tuple[str, str]
ROUNDING = 1e-9
TITLE = "AUC adjusted for head motion"


class Adjusted(NamedTuple):
    """Means over target sites of the AUC, of the adjusted AUC with its 95 % interval, and of the AUC of motion alone."""

    plain: float
    adjusted: float
    low: float
    high: float
    motion: float
    correlation: float  # of decision and motion among controls, within sites
    sites: int
    subjects: int


def motion_of(cohort: Cohort | None) -> pd.Series | None:
    """Mean head motion by subject; None if it is not known."""
    values = None if cohort is None else motion_column(cohort)
    return None if values is None or cohort is None else pd.Series(values, index=cohort.subjects)


def adjusted_auc(part: pd.DataFrame, motion: pd.Series) -> Adjusted | None:
    """Motion-adjusted AUC of one method; `part` is from `over_seeds`. None without a site that has both classes.

    This is the covariate-adjusted AUC of Janes and Pepe (2009) with a linear model of the decision (logit) among controls:
    one slope for all sites and an intercept for each. Each patient is compared with the controls of the site after the
    slope times motion is taken from all decisions. Patients do not enter the slope, because their decisions also differ by
    diagnosis. Subjects without a motion value are left out.
    """
    part = part.assign(motion=motion.reindex(part["subject"]).to_numpy())
    part = part[part["motion"].notna()]
    part = part.assign(decision=logit(part["proba"].to_numpy()))
    controls = part[part["label"] == 0]
    centred = controls[["motion", "decision"]] - controls.groupby("target")[["motion", "decision"]].transform("mean")
    x, y = centred["motion"].to_numpy(), centred["decision"].to_numpy()
    y = np.where(np.abs(y) < ROUNDING, 0.0, y)  # a constant decision, such as that of `prior`, must stay constant
    slope = float(x @ y / (x @ x)) if (x @ x) > 0 else 0.0
    spread = float(np.sqrt((x @ x) * (y @ y)))
    rows, last = [], None
    for _, site in part.groupby("target", sort=False):
        labels, decision, moved = (site[name].to_numpy() for name in ("label", "decision", "motion"))
        if len(set(labels.tolist())) == 2:
            last = labels, decision - slope * moved
            rows.append((auc(labels, decision), auc(*last), auc(labels, moved)))
    if last is None:
        return None
    areas = np.array(rows)  # (site, plain / adjusted / motion)
    plain, adjusted, alone = areas.mean(axis=0).tolist()
    if len(areas) > 1:
        half = half_interval(float(areas[:, 1].std(ddof=1)), len(areas))
        low, high = max(adjusted - half, 0.0), min(adjusted + half, 1.0)
    else:
        low, high = delong_interval(*last)
    correlation = float(x @ y) / spread if spread > 0 else 0.0
    return Adjusted(plain, adjusted, low, high, alone, correlation, len(areas), len(part))


def motion_sentence(mean: pd.DataFrame, key: Key, motion: pd.Series | None) -> str:
    """The motion-adjusted AUC of a method, for the answer; empty if motion is not known."""
    if motion is None:
        return ""
    scores = adjusted_auc(mean[(mean["method"] == key[0]) & (mean["variant"] == key[1])], motion)
    if scores is None:
        return ""
    interval = "" if np.isnan(scores.low) else f" (95 % interval {100 * scores.low:.1f} to {100 * scores.high:.1f})"
    return (
        f"Adjusted for head motion, the AUC of {label(*key)} is {100 * scores.adjusted:.1f} %{interval}, compared with "
        f"{100 * scores.plain:.1f} % without; motion alone has {100 * scores.motion:.1f} %."
    )


def motion_table(mean: pd.DataFrame, keys: Sequence[Key], motion: pd.Series | None) -> Table | None:
    """AUC with and without the adjustment of each method, highest first; None if motion is not known."""
    if motion is None:
        return None
    parts = dict(iter(mean.groupby(["method", "variant"], sort=False)))
    scored = {key: scores for key in keys if key in parts and (scores := adjusted_auc(parts[key], motion)) is not None}
    if not scored:
        return None
    rows = []
    for key, scores in sorted(scored.items(), key=lambda item: -item[1].adjusted):
        interval = "-" if np.isnan(scores.low) else f"{100 * scores.low:.1f} to {100 * scores.high:.1f}"
        difference = 100 * (scores.adjusted - scores.plain)
        areas = (f"{100 * scores.plain:.1f}", f"{100 * scores.adjusted:.1f}", interval, f"{difference:+.1f}")
        rows.append([label(*key), *areas, f"{scores.correlation:+.2f}"])
    first = next(iter(scored.values()))
    known = f"{first.subjects:,} subjects with a motion value at {first.sites} target site{'s' if first.sites > 1 else ''}"
    note = (
        f"in %, means over target sites, probabilities averaged over seeds; {known}; "
        f"motion alone: AUC {100 * first.motion:.1f}; "
        "adjusted: after the part of the decision (logit) that is linear in mean framewise displacement among controls, within "
        "sites, is removed (covariate-adjusted AUC, Janes and Pepe 2009, Biometrika 96: 371-382); interval: "
        + ("t over sites" if first.sites > 1 else "DeLong")
        + "; correlation: of decision and motion among controls, within sites"
    )
    header = ["Method", "AUC", "motion-adjusted AUC", "95 % interval", "difference", "correlation with motion"]
    return Table(TITLE, header, rows, [[0] * len(header) for _ in rows], note)
