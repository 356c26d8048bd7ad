"""Mistakes of the first hour: each message names the file and what to write instead."""

import numpy as np
import pytest

from m2lgdg.data.readers import read
from m2lgdg.storage import InputError
from m2lgdg.study.config import read_study

SUBJECTS = ("p1", "p2", "p3", "p4")


def folder(path, columns=None, header=True, listed=SUBJECTS):
    """Four subjects of two sites with six ROIs; `columns` has the number of columns of some of them."""
    path.mkdir()
    rows = ["participant_id\tsite\tdiagnosis\tage\tsex"]
    rows += [
        f"{name}\t{'Oslo' if i % 2 else 'Rome'}\t{'patient' if i < 2 else 'control'}\t30\tM" for i, name in enumerate(listed)
    ]
    (path / "participants.tsv").write_text("\n".join(rows))
    rng = np.random.default_rng(0)
    for name in SUBJECTS:
        width = (columns or {}).get(name, 6)
        names = ",".join(f"roi{i}" for i in range(width)) if header else ""
        np.savetxt(path / f"{name}.csv", rng.normal(size=(40, width)), delimiter=",", header=names, comments="")
    return path


@pytest.mark.parametrize(("width", "words"), [(5, "it has no column roi5"), (7, "only this one has roi6")])
def test_a_column_of_one_subject_is_named(tmp_path, width, words):
    with pytest.raises(InputError, match=rf"p3\.csv: subject p3: {width} ROI columns, but .* have 6; {words}\.$"):
        read(folder(tmp_path / "lab", {"p3": width}))


def test_many_missing_columns_are_counted(tmp_path):
    with pytest.raises(InputError, match=r"it has no column roi1, roi2, roi3 and 2 more\.$"):
        read(folder(tmp_path / "lab", {"p3": 1}))


def test_without_names_both_reasons_are_given(tmp_path):
    with pytest.raises(InputError, match=r"all files have 40 rows .* either this file has other ROIs, or .* axes are swapped"):
        read(folder(tmp_path / "lab", {"p3": 5}, header=False))


@pytest.mark.parametrize("on_bad", ["stop", "exclude"])
def test_ids_that_are_written_in_another_way(tmp_path, on_bad):
    path = folder(tmp_path / "lab", listed=("1", "2", "3", "4"))
    with pytest.raises(InputError, match=r"no listed subject .*; the first is 1, and a file is called p1\.csv; .*pattern = "):
        read(path, on_bad=on_bad)
    (path / "dataset.toml").write_text('pattern = "p{subject}.csv"')
    assert read(path).subjects.tolist() == ["1", "2", "3", "4"]
    (path / "dataset.toml").write_text('pattern = "q{subject}.csv"')
    with pytest.raises(InputError, match=r"the first is 1, whose file would be .*q1\.csv\.$"):
        read(path, on_bad=on_bad)


def test_a_folder_without_a_table(tmp_path):
    path = folder(tmp_path / "lab")
    (path / "participants.tsv").unlink()
    with pytest.raises(
        InputError, match=r"lab is not of a supported kind: a folder of your own needs a table participants\.tsv"
    ):
        read(path)


def test_one_series_in_place_of_the_folder(tmp_path):
    path = folder(tmp_path / "lab")
    with pytest.raises(InputError, match=r"p1\.csv is not a cohort file; give the folder of the series"):
        read(path / "p1.csv")


def test_a_misspelt_key_of_a_study(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text('cohort = "a.cohort"\nmetods = ["fc-svm"]')
    with pytest.raises(InputError, match=r"study\.toml: key metods is not known; did you mean methods\?"):
        read_study(study)
    study.write_text('cohort = "a.cohort"')
    with pytest.raises(InputError, match=r"study\.toml: key methods is missing\."):
        read_study(study)


def test_a_folder_in_place_of_a_study(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; a study is a TOML file with cohort and methods\."):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a folder; to repeat its study, give .*study\.json\."):
        read_study(tmp_path)
