"""The report of a study: its answer, its sections, what is missing; hostile names stay text; nothing is fetched."""

import html
import json
import os
import re

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, make, table
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.registry import METHODS
from m2lgdg.report.answer import answer
from m2lgdg.report.contents import missing_cells, read_contents
from m2lgdg.report.operating import comparison_table, predictive_table
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import study_tables, training_tables
from m2lgdg.report.tables import plain, render
from m2lgdg.report.trust import checks
from m2lgdg.study.plan import declarations
from m2lgdg.study.stats import cell_scores, over_seeds

pytestmark = pytest.mark.usefixtures("figures_painted_only")

HOSTILE = '<script>alert("x")</script> | & _%$#{}~^\\ "\'' + "ß漢" * 5


def test_hostile_names_stay_text(predictions, tmp_path):
    hostile = predictions.assign(target=predictions.target.where(predictions.target != "NYU", HOSTILE))
    hostile["variant"] = hostile["variant"].where(hostile["variant"] == "", "</td><img src=x onerror=alert(1)>")
    latex, markdown = (render(study_tables(hostile), form) for form in ("latex", "markdown"))
    assert r"\textbackslash{}" in latex
    assert not re.search(r"(?<!\\)[&%#](?![^&]*\\\\)", latex.split(r"\toprule")[0].split("caption{")[1].replace(r"\&", ""))
    assert "<" not in markdown and "\\|" in markdown.split("\n")[0]
    hostile.to_csv(tmp_path / "predictions.csv", index=False)
    page = write_report(tmp_path).read_text()
    assert page.count("<script") == 1
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page


def test_the_page_fetches_nothing(predictions, tmp_path):
    predictions.to_csv(tmp_path / "predictions.csv", index=False)
    page = write_report(tmp_path).read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "http:" not in page
    assert "https:" not in page
    assert "default-src 'none'" in html.unescape(page)
    assert "not a diagnostic device" in page
    assert "Mean AUC over 2 unseen sites: good 100.0 % (95 % interval 100.0 to 100.0, t over sites)" in page
    assert "With only 2 sites, performance at a further site is uncertain" in page


def study_of(predictions, folder, **settings):
    folder.mkdir(exist_ok=True)
    predictions.to_csv(folder / "predictions.csv", index=False)
    names = list(dict.fromkeys(predictions.method))
    fields = {name: METHODS.declaration(name).fields for name in names if name in METHODS}
    settings = {"methods": names, "targets": ["NYU", "USM"], "seeds": [0, 1], "name": "a study", "method": fields} | settings
    (folder / "study.json").write_text(json.dumps(settings))
    return folder


def test_the_answer_is_about_the_papers_method_beside_the_best_simple_peer(predictions, tmp_path):
    named = predictions.replace({"method": {"good": "fc-logistic", "noisy": "m2lgdg"}, "variant": {"with-age": ""}})
    contents = read_contents(study_of(named, tmp_path / "study"))
    reported = answer(contents)
    sites = [
        np.mean([auc(part.label.to_numpy(), part.proba.to_numpy()) for _, part in own.groupby("seed")])
        for _, own in named[named.method == "m2lgdg"].groupby("target")
    ]
    half = 12.7062 * np.std(sites, ddof=1) / np.sqrt(2)  # Student's t with one degree of freedom
    low, high = max(np.mean(sites) - half, 0), min(np.mean(sites) + half, 1)
    wanted = f"m2lgdg {100 * np.mean(sites):.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f}, t over sites)"
    few = "With only 2 sites, performance at a further site is uncertain, whatever the interval."
    assert low <= 0.5 <= high
    assert reported.answer == f"Mean AUC over 2 unseen sites: {wanted}. Chance is 50 %. The interval includes chance."
    assert reported.notes == [few]
    assert reported.comparison.startswith("A simple peer is higher: fc-logistic (scan only) 100.0 ")
    ends = [100 * (np.mean(sites) - 1 + sign * half) for sign in (-1, 1)]  # the peer is perfect at both sites
    wanted = (
        f"m2lgdg minus fc-logistic: {100 * (np.mean(sites) - 1):+.1f} points (95 % interval {ends[0]:+.1f} to {ends[1]:+.1f}"
    )
    assert wanted in reported.comparison and reported.peer_as_good and reported.warnings == []
    told = "A simple model performs as well or better: fc-logistic compared with m2lgdg."
    assert told in [check.text for check in checks(contents, reported) if check.status == "bad"]
    one = named[named.target == "USM"]
    reported = answer(read_contents(study_of(one, tmp_path / "one", targets=["USM"])))
    mean = one[one.method == "m2lgdg"].groupby("subject").agg(label=("label", "first"), proba=("proba", "mean"))
    low, high = delong_interval(mean.label.to_numpy(), mean.proba.to_numpy())
    assert reported.answer.startswith("AUC at the unseen site USM: m2lgdg ")
    assert f"interval {100 * low:.1f} to {100 * high:.1f}, DeLong" in reported.answer


def test_the_answer_is_about_the_main_method_of_the_study(predictions, tmp_path):
    named = predictions.replace({"method": {"good": "fc-logistic", "noisy": "m2lgdg"}, "variant": {"with-age": ""}})
    summary = answer(read_contents(study_of(named, tmp_path / "study", main="fc-logistic")))
    assert summary.main == ("fc-logistic", "") and summary.answer.startswith(
        "Mean AUC over 2 unseen sites: fc-logistic 100.0 %"
    )
    assert "chosen" not in summary.answer  # it was named before the results were known
    assert answer(read_contents(study_of(named, tmp_path / "other", main="gone"))).main == ("m2lgdg", "")
    better = "AUC minus that of"
    noisy = study_of(named, tmp_path / "noisy", main="m2lgdg")
    assert f"{better} m2lgdg " in table(noisy) and f"{better} fc-logistic " in table(noisy, best="fc-logistic")
    assert f"{better} fc-logistic " in table(noisy, rivals=["m2lgdg"]) and f"{better} fc-logistic " in table(tmp_path / "other")
    assert f"{better} m2lgdg" in write_report(noisy).read_text()


def test_what_is_missing_or_leaks_is_told_at_the_top(predictions, tmp_path):
    gone = predictions[~((predictions.method == "noisy") & (predictions.target == "USM") & (predictions.seed == 1))]
    folder = study_of(gone, tmp_path / "study")
    checks = [{"check": "no subject on both sides", "passed": False, "detail": "NYU: 2 <subjects>."}]
    (folder / "checks.json").write_text(json.dumps(checks))
    page = write_report(folder).read_text()
    assert "Leakage check failed: no subject on both sides. NYU: 2 &lt;subjects&gt;." in page
    noisy = gone[gone.method == "good"].assign(method="noisy")
    both = pd.concat([gone[gone.variant == ""], noisy[~((noisy.target == "USM") & (noisy.seed == 1))]])
    assert read_contents(study_of(both, tmp_path / "other")).missing() == ["1 cell of noisy"]
    assert read_contents(study_of(both, tmp_path / "all", seeds=[0])).missing() == []


def test_variants_and_values_of_sweeps_that_are_missing_are_counted(predictions, ablated, tmp_path):
    asked = {"methods": ["noisy"], "variants": {"noisy": ["less"]}, "sweep": {"noisy": {"all": [1, 2]}}}
    there = ablated.replace({"variant": {"all": "all=1"}})
    there = there[~((there.variant == "less") & (there.target == "USM"))]
    # Two of less, four of all=2.
    assert read_contents(study_of(there, tmp_path / "study", **asked)).missing() == ["6 cells of noisy"]
    known = there.replace({"method": {"noisy": "m2lgdg"}, "variant": {"less": "M1"}})
    asked = {"variants": ["phenotypes", "M1"], "sweep": {"m2lgdg": {"all": [1]}}}  # no phenotypes: m2lgdg has no such variant
    assert read_contents(study_of(known, tmp_path / "known", **asked)).missing() == ["2 cells of m2lgdg"]


def test_a_method_of_a_plugin_that_runs_once_is_not_missing(predictions, tmp_path):
    once = predictions[(predictions.method == "good") & (predictions.seed == 0)]
    assert read_contents(study_of(once, tmp_path / "study")).missing() == []
    linear = study_of(once.assign(method="fc-logistic"), tmp_path / "linear")
    assert read_contents(linear).missing() == []
    network = study_of(once.assign(method="m2lgdg"), tmp_path / "network")
    assert read_contents(network).missing() == ["2 cells of m2lgdg"]
    assert read_contents(study_of(once, tmp_path / "none", methods=["good", "later"])).missing() == ["4 cells of later"]


def test_a_variant_of_a_field_that_did_not_exist_is_not_missing(tmp_path):
    rows = [("cdann", ""), ("fc-logistic", ""), ("fc-logistic", "phenotypes")]
    table = pd.DataFrame([(*key, 0, "a") for key in rows], columns=["method", "variant", "seed", "target"])
    now = {name: make(name).fields() for name in ("cdann", "fc-logistic")}
    before = now | {"cdann": {field: value for field, value in now["cdann"].items() if field != "phenotypes"}}
    for fields, count, missing in ((now, 3, ["1 cell of cdann"]), (before, 3, []), (before, 2, ["1 cell of fc-logistic"])):
        study = {"methods": list(now), "seeds": [0], "targets": ["a"], "variants": ["phenotypes"], "method": fields}
        (tmp_path / "study.json").write_text(json.dumps(study))
        assert missing_cells(table[:count], study, declarations(tmp_path)) == missing


def test_the_answer_is_not_about_the_luckiest_value_of_a_sweep_or_ablation(ablated, tmp_path):
    swept = ablated.replace({"variant": {"less": "amount=2", "all": "part"}})
    swept["proba"] = np.where(swept.variant == "part", swept.label, swept.proba)  # perfect too
    contents = read_contents(study_of(swept, tmp_path / "study", sweep={"noisy": {"amount": [2]}}))
    assert answer(contents).main == ("noisy", "")
    alone = swept[swept.variant == "amount=2"]  # of the whole every cell failed
    contents = read_contents(study_of(alone, tmp_path / "alone", sweep={"noisy": {"amount": [2]}}))
    assert answer(contents).main == ("noisy", "amount=2")
    page = write_report(tmp_path / "alone").read_text()
    assert "sensitivity-noisy" in " ".join(path.name for path in (tmp_path / "alone" / "figures").iterdir())
    assert "paired by site and seed" not in page
    other = ablated[ablated.variant == ""].assign(method="other")  # worse, but no value of a sweep
    both = pd.concat([alone, other])
    contents = read_contents(study_of(both, tmp_path / "both", sweep={"noisy": {"amount": [2]}}))
    assert answer(contents).main == ("other", "")


def test_the_answer_is_about_a_method_that_was_run_at_all_sites(predictions, tmp_path):
    good, noisy = (predictions[predictions.method == name].assign(variant="") for name in ("good", "noisy"))
    both = pd.concat([good[good.target == "NYU"], noisy])
    reported = answer(read_contents(study_of(both, tmp_path / "study")))
    assert reported.main == ("noisy", "")
    assert reported.answer.startswith("Mean AUC over 2 unseen sites: noisy ")


def test_the_command_prints_the_trainings_too(ablated, tmp_path, capsys, monkeypatch):
    from m2lgdg.cli import main

    monkeypatch.setattr("sys.argv", ["m2lgdg", "table", str(study_of(ablated, tmp_path / "study"))])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert render(training_tables(cell_scores(ablated)), "text") in capsys.readouterr().out


def test_tables_and_figures_are_files_too(predictions, tmp_path):
    write_report(study_of(predictions, tmp_path / "study"))
    table = pd.read_csv(tmp_path / "study" / "tables" / "Target-NYU.csv", dtype=str)
    nyu, *_ = study_tables(predictions)
    assert table.to_numpy().tolist() == nyu.shown
    assert "\\toprule" in (tmp_path / "study" / "tables" / "Target-NYU.tex").read_text()
    for name in ("forest", "roc", "calibration"):
        assert (tmp_path / "study" / "figures" / f"{name}.png").read_bytes().startswith(b"<svg")
        assert "<svg" in (tmp_path / "study" / "figures" / f"{name}.svg").read_text()


def section_of(page, name):
    return page.split(f'data-section="{name}"')[1].split("</section>")[0]


def test_the_comparison_predictive_values_and_decision_curves_are_shown(predictions, tmp_path):
    named = predictions.replace({"method": {"good": "fc-logistic", "noisy": "m2lgdg"}, "variant": {"with-age": ""}})
    folder = study_of(named, tmp_path / "study")
    page, mean = write_report(folder).read_text(), over_seeds(named)
    keys = [("m2lgdg", ""), ("fc-logistic", "")]
    tables = {"tables": comparison_table(mean, *keys), "operating": predictive_table(mean, keys)}
    assert tables["tables"].title == "m2lgdg versus fc-logistic by site"
    for section, shown in tables.items():
        text = section_of(page, section)
        assert f'<table class="sortable"><caption>{shown.title}</caption>' in text
        assert (f"<details><summary>{shown.title}</summary>" in text) == (section == "tables")
        for row in shown.shown:
            assert "".join(f"<td>{cell}</td>" for cell in row) in re.sub(r' data-number="[^"]*"', "", text)
        file = folder / "tables" / f"{plain(shown.title.replace(' ', '-'))}.csv"
        assert pd.read_csv(file, dtype=str).to_numpy().tolist() == shown.shown
    assert "Decision curves: net benefit" in section_of(page, "operating")
    assert "<title>m2lgdg</title>" in section_of(page, "operating")
    assert "treat all" in (folder / "figures" / "decision.svg").read_text()
    alone = study_of(named[named.method == "m2lgdg"], tmp_path / "alone")
    assert " by site</summary>" not in write_report(alone).read_text()  # no peer to compare with
    one_class = study_of(named[named.label == 1], tmp_path / "patients")
    page = write_report(one_class).read_text()
    assert "Decision curves" not in page and "Predictive values by prevalence" in page
    assert not (one_class / "figures" / "decision.svg").exists()


def test_the_same_study_gives_the_same_page(predictions, tmp_path):
    first = write_report(study_of(predictions, tmp_path / "study")).read_bytes()
    assert write_report(tmp_path / "study").read_bytes() == first


def test_the_record_that_the_predictions_are_of_counts_whatever_its_date(predictions, tmp_path):
    folder = study_of(predictions, tmp_path / "study")
    (folder / "cells").mkdir()
    own = predictions[(predictions.method == "good") & (predictions.target == "NYU") & (predictions.seed == 0)]
    cell = {"method": "good", "variant": "", "target": "NYU", "seed": 0, "status": "done", "subjects": own.subject.tolist()}
    records = [
        cell | {"key": "old", "proba": (own.proba / 2).tolist()},
        cell | {"key": "own", "proba": own.proba.tolist()},
        cell | {"key": "others", "proba": own.proba.tolist(), "subjects": own.subject.tolist()[::-1]},
        cell | {"key": "failed", "status": "failed"},
        cell | {"key": "x", "seed": 9},
    ]
    for clock in (1000, 4_000_000_000):
        for i, record in enumerate(records):
            path = folder / "cells" / f"{record['key']}.json"
            path.write_text(json.dumps(record))
            os.utime(path, (clock + i * (1 if clock == 1000 else -1),) * 2)
        (folder / "cells" / "torn.json").write_text("{")
        assert [record["key"] for record in read_contents(folder).records] == ["own"]


def test_scores_of_cells_are_computed_once_for_a_report(predictions, tmp_path, monkeypatch):
    from m2lgdg.report import contents

    calls = []

    def counted(table, *metrics):
        calls.append(len(table))
        return cell_scores(table, *metrics)

    monkeypatch.setattr(contents, "cell_scores", counted)
    write_report(study_of(predictions, tmp_path / "study"))
    assert calls == [len(predictions)]


def predicted(methods, sites=("A", "B")):
    rng, rows = np.random.default_rng(0), []
    for method in methods:
        for site in sites:
            rows += [(method, "", 0, site, f"{site}{i}", i % 2, rng.uniform(0.3 * (i % 2), 1)) for i in range(30)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def test_a_learning_curve_in_the_folder_is_in_the_report(tmp_path):
    table = predicted(["fc-logistic", "fc-svm"])
    table.to_csv(tmp_path / "predictions.csv", index=False)
    assert "Learning curve" not in write_report(tmp_path).read_text()
    sizes = {0.25: 20, 0.5: 40, 1.0: 80}
    points = [
        ("fc-svm", site, 0, size, 0, n, n // 2, 0.6 + 0.05 * np.log2(n / 20)) for site in "AB" for size, n in sizes.items()
    ]
    columns = ["method", "target", "seed", "size", "repeat", "subjects", "patients", "AUC"]
    (tmp_path / "curve").mkdir()
    pd.DataFrame(points, columns=columns).to_csv(tmp_path / "curve" / "points.csv", index=False)
    page = write_report(tmp_path).read_text()
    section = page.split('data-section="learning"')[1].split("</section>")[0]
    assert "fc-svm: AUC 60.0 with 20 subjects, 70.0 with 80 subjects; +5.0 points for each doubling" in section
    assert (tmp_path / "figures" / "learning-curve.svg").is_file()
    (tmp_path / "curve" / "points.csv").write_text("method,target\nfc-svm,A\n")
    with pytest.raises(InputError, match=r"points\.csv is damaged"):
        write_report(tmp_path)


def test_long_tables_fold_after_ten_rows(tmp_path):
    for count in (12, 13):
        table = predicted([f"m{i:02d}" for i in range(count)])
        (tmp_path / str(count)).mkdir()
        table.to_csv(tmp_path / str(count) / "predictions.csv", index=False)
        page = write_report(tmp_path / str(count)).read_text()
        overall = page.split('data-section="overall"')[1].split("</section>")[0]
        assert ("<summary>3 more rows</summary>" in overall) == (count == 13)
        first = overall.split("</table>")[0]
        areas = [float(area) for area in re.findall(r"<tr><td>m\d\d</td>(?:<td[^>]*>[^<]*</td>){3}<td[^>]*>([\d.]+)", first)]
        assert areas == sorted(areas, reverse=True) and len(areas) == count
