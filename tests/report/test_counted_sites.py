"""Sites with few of a class, and decisions that say nothing: both are shown and named, and neither makes a number wrong."""

import json

import numpy as np
import pandas as pd
import pytest

import m2lgdg
from m2lgdg import InputError
from m2lgdg.metrics import auc
from m2lgdg.report.answer import answer
from m2lgdg.report.card import card
from m2lgdg.report.checklists import methods_text
from m2lgdg.report.contents import read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import Comparison, both_tracks, flat_clauses
from m2lgdg.study.stats import counted_targets

pytestmark = pytest.mark.usefixtures("figures_painted_only")
SIZES = {"A": (20, 20), "B": (12, 15), "C": (9, 6), "tiny": (1, 2), "patients": (6, 0), "four": (4, 30)}  # patients, controls
COUNTED = ["A", "B", "C"]


@pytest.fixture
def table():
    """Two methods at three usable sites, one of three subjects, one of patients only, one with four patients."""
    rng, rows = np.random.default_rng(0), []
    for site, (patients, controls) in SIZES.items():
        labels = np.array([1] * patients + [0] * controls)
        for method, strength in (("fc-logistic", 1.5), ("fc-svm", 0.6)):
            proba = 1 / (1 + np.exp(-(strength * (2 * labels - 1) + rng.normal(size=len(labels)))))
            rows += [(method, "", 0, site, f"{site}{i}", labels[i], proba[i]) for i in range(len(labels))]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def folder_of(table, folder, **study):
    folder.mkdir()
    table.to_csv(folder / "predictions.csv", index=False)
    names = sorted(set(table["method"]))
    settings = {"methods": names, "targets": list(SIZES), "seeds": [0], "method": {name: {} for name in names}}
    (folder / "study.json").write_text(json.dumps(settings | study))
    return folder


def mean_auc(table, method, sites):
    own = table[table["method"] == method]
    return np.mean([auc(one["label"], one["proba"]) for site, one in own.groupby("target") if site in sites])


def test_a_site_of_three_subjects_enters_no_mean_and_no_test(table):
    assert counted_targets(table) == COUNTED
    compared = Comparison(table, "fc-logistic")
    *sites, macro = compared.tables()
    without = Comparison(table[table["target"].isin(COUNTED)], "fc-logistic")
    assert macro.rows == without.macro_table().rows
    assert [panel.rows for panel in compared.panels()] == [panel.rows for panel in without.panels()]
    assert {site.target for site in sites} == set(SIZES)  # still shown
    assert "need at least 5 patients and 5 controls (min_per_class): tiny (patients 1, controls 2), patients (" in macro.note
    assert "not in means and tests" in sites[3].note and "not in means and tests" not in sites[0].note
    assert f"over 3 target sites, {sum(map(sum, (SIZES[site] for site in COUNTED)))} subjects" in macro.note


def test_all_metrics_are_means_over_the_same_sites(table):
    compared = Comparison(table, least=1)
    assert compared.counted == ["A", "B", "C", "tiny", "four"]  # a site of one class never counts
    assert set(compared.macro["sites"]) == {5}
    balanced = compared.macro[compared.macro["metric"] == "balanced ACC"].set_index("method")["mean"]
    both = compared.macro[compared.macro["metric"].isin(["SEN", "SPE"])].groupby("method")["mean"].mean()
    assert np.allclose(balanced[both.index], both)


def test_the_key_of_the_study_sets_the_number(table, tmp_path):
    four = m2lgdg.table(folder_of(table, tmp_path / "four", min_per_class=4), "csv")
    five = m2lgdg.table(folder_of(table, tmp_path / "five"), "csv")
    for text, sites in ((four, [*COUNTED, "four"]), (five, COUNTED)):
        rows = pd.read_csv(pd.io.common.StringIO(text))
        macro = rows[(rows["table"] == "Macro average over target sites") & (rows["metric"] == "AUC")].set_index("method")[
            "mean"
        ]
        assert float(macro["fc-svm"]) == pytest.approx(100 * mean_auc(table, "fc-svm", sites), abs=0.0051)
    damaged = folder_of(table, tmp_path / "damaged", min_per_class="none")
    assert m2lgdg.table(damaged, "csv") == five
    with pytest.raises(InputError, match="min_per_class"):
        m2lgdg.run_study({"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior"], "min_per_class": 0}, tmp_path / "out")


def test_where_no_site_counts_there_is_no_mean(table, tmp_path):
    small = table[table["target"].isin(["tiny", "patients", "four"])]
    macro = Comparison(small).macro_table()
    assert macro.shown[0][1:7] == ["-"] * 6 and macro.note.startswith("no mean and no tests, which need at least 5 patients")
    found = answer(read_contents(folder_of(small, tmp_path / "study")))
    assert found.answer.startswith("No target site has at least 5 patients and 5 controls")
    assert "No target site has at least 5 patients" in write_report(tmp_path / "study").read_text()


def test_the_report_answers_for_the_sites_that_count(table, tmp_path):
    folder = folder_of(table, tmp_path / "study", main="fc-svm")
    contents = read_contents(folder)
    found, mean = answer(contents), 100 * mean_auc(table, "fc-svm", COUNTED)
    assert found.answer.startswith(f"Mean AUC over 3 unseen sites: fc-svm {mean:.1f} %")
    assert "fewer than 5 patients or controls: 3 more sites" in " ".join(found.notes)
    assert found.comparison.startswith("A simple peer is higher: fc-logistic ")  # never next best
    page = write_report(folder).read_text()
    assert page.count(f"fc-svm {mean:.1f} %") == 1  # one number in one place
    words = " ".join(methods_text(contents, motion=False).paragraphs)
    assert "3 target sites with fewer than 5 patients or controls do not enter means and tests" in words
    assert "seeds" not in words.split("averaged over seeds")[0]  # nothing is random here
    strict = both_tracks(table, table, 20)
    counted = table[table["target"].isin(COUNTED)]
    assert strict.shown == both_tracks(counted, counted, 20).shown


def test_peers_see_what_the_main_method_sees(table, tmp_path):
    """fc-svm with phenotypes is the highest of all, but the main method sees the scan only."""
    svm = table[table["method"] == "fc-svm"]
    sure = svm.assign(variant="phenotypes", proba=0.1 + 0.8 * svm["label"])
    alone = sure.assign(method="phenotype-logistic", variant="")
    folder = folder_of(pd.concat([table, sure, alone]), tmp_path / "scan", main="fc-logistic", inputs=["age"])
    contents = read_contents(folder)
    assert contents.inputs_of(("fc-svm", "phenotypes")) == {"scan", "phenotypes"}
    assert contents.inputs_of(("phenotype-logistic", "")) == {"phenotypes"}
    found = answer(contents)
    assert (found.main, found.peer) == (("fc-logistic", ""), ("fc-svm", ""))
    assert found.comparison.startswith("Simple peer: fc-svm ")
    paper = pd.concat([table, sure[sure["method"] == "fc-svm"].assign(method="m2lgdg", variant="")])
    found = answer(read_contents(folder_of(paper, tmp_path / "both", inputs=["age"])))
    assert found.main == ("m2lgdg", "") and found.comparison.startswith("Best of 2 simple peers: fc-logistic (scan only) ")


def flat(table, at, proba):
    return table.assign(proba=table["proba"].where(~((table["method"] == "fc-svm") & table["target"].isin(at)), proba))


def test_decisions_that_say_nothing_are_named(table, tmp_path):
    """The ranking, so the AUC, is as it was: only the level of the probabilities has collapsed."""
    assert flat_clauses(table) == []
    collapsed = flat(table, ["A", "B", "tiny"], 0.31 + 0.001 * table["proba"])
    (clause,) = flat_clauses(collapsed)
    assert clause == (
        "fc-svm calls everybody a control at 2 of 3 sites (A, B) and has nearly constant probabilities (sd below 0.005) at "
        "2 of 3 sites (A, B)"
    )
    sure = flat(table, ["C"], 0.6 + 0.4 * table["proba"])
    assert flat_clauses(sure) == ["fc-svm calls everybody a patient at 1 of 3 sites (C)"]
    folder = folder_of(collapsed, tmp_path / "study")
    assert clause in m2lgdg.table(folder) and clause in answer(read_contents(folder)).flat
    model = m2lgdg.make("fc-svm").fit(m2lgdg.make_cohort("tiny")).save(tmp_path / "model")
    (results,) = (one for one in card(model, folder) if "study" in one.title and one.tables)
    assert any(clause in remark for remark in results.remarks)
    prior = collapsed.replace({"method": {"fc-svm": "prior"}})
    assert flat_clauses(prior) == []  # constant by design


def test_the_card_begins_with_mean_and_range_over_sites(table, tmp_path):
    model = m2lgdg.make("fc-svm").fit(m2lgdg.make_cohort("tiny")).save(tmp_path / "model")
    (results,) = (one for one in card(model, folder_of(table, tmp_path / "study")) if "study" in one.title and one.tables)
    areas = {site: 100 * mean_auc(table, "fc-svm", [site]) for site in COUNTED}
    low, high = min(areas, key=areas.get), max(areas, key=areas.get)
    mean, sd = np.mean(list(areas.values())), np.std(list(areas.values()), ddof=1)
    assert results.facts[0] == (
        "AUC",
        f"{mean:.1f} ± {sd:.1f} over 3 sites, from {areas[low]:.1f} ({low}) to {areas[high]:.1f} ({high})",
    )
    assert any(remark.endswith("patients or controls: tiny, patients, four.") for remark in results.remarks)
    assert any("The study decides at the threshold 0.5, this model at" in one for one in results.sentences)


def test_a_report_without_motion_says_so(table, tmp_path):
    page = write_report(folder_of(table, tmp_path / "study")).read_text()
    assert (
        "Not adjusted: the cohort file of the study is not here"
        in page.split('data-section="motion"')[1].split("</section>")[0]
    )
    m2lgdg.make_cohort("tiny").save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["prior"], "targets": ["north"]}
    page = write_report(m2lgdg.run_study(study, tmp_path / "out").folder).read_text()
    assert "the phenotypes have no column of head motion" in page
