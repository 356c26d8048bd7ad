"""The file of a cohort: files of 0.1.0 are read, with their hash, exclusions, notes and findings."""

from pathlib import Path

import pytest

from m2lgdg import Cohort
from m2lgdg.data.check import duplicate_flags
from m2lgdg.findings import Exclusion, problems

FORMER = Path(__file__).parent / "data" / "cohort-0.1.0.safetensors"  # written by 0.1.0, with float16 series


@pytest.fixture(scope="module")
def former():
    return Cohort.load(FORMER)


def test_a_file_of_0_1_0_is_read_and_written_again(former, tmp_path):
    assert former.hash == "34b0d6984f9168f81d018a0aec42edb627235b8652c2a4ec5e6a88ed7d36377f"
    assert former.atlases == ("aal", "ho") and former.parcellations["ho"].present.tolist() == [1, 1, 0, 1, 1, 1]
    again = Cohort.load(former.save(tmp_path / "again.cohort"))
    held = Cohort.load(tmp_path / "again.cohort", in_memory=True)
    for one in (again, held):
        assert (one.hash, one.excluded, one.notes, one.findings) == (
            former.hash,
            former.excluded,
            former.notes,
            former.findings,
        )
    with pytest.raises(ValueError, match="WRITEABLE"):
        held.series[0].flags.writeable = True


def test_its_exclusions_name_nobody_in_general(former):
    assert former.excluded == (
        Exclusion("x1", "a", "head motion", "func_mean_fd is not below 0.2", "value 0.31"),
        Exclusion("x2", "b", "duplicate", detail="same scan as s1, which is kept"),
        Exclusion("x3", "b", "unusable file", detail="x3.npy: subject x3: NaN at volume 1 of ROI p (1 such value)."),
        Exclusion("x4", "a", "left out by an inclusion list", detail="mine.csv"),
        Exclusion("x5", "S4", "site left out", "its subjects duplicate those of S14"),
        Exclusion("x6", "a", "listed but no series file"),
    )
    assert [one.expected for one in former.excluded] == [True, True, False, True, True, False]
    assert former.excluded[0].reason == "head motion: func_mean_fd is not below 0.2 (value 0.31)"
    assert former.excluded[2].reason.startswith("x3.npy: ") and former.excluded[2].general == "unusable file"


def test_its_findings_keep_their_sentences(former):
    found = problems(former.findings)
    assert len(former.findings) == 20 and len(found) == 13 and len(problems(former.findings, new_site=True)) == 10
    assert found[0].text.startswith("s0 (a) and s3 (b) have identical series")
    assert found[0].anonymous.startswith("A subject (a) and another subject (b) have identical series")
    assert [bool(flags) for flags in duplicate_flags(former)] == [True, False, False, True, False, False]
    assert former.notes[0].kind == "label"
