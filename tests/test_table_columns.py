"""Columns of tables of brain structure: region, hemisphere and place, however FreeSurfer, ENIGMA and others write them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg.data import atlases
from m2lgdg.data.atlases.table_columns import STRUCTURE, column_places, head_column, renamed_as

SIDES = {"L": ("lh", "Left"), "R": ("rh", "Right")}


def bare(atlas):
    """Region without its side, side, and centroid of each row."""
    for row in atlases.regions(atlas).itertuples(index=False):
        yield row.name.removesuffix(f"_{row.hemisphere}"), row.hemisphere, (row.x, row.y, row.z)


@pytest.mark.parametrize("atlas", ["desikan-killiany", "destrieux"])
@pytest.mark.parametrize(
    "form",
    ["{0}_{1}_thickness", "{0}_{1}_area", "{0}_{1}_volume", "ctx-{0}-{1}", "ctx_{0}_{1}", "{2}_{1}_thickavg", "{2}_{1}_surfavg",
     "{1}_{2}", "{2} {1}", "{0}.{1}_meancurv", "{0}_{1}"],
)  # fmt: skip
def test_cortical_regions_in_every_spelling(atlas, form):
    wanted = list(bare(atlas))
    columns = [form.format(SIDES[side][0], region, side) for region, side, _ in wanted]
    found = column_places(columns)
    assert found["region"].tolist() == atlases.regions(atlas)["name"].tolist()
    assert found["hemisphere"].tolist() == [side for _, side, _ in wanted]
    assert found[["x", "y", "z"]].to_numpy().tolist() == [list(place) for *_, place in wanted]


@pytest.mark.parametrize("point", ["-", ".", "_", " "])
def test_structures_of_aseg(point):
    wanted = list(bare("aseg"))
    columns = [f"{SIDES[side][1]}-{region}" if side in SIDES else region for region, side, _ in wanted]
    found = column_places([column.replace("-", point) for column in columns])
    assert found["region"].tolist() == atlases.regions("aseg")["name"].tolist()
    assert found["x"].tolist() == [place[0] for *_, place in wanted]


@pytest.mark.parametrize(
    ("column", "region", "side"),
    [
        ("Left-Thalamus-Proper", "Thalamus_L", "L"),
        ("Right-Thalamus", "Thalamus_R", "R"),
        ("Left-Accumbens-area", "Accumbens-area_L", "L"),
        ("X3rd.Ventricle", "3rd-Ventricle", "M"),
        ("Raccumb", "Accumbens-area_R", "R"),
        ("LLatVent", "Lateral-Ventricle_L", "L"),
        ("lh_G&S_cingul-Ant_thickness", "G_and_S_cingul-Ant_L", "L"),
        ("rh_G.S_cingul.Ant_area", "G_and_S_cingul-Ant_R", "R"),
    ],
)
def test_versions_and_languages_of_a_name(column, region, side):
    row = column_places([column]).loc[column]
    assert (row["region"], row["hemisphere"]) == (region, side)
    assert np.isfinite(row[["x", "y", "z"]].to_numpy(float)).all()


@pytest.mark.parametrize(
    ("column", "side"),
    [("lh_MeanThickness_thickness", "L"), ("rhCortexVol", "R"), ("LThickness", "L"), ("CSF", ""), ("IntraCranialVol", ""),
     ("M_bankssts_thickavg", ""), ("r_squared", ""), ("area", ""), ("wm-lh-insula", ""), ("lh_", ""), ("Left-vessel", "L")],
)  # fmt: skip
def test_what_has_no_place_keeps_its_name(column, side):
    row = column_places([column]).loc[column]
    assert (row["region"], row["hemisphere"]) == (column, side)
    assert row[["x", "y", "z"]].isna().all()


def test_parcels_of_another_atlas_are_known_all_together_or_not_at_all():
    """LH_Vis_1 is a parcel of four atlases."""
    small, large = (atlases.regions(f"schaefer{count}") for count in (100, 200))
    columns = [*small["name"], "mean"]
    found = column_places(columns[::-1])
    assert found.loc[small["name"], "y"].tolist() == small["y"].tolist() and np.isnan(found.loc["mean", "x"])
    assert column_places(large["name"].tolist())["z"].tolist() == large["z"].tolist()
    assert column_places(small["name"].tolist()[:60])["x"].isna().all()


def test_no_region_is_two():
    names = [(region, side) for atlas in STRUCTURE for region, side, _ in bare(atlas)]
    assert len(names) == len(set(names)) == 68 + 148 + 35


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), unique=True, max_size=6))
def test_any_name_has_a_row(columns):
    found = column_places(columns)
    assert list(found.index) == columns and list(found.columns) == ["region", "hemisphere", "x", "y", "z"]
    assert set(found["hemisphere"]) <= {"", "L", "R", "M"}


def test_the_answer_is_a_copy():
    found = column_places(["CSF"])
    found.loc["CSF", "region"] = "other"
    assert column_places(["CSF"]).loc["CSF", "region"] == "CSF"


def test_centroids_agree_with_the_surface():
    """Centroids of the volume are near the means of the pial vertices of fsaverage5 (annotation of the ENIGMA toolbox)."""
    surface = json.loads((Path(__file__).parent / "data" / "desikan_killiany_fsaverage5.json").read_text())
    table = atlases.regions("desikan-killiany").set_index("name")[["x", "y", "z"]]
    assert set(surface) == set(table.index)
    gaps = np.array([np.linalg.norm(table.loc[name] - place) for name, place in surface.items()])
    assert gaps.max() < 8 and np.median(gaps) < 4
    swapped = [np.linalg.norm(table.loc[one] - surface[other]) for one, other in itertools.pairwise(table.index)]
    assert np.median(swapped) > 25


def test_names_of_another_version_are_those_of_the_model():
    seven = pd.DataFrame({"Left-Thalamus": [1.0], "EstimatedTotalIntraCranialVol": [2.0], "CSF": [3.0]})
    six = renamed_as(seven, ["IntraCranialVol", "Left-Thalamus-Proper", "CSF"])
    assert six.iloc[0].to_dict() == {"Left-Thalamus-Proper": 1.0, "IntraCranialVol": 2.0, "CSF": 3.0}
    assert renamed_as(six, list(seven)).equals(seven)  # and back
    assert renamed_as(seven, list(seven)).equals(seven)


def test_two_columns_of_one_measure_keep_their_names():
    both = pd.DataFrame({"eTIV": [1.0], "EstimatedTotalIntraCranialVol": [2.0]})
    assert list(renamed_as(both, ["IntraCranialVol"])) == ["eTIV", "EstimatedTotalIntraCranialVol"]


@pytest.mark.parametrize(
    ("columns", "found"), [(["CSF", "eTIV"], "eTIV"), (["Intra.Cranial.Vol"], "Intra.Cranial.Vol"), (["CSF"], None)]
)
def test_the_column_of_head_size(columns, found):
    assert head_column(columns) == found
