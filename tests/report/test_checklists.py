"""The checklists: complete, honest about what is not known; every fact counted again from the files."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from m2lgdg import Cohort, InputError, make_cohort, run_study
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.findings import Exclusion
from m2lgdg.metrics import auc
from m2lgdg.report.checklists import TO_COMPLETE, checklists, known_facts, methods_text
from m2lgdg.report.contents import read_contents
from m2lgdg.study.predictions import read_predictions

EXCLUDED = (
    Exclusion.from_reason("x1", "north", "no scan"),
    Exclusion.from_reason("x2", "north", "no scan"),
    Exclusion.from_reason("x3", "east", "/secret/x3.1D: NaN."),
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of two peers, its cohort beside it, and its leakage checks."""
    folder = tmp_path_factory.mktemp("study")
    notes = ("label from column dx: asd = patient, td = control",)
    cohort = replace(make_cohort("tiny"), excluded=EXCLUDED, notes=notes)
    cohort.save(folder / "tiny.cohort")
    content = {"cohort": str(folder / "tiny.cohort"), "methods": ["prior", "fc-logistic"], "seeds": [3, 4], "inputs": ["age"]}
    run_study(content, folder / "out")
    (folder / "out" / "checks.json").write_text(json.dumps(leakage_checks(cohort)))
    return folder / "out"


@pytest.fixture(scope="module")
def known(study):
    return known_facts(read_contents(study))


def copied(study, folder):
    """Facts of a folder with the predictions of the study and no other file of it."""
    (folder / "predictions.csv").write_bytes((study / "predictions.csv").read_bytes())
    return known_facts(read_contents(folder))


def rows(known):
    return {(name, row.item): row for name, items in checklists(known).items() for row in items}


def test_all_items_are_there_and_nothing_is_known_of_nothing():
    tripod, reforms, probast, claim = checklists({}).values()
    assert [row.item for row in claim] == [str(number) for number in range(1, 45)]
    domains = ("Participants and data", "Predictors", "Outcome", "Analysis, fitting", "Analysis, testing")
    assert list(dict.fromkeys(row.section for row in probast)) == list(domains)
    assert len(probast) == 24
    numbers = [int(re.match(r"\d+", row.item)[0]) for row in tripod]
    assert sorted(set(numbers)) == list(range(1, 28))
    assert numbers == sorted(numbers)
    parts = {number: count for number, count in Counter(numbers).items() if count > 1}
    assert parts == {3: 3, 5: 2, 6: 3, 8: 3, 9: 3, 12: 7, 18: 6, 20: 3, 23: 2, 27: 3}
    assert Counter(row.item[0] for row in reforms) == dict(zip("12345678", (3, 5, 7, 3, 6, 3, 3, 2), strict=True))
    assert len({row.section for row in reforms}) == 8
    for checklist in (tripod, reforms, probast, claim):
        assert len({row.item for row in checklist}) == len(checklist)
        assert all(row.answer == TO_COMPLETE and row.filled is False and row.topic for row in checklist)


def templates():
    every = {key: f"<{key}>" for key in ALL_KEYS}
    return {name: set(re.findall(r"<(\w+)>", row.answer)) for name, row in rows(every).items() if row.filled}


class Anything(dict):
    """Knows every fact, and remembers which were asked for."""

    def get(self, key, default=None):
        return self.setdefault(key, "?")


def asked():
    everything = Anything()
    checklists(everything)
    return set(everything)


ALL_KEYS = asked()


def test_every_fact_that_is_asked_for_can_be_known(known):
    assert not ALL_KEYS - {key for key, value in known.items() if value}
    assert set(templates()) == {name for name, row in rows(known).items() if row.filled}


def test_a_template_with_a_missing_fact_is_not_filled(known):
    for key in ALL_KEYS:
        needing = {name for name, keys in templates().items() if key in keys}
        for without in ({name: value for name, value in known.items() if name != key}, known | {key: ""}):
            left = rows(without)
            assert needing and {name for name in templates() if not left[name].filled} == needing
            assert all(left[name].answer == TO_COMPLETE for name in needing)


def test_facts_are_put_in_as_they_are():
    hostile = "{included} <b>%s</b> {0}"
    row = rows({"included": "5", "excluded": "2", "exclusions": hostile})["REFORMS", "4a"]
    assert row.answer == f"2 excluded: {hostile}; 5 included."


def test_counts_of_subjects(study, known):
    cohort = Cohort.load(study.parent / "tiny.cohort")
    pairs = list(zip(cohort.sites.tolist(), cohort.labels.tolist(), strict=True))
    assert (known["included"], known["excluded"]) == ("52", "3")
    assert known["exclusions"] == "no scan 2; unusable file 1"
    assert "secret" not in json.dumps(known)
    assert known["subjects"] == known["tested"] == str(len(pairs))
    assert known["patients"] == str(sum(y == 1 for _, y in pairs))
    assert known["controls"] == str(sum(y == 0 for _, y in pairs))
    assert known["sites"] == "east 10, north 16, south 14, west 12"
    sizes = {site: [y for s, y in pairs if s == site] for site in ("east", "north", "south", "west")}
    shares = [100 * sum(ys) / len(ys) for ys in sizes.values()]
    overall = 100 * sum(y for _, y in pairs) / len(pairs)
    assert known["balance"] == (
        f"{overall:.0f} % of labelled subjects are patients, {min(shares):.0f} to {max(shares):.0f} % by site"
    )
    events = sum(y for _, y in pairs)
    sick = sorted(sum(ys) for ys in sizes.values())
    assert known["fold_sizes"] == (
        f"Labelled subjects (patients): source 36 to 42 ({events - sick[-1]} to {events - sick[0]}), "
        f"target 10 to 16 ({sick[0]} to {sick[-1]})"
    )
    ages = cohort.phenotypes["age"]
    lost = {k: [np.isnan(age) for age, y in zip(ages, cohort.labels, strict=True) if y in k] for k in ((0, 1), (1,), (0,))}
    share = [100 * sum(each) / len(each) for each in lost.values()]
    assert known["missing"] == f"age {share[0]:.1f} % (patients {share[1]:.1f} %, controls {share[2]:.1f} %)"
    low, middle, high = np.nanpercentile(ages, [25, 50, 75])
    men = [value == 1 for value in cohort.phenotypes["sex"] if not np.isnan(value)]
    assert known["characteristics"] == (
        f"age median {middle:.1f} (quartiles {low:.1f}, {high:.1f}); {100 * sum(men) / len(men):.0f} % male"
    )
    assert known["outcome"] == "label from column dx: asd = patient, td = control"
    lengths = [len(one) for one in cohort.series]
    assert known["imaging"].startswith(f"12 ROIs of atlas synthetic, {min(lengths)} to {max(lengths)} volumes, TR ")
    assert known["subgroups"] == "sex, age, site size"


def test_performance_with_its_interval(study, known):
    table = read_predictions(study)
    areas = {
        target: 100 * auc(part["label"], part["proba"])
        for target, part in table[table["method"] == "fc-logistic"].groupby("target")
        if target != "east"  # four controls are too few to count
    }
    values = list(areas.values())
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert f"fc-logistic {np.mean(values):.1f} ({low:.1f}-{min(high, 100):.1f}); prior 50.0 (50.0-50.0)" in known["performance"]
    worst, best = min(areas, key=areas.get), max(areas, key=areas.get)
    assert known["heterogeneity"] == (
        f"AUC of fc-logistic from {areas[worst]:.1f} ({worst}) to {areas[best]:.1f} ({best}) over 3 target sites"
    )
    assert known["baselines"] == known["methods"] == "prior, fc-logistic"
    assert "seeds 3, 4" in known["split"]
    assert known["hyperparameters"] == "none"
    assert json.loads((study / "study.json").read_text())["cohort_hash"] == known["cohort_hash"]
    assert json.loads((study / "environment.json").read_text())["code"] in known["code"]


def test_two_sites_have_no_interval_and_one_method_no_comparison(tmp_path):
    rows = [("mine", "", 0, site, f"{site}{i}", i % 2, 0.3 + 0.1 * (i % 3)) for site in "AB" for i in range(10)]
    table = pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])
    table.to_csv(tmp_path / "predictions.csv", index=False)
    facts = known_facts(read_contents(tmp_path))
    assert "(2 sites, no interval)" in facts["performance"]
    assert "comparison" not in facts
    assert facts["baselines"] == ""
    assert "patients" not in facts


def test_checks_are_told_as_they_ended(study, known, tmp_path):
    assert known["checks_inputs"] == "Checked: no label proxy among the inputs; all passed"
    assert known["checks_duplicates"].count("on both sides") == 3
    failed = [
        {"check": "no subject on both sides", "passed": False, "detail": "Target NYU: 1 subject id."},
        {"check": "source labels known", "passed": True, "detail": "Fine."},
    ]
    (tmp_path / "checks.json").write_text(json.dumps(failed))
    facts = copied(study, tmp_path)
    assert facts["checks"] == (
        "Checked: no subject on both sides; source labels known; NOT passed: no subject on both sides: Target NYU: 1 subject id"
    )
    assert "checks_inputs" not in facts
    row = rows(facts)["REFORMS", "6a"]
    assert row.filled
    assert "NOT passed" in row.answer


def test_a_package_that_runs_from_its_folder_has_no_version(study, tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"code": "abc", "m2lgdg": "not installed"}))
    assert copied(study, tmp_path)["code"] == "m2lgdg, hash of the prediction code abc"
    (tmp_path / "environment.json").write_text(json.dumps({"code": "abc", "m2lgdg": "9.9"}))
    assert copied(study, tmp_path)["code"] == "m2lgdg 9.9, hash of the prediction code abc"


@pytest.mark.parametrize(
    ("commit", "tree", "told"),
    [
        ("1" * 40, "clean", "abc (commit 111111111111)"),
        ("1" * 40, "changed", "abc (commit 111111111111, changed since)"),
        ("1" * 40, "named by M2LGDG_COMMIT", "abc (commit 111111111111, named by M2LGDG_COMMIT)"),
        ("unknown", "unknown", "abc"),
    ],
)
def test_the_commit_of_the_code(study, tmp_path, commit, tree, told):
    versions = {"code": "abc", "m2lgdg": "9.9", "commit": commit, "tree": tree, "numpy": "1.0", "system": "Linux"}
    (tmp_path / "environment.json").write_text(json.dumps(versions))
    assert copied(study, tmp_path)["code"] == f"m2lgdg 9.9, hash of the prediction code {told}"
    paragraphs = " ".join(methods_text(read_contents(tmp_path), motion=False).paragraphs)
    assert f", code {told} with numpy 1.0 on Linux." in paragraphs


def changed(study, tmp_path, **changes):
    content = json.loads((study / "study.json").read_text()) | {"cohort": str(study.parent / "tiny.cohort")} | changes
    (tmp_path / "study.json").write_text(json.dumps(content))
    return copied(study, tmp_path)


def test_another_cohort_or_none_is_not_told_about(study, tmp_path):
    assert changed(study, tmp_path)["subjects"] == "52"
    for changes in ({"cohort_hash": "0" * 64}, {"cohort": "gone.cohort"}, {"cohort": "study.json"}, {"inputs": ["moon"]}):
        facts = changed(study, tmp_path, **changes)
        assert "subjects" not in facts, changes
        assert facts["study"] == "study"


def test_of_a_plugin_nothing_is_claimed(study, tmp_path):
    facts = changed(study, tmp_path, plugins=["mine.py"])
    assert not {"selection", "imputation", "transformations"} & set(facts)
    assert not rows(facts)["REFORMS", "5d"].filled


def test_a_damaged_file_is_refused(study, tmp_path):
    assert "checks" not in copied(study, tmp_path)
    (tmp_path / "checks.json").write_text("{")
    with pytest.raises(InputError, match=r"checks\.json cannot be read"):
        copied(study, tmp_path)
