"""Differential privacy of a federated study: clipped contributions of subjects, and Gaussian noise on their sums.

A study with noise asks every site for three sums in two rounds, and for nothing else. Functions here bound what one subject
can change, draw the noise of a site from its secret, and turn the noisy totals into a linear classifier.

Two studies are neighbours if the scan of one subject is replaced by any other scan; sites and diagnoses stay. For a sum that
a replacement changes by at most D (Euclidean norm), Gaussian noise with sd D / sqrt(2 rho) gives rho zero-concentrated
differential privacy; the rho of several sums add up, and rho gives epsilon = rho + 2 sqrt(rho ln(1 / delta)) (Bun and Steinke,
2016).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import needing

Floats = npt.NDArray[np.float64]
DELTA = 1e-5
LEAST_EPSILON, MOST_EPSILON = 0.01, 1000.0
BLOCK = "steady"  # the only features of a model with noise
KINDS = ("contrast", "scores")  # of sums, one for each round
SHARES = {"mean": 0.1, "difference": 0.8, "scores": 0.1}  # of rho, by sum
LARGEST_RMS = 0.25  # root mean square of a subject's features; the scans of ABIDE have a median of 0.245
ROUNDING = 1 + 1e-6  # sums are rounded to integers before the noise is added, which moves them by far less than this
FARTHEST = 9.0  # no draw is farther from 0, in sd: the largest of 2^52 draws is 8.2


def rho_of(epsilon: float) -> float:
    """Zero-concentrated privacy loss that gives (epsilon, DELTA)."""
    log = math.log(1 / DELTA)
    return (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2


def epsilon_of(rho: float) -> float:
    """Epsilon at DELTA of a zero-concentrated privacy loss."""
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def spent(epsilon: float, attempts: int) -> float:
    """Epsilon of a study that began several times: every attempt is a release of its own."""
    return epsilon if attempts == 1 else epsilon_of(rho_of(epsilon) * attempts)


def radius(features: int) -> float:
    """Largest norm of a subject's features; longer ones are shortened to it."""
    return LARGEST_RMS * math.sqrt(features)


def contrast_deviations(epsilon: float, features: int, largest_sign: float) -> Floats:
    """(2,) sd of the noise on the total of features, and on the total of features times centred diagnosis."""
    # Replacing a scan moves a clipped row by at most 2 radii; the diagnosis, and so its centred value, stays.
    change = ROUNDING * 2 * radius(features) * np.array([1.0, largest_sign])
    return change / np.sqrt(2 * rho_of(epsilon) * np.array([SHARES["mean"], SHARES["difference"]]))


def score_deviation(epsilon: float) -> float:
    """sd of the noise on the sums of scores and of their squares, by class."""
    change = ROUNDING * math.sqrt(5)  # a score in [-1, 1] changes by at most 2, its square by at most 1
    return change / math.sqrt(2 * rho_of(epsilon) * SHARES["scores"])


def centred_signs(patients: int, controls: int) -> tuple[float, float]:
    """Values of a control and of a patient: -1 and 1 minus their mean at the site; 0 at a site with one class."""
    share = patients / (patients + controls)
    return -2 * share * (controls > 0), 2 * (1 - share) * (patients > 0)


def clipped(features: npt.NDArray[Any]) -> Floats:
    """(subject, feature) rows, shortened to the largest norm where they are longer."""
    rows = features.astype(np.float64)
    norms = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return np.asarray(rows * np.minimum(1.0, radius(rows.shape[1]) / np.maximum(norms, 1e-300)))


def contrast(features: npt.NDArray[Any], signs: Floats) -> Floats:
    """(2, feature) sum of a site's clipped features, and of their products with the centred diagnosis."""
    return np.stack([np.ones(len(signs)), signs]) @ clipped(features)


def scores(features: npt.NDArray[Any], labels: npt.NDArray[Any], signs: Floats, sent: Floats, scale: float) -> Floats:
    """(class, 2) sums of scores and of their squares; `sent` are the centre of the features and the weights.

    A subject's score leaves out its own contribution to the weights. It depends on this subject and on `sent` only, and is
    clipped to [-1, 1], so the bound of `score_deviation` holds for any weights.
    """
    centre, weights = sent
    rows = clipped(features)
    from_centre = rows - centre
    values = from_centre @ weights - signs * (from_centre**2).sum(axis=1)
    values = np.clip(np.nan_to_num(values / max(scale, 1e-300)), -1.0, 1.0)
    return np.array([[values[labels == label].sum(), (values[labels == label] ** 2).sum()] for label in (0, 1)])


def score_scale(weights: Floats, deviation: float) -> float:
    """Scale of the scores, from public values: a quarter of the radius along the signal, twice the rms along the noise.

    It only has to be of the right size; scores beyond it are clipped.
    """
    size, features = float((weights**2).sum()), len(weights)
    signal = max(size - features * deviation**2, 0.0)
    return max(math.sqrt(signal * radius(features) ** 2 / 16 + 4 * LARGEST_RMS**2 * size), 1e-12)


def calibration(totals: Floats, counts: tuple[int, int], scale: float) -> tuple[float, float, float]:
    """Slope and offset of the log odds for a decision, and the sd of decisions, from noisy sums of scores by class.

    With normal decisions of equal spread in both classes, the log odds are linear in the decision.
    """
    number = np.maximum(np.array(counts, dtype=np.float64), 1.0)
    means = np.clip(totals[:, 0] / number, -1.0, 1.0) * scale
    second = float(np.clip(totals[:, 1].sum() / number.sum(), 0.0, 1.0)) * scale**2
    variance = max(second - float(number @ means**2) / float(number.sum()), (0.05 * scale) ** 2)
    slope = max(float(means[1] - means[0]) / variance, 1e-3 / math.sqrt(variance))
    return slope, math.log(number[1] / number[0]) - slope * float(means.mean()), math.sqrt(variance)


def new_secret() -> str:
    """Secret from which a site draws its noise, hexadecimal; from the operating system, and never sent."""
    return secrets.token_hex(32)


def draw(secret: str, about: str, deviations: npt.ArrayLike, shape: tuple[int, ...]) -> Floats:
    """Gaussian noise of a site for one sum: the same for the same secret and request, so that an answer can be repeated."""
    with needing("federated", "A federated study with noise"):
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from scipy.special import ndtri

    key = HKDF(SHA256(), 32, salt=None, info=b"m2lgdg-noise-1|" + about.encode()).derive(bytes.fromhex(secret))
    count = int(np.prod(shape, dtype=np.int64))
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    uniform = (np.frombuffer(stream, dtype="<u8") >> np.uint64(12)).astype(np.float64)  # 52 bits, so that no draw is infinite
    return np.asarray(ndtri((uniform + 0.5) * 2.0**-52).reshape(shape) * deviations)


def site_deviation(sites: int) -> float:
    """sd of a site's noise relative to that of the total.

    All sites but one have the full noise, so the statement also holds towards a site, which knows its own.
    """
    return 1 / math.sqrt(max(sites - 1, 1))


def largest_total(sites: int) -> float:
    """Largest noise of a total, in units of its sd: every site at its farthest."""
    return FARTHEST * sites * site_deviation(sites)


def fingerprint(values: Mapping[str, npt.NDArray[Any]], arguments: Iterable[Mapping[str, npt.NDArray[Any]]]) -> str:
    """SHA-256 of the arrays of a request, so that another request gets other noise."""
    digest = hashlib.sha256()
    for arrays in (values, *arguments):
        for name, array in sorted(arrays.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
