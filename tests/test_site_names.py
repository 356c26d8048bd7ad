"""One site under two spellings is found, fails the leakage check with both names, and is merged on request."""

import unicodedata
from dataclasses import replace

import numpy as np
import pytest

from m2lgdg import Cohort, check_cohort, make_cohort
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.data.site_names import alike, common_spelling, merged, shown
from m2lgdg.findings import Exclusion

CHECK = "no two site names are one site"
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))

HIDDEN = ["N\u200bYU", "NY\u00adU", "\ufeffNYU", "\uff2e\uff39\uff35"]
ABIDE = ["CALTECH", "CMU", "KKI", "LEUVEN_1", "LEUVEN_2", "MAX_MUN", "NYU", "OHSU", "OLIN", "PITT", "SBL", "SDSU", "STANFORD"]
ABIDE += ["TRINITY", "UCLA_1", "UCLA_2", "UM_1", "UM_2", "USM", "YALE", "ABIDEII-UCLA_1", "ABIDEII-UCLA_Long", "S1", "S11"]


def respelled(cohort, site, other, count):
    """The cohort with the first subjects of a site under another name."""
    sites = cohort.sites.astype("U20")
    sites[np.flatnonzero(sites == site)[:count]] = other
    return replace(cohort, sites=sites)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["NYU", "nyu", "CMU"], [["NYU", "nyu"]]),
        (["UM 1", " UM 1", "UM  1", "UM\u00a01", "UM 2"], [[" UM 1", "UM  1", "UM 1", "UM\u00a01"]]),
        ([COMPOSED, DECOMPOSED], [[DECOMPOSED, COMPOSED]]),
        ([COMPOSED.upper(), DECOMPOSED], [[DECOMPOSED, COMPOSED.upper()]]),
        (["Weiß", "WEISS"], [["WEISS", "Weiß"]]),
        (["b", "a", "B", "A"], [["A", "a"], ["B", "b"]]),
        (["UM_1", "UM-1", "UM 1", "UM_2", "um_01"], [["UM_1", "UM-1", "UM 1", "um_01"]]),
        (["Site1", "Site01", "Site_1", "Site10", "Site 2"], [["Site1", "Site01", "Site_1"]]),
        (["NYU", "N\u200bYU", "NY\u00adU", "\ufeffNYU", "\uff2e\uff39\uff35"], [["NYU", *HIDDEN]]),
        (["0", "00", "1"], [["0", "00"]]),
        (["NYU", "NYU_2", "NY U", "Zurich", COMPOSED, "S1", "S10"], []),
        (["-", "_", "A+", "A*", "A"], []),
        (ABIDE, []),
        (["NYU", "NYU"], []),
        ([], []),
    ],
)
def test_names_alike(names, groups):
    assert [sorted(group) for group in alike(names)] == [sorted(group) for group in groups]
    assert alike(reversed(names)) == alike(names)


def test_the_most_frequent_spelling_wins_composed_and_without_spaces(tiny):
    cohort = respelled(respelled(tiny, "north", "North ", 2), "east", DECOMPOSED, 99)
    cohort = respelled(cohort, DECOMPOSED, COMPOSED.lower(), 1)
    cohort = replace(cohort, excluded=(Exclusion("x", "NORTH", "no scan"), Exclusion("y", "far", "no scan")))
    changed = merged(cohort, alike([*cohort.sites.tolist(), "NORTH"]))
    assert set(changed.sites.tolist()) == {"north", "south", "west", COMPOSED}
    assert (changed.sites == "north").tolist() == (tiny.sites == "north").tolist()
    assert [one.site for one in changed.excluded] == ["north", "far"]
    added = changed.notes[len(cohort.notes) :]
    assert any(note.startswith("Site 'North ' (2 subjects) was merged into north: the names differ only by") for note in added)
    assert any(note.startswith(f"Site {COMPOSED.lower()} (1 subject) was merged into {COMPOSED}: ") for note in added)
    assert len(added) == 4
    assert replace(changed, sites=cohort.sites).hash == cohort.hash  # nothing else has changed


def test_names_that_look_the_same_are_shown_apart_and_the_most_frequent_spelling_wins():
    assert common_spelling(["NYU", "nyu"], {"NYU": 2, "nyu": 2}) == "NYU"
    assert common_spelling(["NYU", "nyu"], {"NYU": 2, "nyu": 3}) == "nyu"
    assert (shown(COMPOSED), shown(DECOMPOSED), shown(" NYU")) == (COMPOSED, "'Zu\\u0308rich'", "' NYU'")


def test_one_site_under_two_names_fails_the_check_with_both_names(tiny):
    (fine,) = (check for check in leakage_checks(tiny) if check["check"] == CHECK)
    assert fine["passed"] is True
    assert fine["detail"].startswith("4 site names checked: ")
    count = int((tiny.sites == "north").sum())
    for other in ("North", "north ", "NORTH"):
        failed = [check for check in leakage_checks(respelled(tiny, "north", other, 2), ["south"]) if not check["passed"]]
        assert [check["check"] for check in failed] == [CHECK]
        assert "m2lgdg convert PATH OUT --merge-sites" in failed[0]["detail"]
        assert f"{shown(other)} (2 subjects)" in failed[0]["detail"]
        assert f"north ({count - 2} subjects)" in failed[0]["detail"]
        assert not any(subject in failed[0]["detail"] for subject in tiny.subjects)


def test_check_reports_them_and_a_merge_leaves_nothing_hidden(tiny):
    cohort = respelled(tiny, "north", "No\u200brth", 9)
    (finding,) = [one for one in check_cohort(cohort).findings if one.kind == "alike sites"]
    assert finding.severity == "finding" and "--merge-sites" in finding.text
    assert finding.numbers["listed"] == ["'No\\u200brth' (9 subjects)", "north (7 subjects)"]
    assert set(merged(cohort, alike(cohort.sites.tolist())).sites.tolist()) == {"North", "south", "west", "east"}
    assert not [one for one in check_cohort(tiny).findings if one.kind == "alike sites"]


def test_convert_merges_on_request_and_names_what_it_merged(tmp_path, typed):
    cohort = respelled(make_cohort("tiny"), "north", "NORTH", 3)
    path = cohort.save(tmp_path / "a.cohort")
    code, printed, _ = typed("convert", path, tmp_path / "plain.cohort")
    assert code == 0
    assert "merged" not in printed
    assert "NORTH" in Cohort.load(tmp_path / "plain.cohort").site_names
    code, printed, _ = typed("convert", path, tmp_path / "b.cohort", "--merge-sites")
    assert code == 0
    assert "Site NORTH (3 subjects) was merged into north: the names differ only by case" in " ".join(printed.split())
    assert Cohort.load(tmp_path / "b.cohort").sites.tolist() == make_cohort("tiny").sites.tolist()
    code, printed, _ = typed("convert", tmp_path / "b.cohort", tmp_path / "c.cohort", "--merge-sites")
    assert "No two site names are alike; nothing was merged." in printed
