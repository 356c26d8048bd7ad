"""`--max-motion`: subjects at or above the limit are left out, listed with their value, for every kind of cohort."""

import re
from collections import Counter

import miniature
import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, InputError, make_cohort, read, run_study
from m2lgdg.data.check import check_cohort
from m2lgdg.data.readers.selection import limit_motion

HIGH = "head motion: func_mean_fd is not below 0.2 (value {})"


@pytest.fixture
def moving():
    """A tiny cohort whose subject i moved by i / 100 mm, subject 3 unknown and subject 5 by a code below 0."""
    cohort = make_cohort("tiny")
    motion = np.arange(len(cohort)) / 100
    motion[[3, 5]] = np.nan, -1.0
    return cohort._changed(phenotypes=cohort.phenotypes.assign(Mean_FD=motion))


def reasons(cohort):
    return {one.subject: (one.site, one.reason) for one in cohort.excluded}


def test_abide_keeps_what_is_strictly_below_the_limit(tmp_path):
    folder = miniature.abide(tmp_path / "ABIDE_pcp").folder
    whole = read(folder)
    assert dict(zip(whole.subjects, whole.phenotypes["func_mean_fd"], strict=True))["CMU_a_0050649"] == 0.2
    cohort = read(folder, max_motion=0.25)
    assert cohort.subjects.tolist() == ["CMU_a_0050649", "CMU_b_0050669", "MaxMun_a_0051607"]
    added = {name: value for name, value in reasons(cohort).items() if name not in reasons(whole)}
    assert added == {
        "Pitt_0050003": ("PITT", "head motion: func_mean_fd is not below 0.25 (value 0.3)"),
        "Pitt_0050004": ("PITT", "no motion value: column func_mean_fd"),
    }
    with pytest.raises(InputError, match=r"no subject with func_mean_fd below 0\.2; raise --max-motion"):
        read(folder, max_motion=0.2)  # the others have 0.2 exactly
    assert "only subjects with func_mean_fd below 0.25 (head motion)" in cohort.notes


def test_the_papers_abide_cohort_by_its_counts(abide_folder):
    """The release's own table, with noise for scans: below 0.2 are the subjects that the paper counts."""
    table = pd.read_csv(abide_folder / "Phenotypic_V1_0b_preprocessed1.csv", dtype={"FILE_ID": str})
    table = table[table["FILE_ID"] != "no_filename"].set_index("FILE_ID")
    cohort = Cohort(
        series=list(np.random.default_rng(0).normal(size=(len(table), 2, 2)).astype(np.float32)),
        subjects=table.index.to_numpy(),
        sites=table["SITE_ID"].to_numpy(),
        labels=2 - table["DX_GROUP"].to_numpy(),
        rois=("a", "b"),
        phenotypes=table[["func_mean_fd"]],
    )
    kept = limit_motion(cohort, 0.2)
    sites = Counter(kept.sites.tolist())
    assert (len(cohort), len(kept), len(kept.excluded)) == (1035, 884, 151)
    assert ((kept.labels == 1).sum(), (kept.labels == 0).sum()) == (408, 476)
    assert (len(sites), sites["NYU"], sites["USM"]) == (20, 171, 61)
    assert [one.subject for one in kept.excluded if one.kind == "no motion value"] == ["Yale_0050610"]


def test_a_cohort_file_is_cut_too(tmp_path, moving):
    file = moving.save(tmp_path / "whole.cohort")
    cohort = read(file, max_motion=0.1)
    assert cohort.subjects.tolist() == moving.subjects[[0, 1, 2, 4, 6, 7, 8, 9]].tolist()
    excluded = reasons(cohort)
    assert excluded[moving.subjects[3]][1] == "no motion value: column Mean_FD"
    assert excluded[moving.subjects[5]][1] == "no motion value: column Mean_FD (value -1)"
    assert excluded[moving.subjects[10]] == (moving.sites[10], "head motion: Mean_FD is not below 0.1 (value 0.1)")
    assert len(excluded) == len(moving) - 8 and cohort.findings is None
    again = Cohort.load(cohort.save(tmp_path / "part.cohort"))
    assert again.excluded == cohort.excluded and again.hash == cohort.hash
    assert read(file, max_motion=10.0).hash != moving.hash  # the two without a value
    named = moving._changed(phenotypes=moving.phenotypes.rename(columns={"Mean_FD": "displacement"}))
    file = named.save(tmp_path / "named.cohort")
    np.testing.assert_array_equal(read(file, max_motion=0.1, motion_column="displacement").subjects, cohort.subjects)


def test_check_counts_them_without_naming_values(moving, tmp_path):
    cohort = read(moving.save(tmp_path / "whole.cohort"), max_motion=0.1)
    sentences = {one.text: one for one in check_cohort(cohort).findings if "exclusion" in one.kind}
    (high,) = [one for text, one in sentences.items() if "is not below" in text]
    (missing,) = [one for text, one in sentences.items() if "no motion value" in text]
    assert (high.severity, missing.severity) == ("note", "finding")
    assert high.text.startswith(f"{len(moving) - 10} subjects excluded: head motion: Mean_FD is not below 0.1 (")
    assert missing.text.startswith("2 subjects excluded: no motion value: column Mean_FD (")
    assert "value" not in high.anonymous and "(value" not in missing.anonymous
    table = check_cohort(cohort).inclusion.set_index("subject")
    assert table.loc[moving.subjects[12], "reason"] == "head motion: Mean_FD is not below 0.1 (value 0.12)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_motion": 0.0}, "max_motion must be a number above 0, not 0.0"),
        ({"max_motion": float("nan")}, "max_motion must be a number above 0, not nan"),
        ({"max_motion": "low"}, "max_motion must be a number above 0, not 'low'"),
        ({"max_motion": 0.2, "motion_column": "fd"}, "has no column fd for --motion-column; its columns are "),
        ({"max_motion": 0.2, "motion_column": "word"}, "column word holds text; head motion must be a number"),
        ({"motion_column": "Mean_FD"}, "--motion-column needs --max-motion"),
    ],
)
def test_wrong_limits_and_columns(moving, tmp_path, options, message):
    file = moving._changed(phenotypes=moving.phenotypes.assign(word="x")).save(tmp_path / "whole.cohort")
    with pytest.raises(InputError, match=re.escape(message)):
        read(file, **options)
    with pytest.raises(InputError, match=r"has no column of head motion \(func_mean_fd, .*--motion-column"):
        read(make_cohort("tiny").save(tmp_path / "none.cohort"), max_motion=0.2)


def test_the_commands(moving, tmp_path, monkeypatch, capsys):
    from m2lgdg.cli import main

    def typed(*words):
        monkeypatch.setattr("sys.argv", ["m2lgdg", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    moving.save("whole.cohort")
    code, text = typed("check", "whole.cohort", "--max-motion", "0.3")
    assert code == 1 and "28 subjects" in text
    assert "Next: m2lgdg convert whole.cohort whole-corrected.cohort --max-motion 0.3" in text
    code, text = typed("convert", "whole.cohort", "still.cohort", "--max-motion", "0.3")
    assert code == 0
    assert f"Excluded {moving.subjects[32]} ({moving.sites[32]}): head motion: Mean_FD is not below 0.3 (value 0.32)." in text
    assert f"Excluded {moving.subjects[3]} ({moving.sites[3]}): no motion value: column Mean_FD." in text
    assert text.count("Excluded ") == len(moving) - 28
    stored = Cohort.load("still.cohort")
    assert len(stored) == 28 and any("is not below 0.3" in one.text for one in stored.findings)
    code, text = typed("check", "still.cohort")
    assert code == 1 and "Mean_FD is not below 0.3" in text


def test_a_study_may_have_the_limit_as_an_option(moving, tmp_path):
    """Workers read the cut cohort, not the file that the study names."""
    file = moving.save(tmp_path / "whole.cohort")
    study = {"cohort": str(file), "methods": ["prior"], "seeds": [0], "options": {"max_motion": 0.3}}
    summary = run_study(study, tmp_path / "out")
    assert summary.done == summary.total > 0
    kept = Cohort.load(tmp_path / "out" / "cohort.cohort")
    assert len(kept) == 28 and (kept.phenotypes["Mean_FD"] < 0.3).all()
