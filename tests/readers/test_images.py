"""CIFTI-2 series of XCP-D, DCAN and HCP: parcellated and dense ones, their time axis, sessions and runs, and damaged files."""

import contextlib
import gzip
import json
import tracemalloc
from pathlib import Path

import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest
from nibabel.cifti2 import BrainModelAxis, LabelAxis, ParcelsAxis, SeriesAxis

from m2lgdg.data.check import check_cohort
from m2lgdg.data.readers import guess, read
from m2lgdg.data.readers.images import load_image, need_whole
from m2lgdg.storage import InputError

VERTICES = {"CIFTI_STRUCTURE_CORTEX_LEFT": 12, "CIFTI_STRUCTURE_CORTEX_RIGHT": 12}
LEFT, RIGHT = VERTICES
THALAMUS = "CIFTI_STRUCTURE_THALAMUS_LEFT"
GRID, AFFINE = (4, 5, 6), np.diag([2.0, 2.0, 2.0, 1.0])
PARCELS = ("L_V1_ROI", "L_MT_ROI", "R_V1_ROI", "THALAMUS_LEFT", "L_lost_ROI")
PEOPLE = [("sub-01", "Oslo", "patient"), ("sub-02", "Rome", "control"), ("sub-03", "Rome", "patient")]
DCAN = "sub-{0}/ses-{1}/func/sub-{0}_ses-{1}_task-rest_bold_atlas-Gordon_desc-filtered_timeseries.ptseries.nii"
XCPD = "sub-{0}/func/sub-{0}_task-rest_space-fsLR_seg-Gordon_den-91k_stat-mean_timeseries.ptseries.nii"
HCP = "{0}/MNINonLinear/Results/rfMRI_{1}/rfMRI_{1}_Atlas_MSMAll_hp2000_clean.ptseries.nii"
DENSE = "sub-{0}/func/sub-{0}_task-rest_space-fsLR_den-91k_{1}bold.dtseries.nii"


def parcels_axis(names=PARCELS):
    none = np.empty((0, 3), dtype=int)
    vertices = {"L_V1_ROI": {LEFT: np.array([0, 1])}, "L_MT_ROI": {LEFT: np.array([5])}, "R_V1_ROI": {RIGHT: np.array([3])}}
    voxels = [np.array([[1, 1, 1]]) if name == "THALAMUS_LEFT" else none for name in names]
    return ParcelsAxis(list(names), voxels, [vertices.get(name, {}) for name in names], AFFINE, GRID, VERTICES)


def save(path, numbers, *axes, dtype=np.float32, change=None):
    """A CIFTI-2 file; `change` may alter its matrix of XML before it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Cifti2Image(np.asarray(numbers, dtype=dtype), header=nibabel.cifti2.Cifti2Header.from_axes(axes))
    if change is not None:
        change(image.header.matrix)
    image.nifti_header.set_data_dtype(dtype)
    image.to_filename(path)
    return path


def save_parcellated(path, numbers, names=PARCELS, step=0.8, unit="SECOND", **how):
    return save(path, numbers, SeriesAxis(0, step, len(numbers), unit), parcels_axis(names), **how)


def people(folder, rows=PEOPLE):
    folder.mkdir(parents=True, exist_ok=True)
    miniature.write_rows(folder / "participants.tsv", ("participant_id", "site", "diagnosis"), rows)
    return folder


def numbers(seed, volumes=14, columns=5):
    return np.random.default_rng(seed).normal(size=(volumes, columns)).astype(np.float32)


@pytest.fixture
def xcpd(tmp_path):
    folder = people(tmp_path / "xcpd")
    miniature.description(folder, "XCP-D")
    for i, step in enumerate((0.8, 2.0, 2.5), start=1):
        save_parcellated(folder / XCPD.format(f"0{i}"), numbers(i, 12 + i), step=step)
    return folder


def test_names_series_and_tr_come_from_the_file(xcpd):
    cohort = read(xcpd)
    assert guess(xcpd) == "bids"
    assert (cohort.rois, cohort.atlas, cohort.tr.tolist()) == (PARCELS, "Gordon", [0.8, 2.0, 2.5])
    assert cohort.labels.tolist() == [1, 0, 1]
    for i, series in enumerate(cohort.series, start=1):
        np.testing.assert_array_equal(series, numbers(i, 12 + i))


def test_columns_follow_the_parcel_names(xcpd):
    other = tuple(reversed(PARCELS))
    save_parcellated(xcpd / XCPD.format("03"), numbers(3)[:, ::-1], names=other)
    cohort = read(xcpd)
    assert cohort.rois == PARCELS
    np.testing.assert_array_equal(cohort.series[2], numbers(3))


def test_stored_integers_with_a_scale(xcpd):
    stored = np.arange(70, dtype=np.int16).reshape(14, 5)
    scaled = nibabel.Cifti2Image(stored, header=nibabel.cifti2.Cifti2Header.from_axes([SeriesAxis(0, 1, 14), parcels_axis()]))
    scaled.nifti_header.set_data_dtype(np.int16)
    scaled.nifti_header.set_slope_inter(0.5, 3)
    scaled.to_filename(xcpd / XCPD.format("01"))
    values = np.asarray(nibabel.load(xcpd / XCPD.format("01")).dataobj)
    np.testing.assert_array_equal(read(xcpd).series[0], values.astype(np.float32))


def test_a_parcel_without_coverage_is_flat_and_one_with_a_gap_is_bad(xcpd):
    series = numbers(2, 14)
    series[:, 4] = np.nan
    save_parcellated(xcpd / XCPD.format("02"), series)
    cohort = read(xcpd)
    assert not cohort.series[1][:, 4].any()
    series[3, 1] = np.nan
    save_parcellated(xcpd / XCPD.format("02"), series)
    with pytest.raises(InputError, match=r"sub-02: NaN at volume 4 of ROI L_MT_ROI"):
        read(xcpd)


@pytest.mark.parametrize(
    ("step", "exponent", "seconds"), [(0.72, 0, 0.72), (720, -3, 0.72), (1_500_000, -6, 1.5), (25, -1, 2.5)]
)
def test_units_of_the_time_axis(xcpd, step, exponent, seconds):
    def change(matrix):
        (time,) = [mim for mim in matrix if mim.number_of_series_points]
        time.series_step, time.series_exponent = step, exponent

    save_parcellated(xcpd / XCPD.format("01"), numbers(1), change=change)
    np.testing.assert_allclose(read(xcpd).tr[0], seconds)


def test_a_time_axis_in_milliseconds_that_says_seconds(xcpd):
    save_parcellated(xcpd / XCPD.format("01"), numbers(1), step=720.0)
    with pytest.raises(InputError, match=r"nii, time axis: a TR of 720 s .*milliseconds; give it in seconds \(0\.72\)"):
        read(xcpd)


def test_an_axis_that_is_not_time_leaves_the_tr_to_the_sidecar(xcpd):
    file = save_parcellated(xcpd / XCPD.format("01"), numbers(1), unit="HERTZ")
    assert np.isnan(read(xcpd).tr[0])
    Path(str(file).replace(".ptseries.nii", ".json")).write_text(json.dumps({"RepetitionTime": 1.1}))
    assert read(xcpd).tr[0] == 1.1


def test_a_table_of_the_same_run_is_read_instead(xcpd):
    table = xcpd / "sub-02/func/sub-02_task-rest_space-fsLR_seg-Gordon_stat-mean_timeseries.tsv"
    pd.DataFrame(numbers(7), columns=PARCELS).to_csv(table, sep="\t", index=False)
    cohort = read(xcpd)
    np.testing.assert_allclose(cohort.series[1], numbers(7), rtol=1e-6)
    np.testing.assert_array_equal(cohort.series[0], numbers(1, 13))


@pytest.fixture
def dcan(tmp_path):
    """sub-01 has three sessions, sub-03 only the second; their names do not sort as text."""
    folder = people(tmp_path / "dcan")
    for subject, session in (("01", "2"), ("01", "10"), ("01", "1"), ("02", "1"), ("03", "2")):
        save_parcellated(folder / DCAN.format(subject, session), numbers(int(subject + session)))
    return folder


def notes_on(cohort, start):
    return [note for note in map(str, cohort.notes) if note.startswith(start)]


def test_the_first_session_is_read_and_noted(dcan):
    cohort = read(dcan)
    for series, seed in zip(cohort.series, (11, 21, 32), strict=True):
        np.testing.assert_array_equal(series, numbers(seed))
    (note,) = notes_on(cohort, "session: ")
    assert note == (
        "session: the first of each subject (1 of 3 subjects have several); --session NAME selects another one, "
        "--join-runs joins them"
    )


@pytest.mark.parametrize("names", [("1", "2"), ("V01", "V02"), ("NYU1baseline", "OILH2followup")])
def test_who_has_only_a_later_session_is_named(tmp_path, names):
    folder = people(tmp_path / "dcan")
    for subject, session in (("01", names[0]), ("01", names[1]), ("02", names[0]), ("03", names[1])):
        save_parcellated(folder / DCAN.format(subject, session), numbers(int(subject)))
    cohort = read(folder)
    (found,) = [note for note in cohort.notes if getattr(note, "kind", "") == "later session"]
    assert found.subjects == ("03",) and found.severity == "finding"
    assert any(
        "1 subject has no first session, so that a later one was read" in one.text for one in check_cohort(cohort).findings
    )
    assert not [note for note in read(folder, session=names[1]).notes if getattr(note, "kind", "") == "later session"]


def test_a_named_session(dcan):
    cohort = read(dcan, session="ses-2")
    assert cohort.subjects.tolist() == ["sub-01", "sub-03"]
    np.testing.assert_array_equal(cohort.series[0], numbers(12))
    assert [each.subject for each in cohort.excluded] == ["sub-02"]
    assert notes_on(cohort, "session: ") == ["session: 2 (1 of 3 subjects have several)"]
    with pytest.raises(InputError, match=r"dcan has no run of session 3; its sessions are 1, 2, 10\."):
        read(dcan, session="3")


def test_sessions_joined(dcan):
    cohort = read(dcan, join_runs=True)
    parts = [numbers(seed).astype(np.float64) for seed in (11, 12, 110)]
    expected = np.concatenate([(part - part.mean(axis=0)) / part.std(axis=0) for part in parts])
    np.testing.assert_allclose(cohort.series[0], expected, atol=1e-5)
    assert notes_on(cohort, "session: ") == ["session: all, joined (1 of 3 subjects have several)"]
    assert len(read(dcan, join_runs=True, session="first").series[0]) == 14


def test_names_of_the_human_connectome_project(tmp_path):
    folder = people(tmp_path / "hcp", [("100307", "HCP", "n/a"), ("100408", "HCP", "n/a")])
    for i, subject in enumerate(("100307", "100408")):
        for j, run in enumerate(("REST1_LR", "REST1_RL", "REST2_LR")):
            save_parcellated(folder / HCP.format(subject, run), numbers(10 * i + j), step=0.72)
    assert guess(folder) == "bids"
    with pytest.raises(InputError, match=r"subject sub-100307 has a second run, rfMRI_REST1_LR"):
        read(folder)
    cohort = read(folder, only="REST1_RL", atlas="glasser360")
    assert (cohort.atlas, cohort.subjects.tolist(), cohort.tr.tolist()) == ("glasser360", ["100307", "100408"], [0.72, 0.72])
    np.testing.assert_array_equal(cohort.series[1], numbers(11))
    assert len(read(folder, join_runs=True, session="REST1").series[0]) == 28


def test_several_atlases_of_cifti_files(xcpd):
    for i in (1, 2, 3):
        names = ("a", "b")
        save_parcellated(xcpd / XCPD.format(f"0{i}").replace("Gordon", "Tian"), numbers(i + 50, 12 + i, 2), names=names)
    with pytest.raises(InputError, match=r"has several atlases; choose one of Gordon, Tian\."):
        read(xcpd)
    cohort = read(xcpd, atlas=("Tian", "Gordon"))
    np.testing.assert_array_equal(cohort.parcellations["Gordon"].series[2], numbers(3, 15))
    np.testing.assert_array_equal(cohort.series[2], numbers(53, 15, 2))


# Dense series


def models(left=range(12), right=range(12), voxels=((1, 1, 1), (2, 1, 1)), vertices=12, grid=GRID):
    axis = BrainModelAxis.from_surface(np.array(list(left)), vertices, LEFT)
    axis += BrainModelAxis.from_surface(np.array(list(right)), 12, RIGHT)
    if len(voxels):
        mask = np.zeros(grid, dtype=bool)
        mask[tuple(np.array(voxels).T)] = True
        axis += BrainModelAxis.from_mask(mask, name=THALAMUS, affine=AFFINE)
    return axis


NAMES = {0: ("???", (0, 0, 0, 0)), 4: ("L_V1", (1, 0, 0, 1)), 7: ("R_V1", (0, 1, 0, 1)), 2: ("Thalamus", (0, 0, 1, 1))}
NAMES |= {9: ("L_pole", (1, 1, 0, 1)), 30: ("unused", (1, 1, 1, 1))}


def save_labels(path, axis=None, table=NAMES, change=()):
    axis = models() if axis is None else axis
    keys = np.zeros(len(axis))
    keys[[0, 1, 2, 12 + 3, 12 + 4]] = [4, 4, 4, 7, 7]  # positions on the whole surfaces
    keys[[10, 11]] = 9
    keys[-2:] = 2
    for position, key in change:
        keys[position] = key
    return save(path, keys[None], LabelAxis(["parcels"], [table]), axis)


@pytest.fixture
def dense(tmp_path):
    """Dense series without the medial wall (left vertices 8 to 11), a parcellation of whole surfaces."""
    folder = people(tmp_path / "dense")
    axis = models(left=[5, 0, 2, 1, 3], right=[3, 0, 4])
    series = {}
    for i in (1, 2, 3):
        series[i] = numbers(i, 20, len(axis)) + 100
        save(folder / DENSE.format(f"0{i}", "desc-denoised_"), series[i], SeriesAxis(0, 2.0, 20), axis)
    return folder, save_labels(tmp_path / "atlas.dlabel.nii"), series


def test_means_of_the_parcels(dense):
    folder, labels, series = dense
    cohort = read(folder, atlas_image=labels)
    assert cohort.rois == ("Thalamus", "L_V1", "R_V1", "L_pole")  # in the order of their labels
    assert cohort.atlas == "atlas"
    assert cohort.tr.tolist() == [2.0] * 3
    for i, one in enumerate(cohort.series, start=1):
        expected = [series[i][:, [8, 9]], series[i][:, [1, 2, 3]], series[i][:, [5, 7]]]
        np.testing.assert_allclose(one[:, :3], np.stack([part.mean(axis=1) for part in expected], axis=1), rtol=1e-6)
        assert not one[:, 3].any()  # the series has no grayordinate of this parcel


def test_grayordinates_without_coverage_are_left_out(dense):
    folder, labels, series = dense
    axis = models(left=[5, 0, 2, 1, 3], right=[3, 0, 4])
    partly = series[1].copy()
    partly[:, 1], partly[:, [5, 7]] = 0, np.nan
    save(folder / DENSE.format("01", "desc-denoised_"), partly, SeriesAxis(0, 2.0, 20), axis)
    one = read(folder, atlas_image=labels).series[0]
    np.testing.assert_allclose(one[:, 1], partly[:, [2, 3]].mean(axis=1), rtol=1e-6)
    assert not one[:, 2].any()
    partly[4, 2] = np.nan
    save(folder / DENSE.format("01", "desc-denoised_"), partly, SeriesAxis(0, 2.0, 20), axis)
    with pytest.raises(InputError, match=r"sub-01: NaN at volume 5 of ROI L_V1"):
        read(folder, atlas_image=labels)


def test_a_dense_series_without_a_parcellation(dense):
    folder, _, _ = dense
    with pytest.raises(InputError, match=r"sub-01.*\.dtseries\.nii is a dense series; give a parcellation .*--atlas-image"):
        read(folder)


def test_a_parcellation_of_other_surfaces(dense, tmp_path):
    folder, _, _ = dense
    other = BrainModelAxis.from_surface(np.arange(30), 30, LEFT)
    keys = np.zeros((1, 30))
    keys[0, :3] = 4
    labels = save(tmp_path / "other.dlabel.nii", keys, LabelAxis(["parcels"], [NAMES]), other)
    with pytest.raises(InputError, match=r"12 vertices in CIFTI_STRUCTURE_CORTEX_LEFT, but other\.dlabel\.nii has 30; give a"):
        read(folder, atlas_image=labels)
    volume = save_labels(tmp_path / "grid.dlabel.nii", models(grid=(5, 5, 6)))
    with pytest.raises(InputError, match=r"its voxels are not on the grid of grid\.dlabel\.nii\."):
        read(folder, atlas_image=volume)
    nothing = save_labels(tmp_path / "none.dlabel.nii", table={0: NAMES[0]})
    with pytest.raises(InputError, match=r"none\.dlabel\.nii has no name for label 2\."):
        read(folder, atlas_image=nothing)


def test_a_parcellation_that_is_no_parcellation(dense, xcpd, tmp_path):
    folder, _, _ = dense
    wrong = tmp_path / "wrong.dlabel.nii"
    wrong.write_bytes((folder / DENSE.format("01", "desc-denoised_")).read_bytes())
    with pytest.raises(InputError, match=r"wrong\.dlabel\.nii is not a parcellation \(label, grayordinate\)\."):
        read(folder, atlas_image=wrong)
    with pytest.raises(InputError, match=r"absent\.dlabel\.nii does not exist\."):
        read(folder, atlas_image=tmp_path / "absent.dlabel.nii")
    (xcpd / XCPD.format("01")).write_bytes((folder / DENSE.format("01", "desc-denoised_")).read_bytes())
    with pytest.raises(InputError, match=r"ptseries\.nii is not a parcellated series \(time, parcel\)\."):
        read(xcpd)


# Bad files


def test_another_parcellation_than_the_rest(xcpd):
    save_parcellated(xcpd / XCPD.format("02"), numbers(2, 14, 3), names=PARCELS[:3])
    with pytest.raises(InputError, match=r"ptseries\.nii: subject sub-02: 3 ROI columns, but the other subjects have 5"):
        read(xcpd)
    other = (*PARCELS[:4], "L_other_ROI")
    save_parcellated(xcpd / XCPD.format("02"), numbers(2, 14), names=other)
    with pytest.raises(InputError, match=r"subject sub-02: no column for ROI L_lost_ROI, which the other subjects have\."):
        read(xcpd)
    assert read(xcpd, on_bad="exclude").subjects.tolist() == ["sub-01", "sub-03"]


def test_a_truncated_file(xcpd):
    """Wherever a download broke off, one sentence names the file, and the others can be read without it."""
    file = xcpd / XCPD.format("02")
    whole = file.read_bytes()
    for length in (0, 540, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"sub-02_\S*ptseries\.nii is (not a readable CIFTI-2|damaged)") as error:
            read(xcpd)
        assert "\n" not in str(error.value)
        assert read(xcpd, on_bad="exclude").subjects.tolist() == ["sub-01", "sub-03"]


def test_a_file_that_declares_too_much(xcpd, monkeypatch):
    monkeypatch.setattr("m2lgdg.data.readers.images.LARGEST_VOXELS", 100)
    with pytest.raises(InputError, match=r"its header declares 260 bytes of numbers, more than the limit of 100\."):
        read(xcpd)


def test_vertices_outside_of_their_surface(dense, tmp_path):
    folder, labels, _ = dense
    text = labels.read_bytes().replace(b'SurfaceNumberOfVertices="12"', b'SurfaceNumberOfVertices="02"')
    (tmp_path / "few.dlabel.nii").write_bytes(text)
    with pytest.raises(InputError, match=r"few\.dlabel\.nii is (damaged: some of its vertices|not a readable)"):
        read(folder, atlas_image=tmp_path / "few.dlabel.nii")


def test_a_table_that_lists_nobody_of_the_folder(xcpd):
    miniature.write_rows(xcpd / "participants.tsv", ("participant_id", "site", "diagnosis"), [("sub-77", "Oslo", "patient")])
    for how in ("stop", "exclude"):
        with pytest.raises(
            InputError, match=r"participants\.tsv lists none of the 3 subjects who have a series, such as sub-01"
        ):
            read(xcpd, on_bad=how)


MODEST = 8 << 20  # bytes


@contextlib.contextmanager
def refused(match):
    """The block ends in this sentence, with little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=match):
            yield
        assert tracemalloc.get_traced_memory()[1] < MODEST
    finally:
        tracemalloc.stop()


def nifti(path, shape=(2, 3, 4, 5), extra=b"", **fields):
    image = nibabel.Nifti1Image(np.zeros((2, 3, 4, 5), np.float32), np.eye(4))
    content = bytearray(image.to_bytes())
    header = nibabel.Nifti1Header(bytes(content[:348]))
    header.set_data_shape(shape)
    for name, value in fields.items():
        header[name] = value
    content[:348] = header.binaryblock
    path.write_bytes(gzip.compress(bytes(content) + extra))
    return path


def test_a_header_that_declares_too_much(tmp_path):
    path = nifti(tmp_path / "a.nii.gz", shape=(2000, 2000, 2000, 300))
    with refused(r"declares 9600000000000 bytes of voxels .*more than the limit of 8589934592"):
        load_image(path)


def test_more_bytes_than_declared(tmp_path):
    """They are counted in chunks, and no further than the first that is too many."""
    path = nifti(tmp_path / "a.nii.gz", extra=bytes(20 << 20))
    with refused("has more than the 832 bytes that its header declares"):
        need_whole(path, load_image(path))
