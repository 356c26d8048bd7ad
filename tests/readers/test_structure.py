"""Tables of brain structure, in the layout that each tool writes: what they are, whose they are, and what is wrong."""

import json
import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m2lgdg
from m2lgdg import InputError
from m2lgdg.data.atlases.table_columns import head_column
from m2lgdg.data.readers.structure import read_stats, read_table, with_files
from m2lgdg.data.table_check import table_findings

SUBJECTS = ["Caltech_0051456", "NYU_0050952", "NYU_0050953"]
LH = {
    "lh_bankssts_thickness": [2.5, 2.4, 2.3],
    "lh_insula_thickness": [3.1, 3.2, 3.3],
    "lh_MeanThickness_thickness": [2.5, 2.6, 2.4],
}
SIZES = {"BrainSegVolNotVent": [1.1e6, 1.2e6, 1.3e6], "eTIV": [1.5e6, 1.6e6, 1.4e6]}
ASEG = {
    "Left-Lateral-Ventricle": [7000, 8000, 6500],
    "Left-Hippocampus": [4100, 4000, 3900],
    "Brain-Stem": [20000, 21000, 19000],
}
ASEG |= {"EstimatedTotalIntraCranialVol": [1.5e6, 1.6e6, 1.4e6]}


def write(path, first, columns, ids=SUBJECTS, separator="\t"):
    """A table with the ids in its first column."""
    lines = [[first, *columns], *([one, *(values[i] for values in columns.values())] for i, one in enumerate(ids))]
    path.write_text("".join(separator.join(map(str, line)) + "\n" for line in lines))
    return path


def right(columns):
    return {name.replace("lh_", "rh_"): [value + 0.25 for value in values] for name, values in columns.items()}


@pytest.fixture(scope="module")
def cohort():
    series = np.random.default_rng(0).normal(size=(3, 20, 4))
    return m2lgdg.Cohort.from_arrays(series, [1, 0, 1], ["Caltech", "NYU", "NYU"], subjects=SUBJECTS, name="abide")


def refused(call, *given):
    with pytest.raises(InputError) as caught:
        call(*given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize("separator", ["\t", ",", ";", " "])
@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.txt", "lh.aparc_table"])
def test_aparcstats2table(tmp_path, separator, name):
    read = read_table(write(tmp_path / name, "lh.aparc.thickness", LH | SIZES, separator=separator))
    assert (read.kind, read.measure, read.atlas) == ("freesurfer", "thickness", "desikan-killiany")
    assert read.table.index.tolist() == SUBJECTS and read.table.columns.tolist() == [*LH, *SIZES]
    np.testing.assert_array_equal(read.table, np.transpose(list((LH | SIZES).values())))
    assert read.whole == ["lh_MeanThickness_thickness", "BrainSegVolNotVent", "eTIV"] and head_column(read.table) == "eTIV"


@pytest.mark.parametrize(
    ("first", "measure", "atlas"),
    [
        ("rh.aparc.area", "area", "desikan-killiany"),
        ("lh.aparc.a2009s.volume", "volume", "destrieux"),
        ("lh.aparc.DKTatlas.thickness", "thickness", "aparc.DKTatlas"),
        ("Measure:volume", "volume", "aseg"),
        ("Measure:mean", "mean", "aseg"),
    ],
)
def test_the_first_cell_tells_what_a_table_of_freesurfer_is(tmp_path, first, measure, atlas):
    read = read_table(write(tmp_path / "some.tsv", first, ASEG))
    assert (read.kind, read.measure, read.atlas) == ("freesurfer", measure, atlas)
    assert head_column(read.table) == "EstimatedTotalIntraCranialVol" and read.whole == ["EstimatedTotalIntraCranialVol"]
    plain = read_table(
        write(tmp_path / "lh.aparc_table_thickness.tsv", "SUB_ID", ASEG)
    )  # the name of the file alone says nothing
    assert (plain.kind, plain.measure, plain.what) == ("table", "", "numbers")
    assert read_table(write(tmp_path / "wm.tsv", "Measure:volume", {"wm-lh-insula": [1, 2, 3]})).atlas == "wmparc"


def test_a_transposed_table_and_names_of_freesurfer_5(tmp_path):
    turned = {subject: [values[i] for values in ASEG.values()] for i, subject in enumerate(SUBJECTS)}
    read = read_table(write(tmp_path / "t.tsv", "Measure:volume", turned, ids=list(ASEG)))
    pd.testing.assert_frame_equal(read.table, read_table(write(tmp_path / "a.tsv", "Measure:volume", ASEG)).table)
    old = read_table(write(tmp_path / "o.tsv", "lh.aparc.a2009s.area", {"lh_G&S_frontomargin_area": [900, 800, 700]}))
    assert old.table.columns.tolist() == ["lh_G_and_S_frontomargin_area"]
    twice = write(tmp_path / "two.tsv", "Measure:volume", turned, ids=["Left-Caudate", "Left-Caudate", "Brain-Stem", "CSF"])
    assert refused(read_table, twice) == f"{twice}: region Left-Caudate is listed twice."


def test_both_hemispheres_are_one_table(tmp_path, cohort):
    left = write(tmp_path / "lh.tsv", "lh.aparc.thickness", LH | SIZES)
    other_order = {name: values[::-1] for name, values in (right(LH) | SIZES).items()}
    other = write(tmp_path / "rh.csv", "rh.aparc.thickness", other_order, ids=SUBJECTS[::-1], separator=",")
    table = with_files(cohort, {"thickness": [left, other]}).tables["thickness"]
    assert table.columns.tolist() == [*LH, *SIZES, *right(LH)]
    assert table.loc["NYU_0050952", "rh_insula_thickness"] == 3.45 and table.loc["NYU_0050953", "eTIV"] == 1.4e6
    assert with_files(cohort, {"thickness": tmp_path}).tables["thickness"].columns.tolist() == table.columns.tolist()
    part = write(tmp_path / "rh.csv", "rh.aparc.thickness", right(LH) | SIZES, ids=[*SUBJECTS[:2], "NYU_1"], separator=",")
    table = with_files(cohort, {"thickness": [left, part]}).tables["thickness"]
    assert table.loc["NYU_0050953"].isna().tolist() == [False] * 5 + [True] * 3


def test_files_of_sites_are_stacked(tmp_path, cohort):
    one = write(tmp_path / "a.tsv", "lh.aparc.thickness", {name: values[:1] for name, values in LH.items()}, ids=SUBJECTS[:1])
    two = write(tmp_path / "b.tsv", "lh.aparc.thickness", {name: values[1:] for name, values in LH.items()}, ids=SUBJECTS[1:])
    three = write(tmp_path / "c.tsv", "rh.aparc.thickness", right(LH))
    table = with_files(cohort, {"thickness": [one, two, three]}).tables["thickness"]
    np.testing.assert_array_equal(table, np.transpose([*LH.values(), *right(LH).values()]))


def test_files_of_two_versions_are_stacked(tmp_path, cohort):
    names = {"Left-Thalamus-Proper": "Left-Thalamus", "IntraCranialVol": "EstimatedTotalIntraCranialVol"}
    six = {"Left-Caudate": [1, 2, 3], "Left-Thalamus-Proper": [4, 5, 6], "IntraCranialVol": [7, 8, 9]}
    one = write(tmp_path / "a.tsv", "Measure:volume", {name: values[:1] for name, values in six.items()}, ids=SUBJECTS[:1])
    seven = {names.get(name, name): values[1:] for name, values in six.items()}
    two = write(tmp_path / "b.tsv", "Measure:volume", seven, ids=SUBJECTS[1:])
    table = with_files(cohort, {"aseg": [one, two]}).tables["aseg"]
    assert list(table) == list(six)
    np.testing.assert_array_equal(table, np.transpose(list(six.values())))


def test_files_that_do_not_fit_together(tmp_path, cohort):
    left = write(tmp_path / "lh.tsv", "lh.aparc.thickness", LH | SIZES)
    area = write(tmp_path / "area.tsv", "rh.aparc.area", {"rh_insula_area": [1, 2, 3]})
    swapped = write(tmp_path / "rh.tsv", "rh.aparc.thickness", right(LH) | SIZES, ids=[SUBJECTS[i] for i in (0, 2, 1)])
    some = write(tmp_path / "some.tsv", "lh.aparc.thickness", {"lh_insula_thickness": [1, 2, 3]})
    where = "table t (lh.tsv, {})"
    assert refused(with_files, cohort, {"t": [left, area]}) == (
        f"{where.format('area.tsv')}: one of its files is thickness, desikan-killiany, freesurfer, another area, "
        "desikan-killiany, freesurfer; give them different names."
    )
    assert refused(with_files, cohort, {"t": [left, swapped]}) == (
        f"{where.format('rh.tsv')}: NYU_0050952 has two values in column BrainSegVolNotVent, so that rows of a file may be "
        "swapped."
    )
    assert refused(with_files, cohort, {"t": [left, left]}) == (
        f"{where.format('lh.tsv')}: id Caltech_0051456 has two rows for the same columns."
    )
    assert refused(with_files, cohort, {"t": [left, some]}) == (
        f"{where.format('some.tsv')}: column lh_insula_thickness is in two of its files, and BrainSegVolNotVent in one of "
        "them only."
    )


SURFACE = """# Table of FreeSurfer cortical parcellation anatomical statistics
# hemi {side}
# Measure Cortex, NumVert, Number of Vertices, 120000, unitless
# Measure Cortex, WhiteSurfArea, White Surface Total Area, 80000.5, mm^2
# Measure Cortex, MeanThickness, Mean Thickness, {mean}, mm
# Measure BrainSegNotVent, BrainSegVolNotVent, Brain Segmentation Volume Without Ventricles, 1100000.000000, mm^3
# Measure EstimatedTotalIntraCranialVol, eTIV, Estimated Total Intracranial Volume, 1500000.25, mm^3
# NTableCols 10
# ColHeaders StructName NumVert SurfArea GrayVol ThickAvg ThickStd MeanCurv GausCurv FoldInd CurvInd
{regions}"""
VOLUMES = """# Title Segmentation Statistics
# subjectname somebody
# Measure BrainSeg, BrainSegVol, Brain Segmentation Volume, 1234567.000000, mm^3
# Measure EstimatedTotalIntraCranialVol, eTIV, Estimated Total Intracranial Volume, 1500000.25, mm^3
# ColHeaders  Index SegId NVoxels Volume_mm3 StructName normMean normStdDev normMin normMax normRange
  1   4      7433     7433.5  Left-Lateral-Ventricle   27.1  12.3  5  90  85
  2  17      4200     4210.0  Left-Hippocampus         70.0   7.0  40 100  60
"""


def surface(side, insula=3.0, atlas="aparc"):
    names = ("bankssts", "insula") if atlas == "aparc" else ("G&S_frontomargin", "S_suborbital")
    regions = (
        f"{names[0]:<40} 1500 1000 2500 2.50 0.5 0.1 0.02 10 1.0\n{names[1]:<40} 6000 4000 9000 {insula} 0.6 0.1 0.02 40 4.0\n"
    )
    return SURFACE.format(side=side, mean=2.5 if side == "lh" else 2.75, regions=regions)


@pytest.fixture
def freesurfer(tmp_path):
    """SUBJECTS_DIR: the third subject has no right hemisphere, and the average is no subject."""
    for i, subject in enumerate([*SUBJECTS, "fsaverage"]):
        stats = tmp_path / "fs" / subject / "stats"
        stats.mkdir(parents=True)
        (stats / "aseg.stats").write_text(VOLUMES)
        for side in ("lh", "rh")[: 1 if i == 2 else 2]:
            (stats / f"{side}.aparc.stats").write_text(surface(side, 3.0 + i))
            (stats / f"{side}.aparc.a2009s.stats").write_text(surface(side, atlas="a2009s"))
    (tmp_path / "fs" / "failed" / "stats").mkdir(parents=True)
    return tmp_path / "fs"


def test_stats_folders(freesurfer, cohort):
    read = read_table(freesurfer, "thickness")
    assert (read.kind, read.measure, read.atlas) == ("freesurfer", "thickness", "desikan-killiany")
    regions = ["lh_bankssts_thickness", "lh_insula_thickness", "rh_bankssts_thickness", "rh_insula_thickness"]
    sizes = ["lh_MeanThickness_thickness", "BrainSegVolNotVent", "eTIV", "rh_MeanThickness_thickness"]
    assert read.table.columns.tolist() == [*regions, *sizes] and read.whole == sizes
    assert sorted(read.table.index) == sorted(SUBJECTS)
    assert read.table.loc[SUBJECTS[1]].tolist() == [2.5, 4.0, 2.5, 4.0, 2.5, 1.1e6, 1500000.25, 2.75]
    assert read.table.loc[SUBJECTS[2], "rh_insula_thickness":].isna().tolist() == [True, False, False, False, True]
    assert read_table(freesurfer, "cortical_area").table.loc[SUBJECTS[0], "lh_WhiteSurfArea_area"] == 80000.5
    volume = read_table(freesurfer, "volume").table
    assert volume.loc[SUBJECTS[0], "lh_insula_volume"] == 9000 and "lh_MeanThickness_volume" not in volume
    destrieux = read_table(freesurfer, "thickness-a2009s")
    assert destrieux.atlas == "destrieux" and "lh_G_and_S_frontomargin_thickness" in destrieux.table
    aseg = read_table(freesurfer, "aseg")
    assert (aseg.measure, aseg.atlas) == ("volume", "aseg") and aseg.table.loc[SUBJECTS[0]].to_dict() == {
        "Left-Lateral-Ventricle": 7433.5,
        "Left-Hippocampus": 4210.0,
        "BrainSegVol": 1234567.0,
        "EstimatedTotalIntraCranialVol": 1500000.25,
    }
    assert with_files(cohort, {"aseg": freesurfer}).tables["aseg"].notna().all(axis=None)


@pytest.mark.parametrize(
    ("name", "parcellation", "atlas"),
    [
        ("thickness", "aparc", "desikan-killiany"),
        ("thickness_baseline", "aparc", "desikan-killiany"),
        ("thickness-desikan", "aparc", "desikan-killiany"),
        ("Destrieux thickness", "aparc.a2009s", "destrieux"),
        ("thickness-a2009s", "aparc.a2009s", "destrieux"),
        ("thickness-DKT", "aparc.DKTatlas", "aparc.DKTatlas"),
        ("thickness_schaefer2018_200parcels", "Schaefer2018_200Parcels_7Networks", "Schaefer2018_200Parcels_7Networks"),
    ],
)
def test_the_name_of_a_table_says_which_atlas_of_a_folder_is_read(tmp_path, name, parcellation, atlas):
    stats, tables = tmp_path / "fs" / "s1" / "stats", tmp_path / "tables"
    stats.mkdir(parents=True), tables.mkdir()
    others = ("aparc", "aparc.a2009s", "aparc.DKTatlas", *(f"Schaefer2018_{n}00Parcels_7Networks" for n in (1, 2)))
    for i, each in enumerate(others):
        (stats / f"lh.{each}.stats").write_text(surface("lh", i))
        write(tables / f"{i}.tsv", f"lh.{each}.thickness", {"lh_insula_thickness": [i]}, ["s1"])
    for folder in (tmp_path / "fs", tables):
        read = read_table(folder, name)
        assert read.atlas == atlas and read.table.loc["s1", "lh_insula_thickness"] == others.index(parcellation)


def test_an_atlas_that_a_folder_does_not_have_or_that_could_be_two(freesurfer, tmp_path):
    assert (
        refused(read_table, freesurfer, "area-DKT") == f"{freesurfer}: none of its 4 stats folders has lh.aparc.DKTatlas.stats."
    )
    folder = tmp_path / "tables"
    folder.mkdir()
    write(folder / "a.tsv", "lh.aparc.thickness", LH)
    assert refused(read_table, folder, "thickness-dkt").endswith(
        "with thickness of aparc.DKTatlas; it has thickness of desikan-killiany."
    )
    for n in (1, 2):
        (freesurfer / SUBJECTS[0] / "stats" / f"lh.Schaefer_{n}00.stats").write_text(surface("lh"))
    assert refused(read_table, freesurfer, "thickness-schaefer") == (
        f"{freesurfer}: the atlas of table thickness-schaefer could be Schaefer_100 or Schaefer_200; name the table after one."
    )


def test_messages_do_not_show_what_a_link_points_to(tmp_path):
    secret, link = tmp_path / "secret", tmp_path / "lh.aparc.stats"
    link.symlink_to(secret)
    for content in (
        "# ColHeaders StructName ThickAvg\nroot hunter2\n",
        "# ColHeaders StructName hunter2\nroot 1\n",
        "# Measure a, MeanThickness, c, hunter2, e\n# ColHeaders StructName ThickAvg\nroot 1\n",
    ):
        secret.write_text(content)
        assert "hunter2" not in refused(read_stats, link, "thickness")


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "lh.aparc.stats", "is not a stats file of FreeSurfer: it has no line # ColHeaders with StructName."),
        ("\0\xff junk", "lh.aparc.stats", "is not a stats file of FreeSurfer: it has no line # ColHeaders with StructName."),
        (surface("rh"), "lh.aparc.stats", "is of the hemisphere rh by its header; rename it."),
        (surface("lh") + "insula 1 1 1 2.0\n", "lh.aparc.stats", ": region lh_insula_thickness is listed twice."),
        (surface("lh") + "cuneus 1 1\n", "lh.aparc.stats", ": the columns of the header are not those of 'cuneus 1 1'."),
        (
            surface("lh", "thick"),
            "lh.aparc.stats",
            ": the columns of the header are not those of 'insula 6000 4000 9000 thick 0.6",
        ),
        ("# ColHeaders ThickAvg StructName\n2.5\n", "lh.aparc.stats", ": the columns of the header are not those of '2.5'."),
        (SURFACE.format(side="lh", mean=2.5, regions=""), "lh.aparc.stats", "has no region."),
        (
            surface("lh").replace("2.5, mm", "about, mm"),
            "lh.aparc.stats",
            ": the measure MeanThickness has the value 'about', which",
        ),
        (
            surface("lh").replace("# hemi lh", ""),
            "aparc.stats",
            "has no line # hemi, nor a name that starts with lh. or rh., to say",
        ),
        (VOLUMES, "lh.aparc.stats", "has no thickness; its columns are Index, SegId, NVoxels, Volume_mm3, StructName"),
    ],
)
def test_damaged_stats_files_are_one_sentence(tmp_path, content, name, words):
    path = tmp_path / name
    path.write_text(content, encoding="latin-1")
    text = refused(read_stats, path, "thickness")
    assert text.removeprefix(str(path)).lstrip(" ").startswith(words)


def test_folders_without_what_is_asked_for(freesurfer, tmp_path):
    for name in ("", "brain"):
        assert "is a folder, so the name of the table says what to read: thickness, area, volume" in refused(
            read_table, freesurfer, name
        )
    for subject in SUBJECTS:
        (freesurfer / subject / "stats" / "aseg.stats").unlink()
    assert refused(read_table, freesurfer, "aseg") == f"{freesurfer}: none of its 4 stats folders has aseg.stats."
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(read_table, empty, "area").endswith("nor a table of FreeSurfer with area of desikan-killiany.")
    write(empty / "x.tsv", "Measure:volume", ASEG)
    assert refused(read_table, empty, "area").endswith("with area of desikan-killiany; it has volume of aseg.")
    lone = freesurfer / SUBJECTS[0] / "stats" / "lh.aparc.stats"
    assert refused(read_table, lone).endswith(
        "is the stats file of one subject; give the folder that has SUBJECT/stats of all."
    )


def morph(folder, subject, content, desc="thickness", seg="4S156Parcels", more=""):
    path = folder / f"sub-{subject}" / "anat" / f"sub-{subject}{more}_space-fsLR_seg-{seg}_stat-mean_desc-{desc}_morph.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_morph_files_of_xcp_d(tmp_path, cohort):
    for i, subject in enumerate(("0051456", "0050952")):
        morph(tmp_path, subject, f"LH_Vis_1\tRH_Vis_1\n{2 + i}.5\tn/a\n")
        morph(tmp_path, subject, "LH_Vis_1\tRH_Vis_1\n0.1\t0.2\n", desc="curv")
    read = read_table(tmp_path, "thickness")
    assert (read.kind, read.measure, read.atlas) == ("morph", "thickness", "4S156Parcels")
    table = with_files(cohort, {"thickness": tmp_path}).tables["thickness"]
    np.testing.assert_array_equal(table, [[2.5, np.nan], [3.5, np.nan], [np.nan, np.nan]])
    other = morph(tmp_path, "0051456", "A\n1\n", seg="Glasser")
    assert "have several atlases (4S156Parcels, Glasser); name the table thickness-4S156Parcels" in refused(
        read_table, tmp_path, "thickness"
    )
    assert read_table(tmp_path, "thickness-glasser").table.columns.tolist() == ["A"]
    assert read_table(other).table.index.tolist() == ["sub-0051456"]
    assert refused(read_table, tmp_path, "volume") == f"{tmp_path}: its *_morph.tsv files have no volume."
    first = morph(tmp_path, "0051456", "A\n1\n", seg="Glasser", more="_ses-2")
    assert refused(read_table, tmp_path, "thickness-glasser") == (
        f"{other}: sub-0051456 has a second table, {first.name}; keep one of the sessions or runs."
    )


def test_morph_files_with_a_row_for_each_region(tmp_path):
    rows = "index\tname\tvolume-mm3\tthickness\n17\tLeft-Hippocampus\t4100\t2.5\n53\tRight-Hippocampus\tn/a\t2.25\n"
    path = tmp_path / "sub-01_seg-gtm_morph.tsv"
    path.write_text(rows)
    read = read_table(path, "volume")
    assert (read.kind, read.measure, read.atlas) == ("morph", "volume", "gtm")
    assert read.table.loc["sub-01", "Left-Hippocampus"] == 4100 and np.isnan(read.table.loc["sub-01", "Right-Hippocampus"])
    assert read_table(path, "thickness").table.loc["sub-01"].tolist() == [2.5, 2.25]
    assert (
        refused(read_table, path, "x")
        == f"{path} has the measures volume-mm3, thickness; name the table after the one to read."
    )
    path.write_text(rows + "17\tLeft-Hippocampus\t1\t1\n")
    assert refused(read_table, path, "volume") == f"{path}: region Left-Hippocampus is listed twice."


def test_enigma(tmp_path, cohort):
    regions = {f"{side}_{name}_thickavg": [2.5, "NA", 2.25] for side in "LR" for name in ("bankssts", "insula")}
    sizes = {"LThickness": [2.5, 2.5, 2.5], "ICV": [1.5e6, 1.6e6, 1.4e6]}
    people = {"Dx": [1, 0, 1], "Site": ["a", "b", "b"], "Age": [20, 30, 40]}
    path = write(tmp_path / "CorticalMeasuresENIGMA_ThickAvg.csv", "SubjID", people | regions | sizes, separator=",")
    read = read_table(path)
    assert (read.kind, read.measure, read.atlas) == ("enigma", "thickness", "desikan-killiany")
    assert read.table.columns.tolist() == [*regions, *sizes] and read.left_out == ("Dx", "Site", "Age")
    assert read.whole == ["LThickness", "ICV"] and head_column(read.table) == "ICV"
    (note,) = with_files(cohort, {"thickness": path}).notes
    assert note.text.endswith("for 3 of 3 subjects; left out: Dx, Site, Age.")
    names = "LLatVent,RLatVent,Lthal,Rthal,Lcaud,Rcaud,Lput,Rput,Lpal,Rpal,Lhippo,Rhippo,Lamyg,Ramyg,Laccumb,Raccumb"
    volumes = {name: ["x", 4000, 4100.5] for name in names.split(",")}
    read = read_table(write(tmp_path / "LandRvolumes.csv", "SubjID", volumes | {"ICV": [1, 2, 3]}, separator=","))
    assert (read.kind, read.measure, read.atlas, read.left_out) == ("enigma", "volume", "aseg", ())
    assert read.table["Lhippo"].isna().tolist() == [True, False, False] and len(read.table.columns) == 17
    surf = {name.replace("thickavg", "surfavg"): [900, 910, 920] for name in regions}
    assert (both := read_table(write(tmp_path / "b.csv", "SubjID", regions | surf, separator=","))).measure == ""
    assert both.atlas == "desikan-killiany"


@pytest.mark.parametrize("column", ["participant_id", "SubjID", "FILE_ID", "sub_id", "ID", "Subject ID", "fsid"])
def test_any_table_with_a_column_of_ids(tmp_path, cohort, column):
    path = write(tmp_path / "t.csv", "gm", {column: [51456, 50952, 999], "wm": [4, "", 6]}, ids=[1, "n/a", 3], separator=",")
    changed = with_files(cohort, {"mine": path})
    np.testing.assert_array_equal(changed.tables["mine"], [[1, 4], [np.nan, np.nan], [np.nan, np.nan]])
    (note,) = changed.notes
    assert (note.kind, note.subjects, note.numbers["sites"]) == ("table", (), {"NYU": 1})
    assert note.text == "Table mine: 2 columns (numbers) for 2 of 3 subjects, 2 matched by the number alone; no row for NYU 1."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty and cannot be read as a table."),
        ("id\tgm\n", "has a header and no row."),
        ("id\n51456\n", "has no column but that of the ids, id."),
        ("id\tgm\n51456\tbig\n", ": subject 51456, column gm: 'big' is not a number."),
        ("lh.aparc.thickness\tlh_insula_thickness\nA\tx\n", ": subject A, column lh_insula_thickness: 'x' is not a number."),
        ("id\tgm\n51456\t1\n51456\t2\n", ": subject 51456 is listed twice in column id."),
        ("id\tgm\n\t1\n", ", line 2: column id is empty."),
        ("id\tgm\tgm\n1\t1\t2\n", ": column gm appears twice."),
        ("id\tgm\n1\n", ", line 2: 1 cells, but the header has 2 columns."),
        ("id\tgm\tADOS_TOTAL\n1\t1\t9\n", ": column ADOS_TOTAL reveals the diagnosis; remove it from the table."),
        ("lh.aparc.area\tlh_insula_area\tDX\n1\t1\t9\n", ": column DX reveals the diagnosis; remove it from the table."),
        (
            "gm\twm\n1\t2\n",
            "has no column of ids (participant_id, subject, SubjID ...) and is neither a table of FreeSurfer nor",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_one_sentence(tmp_path, cohort, content, words):
    path = tmp_path / "t.tsv"
    path.write_text(content)
    assert refused(with_files, cohort, {"t": path}).removeprefix(str(path)).lstrip(" ").startswith(words)


@pytest.mark.parametrize(
    "content",
    [
        "id;thickness, left;lh_G_oc-temp_med-Lingual_area\n51456;2.5;3\n",
        'id;"thickness, left";"lh_G_oc-temp_med-Lingual_area"\n51456;2.5;3\n',
        'id,"thickness, left","lh_G_oc-temp_med-Lingual_area"\n51456,2.5,3\n',
        '"id"\t"thickness, left"\t"lh_G_oc-temp_med-Lingual_area"\r\n"51456"\t2.5\t3\r\n',
    ],
)
def test_names_of_columns_may_have_commas_and_say_med_for_medial(tmp_path, cohort, content):
    path = tmp_path / "t.csv"
    path.write_text(content, newline="")
    table = with_files(cohort, {"t": path}).tables["t"]
    assert table.loc["Caltech_0051456"].to_dict() == {"thickness, left": 2.5, "lh_G_oc-temp_med-Lingual_area": 3}


def test_tables_of_nobody_or_of_others(tmp_path, cohort):
    path = write(tmp_path / "t.tsv", "lh.aparc.thickness", LH, ids=["a", "b", "c"])
    assert refused(with_files, cohort, {"t": path}) == (
        "table t (t.tsv): none of its 3 rows is of a subject of the cohort (its first id is a, the first subject "
        "Caltech_0051456)."
    )
    path = write(tmp_path / "t.tsv", "lh.aparc.thickness", LH, ids=["51456", "b", "c"])
    notes = with_files(cohort, {"t": path}).notes
    assert [note.kind for note in notes] == ["table", "table of others"] and notes[1].severity == "finding"
    assert notes[1].text.startswith("Table t: only 1 of its 3 rows are of subjects of the cohort, which has 3.")
    assert refused(with_files, cohort, {" ": path}).startswith("a table of cohort abide has no name")
    assert refused(with_files, cohort, {"t": []}) == "table t has no file."
    assert "none.tsv" in refused(with_files, cohort, {"t": tmp_path / "none.tsv"})
    again = with_files(with_files(cohort, {"t": path}), {"t": write(path, "lh.aparc.thickness", LH)})
    assert [note.kind for note in again.notes] == ["table"] and again.tables["t"].notna().all(axis=None)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_numbers_come_back_whatever_the_separator_and_the_order(tmp_path_factory, cohort, data):
    finite = st.floats(-1e100, 1e100)
    values = data.draw(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(3)))
    separator = data.draw(st.sampled_from("\t,; "))
    columns = {f"lh_r{i}_area": [each[j] for j in order] for i, each in enumerate(values)}
    path = write(tmp_path_factory.mktemp("any") / "t", "lh.aparc.area", columns, [SUBJECTS[j] for j in order], separator)
    np.testing.assert_array_equal(with_files(cohort, {"t": path}).tables["t"].to_numpy().T, values)


VALID = [
    "lh.aparc.thickness\tlh_insula_thickness\teTIV\nA\t2.5\t1.5e6\n",
    "SubjID,L_insula_thickavg,R_insula_thickavg\nA,2,3\n",
]
VALID += ["index\tname\tvolume\n1\tCSF\t3.5\n", "LH_Vis_1\tRH_Vis_1\n2.5\tn/a\n", surface("lh"), VOLUMES]


@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 900), st.binary(max_size=3)), max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_in_a_file_it_is_read_or_refused_in_a_sentence(tmp_path_factory, text, edits, data):
    content = bytearray(data.draw(st.just(text.encode()) | st.binary(max_size=60)))
    for at, other in edits:
        content[at % (len(content) + 1) : at % (len(content) + 1) + len(other)] = other
    path = tmp_path_factory.mktemp("any") / data.draw(
        st.sampled_from(["t.csv", "sub-01_seg-x_desc-thickness_morph.tsv", "lh.aparc.stats"])
    )
    path.write_bytes(content)
    for call in (lambda: read_table(path, "volume").table, lambda: pd.DataFrame([read_stats(path, "thickness")])):
        try:
            table = call()
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert table.shape[1] and all(kind == np.float64 for kind in table.dtypes)


def test_read_takes_tables_for_any_kind(tmp_path, cohort):
    file = cohort.save(tmp_path / "c.cohort")
    path = write(tmp_path / "t.tsv", "lh.aparc.thickness", LH)
    read = m2lgdg.read(file, tables={"thickness": path})
    assert read.tables["thickness"].shape == (3, 3) and m2lgdg.read(read.save(tmp_path / "d.cohort")).hash == read.hash


def folder_with(tmp_path, toml):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "participants.tsv").write_text("participant_id\tsite\tlabel\n1\ta\t1\n2\ta\t0\n3\tb\t1\n")
    for i in range(3):
        np.save(folder / f"{i + 1}.npy", np.random.default_rng(i).normal(size=(30, 4)))
    (folder / "dataset.toml").write_text(toml)
    write(folder / "lh.tsv", "lh.aparc.thickness", LH, ids=["sub-01", "sub-02", "sub-03"])
    write(folder / "rh.tsv", "rh.aparc.thickness", right(LH), ids=["sub-01", "sub-02", "sub-03"])
    return folder


def test_dataset_toml_names_tables(tmp_path):
    cohort = m2lgdg.read(folder_with(tmp_path, '[tables]\nleft = "lh.tsv"\nboth = ["lh.tsv", "rh.tsv"]\n'))
    assert {name: table.shape for name, table in cohort.tables.items()} == {"left": (3, 3), "both": (3, 6)}
    assert cohort.tables["both"].loc["2", "rh_insula_thickness"] == 3.45
    other = write(tmp_path / "more.tsv", "lh.aparc.thickness", {"lh_cuneus_thickness": [1, 2, 3]}, ids=["1", "2", "3"])
    replaced = m2lgdg.read(tmp_path / "own", tables={"left": other})
    assert replaced.tables["left"].columns.tolist() == ["lh_cuneus_thickness"] and "both" in replaced.tables


def test_dataset_toml_of_connectomes_names_tables(tmp_path):
    """A table, or a folder of stats, is no connectome, wherever it lies."""
    folder = folder_with(tmp_path, 'values = "correlation"\n[tables]\nleft = "lh.tsv"\naseg = "fs"\n')
    for i in range(3):
        (folder / f"{i + 1}.npy").unlink()
        np.savetxt(folder / f"{i + 1}.csv", np.corrcoef(np.random.default_rng(i).normal(size=(5, 40))), delimiter=",")
    (folder / "rh.tsv").unlink()
    for i in range(3):
        (folder / "fs" / f"sub-{i + 1}" / "stats").mkdir(parents=True)
        (folder / "fs" / f"sub-{i + 1}" / "stats" / "aseg.stats").write_text(VOLUMES)
        (folder / "fs" / f"sub-{i + 1}" / "more.txt").write_text("1 2 3\n")
    cohort = m2lgdg.read(folder)
    assert cohort.values == "correlation" and cohort.subjects.tolist() == ["1", "2", "3"]
    assert {name: table.shape for name, table in cohort.tables.items()} == {"left": (3, 3), "aseg": (3, 4)}


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[tables]\nt = "../lh.tsv"', "key tables.t: '../lh.tsv' is not in "),
        ('[tables]\nt = ["lh.tsv", "/tmp/rh.tsv"]', "key tables.t: '/tmp/rh.tsv' is not in "),
        ("[tables]\nt = 3", "key tables.t"),
        ("tables = 3", "key tables: "),
        ("[tables]\nt = []", "table t has no file."),
    ],
)
def test_bad_tables_in_dataset_toml(tmp_path, toml, words):
    assert words in refused(m2lgdg.read, folder_with(tmp_path, toml))


def test_convert_and_check_take_tables(tmp_path, cohort, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save("c.cohort")
    write(tmp_path / "lh.tsv", "lh.aparc.thickness", LH)
    write(tmp_path / "rh.tsv", "rh.aparc.thickness", right(LH), ids=[*SUBJECTS[:2], "x"])
    given = ("--table", "thickness=lh.tsv", "--table", "thickness=rh.tsv", "--table", "left=lh.tsv")
    code, text, _ = typed("convert", "c.cohort", "out.cohort", *given)
    assert code == 0 and "Table thickness: 6 columns (thickness, desikan-killiany, freesurfer) for 3 of 3 subjects.\n" in text
    made = m2lgdg.read("out.cohort")
    assert list(made.tables) == ["thickness", "left"] and made.tables["thickness"].shape == (3, 6)
    code, text, _ = typed("check", "c.cohort", *given[:2], "--json", "--out", "checked")
    texts = [one["text"] for one in json.loads(text)["findings"]]
    assert (
        "Table thickness: 3 columns (thickness, desikan-killiany, freesurfer, left hemisphere only) for 3 of 3 subjects."
        in texts
    )
    code, text, _ = typed("check", "c.cohort", *given[:4], "--out", "checked")
    assert "Next: m2lgdg convert c.cohort c-corrected.cohort --table thickness=lh.tsv --table thickness=rh.tsv" in text
    for wrong in ("lh.tsv", "=lh.tsv", "thickness="):
        code, _, text = typed("convert", "c.cohort", "no.cohort", "--table", wrong)
        assert code == 2 and f"--table {wrong}: give it as NAME=FILE" in text and not (tmp_path / "no.cohort").exists()
    code, _, text = typed("convert", "c.cohort", "no.cohort", "--table", "t=none.tsv")
    assert code == 2 and "none.tsv" in text and not (tmp_path / "no.cohort").exists()


def test_the_real_tables_of_abide(abide_folder):
    """FreeSurfer's tables of the release (github.com/dfsp-spirit/abide_preproc_smri_freesurfer6): everybody is matched."""
    stats = os.environ.get("M2LGDG_ABIDE_STATS")
    if not stats:
        pytest.skip("M2LGDG_ABIDE_STATS does not name the folder stats of that repository")
    cohort = m2lgdg.read(abide_folder, atlas="aal", tables={name: stats for name in ("thickness", "area-a2009s", "aseg")})
    shapes = {name: table.shape[1] for name, table in cohort.tables.items() if table.notna().all(axis=None)}
    assert shapes == {"thickness": 70, "area-a2009s": 150, "aseg": 55}
    assert not {one.kind for one in table_findings(cohort)} - {"constant columns", "failed segmentation"}
