"""Folders of connectomes: every format and layout reads to the matrices that were written, and what they hold is told."""

import csv

import h5py
import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nibabel import cifti2
from scipy.io import savemat

from m2lgdg import Cohort, InputError, read, scans
from m2lgdg.data.atlases import regions
from m2lgdg.data.readers import guess, matrices

ROIS = 6
SUBJECTS = [f"P{i + 1:02}" for i in range(8)]
SITES = ["north"] * 4 + ["south"] * 4
NAMES = tuple(f"area {letter}" for letter in "abcdef")
PEOPLE = "".join(
    f"{one}\t{site}\t{i % 2}\t{20 + i}\t{'MF'[i % 2]}\n" for i, (one, site) in enumerate(zip(SUBJECTS, SITES, strict=True))
)
TABLE = "participant_id\tsite\tlabel\tage\tsex\n" + PEOPLE


def correlations(count=8, rois=ROIS, seed=0, volumes=60):
    """(subject, roi, roi) correlations of short series with a strong common signal, so that Fisher z goes beyond 1."""
    rng = np.random.default_rng(seed)
    series = rng.normal(size=(count, volumes, rois)) + 1.2 * rng.normal(size=(count, volumes, 1))
    series[:, :, 1] += 3 * series[:, :, 0]
    return np.stack([np.corrcoef(one.T) for one in series])


R = correlations()
Z = np.arctanh(np.where(np.eye(ROIS, dtype=bool), 0, R))
COV = np.stack(
    [np.diag(s) @ one @ np.diag(s) for one, s in zip(R, np.random.default_rng(1).uniform(1, 9, (8, ROIS)), strict=True)]
)


def write(file, matrix):
    """A matrix in the format of the name of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npy":
        np.save(file, matrix)
    elif file.suffix == ".mat":
        savemat(file, {"fc": matrix})
    else:
        delimiter = {".csv": ",", ".tsv": "\t"}.get(file.suffix, " ")
        np.savetxt(file, matrix, delimiter=delimiter)


def own(path, stack=R, name="{}.npy", table=TABLE):
    """participants.tsv and one file a subject."""
    path.mkdir()
    (path / "participants.tsv").write_text(table)
    for subject, matrix in zip(SUBJECTS, stack, strict=True):
        write(path / name.format(subject), matrix)
    return path


def sites(path, stack=Z, name="FC_matrices.npy"):
    """One stack a site beside a table in the same order."""
    for site in ("north", "south", "west"):
        (path / site).mkdir(parents=True)
        rows = [i for i in range(8) if SITES[i] == site]
        lines = [f"{SUBJECTS[i]},{i % 2},{20 + i},{1 + i % 2},{9.5 + i}\n" for i in rows] or ["P99,1,50,1,20\n"]
        (path / site / "phenotypic.csv").write_text("ID,Label,Age,Sex,HAMD\n" + "".join(lines))
        if rows:
            np.save(path / site / name, stack[rows])
    return path


def assert_connectomes(cohort, stack, kind):
    assert cohort.subjects.tolist() == SUBJECTS
    assert cohort.values == kind
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), stack.astype(np.float32), rtol=0, atol=1e-6)


def notes(cohort):
    return "\n".join(map(str, cohort.notes))


# Formats and layouts


@pytest.mark.parametrize("name", [f"{{}}{suffix}" for suffix in (".npy", ".csv", ".tsv", ".txt", ".1D", ".mat")])
def test_one_file_a_subject(tmp_path, name):
    path = own(tmp_path / "lab", name=name)
    assert guess(path) == "connectomes"
    cohort = read(path)
    assert_connectomes(cohort, R, "correlation")
    assert cohort.sites.tolist() == SITES and cohort.labels.tolist() == [0, 1] * 4
    assert cohort.inputs == ("sex", "age") and cohort.rois == tuple("123456") and cohort.excluded == ()
    assert "values: correlations, since the diagonal is 1" in notes(cohort)


@pytest.mark.parametrize("name", ["{}_fc.npy", "ROICorrelation_{}.csv", "connectomes/sub-{}_aal.npy", "deep/er/{}.txt"])
def test_names_with_the_same_words_around_the_id(tmp_path, name):
    assert_connectomes(read(own(tmp_path / "lab", name=name)), R, "correlation")


def test_a_pattern_atlases_and_values_of_the_toml(tmp_path):
    path = own(tmp_path / "lab", name="first/{}.npy")
    other = correlations(rois=4, seed=5)
    for subject, matrix in zip(SUBJECTS[:7], other, strict=False):
        write(path / "second" / f"{subject}.npy", matrix)
    (path / "rois.txt").write_text("\n".join(NAMES))
    (path / "dataset.toml").write_text(
        'name = "ours"\natlas = "one"\npattern = "first/{subject}.npy"\nrois = "rois.txt"\nvalues = "partial-correlation"\n'
        '[atlases.two]\npattern = "second/{subject}.npy"\n'
    )
    cohort = read(path)
    assert_connectomes(cohort, R, "partial-correlation")
    assert (cohort.name, cohort.atlases, cohort.rois) == ("ours", ("one", "two"), NAMES)
    two = cohort.parcellation("two")
    assert two.subjects.tolist() == SUBJECTS[:7] and two.values == "partial-correlation"
    np.testing.assert_allclose(np.stack(list(two.connectomes)), other[:7].astype(np.float32), atol=1e-6)
    with pytest.raises(InputError, match=r"participants\.tsv: subject P08 has no connectome"):
        read(path, atlas="two")
    alone = read(path, atlas="two", on_bad="exclude")
    assert alone.atlases == ("two",) and [one.reason for one in alone.excluded] == ["listed but no connectome"]


@pytest.mark.parametrize("form", ["npy", "npz", "mat", "7.3", "subjects last"])
def test_one_stack_for_all(tmp_path, form):
    path = tmp_path / "lab"
    path.mkdir()
    (path / "people.csv").write_text(TABLE.replace("\t", ","))
    if form == "npz":
        np.savez_compressed(path / "all.npz", Z)
    elif form == "7.3":
        with h5py.File(path / "all.mat", "w", userblock_size=512) as file:
            file["fc"], file["count"] = Z, np.ones((1, 1))
        with open(path / "all.mat", "r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    elif form in ("mat", "subjects last"):
        savemat(path / "all.mat", {"fc": np.moveaxis(Z, 0, -1) if form != "mat" else Z, "count": 8.0})
    else:
        np.save(path / "all.npy", Z)
    assert_connectomes(read(path), Z, "fisher-z")


def test_one_stack_a_site_whose_folder_names_it(tmp_path):
    path = sites(tmp_path / "mdd")
    assert guess(path) == "connectomes"
    cohort = read(path)
    assert_connectomes(cohort, Z, "fisher-z")
    assert cohort.sites.tolist() == SITES and cohort.inputs == ("sex", "age")
    np.testing.assert_array_equal(cohort.phenotypes["HAMD"], 9.5 + np.arange(8))
    assert [(one.subject, one.site, one.expected) for one in cohort.excluded] == [("P99", "west", True)]
    words = notes(cohort)
    assert "site from the name of the folder of phenotypic.csv" in words and "site from column" not in words
    assert "Fisher z, since values are beyond 1 in 8 of 8 matrices" in words


MDD = [f"S{i // 4 + 2}-{2 - i % 2}-{i:04d}" for i in range(8)]  # four subjects of S2, then of S3; odd ones are patients


@pytest.fixture
def mdd(tmp_path):
    """Connectomes of REST-meta-MDD beside tables without education, and a workbook with it, in another order."""
    for site in ("S2", "S3"):
        rows = [i for i, one in enumerate(MDD) if one.startswith(site)]
        (tmp_path / "mdd" / site).mkdir(parents=True)
        lines = [f"{MDD[i]},{i % 2},{90 + i},1\n" for i in rows]
        (tmp_path / "mdd" / site / "phenotypic.csv").write_text("ID,Label,Age,Sex\n" + "".join(lines))
        np.save(tmp_path / "mdd" / site / "FC_matrices.npy", Z[rows])
    rows = {label: [(MDD[i], 2, 20 + i, 10 + i) for i in range(7, -1, -1) if i % 2 == label] for label in (1, 0)}
    miniature.rest_workbook(tmp_path / "book.xlsx", [*rows[1], ("S20-1-0001", 1, 40, 9)], rows[0])
    return tmp_path / "mdd"


def test_phenotypes_from_the_workbook_of_rest_meta_mdd(mdd):
    book = mdd.parent / "book.xlsx"
    cohort = read(mdd, participants=book)
    assert cohort.subjects.tolist() == MDD
    assert cohort.labels.tolist() == [0, 1] * 4
    np.testing.assert_array_equal(cohort.phenotypes["age"], 20 + np.arange(8))  # not those beside the connectomes
    np.testing.assert_array_equal(cohort.phenotypes["education"], 10 + np.arange(8))
    assert cohort.inputs == ("sex", "age", "education")
    plain = read(mdd)
    assert plain.inputs == ("sex", "age")
    for one, other in zip(cohort.scans.triangles, plain.scans.triangles, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_workbook_that_does_not_fit(mdd):
    book = mdd.parent / "book.xlsx"
    table = mdd / "S3" / "phenotypic.csv"
    text = table.read_text()
    table.write_text(text.replace(MDD[5], "S3-1-0099"))
    with pytest.raises(InputError, match=r"subject S3-1-0099 is not in column ID of .*book\.xlsx"):
        read(mdd, participants=book)
    table.write_text(text.replace(f"{MDD[5]},1", f"{MDD[5]},0"))
    with pytest.raises(InputError, match=f"the site or label of subject {MDD[5]} is not that of its id"):
        read(mdd, participants=book)
    table.write_text(text)
    (mdd / "S3").rename(mdd / "Basel")
    with pytest.raises(InputError, match=r"the site or label of subject S3-\S+ is not that of its id"):
        read(mdd, participants=book)
    with pytest.raises(InputError, match=r"none\.xlsx"):
        read(mdd, participants=mdd / "none.xlsx")


def test_tables_whose_columns_have_other_names_or_a_site(tmp_path):
    path = sites(tmp_path / "mdd")
    table = (path / "south" / "phenotypic.csv").read_text().splitlines()
    lines = ["subject,site,dx,age,gender,iq\n", *(f"{one.replace(',', ',Malmö,', 1)}\n" for one in table[1:])]
    (path / "south" / "phenotypic.csv").write_text("".join(lines))
    cohort = read(path)
    assert cohort.site_names == ["Malmö", "north"]
    assert cohort.phenotypes["HAMD"].isna().tolist() == [False] * 4 + [True] * 4
    np.testing.assert_array_equal(cohort.phenotypes["iq"], [np.nan] * 4 + [13.5, 14.5, 15.5, 16.5])
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, 2] * 4)


def test_a_table_for_all_and_stacks_in_folders_of_the_sites(tmp_path):
    path = tmp_path / "lab"
    for site in ("north", "south"):
        (path / site).mkdir(parents=True)
        np.save(path / site / "fc.npy", R[[i for i in range(8) if SITES[i] == site]])
    lines = TABLE.splitlines()
    (path / "participants.tsv").write_text("\n".join([lines[0], *reversed(lines[1:])]))  # south comes first
    np.save(path / "south" / "fc.npy", R[[7, 6, 5, 4]])
    np.save(path / "north" / "fc.npy", R[[3, 2, 1, 0]])
    cohort = read(path)
    assert cohort.subjects.tolist() == SUBJECTS[::-1]
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), R[::-1].astype(np.float32), atol=1e-6)


def test_only_selects_one_of_two_stacks(tmp_path):
    path = sites(tmp_path / "mdd")
    for site in ("north", "south"):
        np.save(path / site / "other.npy", R[:4])
    assert_connectomes(read(path, only="FC_"), Z, "fisher-z")


# Triangles as rows


def rows_of(stack, way, diagonal):
    indices = np.triu_indices if way == "upper" else np.tril_indices
    offset = 0 if diagonal else {"upper": 1, "lower": -1}[way]
    return np.stack([one[indices(stack.shape[1], offset)] for one in stack])


@pytest.mark.parametrize("way", ["upper", "lower"])
@pytest.mark.parametrize(
    ("kind", "diagonal"),
    [*((kind, True) for kind in ("correlation", "fisher-z", "covariance")), ("correlation", False), ("fisher-z", False)],
)
def test_triangles_are_told_apart_by_their_eigenvalues(tmp_path, way, diagonal, kind):
    r = correlations(rois=12, volumes=15)
    scale = np.random.default_rng(3).uniform(1, 5, (8, 12))
    stack = {
        "correlation": r,
        "fisher-z": np.arctanh(np.where(np.eye(12, dtype=bool), 0, r)),
        "covariance": r * scale[:, :, None] * scale[:, None, :],
    }[kind]
    path = tmp_path / "lab"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    np.save(path / "edges.npy", rows_of(stack, way, diagonal))
    cohort = read(path, "connectomes")
    assert_connectomes(cohort, stack, kind)
    assert f"the {way} half by rows" in notes(cohort)


def test_triangles_in_a_table_are_matched_by_id(tmp_path):
    path = tmp_path / "lab"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    edges = rows_of(correlations(rois=9, volumes=10), "upper", False)
    frame = pd.DataFrame(edges, index=pd.Index(SUBJECTS, name="participant_id"), columns=[f"e{i}" for i in range(36)])
    frame.iloc[::-1].to_csv(path / "edges.csv")
    cohort = read(path, "connectomes")
    assert_connectomes(cohort, correlations(rois=9, volumes=10), "correlation")


def test_triangles_that_nothing_tells_apart_are_asked_for(tmp_path):
    path = tmp_path / "lab"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    weak = 0.02 * np.random.default_rng(0).uniform(-1, 1, (8, 15))  # positive definite in every order
    np.save(path / "edges.npy", weak)
    with pytest.raises(InputError, match=r"edges\.npy has rows of 15 values, .*of 6 ROIs; say it by --triangle upper or lower"):
        read(path, "connectomes")
    (path / "names.txt").write_text("\n".join(NAMES))
    cohort = read(path, "connectomes", triangle="lower", atlas_labels=path / "names.txt")
    expected = np.eye(6)
    expected[np.tril_indices(6, -1)] = weak[2]
    assert cohort.rois == NAMES
    np.testing.assert_allclose(np.tril(cohort.connectomes[2]), expected, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 9), st.sampled_from(["upper", "lower"]), st.booleans(), st.integers(0, 2**31))
def test_rows_are_unfolded_as_they_were_folded(n, way, diagonal, seed):
    """Against squareform-like loops: entry (i, j) of the matrix is the value that the order gives it."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(2, n, n))
    full = full + full.transpose(0, 2, 1)
    rows = []
    for one in full:
        pairs = [(i, j) for i in range(n) for j in (range(i, n) if way == "upper" else range(i + 1))]
        rows.append([one[i, j] for i, j in pairs if diagonal or i != j])
    got = matrices._unfolded(np.array(rows), matrices._row_places(n, way, diagonal), n)
    want = full if diagonal else full * (1 - np.eye(n))
    np.testing.assert_array_equal(got, want)


# Text with names


def frame(matrix, names=NAMES):
    return pd.DataFrame(matrix, index=list(names), columns=list(names))


@pytest.mark.parametrize(
    ("text", "rois"),
    [
        (lambda one: frame(one).to_csv(index_label="Node"), NAMES),
        (lambda one: frame(one).to_csv(), NAMES),
        (lambda one: frame(one).to_csv(index=False), NAMES),
        (lambda one: frame(one).to_csv(header=False), NAMES),
        (lambda one: frame(one).to_csv(quoting=csv.QUOTE_NONNUMERIC), NAMES),
        (lambda one: frame(one, [f"left, {i}" for i in range(6)]).to_csv(), tuple(f"left, {i}" for i in range(6))),
        (lambda one: pd.DataFrame(one).to_csv(), tuple("123456")),
        (lambda one: pd.DataFrame(one).to_csv(index=False), tuple("123456")),
        (lambda one: frame(one).to_csv(index=False).replace("\n", "\r\n"), NAMES),
        (lambda one: "\ufeff" + frame(one).to_csv(index=False), NAMES),
    ],
)
def test_a_header_and_a_first_column_of_names(tmp_path, text, rois):
    path = own(tmp_path / "lab")
    for subject, matrix in zip(SUBJECTS, R, strict=True):
        (path / f"{subject}.npy").unlink()
        (path / f"{subject}.csv").write_text(text(matrix), newline="", encoding="utf-8")
    cohort = read(path)
    assert_connectomes(cohort, R, "correlation")
    assert cohort.rois == rois


def test_rois_in_another_order_are_matched_by_name(tmp_path):
    path = own(tmp_path / "lab", name="{}.csv")
    order = [3, 1, 0, 5, 2, 4]
    for i, (subject, matrix) in enumerate(zip(SUBJECTS, COV, strict=True)):
        table = frame(matrix) if i != 5 else frame(matrix).iloc[order, order]
        table.to_csv(path / f"{subject}.csv")
    cohort = read(path)
    assert cohort.rois == NAMES
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), COV, rtol=1e-6)


def test_codes_and_numbers_of_an_included_atlas(tmp_path):
    stack = correlations(rois=116)
    path = own(tmp_path / "plain", stack)
    assert read(path, atlas="aal").rois == tuple(regions("aal")["name"])
    coded = own(tmp_path / "coded", stack)
    for subject, matrix in zip(SUBJECTS, stack, strict=True):
        (coded / f"{subject}.npy").unlink()
        frame(matrix, regions("aal")["code"]).to_csv(coded / f"{subject}.csv")
    cohort = read(coded, atlas="aal")
    assert cohort.rois == tuple(regions("aal")["name"]) and cohort.atlas == "aal"
    with pytest.raises(InputError, match=r"P01\.npy: subject P01: 6 ROIs, but aal names 116\."):
        read(own(tmp_path / "few"), atlas="aal")
    assert "cc200 has 200 ROIs, the files have 116" in notes(read(path, atlas="cc200"))


# BIDS derivatives


def pconn(file, matrix, names=NAMES):
    file.parent.mkdir(parents=True, exist_ok=True)
    parcels = cifti2.ParcelsAxis(
        list(names), [np.array([[i, 0, 0]]) for i in range(len(names))], [{}] * len(names), np.eye(4), (9, 9, 9)
    )
    header = cifti2.Cifti2Header.from_axes((parcels, parcels))
    nibabel.Cifti2Image(matrix.astype(np.float32), header).to_filename(file)


def derivatives(path, form="relmat"):
    path.mkdir()
    (path / "dataset_description.json").write_text("{}")
    (path / "participants.tsv").write_text(TABLE.replace("P0", "sub-P0"))
    other = correlations(rois=4, seed=5)
    for i, subject in enumerate(SUBJECTS):
        stem = path / f"sub-{subject}" / "func" / f"sub-{subject}_task-rest_space-fsLR_seg-"
        stem.parent.mkdir(parents=True)
        for atlas, matrix in (("Gordon", R[i]), ("Tian", other[i])):
            names = NAMES[: len(matrix)]
            if form in ("relmat", "both"):
                table = frame(matrix, names).to_csv(sep="\t", index_label="Node", na_rep="n/a")
                (stem.parent / f"{stem.name}{atlas}_stat-pearsoncorrelation_relmat.tsv").write_text(table)
            if form in ("pconn", "both"):
                pconn(stem.parent / f"{stem.name}{atlas}_den-91k_stat-pearsoncorrelation_boldmap.pconn.nii", matrix, names)
    return path


@pytest.mark.parametrize("form", ["relmat", "pconn", "both"])
def test_derivatives_of_several_atlases(tmp_path, form):
    path = derivatives(tmp_path / "xcp_d", form)
    assert guess(path) == "connectomes"
    with pytest.raises(InputError, match=r"xcp_d has several atlases; choose one of Gordon, Tian\."):
        read(path)
    cohort = read(path, atlas=("Gordon", "Tian"))
    assert cohort.subjects.tolist() == [f"sub-{one}" for one in SUBJECTS]
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), R.astype(np.float32), atol=1e-6)
    assert (cohort.atlases, cohort.rois, len(cohort.parcellation("Tian").rois)) == (("Gordon", "Tian"), NAMES, 4)
    assert read(path, atlas="Tian").rois == NAMES[:4]


def test_derivatives_with_series_are_series(tmp_path):
    path = derivatives(tmp_path / "xcp_d")
    for subject in SUBJECTS:
        table = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 6)), columns=list(NAMES))
        file = path / f"sub-{subject}" / "func" / f"sub-{subject}_task-rest_space-fsLR_seg-Gordon_stat-mean_timeseries.tsv"
        table.to_csv(file, sep="\t", index=False)
    assert guess(path) == "bids"
    assert read(path, "connectomes", atlas="Gordon").values == "correlation"


def test_a_parcel_without_coverage_is_an_empty_roi(tmp_path):
    path = derivatives(tmp_path / "xcp_d")
    file = next(path.glob("**/sub-P03*Gordon*relmat.tsv"))
    hurt = R[2].copy()
    hurt[4] = hurt[:, 4] = np.nan
    file.write_text(frame(hurt).to_csv(sep="\t", index_label="Node", na_rep="n/a"))
    cohort = read(path, atlas="Gordon")
    np.testing.assert_array_equal(cohort.connectomes[2][4], np.eye(6)[4])
    np.testing.assert_allclose(cohort.connectomes[2][0, 1], R[2][0, 1], atol=1e-6)
    assert "NaN throughout were set to zero: of 1 subject" in notes(cohort)


def test_sessions_and_runs(tmp_path):
    path = derivatives(tmp_path / "xcp_d")
    for file in sorted(path.glob("**/*Gordon*relmat.tsv")):
        for session in ("1", "2"):
            matrix = R[0] if session == "1" else R[1]
            text = frame(matrix).to_csv(sep="\t", index_label="Node")
            (file.parent / file.name.replace("_task", f"_ses-{session}_task")).write_text(text)
        file.unlink()
    cohort = read(path, atlas="Gordon")
    np.testing.assert_allclose(cohort.connectomes[3], R[0], atol=1e-6)
    assert "session: the first of each subject (8 of 8 subjects have several); --session NAME selects another one" in notes(
        cohort
    )
    assert "join" not in notes(cohort)
    np.testing.assert_allclose(read(path, atlas="Gordon", session="2").connectomes[3], R[1], atol=1e-6)
    file = next(path.glob("**/sub-P04*ses-1*Gordon*relmat.tsv"))
    for run in "12":
        (file.parent / file.name.replace("_space", f"_run-{run}_space")).write_text(file.read_text())
    file.unlink()
    with pytest.raises(InputError, match=r"run-2.*: subject sub-P04 has a second run, .*for example 'run-1'\."):
        read(path, atlas="Gordon")


# What the values are


@pytest.mark.parametrize(
    ("stack", "kind", "words", "expected"),
    [
        (R, "correlation", "since the diagonal is 1", R),
        (R * (1 - np.eye(ROIS)), "correlation", "no value of 8 matrices is beyond 1", R),
        (np.where(np.eye(ROIS, dtype=bool), np.nan, R), "correlation", "no value of 8 matrices is beyond 1", R),
        (Z, "fisher-z", "beyond 1 in 8 of 8 matrices", Z),
        (Z + 18.7 * np.eye(ROIS), "fisher-z", "beyond 1", Z),
        (np.where(np.eye(ROIS, dtype=bool), np.inf, 0.4 * Z), "fisher-z", "with a large diagonal", 0.4 * Z),
        (COV, "covariance", "the diagonal is positive", COV),
        (R * 60 / 59, "covariance", "the diagonal is positive", R * 60 / 59),  # of z-scored series, divided by n - 1
    ],
)
def test_what_matrices_hold_is_told_from_range_and_diagonal(tmp_path, stack, kind, words, expected):
    cohort = read(own(tmp_path / "lab", stack))
    assert_connectomes(cohort, expected, kind)
    assert words in notes(cohort)


def test_all_files_decide(tmp_path):
    """One of eight matrices with a value beyond 1 shows that all are Fisher z."""
    weak = np.where(np.eye(ROIS, dtype=bool), 0, 0.3 * R)
    weak[7, 0, 1] = weak[7, 1, 0] = 1.4
    cohort = read(own(tmp_path / "lab", weak))
    assert_connectomes(cohort, weak, "fisher-z")
    assert "beyond 1 in 1 of 8 matrices" in notes(cohort)


def test_values_that_are_given(tmp_path):
    weak = np.where(np.eye(ROIS, dtype=bool), 0, 0.3 * R)
    path = own(tmp_path / "lab", weak)
    assert read(path).values == "correlation"
    assert_connectomes(read(path, values="fisher-z"), weak, "fisher-z")
    assert "Fisher z, as given" in notes(read(path, values="fisher-z"))
    assert_connectomes(read(path, values="partial-correlation"), weak + np.eye(ROIS), "partial-correlation")
    with pytest.raises(InputError, match=r"option values: 'z' is not one of correlation, fisher-z"):
        read(path, values="z")


def test_files_that_contradict_the_given_values_are_theirs_alone(tmp_path):
    mixed = np.where((np.arange(8) == 5)[:, None, None], R, Z)
    path = own(tmp_path / "lab", mixed)
    with pytest.raises(
        InputError, match=r"different kinds: that of .*P01\.npy \(subject P01\) .*fisher-z, .*P06\.npy \(subject P06\)"
    ):
        read(path, on_bad="exclude")
    with pytest.raises(
        InputError, match=r"P06\.npy: subject P06: by its range and diagonal it holds correlations, not Fisher z"
    ):
        read(path, values="fisher-z")
    cohort = read(path, values="fisher-z", on_bad="exclude")
    assert [one.subject for one in cohort.excluded] == ["P06"] and len(cohort) == 7
    cohort = read(path, values="correlation", on_bad="exclude")
    assert cohort.subjects.tolist() == ["P06"]


@settings(max_examples=200, deadline=None)
@given(
    arrays(np.float32, (5, 5), elements=st.floats(-3, 3, width=32)),
    st.sampled_from([0.0, 1.0, 18.7, np.inf, np.nan, None, 0.5]),
)
def test_the_quick_way_says_what_the_plain_way_says(values, diagonal):
    """Kinds, defects and triangles of a stack are those of `scans`, matrix by matrix."""
    matrix = values + values.T
    if diagonal is not None:
        np.fill_diagonal(matrix, diagonal)
    rois = [str(i + 1) for i in range(5)]
    with np.errstate(invalid="ignore"):
        stack = np.stack([matrix, np.eye(5, dtype=np.float32), matrix])
    found = matrices.of_stack(matrices.Path("a.npy"), stack)
    half = np.triu(matrix, 1).any() != np.tril(matrix, -1).any()
    if not half:
        assert found.kinds[0] == scans.possible_kinds(matrix) == found.kinds[2]
        assert (found.defects.get(2) is None) == (scans.symmetry_defect(matrix, rois) is None)
        np.testing.assert_array_equal(found.triangles[2], scans.packed(matrix, scans.FISHER_Z))
    alone = matrices.of_stack(matrices.Path("a.npy"), stack[:1])
    for one, other in zip(alone[:4], found[:4], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    assert (0 in alone.defects, list(alone.halves), list(alone.absent)) == (
        0 in found.defects,
        [i for i in found.halves if i == 0],
        [i for i in found.absent if i == 0],
    )


# Mended, and noted


@pytest.mark.parametrize("half", [np.triu, np.tril])
@pytest.mark.parametrize("offset", [0, 1])
def test_one_half_is_completed_and_noted(tmp_path, half, offset):
    stack = np.stack([half(one, offset if half is np.triu else -offset) for one in R])
    path = own(tmp_path / "lab", stack)
    cohort = read(path)
    assert_connectomes(cohort, R, "correlation")
    assert "completed: of 8 subjects the file holds one half" in notes(cohort)


def test_an_empty_roi_is_usable(tmp_path):
    stack = Z.copy()
    stack[2, 3] = stack[2, :, 3] = 0
    cohort = read(own(tmp_path / "lab", stack))
    assert_connectomes(cohort, stack, "fisher-z")


def test_rounding_is_no_asymmetry(tmp_path):
    rng = np.random.default_rng(0)
    stack = R + rng.uniform(-1e-6, 1e-6, R.shape) * (1 - np.eye(ROIS))
    cohort = read(own(tmp_path / "lab", stack))
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), (stack + stack.transpose(0, 2, 1)) / 2, atol=1e-7)


# Chunks, maps, threads, order


def test_chunks_and_maps_hold_the_same(tmp_path, monkeypatch):
    path = sites(tmp_path / "mdd")
    whole = read(path)
    monkeypatch.setattr(matrices, "CHUNK", 2 * ROIS**2)
    monkeypatch.setattr(matrices.arrays, "LARGEST", 500)  # stacks are larger and mapped
    stack = np.load(path / "north" / "FC_matrices.npy")
    stack[3, 0, 1] = 9
    parts = read(path)
    assert parts.hash == whole.hash
    np.save(path / "north" / "FC_matrices.npy", stack)
    with pytest.raises(InputError, match=r"FC_matrices\.npy: subject P04: the matrix is not symmetric: .* ROI 1 and ROI 2"):
        read(path)


def test_the_hash_is_that_of_arrays_in_memory(tmp_path):
    cohort = read(own(tmp_path / "lab"))
    table = cohort.phenotypes
    same = Cohort.from_connectomes(R, cohort.labels, SITES, phenotypes=table, subjects=SUBJECTS, name="lab")
    assert same.hash == cohort.hash
    saved = Cohort.load(cohort.save(tmp_path / "a.cohort"))
    assert saved.hash == cohort.hash and saved.notes == cohort.notes


# The command


def test_convert_writes_connectomes_of_series(tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    series = np.random.default_rng(0).normal(size=(8, 50, ROIS))
    path = own(tmp_path / "lab", series)
    code, out, _ = typed("convert", path, "a.cohort", "--connectomes")
    assert code == 0 and "connectomes (fisher-z)" in out
    cohort = read("a.cohort")
    assert cohort.hash == read(path).to_connectomes().hash
    code, _, error = typed("convert", "a.cohort", "b.cohort", "--connectomes")
    assert code == 2 and "holds connectomes (fisher-z) already" in error and not (tmp_path / "b.cohort").exists()
    code, out, _ = typed("convert", own(tmp_path / "fc"), "c.cohort", "--values", "partial-correlation")
    assert code == 0 and "Values: partial correlations, as given." in out
    code, _, error = typed("convert", path, "d.cohort", "--values", "correlation")
    assert code == 2 and "kind folder has no option --values" in error


def test_a_toml_with_values_is_enough_to_be_guessed(tmp_path):
    path = tmp_path / "lab"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    np.save(path / "edges.npy", rows_of(R, "upper", False))
    (path / "dataset.toml").write_text('values = "correlation"\ntriangle = "upper"')
    assert guess(path) == "connectomes"
    assert_connectomes(read(path), R, "correlation")
    with pytest.raises(InputError, match=r"dataset\.toml, key values: it is about connectomes"):
        read(path, "folder")


def test_ids_inside_of_longer_words(tmp_path):
    """Ids 1 to 8, and names in which such digits occur elsewhere."""
    path = own(tmp_path / "lab", name="fc116_{}_run1.npy", table=TABLE.replace("P0", ""))
    for i in range(8):
        (path / f"fc116_P0{i + 1}_run1.npy").rename(path / f"fc116_{i + 1}_run1.npy")
    cohort = read(path)
    assert cohort.subjects.tolist() == list("12345678")
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), R, atol=1e-6)


def test_a_table_of_one_row_more_than_columns_is_no_header(tmp_path):
    path = tmp_path / "lab"
    path.mkdir()
    stack = correlations(count=37, rois=9, volumes=10)
    lines = ["participant_id\tsite\tlabel", *(f"S{i}\ta\t{i % 2}" for i in range(37))]
    (path / "participants.tsv").write_text("\n".join(lines))
    np.savetxt(path / "edges.csv", rows_of(stack, "lower", False), delimiter=",")
    cohort = read(path, "connectomes")
    np.testing.assert_allclose(np.stack(list(cohort.connectomes)), stack, atol=1e-6)


def test_two_files_a_subject_are_not_chosen_by_chance(tmp_path):
    path = own(tmp_path / "runs", name="{}_run-1.npy")
    for subject, matrix in zip(SUBJECTS, Z, strict=True):
        np.save(path / f"{subject}_run-2.npy", matrix)
    with pytest.raises(InputError, match=r"P01_run-2\.npy: subject P01 has a second file, .*P01_run-1\.npy; select one with"):
        read(path)
    assert_connectomes(read(path, only="run-1"), R, "correlation")
    assert_connectomes(read(path, only="run-2"), Z, "fisher-z")
    stray = own(tmp_path / "stray", name="{}_fc.npy")
    np.save(stray / "mean_of_P01.npy", R[0])
    assert_connectomes(read(stray), R, "correlation")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_as_many_subjects_as_rois_and_a_matrix_that_was_rounded(tmp_path, order):
    path = tmp_path / "a"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    stack = correlations(rois=8)
    np.save(path / "all.npy", (stack + np.triu(np.full((8, 8), 1e-7), 1)).transpose(order))
    assert_connectomes(read(path), stack, "correlation")


@pytest.mark.parametrize("ids", ["subjects", "ID"])
@pytest.mark.parametrize("dtype", ["U", "S"])
def test_ids_in_an_archive_count_more_than_the_order_of_the_table(tmp_path, ids, dtype):
    path = tmp_path / "a"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    order = np.random.default_rng(0).permutation(8)
    np.savez(path / "all.npz", fc=R[order], **{ids: np.array(SUBJECTS, dtype=dtype)[order]})
    assert_connectomes(read(path), R, "correlation")
    (path / "dataset.toml").write_text('variable = "fc"\n')
    assert_connectomes(read(path), R, "correlation")
    np.savez(path / "all.npz", fc=R, subjects=SUBJECTS[1:])
    with pytest.raises(InputError, match=r"8 matrices, but .* 7 subjects \(P02 to P08\)"):
        read(path, "connectomes")
    np.savez(path / "all.npz", fc=R, subjects=[one.lower() for one in SUBJECTS])
    with pytest.raises(InputError, match=r"first row is named 'p01', and no row is named by a listed subject"):
        read(path, "connectomes")


@pytest.mark.parametrize(("mask", "way"), [("triu", "lower"), ("tril", "upper")])
def test_halves_in_the_order_of_matlab(tmp_path, mask, way):
    path = tmp_path / "a"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    chosen = {"triu": np.triu, "tril": np.tril}[mask](np.ones((ROIS, ROIS), dtype=bool), 1 if mask == "triu" else -1)
    by_columns = [one.ravel(order="F")[chosen.ravel(order="F")] for one in R]  # A(mask) of MATLAB
    savemat(path / "all.mat", {"rows": np.array(by_columns)})
    cohort = read(path, "connectomes", triangle=way)
    assert_connectomes(cohort, R, "correlation")
    assert f"MATLAB's {mask}" in notes(cohort) or f"and {mask}" in notes(cohort)


def test_three_rois_with_their_diagonal_have_two_orders(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    (path / "names.txt").write_text("a\nb\nc\n")
    rows = np.array([4, 0.5, 1, 1.5, 0.5, 4]) + np.arange(8)[:, None] / 100  # positive definite in both
    np.save(path / "all.npy", rows)
    with pytest.raises(InputError, match=r"nothing tells whether they are the upper or the lower half of a matrix, of 3 ROIs"):
        read(path, "connectomes", atlas_labels=path / "names.txt")
    cohort = read(path, "connectomes", atlas_labels=path / "names.txt", triangle="lower")
    np.testing.assert_allclose(cohort.connectomes[0], [[4, 0.5, 1.5], [0.5, 1, 0.5], [1.5, 0.5, 4]])


def test_names_of_files_say_what_their_values_leave_open(tmp_path):
    partial = own(tmp_path / "partial", name="{}_stat-partialcorrelation.npy")
    assert_connectomes(read(partial), R, "partial-correlation")
    assert "partial correlations, by the names of the files" in notes(read(partial))
    assert_connectomes(read(partial, values="correlation"), R, "correlation")
    weak = own(tmp_path / "z", Z * 0.3, "ROICorrelation_FisherZ_{}.npy")  # no value beyond 1
    assert_connectomes(read(weak), Z * 0.3, "fisher-z")
    liar = own(tmp_path / "liar", R, "ROICorrelation_FisherZ_{}.npy")  # a diagonal of 1
    assert_connectomes(read(liar), R, "correlation")
    np.save(partial / "P01_stat-partialcorrelation.npy", COV[0])
    with pytest.raises(InputError, match="of different kinds"):
        read(partial)
