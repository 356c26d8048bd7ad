"""Download of ABIDE I with nilearn's fetcher, file by file, so that an interrupted download can be continued.

Called by `m2lgdg fetch`. The folder is one that `m2lgdg.read` reads as abide-pcp; SHA256SUMS holds a checksum of every file.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from m2lgdg.data.readers import tables
from m2lgdg.data.readers.abide import PIPELINES, STRATEGIES
from m2lgdg.data.readers.arrays import LARGEST, read_table
from m2lgdg.storage import InputError, file_hash, one_line, read_bytes, write_text

ATLASES = ("aal", "cc200", "cc400", "dosenbach160", "ez", "ho", "tt")
FOLDER, TABLE, SUMS = "ABIDE_pcp", "Phenotypic_V1_0b_preprocessed1.csv", "SHA256SUMS"  # the first two are nilearn's
STRATEGY = "cpac/filt_global"
TEMPORARY = re.compile(r"[0-9a-f]{32}")  # folders in which nilearn downloads
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
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
    _check(to, atlases, strategy, subjects)
    folder = to / FOLDER
    created = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)  # nilearn would also write a README into the folder around it
        sums = _read_sums(folder)
        damaged = _remove_damaged(folder, sums)
        _remove_temporary(folder)
        table = _fetch_table(to, url, sums)
        names = _chosen(table, folder / TABLE, sites, subjects)
        new = _fetch_series(to, names, atlases, strategy, url, sums, progress)
    except BaseException:
        _remove_temporary(folder)
        for each in created:
            with contextlib.suppress(OSError):
                each.rmdir()  # only if nothing was fetched
        raise
    return Fetched(folder, len(names), new, len(names) * len(atlases) - new, damaged)


def _check(to: Path, atlases: Sequence[str], strategy: str, subjects: int | None) -> None:
    unknown = next((name for name in atlases if name not in ATLASES), None)
    if unknown is not None or not atlases:
        raise InputError(f"ABIDE has no atlas {unknown}; choose from {', '.join(ATLASES)}." if atlases else "Give an --atlas.")
    pipeline, _, form = strategy.partition("/")
    if pipeline not in PIPELINES or form not in STRATEGIES:
        available = f"{'|'.join(PIPELINES)}/{'|'.join(STRATEGIES)}"
        raise InputError(f"ABIDE has no strategy {strategy}; choose from {available}.")
    if subjects is not None and subjects < 1:
        raise InputError(f"the number of subjects must be at least 1, not {subjects}.")
    if os.pathsep in str(to):
        raise InputError(f"{to}: nilearn cannot write to a folder with {os.pathsep} in its name; choose another --out.")


def _fetch_table(to: Path, url: str | None, sums: dict[str, str]) -> pd.DataFrame:
    path = to / FOLDER / TABLE
    with _fetching("The phenotype table", path, sums):
        _nilearn(to, n_subjects=1, derivatives=[], url=url)
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


def _fetch_series(
    to: Path,
    names: Sequence[str],
    atlases: Sequence[str],
    strategy: str,
    url: str | None,
    sums: dict[str, str],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Fetch what is missing, and write the checksums of all files; the number of new files."""
    folder, new = to / FOLDER, 0
    pipeline, _, form = strategy.partition("/")
    filters = {"band_pass_filtering": form.startswith("filt"), "global_signal_regression": form.endswith("_global")}
    try:
        for count, name in enumerate(names, start=1):
            for atlas in atlases:
                file = folder / strategy / f"{name}_rois_{atlas}.1D"
                if f"{strategy}/{file.name}" not in sums:
                    new += not file.is_file()
                    with _fetching(f"{file.name} (subject {count} of {len(names)})", file, sums):
                        _nilearn(to, FILE_ID=name, derivatives=[f"rois_{atlas}"], url=url, pipeline=pipeline, **filters)
                        read_table(file)  # raises an error for an empty file, which nilearn accepts
            if count % EVERY == 0:
                _write_sums(folder, sums)
            if progress is not None:
                progress(count, len(names))
    finally:
        _write_sums(folder, sums)
    return new


def _nilearn(to: Path, **options: Any) -> None:
    from nilearn.datasets import fetch_abide_pcp

    fetch_abide_pcp(data_dir=to, quality_checked=False, verbose=0, **options)


@contextlib.contextmanager
def _fetching(what: str, file: Path, sums: dict[str, str]) -> Iterator[None]:
    """Add the checksum of a file that the block fetches and reads; if it fails, report it and remove the file."""
    import requests

    name = file.relative_to(next(each for each in file.parents if each.name == FOLDER)).as_posix()
    again = "the same command continues, and complete files are kept"
    try:
        yield
        sums.setdefault(name, file_hash(file, LARGEST))
    except requests.HTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise InputError(f"{what} of ABIDE cannot be fetched (the server answered {status}); {again}.") from None
    except requests.RequestException:
        raise InputError(f"{what} of ABIDE cannot be fetched: no connection to the server; with a network, {again}.") from None
    except (ValueError, KeyError, OSError) as error:  # of nilearn, which also reads what it has fetched
        raise InputError(f"{what} of ABIDE cannot be fetched: no readable file ({one_line(error)}); {again}.") from None
    finally:
        if name not in sums:
            file.unlink(missing_ok=True)


def _read_sums(folder: Path) -> dict[str, str]:
    """Checksums of earlier calls, by file."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    lines = read_bytes(path, LARGEST).decode("utf-8", errors="replace").splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    return {match[2]: match[1] for match in matches if match and not Path(match[2]).is_absolute() and ".." not in match[2]}


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def _remove_damaged(folder: Path, sums: dict[str, str]) -> int:
    """Remove files that are not those that were fetched, and forget files that are gone; the number of removed ones."""
    damaged = 0
    for name, digest in list(sums.items()):
        file = folder / name
        if not file.is_file():
            del sums[name]
        elif file_hash(file, LARGEST) != digest:
            file.unlink()
            del sums[name]
            damaged += 1
    return damaged


def _remove_temporary(folder: Path) -> None:
    """Remove what nilearn leaves of a download that was interrupted."""
    for each in [*folder.glob("*"), *folder.glob("*/*/*")]:
        if each.is_dir() and TEMPORARY.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)
