"""Several atlases in one reading: each kind of data, subjects that lack an atlas, and what the commands print."""

import shutil
from dataclasses import replace

import miniature
import numpy as np
import pytest

from m2lgdg import Cohort, InputError, check_cohort, make, make_cohort, read
from m2lgdg.cohort import Parcellation
from m2lgdg.data.check import atlas_line, empty_scans
from m2lgdg.data.duplicates import find_duplicates, without_duplicates

HEMISPHERES = ("left", "right")


def excluded(cohort):
    return {each.subject: (each.site, each.reason) for each in cohort.excluded}


def assert_same(one, other):
    """Both cohorts have the same content in one atlas."""
    assert one.atlas == other.atlas
    assert one.subjects.tolist() == other.subjects.tolist()
    assert one.hash == other.hash


def assert_parts(path, cohort, atlases, **options):
    """Each atlas of the cohort is as if it had been read alone."""
    assert cohort.atlases == atlases
    for atlas in atlases:
        assert_same(cohort.parcellation(atlas), read(path, atlas=atlas, **options))


@pytest.fixture
def abide(tmp_path):
    return miniature.abide(tmp_path / "ABIDE_pcp", atlases=("aal", "ho", "cc200")).folder


def place(folder, subject, atlas):
    return folder / "cpac/filt_global" / f"{subject}_rois_{atlas}.1D"


@pytest.mark.parametrize("atlases", [("aal", "ho"), ("ho", "aal", "cc200")])
def test_abide(abide, atlases):
    cohort = read(abide, atlas=atlases)
    assert_parts(abide, cohort, atlases)
    assert cohort.notes[: len(atlases)] == tuple(f"atlas {name}, strategy cpac/filt_global" for name in atlases)
    assert len(cohort) == 5
    assert_same(read(abide, atlas=list(atlases)[:1]), read(abide, atlas=atlases[0]))


def test_all_atlases_are_in_alphabetical_order(abide):
    assert read(abide, atlas="all").atlases == ("aal", "cc200", "ho")
    assert read(abide, atlas=["all"]).hash == read(abide, atlas=("aal", "cc200", "ho")).hash
    one = miniature.abide(abide.parent / "one")
    assert_same(read(one.folder, atlas="all"), read(one.folder))


@pytest.mark.parametrize(
    ("atlas", "words"),
    [
        (("aal", "aal"), r"option atlas: aal is given twice\."),
        (("aal", "all"), r"option atlas: all stands for every atlas and is given alone\."),
        (("aal", ""), r"option atlas: '' is not the name of an atlas\."),
        (("aal", 7), r"option atlas: 7 is not the name of an atlas\."),
        (("aal", "power"), r"has no series of atlas power; available: atlas aal"),
        ((), r"has several kinds of series; choose one with --atlas and --strategy: atlas aal"),
    ],
)
def test_wrong_requests(abide, atlas, words):
    with pytest.raises(InputError, match=words):
        read(abide, atlas=atlas)


def test_a_subject_without_one_of_the_atlases(abide):
    place(abide, "Pitt_0050003", "ho").unlink()
    place(abide, "CMU_a_0050649", "aal").unlink()
    cohort = read(abide, atlas=("aal", "ho"))
    assert "CMU_a_0050649" not in cohort.subjects
    assert excluded(cohort)["CMU_a_0050649"] == ("CMU", "listed but no series file: atlas aal")
    assert cohort.parcellations["ho"].present.tolist() == [True, True, False, True]
    assert cohort.subjects[2] == "Pitt_0050003"
    assert cohort.parcellation("ho").subjects.tolist() == ["CMU_b_0050669", "MaxMun_a_0051607", "Pitt_0050004"]
    # The other way round, the other one is excluded.
    turned = read(abide, atlas=("ho", "aal"))
    assert excluded(turned)["Pitt_0050003"] == ("PITT", "listed but no series file: atlas ho")
    assert turned.parcellation("aal").subjects.tolist() == ["CMU_b_0050669", "MaxMun_a_0051607", "Pitt_0050004"]


def test_an_unlisted_series_of_any_atlas(abide):
    shutil.copy(place(abide, "Pitt_0050003", "ho"), place(abide, "Pitt_0059999", "ho"))
    with pytest.raises(InputError, match=r"Pitt_0059999_rois_ho\.1D: subject Pitt_0059999 is not in column FILE_ID"):
        read(abide, atlas=("aal", "ho"))
    cohort = read(abide, atlas=("aal", "ho"), on_bad="exclude")
    assert excluded(cohort)["Pitt_0059999"] == ("", "series file but not listed")
    assert len(read(abide, atlas="aal")) == 5


def rewrite(file, change):
    """The same table with its rows changed."""
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([head, *change(rows)]) + "\n")


def test_other_volumes_are_another_scan(abide):
    rewrite(place(abide, "Pitt_0050003", "ho"), lambda rows: rows[:-2])
    with pytest.raises(InputError, match=r"/Pitt_0050003_rois_ho\.1D: subject Pitt_0050003: 4 volumes, but 6 in atlas aal\.$"):
        read(abide, atlas=("aal", "ho"))
    cohort = read(abide, atlas=("aal", "ho", "cc200"), on_bad="exclude")
    assert "Pitt_0050003" not in cohort.subjects
    reason = "Pitt_0050003_rois_ho.1D: subject Pitt_0050003: 4 volumes, but 6 in atlas aal."
    assert excluded(cohort)["Pitt_0050003"] == ("PITT", reason)
    assert [len(each.series) for each in cohort.parcellations.values()] == [4, 4]
    assert len(read(abide, atlas=("aal", "cc200"))) == 5


def test_no_subject_with_as_many_volumes(abide):
    for file in abide.rglob("*_rois_ho.1D"):
        rewrite(file, lambda rows: rows[:-1])
    with pytest.raises(InputError, match=r"^\S*_rois_ho\.1D: subject .*volumes, but .* in atlas aal\.$"):
        read(abide, atlas=("aal", "ho"), on_bad="exclude")


def test_an_unusable_series_of_a_further_atlas_is_left_out(abide):
    rewrite(place(abide, "Pitt_0050003", "ho"), lambda rows: [rows[0].replace(rows[0].split("\t")[1], "nan"), *rows[1:]])
    words = r"Pitt_0050003_rois_ho.1D: subject Pitt_0050003: NaN at volume 1 of ROI 2 \(1 such value\)"
    with pytest.raises(InputError, match=f"{words}\\."):
        read(abide, atlas=("aal", "ho"))
    cohort = read(abide, atlas=("aal", "ho"), on_bad="exclude")
    assert len(cohort) == 5
    assert cohort.parcellations["ho"].present.tolist() == [True, True, True, False, True]
    assert "Pitt_0050003" not in excluded(cohort)
    note = words.replace("\\", "")
    assert str(cohort.notes[-1]) == f"Subject Pitt_0050003 has no series of atlas ho: {note}."
    assert str(abide) not in str(cohort.notes[-1])
    # In the first atlas it excludes the subject.
    turned = read(abide, atlas=("ho", "aal"), on_bad="exclude")
    assert excluded(turned)["Pitt_0050003"] == ("PITT", f"{note}.")
    assert turned.parcellation("aal").subjects.tolist() == turned.subjects.tolist()


def test_atlases_of_two_pipelines_are_not_read_together(tmp_path):
    folder = miniature.abide(tmp_path / "ABIDE_pcp", atlases=("aal", "ho"), strategies=("cpac/filt_global",)).folder
    other = folder / "ccs/filt_global"
    other.mkdir(parents=True)
    for file in folder.rglob("*_rois_ho.1D"):
        file.rename(other / file.name)
    with pytest.raises(
        InputError,
        match=r"atlas aal has the strategy cpac/filt_global, atlas ho ccs/filt_global; atlases .* must have the same",
    ):
        read(folder, atlas=("aal", "ho"))
    with pytest.raises(InputError, match=r"has no series of atlas ho, strategy cpac/filt_global; available: "):
        read(folder, atlas=("aal", "ho"), strategy="cpac/filt_global")
    assert read(folder, atlas="all", strategy="ccs/filt_global").atlases == ("ho",)


def test_a_further_atlas_that_no_subject_has(abide):
    for file in abide.rglob("*_rois_ho.1D"):
        if "Pitt_0050003" not in file.name:
            file.unlink()
    place(abide, "Pitt_0050003", "aal").unlink()
    with pytest.raises(InputError, match=r"no subject with a series of atlas aal has one of atlas ho\."):
        read(abide, atlas=("aal", "ho"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return miniature.rest_meta_mdd(tmp_path_factory.mktemp("rest") / "mdd", newer=("S14",)).folder


def test_rest_meta_mdd(rest):
    cohort = read(rest, atlas=("aal", "dosenbach160", "power264"))
    assert cohort.atlases == ("aal", "dosenbach160", "power264")
    assert [len(each.rois) for each in cohort.parcellations.values()] == [160, 264]
    for atlas in ("aal", "dosenbach160"):
        assert_same(cohort.parcellation(atlas), read(rest, atlas=atlas))
    # The files of S2 are of an older DPARSF, which has no such columns: the subjects are kept.
    assert sorted(set(cohort.sites)) == ["S1", "S14", "S2"]
    assert_same(cohort.parcellation("power264"), read(rest, atlas="power264", on_bad="exclude"))
    assert cohort.parcellations["power264"].present.tolist() == (cohort.sites != "S2").tolist()
    assert cohort.notes[:3] == tuple(f"atlas {name}, folder ROISignals_FunImgARCWF" for name in cohort.atlases)


def test_all_of_rest_meta_mdd(rest):
    """Those that some file holds, and not the two halves of an atlas next to the whole."""
    names = ("aal", "craddock200", "dosenbach160", "harvard-oxford", "power264", "schaefer400", "zalesky980")
    cohort = read(rest, atlas="all")
    assert cohort.atlases == names
    older = read(rest, atlas="all", exclude_sites=["S1", "S4", "S5", "S14", "S19"])
    assert older.atlases == tuple(name for name in names if name not in ("power264", "schaefer400"))
    assert len(older.notes) == 6
    with pytest.raises(InputError, match=r"no subject with a series of atlas aal has one of atlas schaefer400\."):
        read(rest, atlas=("aal", "schaefer400"), exclude_sites=["S4", "S5", "S14", "S19"])
    with pytest.raises(InputError, match=r"atlas ho is not known; REST-meta-MDD has aal, .*schaefer400\."):
        read(rest, atlas=("aal", "ho"))
    halves = read(rest, atlas=("harvard-oxford", "harvard-oxford-subcortical"))
    whole, half = halves.series[0], halves.parcellations["harvard-oxford-subcortical"].series[0]
    np.testing.assert_array_equal(whole[:, -half.shape[1] :], half)


@pytest.fixture
def xcpd(tmp_path):
    return miniature.xcpd(tmp_path / "xcpd").folder


def table(folder, subject, atlas):
    (file,) = folder.glob(f"{subject}/**/*_atlas-{atlas}_*timeseries.tsv")
    return file


def test_bids(xcpd):
    cohort = read(xcpd, atlas=("Gordon", "4S156Parcels"))
    assert_parts(xcpd, cohort, ("Gordon", "4S156Parcels"))
    assert cohort.notes[:2] == ("atlas Gordon", "atlas 4S156Parcels")
    assert read(xcpd, atlas="all").atlases == ("4S156Parcels", "Gordon")
    with pytest.raises(InputError, match=r"has no atlas Glasser; it has 4S156Parcels, Gordon\."):
        read(xcpd, atlas=("Gordon", "Glasser"))
    table(xcpd, "sub-07", "Gordon").unlink()
    turned = read(xcpd, atlas=("4S156Parcels", "Gordon"))
    assert turned.parcellation("Gordon").subjects.tolist() == ["sub-0051", "sub-0052", "sub-8"]
    assert turned.tr.tolist()[0] == 2.0
    left = read(xcpd, atlas=("Gordon", "4S156Parcels"))
    assert excluded(left)["sub-07"] == ("Rome", "listed but no series file: atlas Gordon")


def test_bids_series_of_another_run(xcpd):
    """As many volumes do not make it the same scan."""
    file = table(xcpd, "sub-07", "Gordon")
    file.rename(file.with_name(file.name.replace("task-rest", "task-rest_run-2")))
    with pytest.raises(InputError, match=r"run-2_.*atlas-Gordon_timeseries\.tsv: it is not of the same run as sub-07_.*4S156"):
        read(xcpd, atlas=("4S156Parcels", "Gordon"))
    cohort = read(xcpd, atlas=("4S156Parcels", "Gordon"), on_bad="exclude")
    assert cohort.parcellations["Gordon"].present.tolist() == [True, True, False, True]
    assert str(cohort.notes[-1]).startswith("Subject sub-07 has no series of atlas Gordon: sub-07_task-rest_run-2")


def test_bids_runs_are_joined_in_each_atlas(xcpd):
    for atlas in ("4S156Parcels", "Gordon"):
        file = table(xcpd, "sub-07", atlas)
        for run in ("1", "2"):
            shutil.copy(file, file.with_name(file.name.replace("task-rest", f"task-rest_run-{run}")))
        file.unlink()
    cohort = read(xcpd, atlas=("4S156Parcels", "Gordon"), join_runs=True)
    assert_parts(xcpd, cohort, ("4S156Parcels", "Gordon"), join_runs=True)
    assert cohort.lengths.tolist() == [12, 9, 30, 10]


def test_an_atlas_image_is_one_atlas(tmp_path):
    images = miniature.nifti(tmp_path)
    with pytest.raises(InputError, match=r"atlas\.nii\.gz is one atlas; give one name with atlas \(--atlas\), not 2\."):
        read(images.folder, atlas_image=images.atlas, atlas=("a", "b"))
    assert read(images.folder, atlas_image=images.atlas, atlas=("mine",)).atlas == "mine"


OWN = """
atlas = "four"
pattern = "ts/{subject}.npy"
[atlases.halves]
pattern = "halves/{subject}_h.npy"
orientation = "roi,time"
rois = "halves.tsv"
"""


@pytest.fixture
def lab(tmp_path):
    release = miniature.own_folder(tmp_path / "lab", dataset=OWN, pattern="ts/{subject}")
    halves = release.folder / "halves"
    halves.mkdir()
    miniature.write_rows(release.folder / "halves.tsv", ("name",), [(name,) for name in HEMISPHERES])
    for subject, series in release.series.items():
        np.save(halves / f"{subject}_h.npy", series[:, :2].T + 1)
    return release


def test_own_folder(lab):
    cohort = read(lab.folder)  # all that dataset.toml names
    assert cohort.atlases == ("four", "halves")
    assert cohort.parcellations["halves"].rois == HEMISPHERES
    for subject, one in zip(cohort.subjects, cohort.parcellations["halves"].series, strict=True):
        np.testing.assert_array_equal(one, (lab.series[subject][:, :2] + 1).astype(np.float32))
    assert_parts(lab.folder, cohort, ("four", "halves"))
    assert read(lab.folder, atlas=("halves", "four")).atlases == ("halves", "four")
    assert read(lab.folder, atlas="all").atlases == ("four", "halves")
    with pytest.raises(InputError, match=r"dataset\.toml has no atlas aal; it has four, halves\."):
        read(lab.folder, atlas="aal")


def test_own_folder_lacks_a_series(lab):
    (lab.folder / "halves/12_h.npy").unlink()
    cohort = read(lab.folder)
    assert cohort.parcellation("halves").subjects.tolist() == ["0007", "0010", "013"]
    assert len(cohort) == 4
    with pytest.raises(InputError, match=r"participants\.tsv: subject 12 has no series file .*halves/12_h\.npy\."):
        read(lab.folder, atlas="halves")
    turned = read(lab.folder, atlas=("halves", "four"), on_bad="exclude")
    assert excluded(turned) == {"12": ("Bergen", "listed but no series file: atlas halves")}
    np.save(lab.folder / "halves/99_h.npy", np.eye(2))
    with pytest.raises(InputError, match=r"99_h\.npy: subject 99 is not in"):
        read(lab.folder)
    assert len(read(lab.folder, atlas="four")) == 4


def test_own_folder_with_all_files_in_one_place(tmp_path):
    """Files of a further atlas are not taken for subjects of the first that are not listed."""
    dataset = 'atlas = "four"\n[atlases.two]\npattern = "{subject}_two.npy"\n'
    release = miniature.own_folder(tmp_path / "lab", dataset=dataset)
    for subject, series in release.series.items():
        np.save(release.folder / f"{subject}_two.npy", series[:, :2])
    assert read(release.folder).parcellation("two").subjects.tolist() == ["0007", "0010", "013", "12"]
    assert read(release.folder, atlas="four").atlases == ("four",)
    np.save(release.folder / "99_two.npy", np.eye(2))
    assert excluded(read(release.folder, on_bad="exclude")) == {"99": ("", "series file but not listed")}
    assert read(release.folder, atlas="four").excluded == ()


def test_own_folder_with_two_variables_of_one_file(tmp_path):
    from scipy.io import savemat

    dataset = 'atlas = "four"\nvariable = "a"\n[atlases.two]\nvariable = "b"\n'
    release = miniature.own_folder(tmp_path / "lab", ".mat", dataset=dataset)
    for subject, series in release.series.items():
        savemat(release.folder / f"{subject}.mat", {"a": series, "b": series[:, 1:3]})
    cohort = read(release.folder)
    np.testing.assert_array_equal(cohort.parcellations["two"].series[0], cohort.series[0][:, 1:3])


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ('[atlases.x]\npattern = "{subject}.npy"', r'key atlases\.x: the first atlas needs a name, too: atlas = "\.\.\."\.'),
        ('atlas = "x"\n[atlases.x]\npattern = "{subject}.npy"', r"key atlases\.x: the name of a further atlas is not that of"),
        ('atlas = "y"\n[atlases.""]\npattern = "{subject}.npy"', r"key atlases\.: the name of a further atlas is not"),
        ('atlas = "y"\n[atlases.x]', r"key atlases\.x: give the pattern of its files, or their variable\."),
        ('atlas = "y"\n[atlases.x]\npattern = "a.npy"', r"key atlases\.x\.pattern: 'a\.npy' does not contain \{subject\}"),
        ('atlas = "y"\n[atlases.x]\npattern = "/{subject}.npy"', r"key atlases\.x\.pattern: .* is absolute"),
        ('atlas = "y"\n[atlases.x]\npattern = "{subject}_{run}"', r"key atlases\.x\.pattern: \{run\} needs join_runs = true"),
        (
            'atlas = "y"\n[atlases.x]\npatern = "a"',
            r"key atlases\.x\.patern: .*known keys: pattern, variable, orientation, rois",
        ),
    ],
)
def test_wrong_tables_of_atlases(tmp_path, dataset, words):
    release = miniature.own_folder(tmp_path / "lab", dataset=dataset)
    with pytest.raises(InputError, match=words):
        read(release.folder)


@pytest.fixture(scope="module")
def checked():
    """A cohort with a second atlas in which known problems were planted."""
    sizes = {"a": 12, "b": 12, "c": 12}
    cohort = make_cohort("tiny", n_rois=20, lengths=(140, 140), sizes=sizes, seed=1)
    other = make_cohort("tiny", n_rois=16, lengths=(140, 140), sizes=sizes, seed=2)
    first, second = [np.array(one) for one in cohort.series], [np.array(one) for one in other.series]
    second[0][:, 3] = 5.0  # flat in the second atlas only
    first[20], second[20] = first[3], second[3]  # a copy in both
    second[30] = 2 * second[5]  # a copy in the second only
    first[25] = 3 * first[2]  # a copy in the first only
    second[7] = None
    rois = [f"r{i}" for i in range(16)]
    return replace(cohort, series=first, atlas="one", parcellations={"two": Parcellation(rois, second)})


def texts(result, level="finding"):
    return [each.text for each in result.findings if each.severity == level]


def test_duplicates_are_sought_in_every_atlas(checked):
    pairs = {(pair.first, pair.second): pair.atlases for pair in find_duplicates(checked)}
    assert pairs == {(3, 20): ("one", "two"), (5, 30): ("two",), (2, 25): ("one",)}
    assert all(pair.atlases == () for pair in find_duplicates(checked.parcellation("one")))
    found = [text for text in texts(check_cohort(checked)) if " and " in text and "the scan " in text]
    assert len(found) == 3  # a pair is one finding, whatever the number of atlases
    names = [f"{subject} ({site})" for subject, site in zip(checked.subjects, checked.sites, strict=True)]
    assert any(text.startswith(f"{names[3]} and {names[20]} have identical series (atlas one, two)") for text in found)
    near = f"{names[5]} and {names[30]} appear to be the same scan (atlas two: their series correlate at 1.000)"
    assert any(text.startswith(near) for text in found)
    kept = without_duplicates(checked)
    assert len(kept) == len(checked) - len({each.subject for each in kept.excluded})
    assert find_duplicates(kept) == []
    assert kept.atlases == ("one", "two")


def test_findings_name_the_atlas(checked):
    result = check_cohort(checked)
    first = str(checked.subjects[0])
    assert "Atlas two: 1 subject has at least one flat ROI (most often r3 1)." in texts(result)
    assert f"1 subject has no series of atlas two ({checked.subjects[7]})." in texts(result)
    (lacking,) = [each for each in result.findings if each.kind == "no series of an atlas"]
    assert lacking.subjects == (str(checked.subjects[7]),)
    assert lacking.anonymous == "1 subject has no series of atlas two."
    table = result.sites.set_index("site")
    assert table.index.tolist() == ["a", "b", "c"]
    assert table["subjects"].tolist() == [12, 12, 12]
    assert table["with flat ROIs"].to_dict() == {"a": 1, "b": 0, "c": 0}
    rows = result.inclusion.set_index("subject")["reason"]
    assert "Atlas two: 1 subject has" in rows[first]
    assert "no series of atlas two" in rows[checked.subjects[7]]
    # With one atlas, nothing names it.
    assert not any("tlas" in text for text in texts(check_cohort(checked.parcellation("two"))))
    assert "1 subject has at least one flat ROI (most often r3 1)." in texts(check_cohort(checked.parcellation("two")))


def test_a_sentence_names_a_few_of_many(checked):
    series = [None if i < 9 else one for i, one in enumerate(checked.parcellations["two"].series)]
    other = replace(checked, parcellations={"two": Parcellation(checked.parcellations["two"].rois, series)})
    listed = ", ".join(checked.subjects[:6])
    assert f"9 subjects have no series of atlas two ({listed} and 3 more)." in texts(check_cohort(other))
    assert atlas_line(other) == "Atlases: one (20 ROIs, 36 subjects), two (16 ROIs, 27 subjects)."
    assert atlas_line(other.parcellation("one")) == ""
    nobody = replace(other, parcellations={"two": Parcellation(["x"], [None] * 36), "three": other.parcellations["two"]})
    assert "Atlases: one (20 ROIs, 36 subjects), two (1 ROIs, 0 subjects), three" in atlas_line(nobody)
    found = texts(check_cohort(nobody))
    assert any(text.startswith("36 subjects have no series of atlas two (") for text in found)
    assert any(text.startswith("9 subjects have no series of atlas three (") for text in found)


def test_an_empty_scan_in_any_atlas(checked):
    series = list(checked.parcellations["two"].series)
    series[11] = series[11] * np.float32(1e-9)
    empty = replace(checked, parcellations={"two": Parcellation(checked.parcellations["two"].rois, series)})
    assert empty_scans(checked) == []
    assert empty_scans(empty) == [11]
    assert any(
        text.startswith(f"Atlas two: {empty.subjects[11]} (a) is an unusable subject") for text in texts(check_cohort(empty))
    )


def test_an_unusable_series_is_a_finding_about_its_subject(abide):
    place(abide, "Pitt_0050003", "ho").write_text("#1\t#2\n1\tx.5\n")
    result = check_cohort(read(abide, atlas=("aal", "ho"), on_bad="exclude"))
    found = [each for each in result.findings if each.kind in ("no series of an atlas", "unusable series")]
    assert [each.subjects for each in found] == [("Pitt_0050003",), ("Pitt_0050003",)]
    assert found[1].text.startswith(
        "Subject Pitt_0050003 has no series of atlas ho: Pitt_0050003_rois_ho.1D, line 2, column 2: "
    )
    assert found[1].anonymous == "A subject has no series of atlas ho, because its file is unusable."
    assert all("Pitt" not in each.anonymous for each in found)


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    from m2lgdg.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["m2lgdg", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def test_the_commands(abide, typed):
    place(abide, "Pitt_0050003", "ho").unlink()
    line = "Atlases: aal (116 ROIs, 5 subjects), ho (20 ROIs, 4 subjects)."
    code, text, _ = typed("check", abide, "--atlas", "aal", "--atlas", "ho")
    assert code == 1
    assert text.splitlines().count(line) == 1
    assert sum(row.startswith("PITT") for row in text.splitlines()) == 1
    assert "1 subject has no series of atlas ho (Pitt_0050003)." in text
    (command,) = [row for row in text.splitlines() if row.startswith("Next: ")]
    assert command == f"Next: m2lgdg convert {abide} abide.cohort --atlas aal --atlas ho"
    code, text, _ = typed("convert", abide, "two.cohort", "--atlas", "aal", "--atlas", "ho")
    assert code == 0 and line in text.splitlines()
    loaded = Cohort.load("two.cohort")
    assert loaded.hash == read(abide, atlas=("aal", "ho")).hash
    assert any(each.text == "1 subject has no series of atlas ho (Pitt_0050003)." for each in loaded.findings)
    code, text, _ = typed("check", "two.cohort")
    assert line in text.splitlines()
    assert typed("convert", abide, "all.cohort", "--atlas", "all", "--float16")[0] == 0
    assert Cohort.load("all.cohort").atlases == ("aal", "cc200", "ho")
    code, text, _ = typed("convert", abide, "one.cohort", "--atlas", "aal")
    assert code == 0 and "Atlases:" not in text
    assert Cohort.load("one.cohort").hash == read(abide, atlas="aal").hash
    code, _, error = typed("convert", abide, "bad.cohort", "--atlas", "aal", "--atlas", "aal")
    assert (code, error.strip()) == (2, "m2lgdg: option atlas: aal is given twice.")


def test_other_options_work_with_several_atlases(abide, typed, tmp_path):
    def converted(name, *options):
        code, _, error = typed("convert", abide, name, "--atlas", "aal", "--atlas", "ho", *options)
        assert code == 0, error
        cohort = Cohort.load(name)
        assert cohort.atlases == ("aal", "ho")
        for subject, one in zip(cohort.subjects, cohort.parcellations["ho"].series, strict=True):
            np.testing.assert_array_equal(one, alone[subject])
        return cohort.subjects.tolist()

    whole = read(abide, atlas="ho")
    alone = dict(zip(whole.subjects.tolist(), whole.series, strict=True))
    assert converted("site", "--site", "CMU") == ["CMU_a_0050649", "CMU_b_0050669"]
    assert converted("still", "--max-motion", "0.25") == ["CMU_a_0050649", "CMU_b_0050669", "MaxMun_a_0051607"]
    miniature.write_rows(tmp_path / "keep.csv", ("subject", "status"), [("Pitt_0050004", "included")], ",")
    assert converted("keep", "--keep", "keep.csv") == ["Pitt_0050004"]
    table = abide / miniature.ABIDE_TABLE
    table.write_text(table.read_text().replace("CMU,CMU_b", "cmu,CMU_b"))
    assert len(converted("merged", "--merge-sites")) == 5
    assert set(Cohort.load("merged").sites) == {"CMU", "MAX_MUN", "PITT"}
    shutil.copy(place(abide, "Pitt_0050003", "ho"), place(abide, "Pitt_0050004", "ho"))
    rewrite(place(abide, "Pitt_0050004", "ho"), lambda rows: [*rows, rows[-1]])
    shutil.copy(place(abide, "Pitt_0050003", "aal"), place(abide, "Pitt_0050004", "aal"))
    rewrite(place(abide, "Pitt_0050004", "aal"), lambda rows: [*rows, rows[-1]])
    whole = read(abide, atlas="ho")
    alone = dict(zip(whole.subjects.tolist(), whole.series, strict=True))
    dropped = converted("unique", "--drop-duplicates")
    assert not {"Pitt_0050003", "Pitt_0050004"} & set(dropped)  # one scan with two labels


def test_methods_use_the_main_atlas(checked):
    one = checked.parcellation("one")
    source, target = np.flatnonzero(checked.sites != "a"), np.flatnonzero(checked.sites == "a")
    predictions = [
        make("fc-logistic").fit(cohort.select(source)).predict_proba(cohort.select(target).unlabelled())
        for cohort in (checked, one)
    ]
    np.testing.assert_array_equal(*predictions)
