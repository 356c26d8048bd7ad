"""Tables of brain structure beside the scans: FreeSurfer's tables and stats folders, *_morph.tsv, ENIGMA and any other table.

`m2lgdg.read(..., tables={"thickness": path})` and `convert --table` call `with_files`. What a file is, its header says; its
name gives the subject where a file has one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.data.atlases.table_columns import renamed_as
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.embeddings import read_archive, read_vectors
from m2lgdg.data.readers.ids import matched_ids, plain_id
from m2lgdg.data.readers.runs import entities
from m2lgdg.findings import Finding, is_table_proxy
from m2lgdg.storage import InputError, read_bytes

Paths = str | Path | Sequence[str | Path]
MEASURES = ("thickness", "area", "volume")
ATLASES = {"aparc": "desikan-killiany", "aparc.a2009s": "destrieux", "aparc.pial": "desikan-killiany"}
# What a word of a table's name may be, to mean an atlas of FreeSurfer's folders; the first without such a word
WORDS = {
    "aparc": "desikan-killiany",
    "aparc.a2009s": "a2009s destrieux",
    "aparc.DKTatlas": "dktatlas",
    "aparc.pial": "pial",
}
SURFACE = re.compile(r"(?P<side>lh|rh)\.(?P<atlas>.+)\.(?P<measure>[a-z]+)")  # first cell of aparcstats2table
VOLUME = re.compile(r"measure:\s*(?P<measure>\w+)", re.IGNORECASE)  # first cell of asegstats2table
# Columns of a hemisphere, or of the whole brain or head, in the order of FreeSurfer's two commands and ENIGMA's
WHOLE = re.compile(
    r"[lr]h_(MeanThickness|WhiteSurfArea)_\w+|eTIV|(Estimated)?(Total)?IntraCranialVol|[A-Za-z]+Vol(NotVent\w*)?(-to-eTIV)?|"
    r"[lr]?h?SurfaceHoles|[LR]Thickness|[LR]SurfArea|ICV",
    re.IGNORECASE,
)
ENIGMA = re.compile(r"[LRM]_(?P<region>\w+)_(?P<measure>thickavg|surfavg)", re.IGNORECASE)
ENIGMA_MEASURES = {"thickavg": "thickness", "surfavg": "area"}
ENIGMA_ASEG = re.compile(r"[LRM](lat)?(vent|thal|caud|put|pal|hippo|amyg|accumb|vol)", re.IGNORECASE)
FEWEST = 4  # columns of ENIGMA's names that make a table one of ENIGMA
ID_COLUMNS = (*tables.ALIASES["subject"], "subjid", "subj_id", "file_id", "fsid", "subjectid", "participant", "eid")
NAMES = ("name", "region", "structname", "structure", "label", "node")  # column of regions in a table of one subject
STATS = {"thickness": "ThickAvg", "area": "SurfArea", "volume": "GrayVol"}
LARGEST_STATS = 16 << 20  # bytes
TABLE_SUFFIXES = (".tsv", ".csv", ".txt", ".dat", ".table")


class Structure(NamedTuple):
    """A table as it is in its files, by the ids that are written there, and what it holds."""

    table: pd.DataFrame
    kind: str  # freesurfer, morph, enigma or table
    measure: str = ""  # thickness, area, volume ...
    atlas: str = ""  # desikan-killiany, destrieux, aseg, or as the file names it
    left_out: tuple[str, ...] = ()  # columns that are no structure

    @property
    def whole(self) -> list[str]:
        """Columns of a hemisphere, the brain or the head: mean thickness, intracranial volume and the like."""
        return [column for column in self.table.columns if WHOLE.fullmatch(column)]

    @property
    def what(self) -> str:
        """Measure, atlas and kind in words."""
        known = [self.measure, self.atlas, "" if self.kind == "table" else self.kind]
        return ", ".join(filter(None, known)) or "numbers"

    @property
    def side(self) -> str:
        """The hemisphere, if the regions are of one only."""
        sides = {column[:3] for column in self.table.columns if column[:3] in ("lh_", "rh_")}
        return f"{'left' if sides == {'lh_'} else 'right'} hemisphere only" if len(sides) == 1 else ""


def read_table(path: str | Path, name: str = "") -> Structure:
    """Read a table of brain structure.

    Parameters
    ----------
    path : str or Path
        A table of all subjects, the `*_morph.tsv` of one, or a folder: of FreeSurfer's subjects (`SUBJECT/stats/*.stats`), of
        `*_morph.tsv` files, of FreeSurfer's tables, or of a vector of features for each subject (`SUBJECT.npy`). Features of
        all subjects may also be a .npz file with the arrays `ids` and another of shape (subject, feature).
    name : str
        Of the table. In a folder it says which measure is read (thickness, area, volume or aseg), and in which atlas
        (thickness-a2009s, thickness-Glasser; by default Desikan-Killiany or the only one).

    Returns
    -------
    Structure
        `table` (indexed by the id as it is written), `kind`, `measure`, `atlas`.
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path, name)
    if path.suffix == ".stats":
        raise InputError(f"{path} is the stats file of one subject; give the folder that has SUBJECT/stats of all.")
    return _file(path, name)


def joined(parts: Sequence[Structure], where: str) -> Structure:
    """One table of several files: rows of other subjects in the same columns, or other columns, such as both hemispheres."""
    first = parts[0]
    by_columns: dict[frozenset[str], list[pd.DataFrame]] = {}
    for other in parts:
        if (other.kind, other.measure, other.atlas) != (first.kind, first.measure, first.atlas):
            raise InputError(f"{where}: one of its files is {first.what}, another {other.what}; give them different names.")
        rows = renamed_as(other.table, [column for every in by_columns for column in every])
        by_columns.setdefault(frozenset(rows.columns), []).append(rows)
    stacked = [pd.concat(some) for some in by_columns.values()]
    for each in stacked:
        if each.index.has_duplicates:
            raise InputError(f"{where}: id {each.index[each.index.duplicated()][0]} has two rows for the same columns.")
    table = stacked[0]
    for more in stacked[1:]:
        both = [column for column in more.columns if column in table.columns]
        for column in both:
            if not WHOLE.fullmatch(column):
                only = sorted(set(table.columns) ^ set(more.columns))[0]
                raise InputError(f"{where}: column {column} is in two of its files, and {only} in one of them only.")
            ours, theirs = table[column].align(more[column], join="inner")
            unlike = ~np.isclose(ours, theirs, rtol=1e-6, equal_nan=True)
            if unlike.any():
                who = ours.index[unlike][0]
                raise InputError(f"{where}: {who} has two values in column {column}, so that rows of a file may be swapped.")
        table = table.reindex(table.index.union(more.index, sort=False))
        table = table.fillna(more[both]).join(more.drop(columns=both))
    left_out = dict.fromkeys(column for part in parts for column in part.left_out)
    return first._replace(table=table, left_out=tuple(left_out))


def with_files(cohort: Cohort, files: Mapping[str, Paths]) -> Cohort:
    """The cohort with tables from files, by name; notes say what each is, and for whom it has no row."""
    for name, paths in files.items():
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"a table of cohort {cohort.name} has no name; give it as NAME=FILE.")
        if not given:
            raise InputError(f"table {name} has no file.")
        where = f"table {name} ({', '.join(Path(one).name for one in given)})"
        read = joined([read_table(one, name) for one in given], where)
        cohort = _with_table(cohort, name, read, where)
    return cohort


def _with_table(cohort: Cohort, name: str, read: Structure, where: str) -> Cohort:
    subjects = cohort.subjects.tolist()
    ids = matched_ids(read.table.index.tolist(), subjects, where)
    if not ids:
        example = f"its first id is {read.table.index[0]}, the first subject {subjects[0]}"
        raise InputError(f"{where}: none of its {len(read.table)} rows is of a subject of the cohort ({example}).")
    table = read.table.loc[list(ids.values())].set_axis(list(ids), axis=0)
    lacking = [subject for subject in subjects if subject not in ids]
    sites = Counter(cohort.sites[np.isin(cohort.subjects, lacking)].tolist())
    numbers: dict[str, object] = {
        "table": name,
        "columns": len(table.columns),
        "what": read.what,
        "matched": len(ids),
        "size": len(subjects),
        "rows": len(read.table),
        "side": read.side,
        "by_number": sum(plain_id(subject) != plain_id(one) for subject, one in ids.items()) or "",
        "sites": {site: sites[site] for site in sorted(sites, key=natural_key)} or "",
        "left": list(read.left_out),
    }
    notes = [note for note in cohort.notes if isinstance(note, str) or note.numbers.get("table") != name]
    notes.append(Finding("table", numbers=numbers))  # `check` names those without a row
    if 2 * len(ids) < min(len(subjects), len(read.table)):
        notes.append(Finding("table of others", numbers=numbers))
    return cohort.with_tables({name: table})._changed(notes=tuple(notes))


def _file(path: Path, name: str) -> Structure:
    if path.suffix == ".npz":
        return _without_proxies(Structure(read_archive(path), "table"), path)
    if path.suffix == ".npy":
        raise InputError(
            f"{path} has no ids of subjects; save a .npz file with ids and numbers: np.savez(FILE, ids=..., x=...)."
        )
    return parse_table(path, read_bytes(path, tables.LARGEST_TABLE), name)


def parse_table(path: Path, content: bytes, name: str, alone: str | None = None) -> Structure:
    """The table in the content of a file, as `read_table`; a single row without an id is of the subject `alone`, if given."""
    return _without_proxies(_recognised(path, content, name, alone), path)


def _without_proxies(read: Structure, path: Path) -> Structure:
    for column in read.table.columns:
        if is_table_proxy(column):
            raise InputError(f"{path}: column {column} reveals the diagnosis; remove it from the table.")
    return read


def _recognised(path: Path, content: bytes, name: str, alone: str | None) -> Structure:
    rows = tables.parse_text_table(path, content, separator=_separator(content))
    if not len(rows) or not len(rows.columns):
        raise InputError(f"{path} has {'a header and no row' if len(rows.columns) else 'no named column'}.")
    if known := _written_by_freesurfer(rows.columns):
        return _of_freesurfer(rows, path, *known)
    column = _id_column(rows)
    if column is None and alone is not None and len(rows) == 1:
        column = ID_COLUMNS[0]
        rows = rows.assign(**{column: alone})
    if column is None:
        return _one_subject(rows, path, name)
    found = [ENIGMA.fullmatch(each) for each in rows.columns]
    measures = {ENIGMA_MEASURES[match["measure"].lower()] for match in found if match}
    subcortical = [each for each in rows.columns if ENIGMA_ASEG.fullmatch(each)]
    if sum(map(bool, found)) + len(subcortical) < FEWEST:
        return Structure(_numbers(rows, column, path), "table")
    if subcortical:
        measures.add("volume")
    kept = [each for each in rows.columns if ENIGMA.fullmatch(each) or each in subcortical or WHOLE.fullmatch(each)]
    others = tuple(each for each in rows.columns if each not in (column, *kept))
    # Where a region failed the quality check, x stands for its value.
    table = _numbers(rows[[column, *kept]], column, path, missing=(*tables.MISSING_CODES, "x"))
    atlas = "aseg" if not any(found) else "" if subcortical else "desikan-killiany"
    return Structure(table, "enigma", measures.pop() if len(measures) == 1 else "", atlas, others)


def _separator(content: bytes) -> str:
    """What separates the columns of the first line that is not empty; names may have commas and spaces."""
    header = re.sub('"[^"]*"', "", _first_line(content))
    marks = "\t;, " if header.count(";") >= header.count(",") else "\t, "
    return next((one for one in marks if one in header), "\t")


def _first_line(content: bytes) -> str:
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text[: text.find(b"\n") if b"\n" in text else None].decode(errors="replace").strip()


def _written_by_freesurfer(header: Sequence[str]) -> tuple[str, str] | None:
    """Measure and atlas of a table of aparcstats2table or asegstats2table, which its first cell tells; None for others."""
    if surface := SURFACE.fullmatch(header[0]):
        return surface["measure"], ATLASES.get(surface["atlas"], surface["atlas"])
    if volume := VOLUME.fullmatch(header[0]):
        return volume["measure"].lower(), "wmparc" if any(column.startswith("wm-") for column in header[1:]) else "aseg"
    return None


def _id_column(rows: pd.DataFrame) -> str | None:
    lower = {str(name).lower().replace(" ", "_"): str(name) for name in reversed(rows.columns)}
    return next((lower[name] for name in ID_COLUMNS if name in lower), None)


def _numbers(rows: pd.DataFrame, column: str, path: Path, missing: Sequence[str] = tables.MISSING_CODES) -> pd.DataFrame:
    """The columns as numbers, by the id as it is written; text, an id that is repeated and an empty one are errors."""
    table = tables.SubjectTable.of(rows, column, path, missing=missing)
    names = [str(name) for name in rows.columns if name != column]
    if not names:
        raise InputError(f"{path} has no column but that of the ids, {column}.")
    return pd.DataFrame({name: table.numeric(name) for name in names}, index=pd.Index(table.subjects, dtype=object))


def _of_freesurfer(rows: pd.DataFrame, path: Path, measure: str, atlas: str) -> Structure:
    first = str(rows.columns[0])
    regions = [re.fullmatch(r"[lr]h_.+|(Left|Right)-.+|Brain-Stem|CSF", str(each)) for each in rows[first]]
    if 2 * sum(map(bool, regions)) > len(rows):  # written with --transpose
        turned = rows.set_index(first).T
        if not turned.columns.is_unique:
            raise InputError(f"{path}: region {turned.columns[turned.columns.duplicated()][0]} is listed twice.")
        rows = turned.rename_axis(None, axis=1).rename_axis(first).reset_index()
    table = _numbers(rows, first, path)
    return Structure(table.rename(columns=_region), "freesurfer", measure, atlas)


def _region(name: str) -> str:
    """Names of regions as FreeSurfer 6 and later write them."""
    return name.replace("G&S", "G_and_S").replace("&", "_and_")


def _one_subject(rows: pd.DataFrame, path: Path, name: str) -> Structure:
    """A *_morph.tsv: a row of regions, or a row for each region with its measures."""
    known = entities(path)
    lower = {str(each).lower(): str(each) for each in rows.columns}
    column = next((lower[each] for each in NAMES if each in lower), None)
    if "sub" not in known or (column is None and len(rows) != 1):
        usual = "participant_id, subject, SubjID ..."
        raise InputError(
            f"{path} has no column of ids ({usual}) and is neither a table of FreeSurfer nor of one subject (sub-*_morph.tsv); "
            f"{tables.present_columns(rows, path)}; call the column of the ids participant_id."
        )
    who, measure = f"sub-{known['sub']}", known.get("desc", "")
    if column is None:
        table = _numbers(rows.assign(participant_id=who), "participant_id", path)
        return Structure(table, "morph", measure, known.get("seg", known.get("atlas", "")))
    measures = [str(each) for each in rows.columns if each not in (column, lower.get("index"))]
    wanted = [each for each in measures if any(word in each.lower() for word in (_measure(name), measure.lower()) if word)]
    if len(wanted) != 1 and len(measures) != 1:
        raise InputError(f"{path} has the measures {', '.join(measures)}; name the table after the one to read.")
    chosen = (wanted or measures)[0]
    if rows[column].duplicated().any():
        raise InputError(f"{path}: region {rows[column][rows[column].duplicated()].iloc[0]} is listed twice.")
    values = tables.SubjectTable(rows.set_index(column), path).numeric(chosen)
    table = pd.DataFrame([values], index=pd.Index([who], dtype=object), columns=rows[column].tolist())
    return Structure(table, "morph", _measure(chosen) or chosen, known.get("seg", known.get("atlas", "")))


def _measure(name: str) -> str:
    """The measure that the name of a table contains."""
    found = [measure for measure in (*MEASURES, "curv", "sulc") if measure in name.lower()]
    return found[0] if found else "volume" if "aseg" in name.lower() else ""


def _folder(path: Path, name: str) -> Structure:
    measure = _measure(name)
    if vectors := sorted(path.glob("*.npy")):
        return Structure(read_vectors(vectors), "table")
    if not measure:
        words = "thickness, area, volume or aseg (thickness-a2009s for the Destrieux atlas)"
        raise InputError(f"{path} is a folder, so the name of the table says what to read: {words}, not {name or 'empty'}.")
    stats = sorted(
        folder for folder in path.glob("*/stats") if folder.is_dir() and not folder.parent.name.startswith("fsaverage")
    )
    if stats:
        return _stats_folders(path, stats, name, measure)
    if morph := sorted(path.glob("**/sub-*_morph.tsv")):
        return _morph_files(path, morph, name, measure)
    return _folder_of_tables(path, name, measure)


def _atlas_of(name: str, known: Mapping[str, str], where: Path) -> str:
    """The key of the atlas with most words of the name of a table; `known` has the words of each, the usual one first."""
    words = {word for word in re.split("[^a-z0-9]+", name.lower()) if len(word) > 2 and word not in (*MEASURES, "aparc")}
    scores = {atlas: sum(word in text.lower() for word in words) for atlas, text in known.items()}
    best = [atlas for atlas, score in scores.items() if score == max(scores.values())]
    if max(scores.values()) and len(best) > 1:
        raise InputError(f"{where}: the atlas of table {name} could be {best[0]} or {best[1]}; name the table after one.")
    return best[0]


def _folder_of_tables(path: Path, name: str, measure: str) -> Structure:
    """The tables of FreeSurfer in a folder that have the measure and the atlas."""
    files = sorted(file for file in (*path.glob("*"), *path.glob("*/*")) if file.suffix in TABLE_SUFFIXES and file.is_file())
    found: dict[tuple[str, str], list[Path]] = {}
    for file in files:
        content = read_bytes(file, tables.LARGEST_TABLE)
        header = [cell.strip() for cell in _first_line(content).split(_separator(content))]
        if known := _written_by_freesurfer(header):
            found.setdefault(known, []).append(file)
    usual = {ATLASES.get(each, each): words for each, words in WORDS.items() if each != "aparc.pial"}
    present = {atlas: atlas for of_measure, atlas in found if of_measure == measure and atlas not in usual}
    atlas = "aseg" if "aseg" in name.lower() else _atlas_of(name, usual | present, path)
    chosen = found.get((measure, atlas))
    if chosen is None:
        has = "; it has " + ", ".join(" of ".join(key) for key in sorted(found)) if found else ""
        raise InputError(
            f"{path} has neither SUBJECT/stats folders, sub-*_morph.tsv files nor a table of FreeSurfer with {measure} of "
            f"{atlas}{has}."
        )
    return joined([_file(file, name) for file in chosen], f"table {name} ({', '.join(file.name for file in chosen)})")


def _morph_files(path: Path, files: Sequence[Path], name: str, measure: str) -> Structure:
    """The *_morph.tsv files of all subjects; of several atlases, that which the name of the table contains."""
    of_measure = [file for file in files if measure in entities(file).get("desc", measure).lower()]
    atlases = {file: entities(file).get("seg", entities(file).get("atlas", "")) for file in of_measure}
    names = sorted(set(atlases.values()))
    wanted = [each for each in names if each and each.lower() in name.lower()] or names
    if not of_measure or len(wanted) > 1:
        problem = (
            f"several atlases ({', '.join(names)}); name the table {measure}-{names[0]} or so"
            if of_measure
            else f"no {measure}"
        )
        raise InputError(f"{path}: its *_morph.tsv files have {problem}.")
    parts: dict[str, tuple[Path, Structure]] = {}
    for file in (each for each in of_measure if atlases[each] == wanted[0]):
        one = _file(file, name)
        who = str(one.table.index[0])
        if who in parts:
            raise InputError(f"{file}: {who} has a second table, {parts[who][0].name}; keep one of the sessions or runs.")
        parts[who] = file, one
    table = pd.concat([one.table for _, one in parts.values()])
    return next(iter(parts.values()))[1]._replace(table=table)


def _stats_folders(path: Path, folders: Sequence[Path], name: str, measure: str) -> Structure:
    """SUBJECT/stats/*.stats of all subjects, with the columns that FreeSurfer's own tables have."""
    parc = ""
    if "aseg" not in name.lower():
        present = sorted({file.name[3:-6] for folder in folders for file in folder.glob("[lr]h.*.stats")})
        parc = _atlas_of(name, WORDS | {each: each for each in present if each not in WORDS}, path)
    files = [f"{side}.{parc}.stats" for side in ("lh", "rh")] if parc else ["aseg.stats"]
    rows: dict[str, dict[str, float]] = {}
    for folder in folders:
        values: dict[str, float] = {}
        for file in (folder / each for each in files):
            if file.is_file():
                values |= read_stats(file, measure)
        if values:
            rows[folder.parent.name] = values
    if not rows:
        raise InputError(f"{path}: none of its {len(folders)} stats folders has {files[0]}.")
    columns = list(dict.fromkeys(column for values in rows.values() for column in values))
    ends = [column for column in columns if WHOLE.fullmatch(column)]  # last, as in the tables of FreeSurfer
    table = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=[each for each in columns if each not in ends] + ends)
    return Structure(
        table.set_axis(pd.Index(list(rows), dtype=object), axis=0), "freesurfer", measure, ATLASES.get(parc, parc) or "aseg"
    )


def read_stats(path: Path, measure: str) -> dict[str, float]:
    """Values of one stats file of FreeSurfer, by the names that aparcstats2table and asegstats2table give them."""
    return parse_stats(path, read_bytes(path, LARGEST_STATS), measure)


def parse_stats(path: Path, content: bytes, measure: str) -> dict[str, float]:
    """Values of the content of a stats file, as `read_stats`."""
    lines = content.decode(errors="replace").splitlines()
    headers = [line.split()[2:] for line in lines if line.startswith("# ColHeaders")]
    if not headers or "StructName" not in headers[-1]:
        raise InputError(f"{path} is not a stats file of FreeSurfer: it has no line # ColHeaders with StructName.")
    header = headers[-1]
    surface = "ThickAvg" in header
    column = STATS.get(measure, "") if surface else "Volume_mm3" if measure == "volume" else ""
    if column not in header:
        has = "" if tables.is_elsewhere(path) else f"; its columns are {', '.join(header)}"
        raise InputError(f"{path} has no {measure}{has}.")
    side = _side(path, lines) if surface else ""
    values: dict[str, float] = {}
    for cells in (line.split() for line in lines if line.strip() and not line.startswith("#")):
        try:
            region = cells[header.index("StructName")]
            region = f"{side}_{_region(region)}_{measure}" if surface else region
            if region in values:
                raise InputError(f"{path}: region {region} is listed twice.")
            values[region] = tables.number(cells[header.index(column)])
        except (IndexError, ValueError):
            line = tables.quoted(path, " ".join(cells))
            raise InputError(f"{path}: the columns of the header are not those of {line}.") from None
    if not values:
        raise InputError(f"{path} has no region.")
    return values | dict(_measured(lines, path, side, measure))


def _side(path: Path, lines: Iterable[str]) -> str:
    found = [line.split()[2] for line in lines if re.match(r"# hemi [lr]h\s*$", line)]
    named = path.name.partition(".")[0]
    if found and named in ("lh", "rh") and found[0] != named:
        raise InputError(f"{path} is of the hemisphere {found[0]} by its header; rename it.")
    if not found and named not in ("lh", "rh"):
        raise InputError(f"{path} has no line # hemi, nor a name that starts with lh. or rh., to say its hemisphere.")
    return found[0] if found else named


def _measured(lines: Iterable[str], path: Path, side: str, measure: str) -> Iterator[tuple[str, float]]:
    """The measures of a hemisphere or the whole brain, which are lines # Measure of the header."""
    wanted = {"thickness": "MeanThickness", "area": "WhiteSurfArea"}.get(measure)
    for line in lines:
        parts = [part.strip() for part in line.removeprefix("# Measure").split(",")] if line.startswith("# Measure") else []
        if len(parts) < 5:
            continue
        name = "eTIV" if parts[1] == "eTIV" and side else parts[0] if parts[1] == "eTIV" else parts[1]
        if side and name not in (wanted, "eTIV", "BrainSegVolNotVent"):
            continue
        try:
            yield f"{side}_{name}_{measure}" if name == wanted else name, tables.number(parts[3])
        except ValueError:
            raise InputError(
                f"{path}: the measure {name} has the value {tables.quoted(path, parts[3])}, which is not a number."
            ) from None
