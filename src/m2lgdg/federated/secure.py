"""Pairwise masks, so that the coordinator sees totals over sites and not the sums of one site.

Two sites agree on a secret by their X25519 keys. Both draw the same random numbers from it; one adds them to its sums, the
other subtracts them, so they cancel in the total. Without masks the totals have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from m2lgdg.federated.plan import Ask, Form, Plan
from m2lgdg.federated.sums import Words
from m2lgdg.storage import InputError, needing

WHAT = "A federated study with masks"


def new_key() -> tuple[str, str]:
    """Private and public key of a site, hexadecimal."""
    with needing("federated", WHAT):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private.private_bytes_raw().hex(), private.public_key().public_bytes_raw().hex()


class Masks:
    """Masks of one site: secrets that it shares with each other site."""

    def __init__(self, plan: Plan, site: str, private: str) -> None:
        self.plan, self.site = plan, site
        self.secrets = {one.site: _secret(private, one.key, one.site) for one in plan.members if one.site != site}

    def masked(self, words: Words, ask: Ask, form: Form, number: int) -> Words:
        """Sums of this site plus its masks for round `number`, modulo 2^64."""
        result = words.copy()
        for other in self.others(form):
            mask = self.mask(other, ask.key, number, form.shape)
            result = result + mask if self.site < other else result - mask
        return result

    def others(self, form: Form) -> Iterable[str]:
        """Sites whose masks cancel those of this one: all, or those held out together with it for sums by fold."""
        return [site for site in self.secrets if not form.by_fold or site in self.plan.mates(self.site)]

    def mask(self, other: str, key: str, number: int, shape: tuple[int, ...]) -> Words:
        """Random numbers that only the two sites know, new for every attempt, round and sum."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        first, second = sorted([self.site, other])
        info = f"m2lgdg-federated-1|{self.plan.attempt}|{number}|{key}|{first}|{second}".encode()
        secret = HKDF(SHA256(), 32, salt=self.plan.study.id.encode(), info=info).derive(self.secrets[other])
        stream = Cipher(algorithms.ChaCha20(secret, bytes(16)), mode=None).encryptor()
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
