"""Sums as they travel: fixed-point integers, so that totals do not depend on the order of sites, and the masks on them.

`site` encodes and masks its sums here, `coordinator` adds and decodes them. Integers are added modulo a power of two, which
makes a total exact, and lets the masks cancel: two sites agree on a secret by their X25519 keys, and one adds the random
numbers drawn from it that the other subtracts. With and without masks, the totals have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.federated.plan import LONG, Ask, Floats, Form, Plan
from m2lgdg.storage import InputError, needing

Words = npt.NDArray[np.uint64]
WHAT = "A federated study with masks"


def exponents(form: Form) -> npt.NDArray[np.int64]:
    """Power of two that each row is multiplied by: as large as the bound of the total allows; counts stay as they are."""
    bits = 8 * form.bytes - 2  # one bit for the sign, one for the rounding errors of the sites
    size = np.where(form.bound > 0, form.bound, 1.0)
    return np.where(form.bound > 0, bits - np.ceil(np.log2(size)), 0).astype(np.int64)


def to_words(values: npt.NDArray[Any], form: Form, where: str) -> Words:
    """Fixed-point integers of a sum, modulo 2^64; a value beyond its bound is refused."""
    values = np.asarray(values, dtype=np.float64)
    if values.shape != form.shape:
        raise ValueError(f"{where} has shape {values.shape}, not {form.shape}")
    if not np.isfinite(values).all():
        raise InputError(f"{where} holds NaN or infinite values; nothing was written.")
    if (np.abs(values) > np.where(form.bound > 0, form.bound, 2.0**40)).any():
        raise InputError(f"{where} is larger than the protocol allows; check the units of the series and phenotypes.")
    return np.asarray(np.rint(np.ldexp(values, exponents(form))).astype(np.int64).view(np.uint64))


def to_bytes(words: Words, form: Form) -> npt.NDArray[Any]:
    """Array of a message: 64-bit integers, or the lowest bytes of each."""
    if form.bytes == LONG:
        return words.view(np.int64)
    lowest = np.ascontiguousarray(words).astype("<u8").view(np.uint8).reshape(*words.shape, LONG)
    return np.ascontiguousarray(lowest[..., : form.bytes])


def check_array(array: npt.NDArray[Any], form: Form, where: str) -> None:
    """Refuse an array of a message that does not have the form of its sum."""
    shape = form.shape if form.bytes == LONG else (*form.shape, form.bytes)
    kind = np.dtype(np.int64 if form.bytes == LONG else np.uint8)
    if array.shape != shape or array.dtype != kind:
        raise InputError(f"{where} has shape {array.shape} and type {array.dtype}, not {shape} and {kind}.")


def add(arrays: Iterable[npt.NDArray[Any]], form: Form) -> npt.NDArray[np.int64]:
    """Total of the arrays of all sites, as integers; masks that are added and subtracted leave no trace."""
    total = np.zeros(form.shape, dtype=np.uint64)
    for array in arrays:
        if form.bytes == LONG:
            total += array.view(np.uint64)
        else:
            wide = np.zeros((*form.shape, LONG), dtype=np.uint8)
            wide[..., : form.bytes] = array
            total += wide.view("<u8")[..., 0].astype(np.uint64)
    unused = np.uint64(8 * (LONG - form.bytes))
    return (total << unused).view(np.int64) >> unused.astype(np.int64)  # the shift back keeps the sign


def to_numbers(total: npt.NDArray[np.int64], form: Form) -> Floats:
    """Total as numbers."""
    return np.asarray(np.ldexp(total.astype(np.float64), -exponents(form)))


def ordered(values: Floats) -> Words:
    """Integers in the same order as the numbers, one for each of the 2^64 bit patterns."""
    bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)  # + 0.0: there is one zero
    negative = bits >> np.uint64(63) != 0
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def number(key: int) -> float:
    """The number with this place in the order."""
    bits = np.uint64(key)
    positive = bits >> np.uint64(63) != 0
    return float((bits & np.uint64((1 << 63) - 1) if positive else ~bits).view(np.float64))


def new_key() -> tuple[str, str]:
    """Private and public key of a site, hexadecimal."""
    with needing("federated", WHAT):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private.private_bytes_raw().hex(), private.public_key().public_bytes_raw().hex()


def masked(words: Words, plan: Plan, site: str, private: str, ask: Ask, number: int) -> Words:
    """Sums of a site plus its masks for round `number`, modulo 2^64.

    Masks cancel over all sites; those of sums by fold cancel over the sites that are held out together.
    """
    form = plan.form(ask)
    for other in plan.members:
        if other.site != site and (not form.by_fold or plan.fold_of[other.site] == plan.fold_of[site]):
            first, second = sorted([site, other.site])
            info = f"m2lgdg-federated-1|{plan.attempt}|{number}|{ask.key}|{first}|{second}"
            mask = _mask(_secret(private, other.key, other.site), plan.study.id, info, form.shape)
            words = words + mask if site == first else words - mask
    return words


def _mask(secret: bytes, study: str, info: str, shape: tuple[int, ...]) -> Words:
    """Random numbers that only two sites know, new for every attempt, round and sum."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), 32, salt=study.encode(), info=info.encode()).derive(secret)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64).reshape(shape)


def _secret(private: str, public: str, site: str) -> bytes:
    with needing("federated", WHAT):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        other: Any = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return bytes(X25519PrivateKey.from_private_bytes(bytes.fromhex(private)).exchange(other))
    except ValueError:
        raise InputError(f"the public key of site {site} is not a valid X25519 key.") from None
