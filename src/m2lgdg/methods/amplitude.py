"""Whether the regional amplitudes of a scan have the scaling of the source scans.

Methods with an amplitude block fit an `AmplitudeRange` on source. For a scan whose ROIs were standardised or rescaled one by
one, they leave the block out and raise a quality flag.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import amplitude_features

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.floating[Any]]
STANDARDISED = 0.01  # spread of log amplitudes over ROIs below which a scan was standardised; real scans have about 0.5
USUAL = 0.95  # quantile of the distances of source subjects, beyond which amplitudes are used, but flagged
TAIL = 0.005  # quantile of source subjects, so that one odd subject does not set the range
MARGIN = 2.0  # a new site may be this factor beyond the source quantile
FOLDS = 5  # if source is one site
# Names in the state of a fitted method
ARRAYS = ("amplitude.profile", "amplitude.low", "amplitude.high", "amplitude.usual", "amplitude.mean")
FLAG = "amplitude not used: the series are scaled differently from source"
UNUSUAL = "outside: amplitude"


def standardised_scans(features: Features) -> npt.NDArray[np.bool_]:
    """(subject,) whether all ROIs have the same amplitude, as after z-scoring. `features` are (subject, roi) log amplitudes."""
    return features.std(axis=1) < STANDARDISED


class AmplitudeRange(NamedTuple):
    """Profile of log amplitudes over ROIs in source, and the range in which left-out source sites stayed.

    Three measures of a scan: the slope of its profile on the source profile (1 on average, 0 after each ROI was rescaled), the
    spread of its profile, and its root mean square distance from the source profile.
    """

    profile: Floats  # (roi,)
    low: Floats  # (3,) least slope and spread; the distance has no lower bound
    high: Floats  # (3,) greatest distance; slope and spread have no upper bound
    usual: float = np.inf  # distance that few source subjects exceed

    @classmethod
    def fit(cls, features: Features, source: Cohort) -> AmplitudeRange:
        """Fit to the source subjects that are not standardised; each site is measured against the profile of the others."""
        groups = (
            np.unique(source.sites, return_inverse=True)[1] if len(source.site_names) > 1 else np.arange(len(source)) % FOLDS
        )
        usable = ~standardised_scans(features)
        measured = []
        for group in range(groups.max() + 1):
            here, others = usable & (groups == group), usable & (groups != group)
            if here.any() and others.any():
                measured.append(_measures(features[here], features[others].mean(axis=0)))
        if not measured:  # one subject: nothing to compare it with
            return cls(features.mean(axis=0, dtype=np.float64), np.array([-np.inf, STANDARDISED, -np.inf]), np.full(3, np.inf))
        lowest, highest = np.quantile(np.concatenate(measured), [TAIL, 1 - TAIL], axis=0)
        # A slope near 0 or below means that source subjects share no profile: then the slope tells nothing.
        least_slope = lowest[0] / MARGIN if lowest[0] > 0 else -np.inf
        return cls(
            features[usable].mean(axis=0, dtype=np.float64),
            np.array([least_slope, max(lowest[1] / MARGIN, STANDARDISED), -np.inf]),
            np.array([np.inf, np.inf, highest[2] * MARGIN]),
            float(np.quantile(np.concatenate(measured)[:, 2], USUAL)),
        )

    def outside(self, features: Floats) -> npt.NDArray[np.bool_]:
        """(subject,) whether a scan is scaled differently from the source scans."""
        values = _measures(features, self.profile)
        return np.asarray(((values < self.low) | (values > self.high)).any(axis=1))

    def unusual(self, features: Floats) -> npt.NDArray[np.bool_]:
        """(subject,) whether amplitudes are further from the source profile than those of most source subjects."""
        return np.asarray(_measures(features, self.profile)[:, 2] > self.usual)

    def save(self, state: MutableMapping[str, Any]) -> None:
        state.update({f"amplitude.{name}": np.asarray(value) for name, value in self._asdict().items()})

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> AmplitudeRange:
        """From the state of a fitted method; models saved by earlier versions know standardised scans only."""
        if "amplitude.profile" not in state:
            return cls(state["amplitude.mean"], np.array([-np.inf, STANDARDISED, -np.inf]), np.full(3, np.inf))
        usual = float(state.get("amplitude.usual", np.inf))
        return cls(state["amplitude.profile"], state["amplitude.low"], state["amplitude.high"], usual)


def fill_standardised(features: Features, standardised: npt.NDArray[np.bool_], sites: npt.NDArray[np.str_]) -> None:
    """Replace the amplitudes of standardised source scans by the mean of the other scans of their site, or of all sites."""
    for site in np.unique(sites[standardised]):
        here = sites == site
        others = here & ~standardised
        features[here & standardised] = features[others if others.any() else ~standardised].mean(axis=0)


class UsesAmplitude:
    """Part of a method with an amplitude block: scans scaled differently from source are flagged and the block is left out."""

    @property
    def amplitude_state(self) -> Mapping[str, Any]:
        """Fitted arrays of the amplitude block: the range in source, `amplitude.mean` and `amplitude.weights`."""
        raise NotImplementedError

    @property
    def uses_amplitude(self) -> bool:
        """Whether the signal's amplitude in each ROI enters the decision."""
        state = self.amplitude_state
        return "amplitude.mean" in state and bool(state["amplitude.weights"].any())

    def method_flags(self, target: Cohort) -> list[list[str]]:
        if not self.uses_amplitude or not len(target):
            return [[] for _ in range(len(target))]
        known, features = AmplitudeRange.restore(self.amplitude_state), amplitude_features(target.series)
        pairs = zip(known.outside(features), known.unusual(features), strict=True)
        return [[FLAG] if outside else [UNUSUAL] if unusual else [] for outside, unusual in pairs]

    def amplitude_block(self, cohort: Cohort) -> Floats:
        """(subject, roi) amplitudes; once fitted, those outside the range of source are replaced by the source mean."""
        features, state = amplitude_features(cohort.series), self.amplitude_state
        if "amplitude.mean" not in state:
            return features
        outside = AmplitudeRange.restore(state).outside(features)
        return np.where(outside[:, None], state["amplitude.mean"], features)


def _measures(features: Features, profile: Features) -> Floats:
    """(subject, measure) slope on the profile, spread over ROIs and distance from the profile."""
    slope = (features * profile).sum(axis=1) / (float(profile @ profile) or 1.0)
    distance = np.sqrt(((features - profile) ** 2).mean(axis=1))
    return np.stack([slope, features.std(axis=1), distance], axis=1)
