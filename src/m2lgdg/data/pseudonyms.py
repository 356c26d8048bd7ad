"""What is shared names nobody: salted hashes in place of subject ids, and texts without paths.

The salt is drawn for each output and never stored, so pseudonyms can neither be reversed nor linked across outputs, unless the
user keeps a secret of their own. A path is removed as a whole, because any part of one may be the name of a person; nothing
here tries to recognise names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Self

import pandas as pd

from m2lgdg.storage import InputError

REMOVED = "[path]"
# A slash or backslash; not that of 1/2, n/a or and/or.
SEPARATOR = re.compile(r"\\|(?!(?<=\d)/\d|(?<=\bn)/a\b|(?<=\band)/or\b)/")
# Where a path begins that is given from a root, a drive, a server, a home folder or the working folder.
START = re.compile(
    r"(?:^|(?<=[\s'\"`=(\[{<,:;|]))(?:file:(?=[\\/])|[A-Za-z]:(?=[\\/])|\\\\|~(?=[\\/A-Za-z_])|\.{0,2}[\\/])", re.IGNORECASE
)
HOME = re.compile(r"(?<![\w.~/\\])~[A-Za-z_][\w.-]*")
# The last part of a path is kept only if it is a file of a known kind: other parts may be a folder named after a person.
KINDS = "1D bin cohort csv gz h5 html json jsonl mat md nii npy npz onnx pt py safetensors toml tsv txt xls xlsx yaml yml"
FILE = re.compile(rf"[^\s'\"<>|:;,()]+\.(?:{'|'.join(KINDS.split())})(?!\w|\.\w)")


class Pseudonyms:
    """Mapping from subject ids to pseudonyms; create one `Pseudonyms()` for each output, or one of a secret for several."""

    def __init__(self, secret: bytes = b"") -> None:
        self._salt = secret or secrets.token_bytes(32)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Those of the secret in a file, which is made if it is not there."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as new:
                new.write(secrets.token_hex(32) + "\n")
        except FileExistsError:  # also if another process has just made it
            pass
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}.") from None
        try:
            secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
        except ValueError:
            secret = b""
        if len(secret) != 32:
            raise InputError(
                f"{path} is no secret of pseudonyms, which has 64 hexadecimal digits; name a new file to make one."
            )
        return cls(secret)

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


def has_path(text: str) -> bool:
    """Whether a text may contain a path."""
    return bool(SEPARATOR.search(text) or HOME.search(text))


def starts_path(name: str) -> bool:
    """Whether a name contains a path from a root, a drive, a server or a home folder; `A/B` may name a site."""
    return bool(HOME.search(name) or any(SEPARATOR.search(name, match.start()) for match in START.finditer(name)))


def without_paths(text: str) -> str:
    """Text in which a line with a path has the words before it, and the name and words after it if it is that of a file.

    Of a path that is not given from a root the words before are removed as well. It ends at the last separator of the line,
    since folders may have spaces and quotes in their names.
    """
    return "\n".join(map(_without_path, text.split("\n")))


def _without_path(line: str) -> str:
    line = HOME.sub(lambda match: match[0] if SEPARATOR.match(line, match.end()) else REMOVED, line)
    separators = [match.start() for match in SEPARATOR.finditer(line)]
    if not separators:
        return line
    starts = [match.start() for match in START.finditer(line) if match.start() <= separators[0]]
    before, after = line[: starts[0]] if starts else "", line[separators[-1] + 1 :]
    return before + (after if FILE.match(after) else REMOVED)


def file_name(path: str) -> str:
    """Last part of a path of any system, if it is a file of a known kind."""
    name = re.split(r"[\\/]", path)[-1]
    return name if re.search(rf"\.(?:{'|'.join(KINDS.split())})$", name) else "folder"
