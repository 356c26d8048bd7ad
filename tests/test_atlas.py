"""Places of ROIs: ours for AAL, a user's from a table or an atlas image; what does not fit is refused by name."""

import nibabel
import numpy as np
import pytest

from m2lgdg import InputError
from m2lgdg.data.atlases import read_centroids, regions


def test_aal_has_a_place_for_each_of_its_regions():
    table = regions("AAL")
    assert len(table) == 116
    assert table[["x", "y", "z"]].notna().all(axis=None)
    left = table[table["name"].str.endswith("_L")]
    assert (left["x"] < 0).all()


def test_a_table_gives_names_codes_and_places(tmp_path):
    path = tmp_path / "rois.tsv"
    path.write_text("name\tcode\tx\ty\tz\nB\t07\t1\t2\t3\nA\t01\t-4.5\t5\t6\n")
    table = read_centroids(path, ["A", "B"]).set_index("name")
    assert table.loc["A"].tolist() == ["01", -4.5, 5.0, 6.0]
    assert table.loc["B", "code"] == "07"
    (tmp_path / "rois.csv").write_text("name,x,y,z\nA,1,2,3\n")
    assert read_centroids(tmp_path / "rois.csv", ["A"]).to_numpy().tolist() == [["A", "", 1, 2, 3]]


def test_an_image_gives_centroids_in_the_order_of_its_labels(tmp_path):
    volume = np.zeros((20, 20, 20), dtype=np.int16)
    volume[2:5, 2:5, 2:5] = 40
    volume[12:15, 8:11, 4:7] = 7
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    affine[:3, 3] = (-20, -10, 0)
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "atlas.nii.gz")
    table = read_centroids(tmp_path / "atlas.nii.gz", ["first", "second"])
    assert table["name"].tolist() == ["first", "second"]
    assert table["code"].tolist() == ["7", "40"]
    np.testing.assert_allclose(table[["x", "y", "z"]].to_numpy(), [[6, 8, 10], [-14, -4, 6]], atol=2.0)
    with pytest.raises(InputError, match="has 2 regions, but the cohort has 3 ROIs"):
        read_centroids(tmp_path / "atlas.nii.gz", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name\tx\ty\nA\t1\t2\n", "has no column z"),
        ("name\tx\ty\tz\nA\t1\t2\t3\n", "has no coordinates for 1 ROI, B"),
        ("name\tx\ty\tz\nA\tleft\t2\t3\nB\t1\t1\t1\n", "has no coordinates for 1 ROI, A"),
        ("", "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, text, words):
    (tmp_path / "rois.tsv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_centroids(tmp_path / "rois.tsv", ["A", "B"])


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    (tmp_path / "atlas.nii.gz").write_bytes(b"no image")
    for name in ("atlas.nii.gz", "none.nii.gz", "none.tsv"):
        with pytest.raises(InputError, match=name):
            read_centroids(tmp_path / name, ["A"])
