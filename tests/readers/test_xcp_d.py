"""Folders with the very names that XCP-D 26 writes: spaces, densities, runs joined by it, tables and images of atlases."""

import json

import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest

import m2lgdg
from m2lgdg.data.atlases import read_centroids
from m2lgdg.data.atlases.bids_atlas import names_by_index, tables
from m2lgdg.storage import InputError

ATLAS = "4S156Parcels"
NAMES = ("LH_Vis_1", "LH_Vis_2", "RH_Default_1", "LH-HIP")
CORNERS = {1: (0, 0, 0), 2: (4, 0, 0), 3: (0, 4, 2), 7: (4, 4, 2)}  # of the 2 x 2 x 2 voxels of each region
SPACE = f"space-MNI152NLin6Asym_atlas-{ATLAS}"


def write_series(folder, subject, runs, *, header=NAMES, entity=f"atlas-{ATLAS}", session="", seed=0):
    """A subject with a file for each run and, of several, the file of all; the series by the entity of the run."""
    rng = np.random.default_rng([seed, *subject.encode()])
    series = {run: rng.standard_normal((12, len(header))).astype(np.float32) for run in runs}
    if len(runs) > 1:
        series[""] = np.concatenate(list(series.values()))
    place = folder / f"sub-{subject}" / session.rstrip("_") / "func"
    place.mkdir(parents=True, exist_ok=True)
    for run, numbers in series.items():
        scan = f"sub-{subject}_{session}task-rest_{f'run-{run}_' if run else ''}"
        stem = f"{scan}space-MNI152NLin6Asym_{entity}"
        table = pd.DataFrame(numbers, columns=list(header))
        table.to_csv(place / f"{stem}_stat-mean_timeseries.tsv", sep="\t", index=False)
        (place / f"{stem}_stat-mean_timeseries.json").write_text(json.dumps({"RepetitionTime": 2.0}))
        table.iloc[:1].to_csv(place / f"{stem}_stat-coverage_bold.tsv", sep="\t", index=False)
        table.iloc[:1].to_csv(place / f"{stem}_stat-alff_bold.tsv", sep="\t", index=False)
        relmat = table.corr().rename_axis("Node")
        relmat.to_csv(place / f"{stem}_stat-pearsoncorrelation_relmat.tsv", sep="\t")
        relmat.to_csv(place / f"{stem}_stat-pearsoncorrelation_desc-8volumes_relmat.tsv", sep="\t")
        (place / f"{scan}motion.tsv").write_text(f"framewise_displacement\nn/a\n{0.1 * (1 + len(run))}\n")
        (place / f"{scan}outliers.tsv").write_text("framewise_displacement\n0\n")
    return series


def write_atlas(folder, *, template="MNI152NLin6Asym", image=True, ending="", columns=()):
    place = folder / "sourcedata" / "atlases" / f"tpl-{template}"
    place.mkdir(parents=True, exist_ok=True)
    stem = place / f"tpl-{template}_atlas-{ATLAS}{ending}_dseg"
    rows = pd.DataFrame({"index": list(CORNERS), "name": NAMES, "network_label": ["Vis", "Vis", "Default", ""]})
    rows.assign(**dict(columns)).sample(frac=1, random_state=1).to_csv(f"{stem}.tsv", sep="\t", index=False)
    if image:
        volume = np.zeros((8, 8, 6), dtype=np.int16)
        for index, (x, y, z) in CORNERS.items():
            volume[x : x + 2, y : y + 2, z : z + 2] = index
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([2.0, 2, 2, 1])), f"{stem}.nii.gz")
    (folder / "sourcedata" / "atlases" / f"atlas-{ATLAS}_description.json").write_text("{}")
    return stem


@pytest.fixture
def folder(tmp_path):
    miniature.description(tmp_path / "xcp_d", "XCP-D")
    rows = [("sub-01", "A", "patient"), ("sub-02", "B", "control")]
    miniature.write_rows(tmp_path / "xcp_d" / "participants.tsv", ("participant_id", "site", "diagnosis"), rows)
    return tmp_path / "xcp_d"


def test_runs_and_the_file_of_all_runs(folder):
    one = write_series(folder, "01", ["01", "02"])
    other = write_series(folder, "02", [""])  # a single run has no entity
    with pytest.raises(InputError, match=r"has a second run.*'run-' for the file without it, or join them"):
        m2lgdg.read(folder)
    whole = m2lgdg.read(folder, only="run-")
    np.testing.assert_array_equal(whole.series[0], one[""])
    np.testing.assert_array_equal(whole.series[1], other[""])
    assert whole.rois == NAMES and whole.atlas == ATLAS and whole.tr.tolist() == [2, 2]
    np.testing.assert_allclose(whole.phenotypes["mean_fd"], 0.1)
    first = m2lgdg.read(folder, only="run-01", on_bad="exclude")
    np.testing.assert_array_equal(first.series[0], one["01"])
    assert first.subjects.tolist() == ["sub-01"]
    joined = m2lgdg.read(folder, join_runs=True)
    assert [len(each) for each in joined.series] == [24, 12]
    np.testing.assert_allclose(joined.phenotypes["mean_fd"], [0.3, 0.1])  # of the two runs


def test_connectomes_of_all_volumes_and_of_some(folder):
    one = write_series(folder, "01", ["01", "02"])
    write_series(folder, "02", [""])
    with pytest.raises(InputError, match=r"one run in two forms, which differ in desc"):
        m2lgdg.read(folder, kind="connectomes", only="run-")
    cohort = m2lgdg.read(folder, kind="connectomes", only="run- desc-")
    np.testing.assert_allclose(cohort.connectomes[0], np.corrcoef(one[""].T), atol=1e-5)


@pytest.mark.parametrize("session", ["", "ses-1mo_"])
def test_scales_of_an_atlas_are_atlases(folder, session):
    small, large = NAMES[:3], NAMES
    for subject in ("01", "02"):
        for scale, names in ((100, small), (400, large)):
            write_series(folder, subject, [""], header=names, entity=f"seg-Schaefer_scale-{scale}", session=session, seed=scale)
    cohort = m2lgdg.read(folder, atlas=("Schaefer-400", "Schaefer-100"))
    assert cohort.atlases == ("Schaefer-400", "Schaefer-100") and cohort.rois == large
    with pytest.raises(InputError, match=r"Schaefer-100"):
        m2lgdg.read(folder, atlas="Schaefer")


def test_numbers_get_the_names_of_the_folder(folder):
    for subject in ("01", "02"):
        write_series(folder, subject, [""], header=tuple(map(str, CORNERS)))
    assert m2lgdg.read(folder).rois == ("1", "2", "3", "7")
    write_atlas(folder)
    assert m2lgdg.read(folder).rois == NAMES
    stem = write_atlas(folder, template="fsLR", image=False, ending="_den-91k")
    assert m2lgdg.read(folder).rois == NAMES
    assert [file.name for file in tables(folder, ATLAS)][-1] == f"{stem.name}.tsv"  # the volume comes first


def test_numbers_stay_if_the_table_lacks_one(folder):
    for subject in ("01", "02"):
        write_series(folder, subject, [""], header=("1", "2", "3", "8"))
    write_atlas(folder)
    assert m2lgdg.read(folder).rois == ("1", "2", "3", "8")


@pytest.mark.parametrize("rois", [NAMES, ("7", "1")])
def test_coordinates_of_the_image(folder, rois):
    write_atlas(folder)
    write_atlas(folder, template="fsLR", image=False, ending="_den-91k")
    found = read_centroids(folder, rois, ATLAS).set_index("name")
    centres = {str(index): 2 * (np.array(corner) + 0.5) for index, corner in CORNERS.items()}
    centres |= dict(zip(NAMES, centres.values(), strict=True))
    for roi in rois:
        np.testing.assert_allclose(found.loc[roi, ["x", "y", "z"]].astype(float), centres[roi], atol=1.01)  # of a voxel
    assert found["code"].tolist() == (["1", "2", "3", "7"] if len(rois) == 4 else ["7", "1"])


def test_coordinates_of_the_table(folder):
    write_atlas(folder, image=False, columns={"x": [1.5, 2, 3, 4], "y": [0, 0, 0, 1], "z": [9, 8, 7, 6]})
    found = read_centroids(folder / "sourcedata" / "atlases", NAMES, ATLAS.lower())
    assert found[["x", "y", "z"]].to_numpy().tolist() == [[1.5, 0, 9], [2, 0, 8], [3, 0, 7], [4, 1, 6]]


def test_what_the_folder_cannot_tell(folder):
    with pytest.raises(InputError, match="has no table of atlas Gordon"):
        read_centroids(folder, NAMES, "Gordon")
    stem = write_atlas(folder, template="fsLR", image=False, ending="_den-91k")
    with pytest.raises(InputError, match=r"has no columns x, y and z, and no _dseg"):
        read_centroids(folder, NAMES, ATLAS)
    write_atlas(folder)
    with pytest.raises(InputError, match="no coordinates for 1 ROIs, the first is RH_Vis_9"):
        read_centroids(folder, (*NAMES, "RH_Vis_9"), ATLAS)
    table = stem.with_suffix(".tsv")
    for text, problem in (
        ("index\tcolour\n1\tred\n", "has no column name"),
        ("index\tname\n1\ta\n1\tb\n", "listed twice"),
        ("index\tname\n1\ta\n2\ta\n", "listed twice"),
        ("index\tname\nx\ta\n", "index 'x' is not a whole number"),
    ):
        table.write_text(text)
        with pytest.raises(InputError, match=problem):
            names_by_index(table)


def test_names_of_an_atlas_image_are_beside_it(tmp_path):
    made = miniature.nifti(tmp_path)
    image = tmp_path / "tpl-MNI152NLin6Asym_atlas-Mine_dseg.nii.gz"
    image.write_bytes(made.atlas.read_bytes())
    numbered = m2lgdg.read(made.folder, atlas_image=image)
    image.with_name(image.name.replace(".nii.gz", ".tsv")).write_bytes(made.labels.read_bytes())
    named = m2lgdg.read(made.folder, atlas_image=image)
    assert numbered.atlas == named.atlas == "Mine"
    assert named.rois == m2lgdg.read(made.folder, atlas_image=made.atlas, atlas_labels=made.labels).rois != numbered.rois
