"""Pseudonyms for subjects in shared files: salted hashes in place of ids.

The salt is drawn for each output and never stored, so pseudonyms can neither be reversed nor linked across outputs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import pandas as pd


class Pseudonyms:
    """Mapping from subject ids to pseudonyms; create one `Pseudonyms()` for each output."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)

    def __call__(self, subject: str) -> str:
        """Pseudonym of a subject: 16 hexadecimal digits that reveal nothing without the salt."""
        return hmac.new(self._salt, subject.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:16]

    def sorted_table(self, table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
        """A table with pseudonyms in its column subject, sorted by them within `by` so that row order reveals nothing."""
        renamed = table.assign(subject=[self(str(one)) for one in table["subject"]])
        if not by:
            return renamed.sort_values("subject", ignore_index=True)
        groups = [rows.sort_values("subject") for _, rows in renamed.groupby(by, sort=False)]
        return pd.concat(groups, ignore_index=True)
