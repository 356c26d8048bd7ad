"""Keys of the coordinator and of the sites: signatures (Ed25519), and masks that cancel in a total (X25519, HKDF, ChaCha20).

Two sites share a secret; one adds the random numbers drawn from it that the other subtracts. The numbers depend on the hash of
the whole request, so they cancel only if all sites were asked the same.
"""

from __future__ import annotations

import numpy as np

from m2lgdg.federated.plan import Ask, Plan
from m2lgdg.federated.sums import Words
from m2lgdg.storage import InputError, needing

with needing("federated", "A federated study"):
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def new_mask_key() -> tuple[str, str]:
    """Private and public X25519 key, hexadecimal."""
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw().hex(), private.public_key().public_bytes_raw().hex()


def new_signing_key() -> tuple[str, str]:
    """Private and public Ed25519 key, hexadecimal."""
    private = Ed25519PrivateKey.generate()
    return private.private_bytes_raw().hex(), private.public_key().public_bytes_raw().hex()


def sign(content: bytes, private: str) -> str:
    """Signature, hexadecimal; the same for the same content."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).sign(content).hex()


def is_signed(content: bytes, signature: str, public: str) -> bool:
    """Whether the signature is that of the owner of a key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True


def masked(words: Words, plan: Plan, site: str, private: str, ask: Ask, asked: str) -> Words:
    """Sums of a site plus its masks for the request with the hash `asked`, modulo 2^64.

    Masks cancel over all sites; those of sums by fold cancel over the sites that are held out together.
    """
    form = plan.form(ask)
    for other in plan.members:
        if other.site != site and (not form.by_fold or plan.fold_of[other.site] == plan.fold_of[site]):
            first, second = sorted([site, other.site])
            info = f"m2lgdg-federated-2|{asked}|{ask.key}|{first}|{second}"
            mask = _mask(_secret(private, other.key, other.site), plan.study.id, info, form.shape)
            words = words + mask if site == first else words - mask
    return words


def _mask(secret: bytes, study: str, info: str, shape: tuple[int, ...]) -> Words:
    """Random numbers that only two sites know, new for every request and sum."""
    key = HKDF(SHA256(), 32, salt=study.encode(), info=info.encode()).derive(secret)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64).reshape(shape)


def _secret(private: str, public: str, site: str) -> bytes:
    try:
        other = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(private)).exchange(other)
    except ValueError:
        raise InputError(f"the public key of site {site} is not a valid X25519 key.") from None
