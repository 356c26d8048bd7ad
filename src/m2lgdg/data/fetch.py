"""Download of ABIDE I, file by file, so that an interrupted download can be continued.

Called by `m2lgdg fetch`. The folder is one that `m2lgdg.read` reads as abide-pcp; SHA256SUMS holds a checksum of every file.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from m2lgdg.data.readers import tables
from m2lgdg.data.readers.abide import PIPELINES, STRATEGIES
from m2lgdg.data.readers.arrays import read_table
from m2lgdg.storage import InputError, file_hash, one_line, read_bytes, write_bytes, write_text

ATLASES = ("aal", "cc200", "cc400", "dosenbach160", "ez", "ho", "tt")
URL = "https://s3.amazonaws.com/fcp-indi/data/Projects/ABIDE_Initiative"
FOLDER, TABLE, SUMS = "ABIDE_pcp", "Phenotypic_V1_0b_preprocessed1.csv", "SHA256SUMS"
STRATEGY = "cpac/filt_global"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
LARGEST = 64 << 20  # bytes of a file; the largest of the release has 2 MB
PATIENCE = 30  # seconds without an answer
EVERY = 20  # subjects after which the checksums are written
CITATION = """Please cite:
  Di Martino et al. (2014). The autism brain imaging data exchange. Molecular Psychiatry 19, 659-667.
  Craddock et al. (2013). The Neuro Bureau Preprocessing Initiative. Frontiers in Neuroinformatics 7.
The data may be used for non-commercial research (http://preprocessed-connectomes-project.org/abide)."""


class Fetched(NamedTuple):
    """What `fetch_abide` did, with numbers of files."""

    folder: Path
    subjects: int
    new: int
    present: int
    damaged: int


def fetch_abide(
    to: Path,
    atlases: Sequence[str],
    *,
    strategy: str = STRATEGY,
    sites: Sequence[str] = (),
    subjects: int | None = None,
    url: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Fetched:
    """Fetch the series of ABIDE I in some atlases into `to`/ABIDE_pcp; files that are there and intact are kept.

    `sites` and `subjects` (the first of the table) limit the download; `url` is the address of a copy of the release.
    """
    _check(atlases, strategy, subjects)
    folder, url = to / FOLDER, (url or URL).rstrip("/")
    created = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sums = _read_sums(folder)
        damaged = _remove_damaged(folder, sums)
        path = folder / TABLE
        _fetch("The phenotype table", folder, TABLE, f"{url}/{TABLE}", sums, _read_people)
        names = _chosen(_read_people(path), path, sites, subjects)
        new = 0
        try:
            for count, name in enumerate(names, start=1):
                for atlas in atlases:
                    file = f"{name}_rois_{atlas}.1D"
                    address = f"{url}/Outputs/{strategy}/rois_{atlas}/{file}"
                    what = f"{file} (subject {count} of {len(names)})"
                    new += _fetch(what, folder, f"{strategy}/{file}", address, sums, read_table)
                if count % EVERY == 0:
                    _write_sums(folder, sums)
                if progress is not None:
                    progress(count, len(names))
        finally:
            _write_sums(folder, sums)
    except BaseException:
        for each in created:
            with contextlib.suppress(OSError):
                each.rmdir()  # only if nothing was fetched
        raise
    return Fetched(folder, len(names), new, len(names) * len(atlases) - new, damaged)


def _check(atlases: Sequence[str], strategy: str, subjects: int | None) -> None:
    unknown = next((name for name in atlases if name not in ATLASES), None)
    if unknown is not None or not atlases:
        raise InputError(f"ABIDE has no atlas {unknown}; choose from {', '.join(ATLASES)}." if atlases else "Give an --atlas.")
    pipeline, _, form = strategy.partition("/")
    if pipeline not in PIPELINES or form not in STRATEGIES:
        available = f"{'|'.join(PIPELINES)}/{'|'.join(STRATEGIES)}"
        raise InputError(f"ABIDE has no strategy {strategy}; choose from {available}.")
    if subjects is not None and subjects < 1:
        raise InputError(f"the number of subjects must be at least 1, not {subjects}.")


def _read_people(path: Path) -> pd.DataFrame:
    table = tables.read_text_table(path)
    tables.need_columns(table, ("FILE_ID", "SITE_ID"), path)
    return table


def _chosen(table: pd.DataFrame, path: Path, sites: Sequence[str], subjects: int | None) -> list[str]:
    """FILE_ID of the subjects to fetch."""
    table = table[~table["FILE_ID"].isin(("", "no_filename"))]
    known = sorted(set(table["SITE_ID"]))
    unknown = next((site for site in sites if site not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown.upper(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its sites are {', '.join(known)}."
        raise InputError(f"{path} has no site {unknown}; {hint}")
    names: list[str] = table.loc[table["SITE_ID"].isin(list(sites)) if sites else slice(None), "FILE_ID"].tolist()
    if any(not re.fullmatch(r"[\w.-]+", name) for name in names):
        raise InputError(f"{path}: column FILE_ID has a name that is no file name.")
    return names[:subjects]


def _fetch(what: str, folder: Path, name: str, address: str, sums: dict[str, str], read: Callable[[Path], object]) -> bool:
    """Fetch a file unless it is there, read it, and add its checksum; whether it is new. One that is unreadable is removed."""
    import requests

    file = folder / name
    if name in sums:
        return False
    if not _is_inside(file, folder):
        raise InputError(f"{file.parent} is a link to another folder, and fetch writes only into {folder}; remove the link.")
    new = not file.is_file()
    again = "the same command continues, and complete files are kept"
    try:
        if new:
            write_bytes(file, _download(address))
        read(file)
        sums[name] = file_hash(file, LARGEST)
    except requests.HTTPError as error:
        status = "an error" if error.response is None else error.response.status_code
        raise InputError(f"{what} of ABIDE cannot be fetched (the server answered {status}); {again}.") from None
    except requests.RequestException:
        raise InputError(f"{what} of ABIDE cannot be fetched: no connection to the server; with a network, {again}.") from None
    except (InputError, ValueError, OSError) as error:
        raise InputError(f"{what} of ABIDE cannot be fetched: no readable file ({one_line(error)}); {again}.") from None
    finally:
        if name not in sums:
            file.unlink(missing_ok=True)
            _remove_empty(file.parent, folder)
    return new


def _download(address: str) -> bytes:
    """Content of an address, of at most LARGEST bytes whatever the server declares."""
    import requests

    content = bytearray()
    with requests.get(address, stream=True, timeout=PATIENCE, headers={"Accept-Encoding": "identity"}) as answer:
        answer.raise_for_status()
        declared = answer.headers.get("Content-Length", "")
        for chunk in answer.iter_content(1 << 16) if not declared.isdigit() or int(declared) <= LARGEST else ():
            content += chunk
            if len(content) > LARGEST:
                break
    if len(content) > LARGEST or (declared.isdigit() and int(declared) > LARGEST):
        raise ValueError(f"the server sends more than {LARGEST >> 20} MiB")
    if declared.isdigit() and len(content) != int(declared):
        raise ValueError(f"{len(content)} of {declared} bytes arrived")
    return bytes(content)


def _read_sums(folder: Path) -> dict[str, str]:
    """Checksums of earlier calls, by file."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    lines = read_bytes(path, LARGEST).decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    return {match[2]: match[1] for match in matches if _is_inside(folder / match[2], folder)}


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in the folder, also if folders on the way are links; a link that lies there does."""
    return ".." not in file.parts and file.parent.resolve().is_relative_to(folder.resolve())


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def _remove_damaged(folder: Path, sums: dict[str, str]) -> int:
    """Remove files that are not those that were fetched, and forget files that are gone; the number of removed ones."""
    damaged = 0
    for name, digest in list(sums.items()):
        file = folder / name
        if not file.is_file():
            del sums[name]
        elif file.stat().st_size > LARGEST or file_hash(file, LARGEST) != digest:
            file.unlink()
            del sums[name]
            damaged += 1
    return damaged


def _remove_empty(place: Path, folder: Path) -> None:
    """Remove folders that were made for a file that did not come."""
    for each in (place, *place.parents):
        if each == folder:
            return
        with contextlib.suppress(OSError):
            each.rmdir()
