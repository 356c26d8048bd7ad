"""Sums as they travel: fixed-point integers, so that totals do not depend on the order of sites.

`site` encodes its sums here, `keys` masks them, `coordinator` adds and decodes them. Integers are added modulo a power of two,
which makes a total exact and lets the masks cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.federated.plan import LONG, Floats, Form
from m2lgdg.storage import InputError

Words = npt.NDArray[np.uint64]


def exponents(form: Form) -> npt.NDArray[np.int64]:
    """Power of two that each row is multiplied by: as large as the bound of the total allows; counts stay as they are."""
    bits = 8 * form.bytes - 2  # one bit for the sign, one for the rounding errors of the sites
    fraction, power = np.frexp(form.bound)  # exact on every machine, unlike a logarithm
    return np.where(form.bound > 0, bits - power + (fraction == 0.5), 0).astype(np.int64)


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
