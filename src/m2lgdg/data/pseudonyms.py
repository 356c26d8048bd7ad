"""Pseudonyms for subjects in whatever is shared: salted hashes in place of ids.

The salt is drawn anew for each output and kept nowhere, so that nobody can go back from a pseudonym or join two outputs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import pandas as pd


class Pseudonyms:
    """A new name for each subject, the same for the same subject; `Pseudonyms()` once an output."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)

    def __call__(self, subject: str) -> str:
        """Sixteen letters that say nothing of the subject without the salt."""
        return hmac.new(self._salt, subject.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:16]

    def sorted_table(self, table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
        """A table with new names in its column subject, in their order within `by`: the order of the rows tells nothing."""
        renamed = table.assign(subject=[self(str(one)) for one in table["subject"]])
        if not by:
            return renamed.sort_values("subject", ignore_index=True)
        groups = [part.sort_values("subject") for _, part in renamed.groupby(by, sort=False)]
        return pd.concat(groups, ignore_index=True)
