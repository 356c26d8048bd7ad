"""What is missing reveals the label: found where it is planted, whatever is missing, and not where it is missing by site."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import fisher_exact

from m2lgdg import check_cohort, make_cohort, read
from m2lgdg.cohort import Parcellation
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.data.missingness import _chance, missing_by_label
from m2lgdg.study.audit import Audited

CHECK = "missingness does not reveal the label"
NOISE = {"roi_effect": 0.0, "edge_effect": 0.0, "phenotype_effect": 0.0, "missing": 0.0, "lengths": (40, 40)}


@pytest.fixture(scope="module")
def noise():
    """A cohort without any effect of the label."""
    return make_cohort("tiny", sizes=dict.fromkeys("abcd", 40), seed=5, **NOISE)


def without_atlas(cohort, missing):
    """The cohort with a second atlas of noise, which some subjects do not have."""
    rng = np.random.default_rng(0)
    series = [None if lacks else rng.normal(size=(40, 8)) for lacks in missing]
    return replace(cohort, parcellations={"second": Parcellation(tuple(f"b{i}" for i in range(8)), series)})


def with_missing(cohort, **missing):
    """The cohort with inputs that some subjects do not have."""
    rng = np.random.default_rng(0)
    columns = {name: np.where(rows, np.nan, rng.normal(size=len(cohort))) for name, rows in missing.items()}
    return replace(cohort, phenotypes=cohort.phenotypes.assign(**columns), inputs=("age", *columns))


def failed(cohort):
    (result,) = [one for one in leakage_checks(cohort) if one["check"] == CHECK]
    return "" if result["passed"] else result["detail"]


def test_an_atlas_that_most_patients_lack(noise):
    lacking = (noise.labels == 1) & (np.random.default_rng(1).random(len(noise)) < 0.8)
    cohort = without_atlas(noise, lacking)
    (finding,) = missing_by_label(cohort)
    assert (finding.kind, finding.severity, finding.numbers["column"]) == ("atlas missing by label", "finding", "second")
    assert finding.numbers["controls"] == 0 and 70 < finding.numbers["patients"] < 90
    assert failed(cohort).startswith("Atlas second is missing for 0 % of controls and ")
    assert finding in check_cohort(cohort).findings
    assert failed(replace(cohort, labels=np.random.default_rng(2).permutation(noise.labels))) == ""


def test_inputs_that_one_class_has(noise):
    patients = noise.labels == 1
    assert len(missing_by_label(with_missing(noise, score=~patients))) == 1
    assert failed(with_missing(noise, score=~patients)).startswith("score is missing for 100 % of controls and 0 % of patients")
    # Five inputs, each missing for other patients: no single one tells much, but that one of them is missing does.
    turn = np.arange(len(noise)) % 10
    parts = {f"item{i}": patients & (turn == i) for i in range(5)}
    assert "At least one input is missing for 0 % of controls and " in failed(with_missing(noise, **parts))
    # All at three of four sites, which are of one class each: only a comparison over all subjects can see it.
    sites = np.where(noise.sites == "a", "a", np.where(patients, "p", "c"))
    apart = with_missing(replace(noise, sites=sites), score=patients & (noise.sites != "a"))
    assert "(within sites)" not in failed(apart) and failed(apart).startswith("score is missing for 0 % of controls and ")


def test_a_roi_that_is_flat_for_patients(noise):
    series = [np.array(one) for one in noise.series]
    for i in np.flatnonzero(noise.labels == 1):
        series[i][:, 3] = 1.0
    for i in np.flatnonzero(noise.labels == 1)[10:]:
        series[i][:, 5:7] = 1.0
    cohort = replace(noise, series=series)
    assert len(missing_by_label(cohort)) == 1 and ", and 2 other ROIs likewise, which" in failed(cohort)
    assert failed(cohort).startswith(f"ROI {noise.rois[3]} is flat for 0 % of controls and 100 % of patients (within sites)")


@pytest.mark.parametrize("seed", range(4))
def test_what_is_missing_by_site_or_by_chance_is_quiet(noise, seed):
    rng = np.random.default_rng(seed)
    by_site = np.isin(noise.sites, ["a", "b"]) & (rng.random(len(noise)) < 0.9)
    by_chance = rng.random(len(noise)) < 0.3
    assert failed(with_missing(without_atlas(noise, by_chance), iq=by_site, other=rng.random(len(noise)) < 0.1)) == ""


def test_a_small_difference_in_a_large_cohort_is_quiet(noise):
    """Eight points between the classes are significant among 4,000 subjects, and teach a method next to nothing."""
    n = 4000
    labels, missing = np.arange(n) % 2, np.arange(n) % 50 < 4
    assert fisher_exact([[0, n // 2], [160, n // 2 - 160]]).pvalue < 1e-40
    table = pd.DataFrame({"iq": np.where(missing & (labels == 1), np.nan, 100.0)}, index=[f"s{i}" for i in range(n)])
    fields = {"subjects": table.index.to_numpy(dtype=str), "sites": np.array(["a", "b"])[np.arange(n) // 2 % 2]}
    large = replace(
        noise, series=[noise.series[0]] * n, labels=labels, phenotypes=table, inputs=("iq",), tr=np.full(n, 2.0), **fields
    )
    assert missing_by_label(large) == []


def test_the_exact_test():
    """One group: Fisher's test. Several: the chance of so many missing patients if labels are drawn within groups."""
    for counts in ([20, 22, 9, 2], [5, 40, 3, 10], [7, 7, 0, 7]):
        patients, controls, first, second = counts
        wanted = fisher_exact([[first, patients - first], [second, controls - second]]).pvalue
        assert _chance(np.array([counts])) == pytest.approx(wanted)
    counts = np.array([[6, 8, 4, 1], [5, 5, 3, 2]])
    rng, drawn = np.random.default_rng(0), np.zeros(40_000, dtype=int)
    for patients, controls, first, second in counts:
        drawn += rng.hypergeometric(first + second, patients + controls - first - second, patients, size=len(drawn))
    often = np.bincount(drawn) / len(drawn)
    assert _chance(counts) == pytest.approx(often[often <= often[7] * 1.05].sum(), abs=0.01)
    assert _chance(counts[::-1]) == pytest.approx(_chance(counts), rel=1e-12)


@pytest.mark.usefixtures("figures_painted_only")
def test_it_is_told_from_check_to_audit(noise, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_missing(noise, score=noise.labels == 0).save("noise.cohort")
    (tmp_path / "s.toml").write_text('cohort = "noise.cohort"\nmethods = ["prior"]\ntargets = ["a"]\nseeds = [0]\n')
    words = "score is missing for 100 % of controls and 0 % of patients (within sites); its missingness reveals the label."
    code, text, _ = typed("check", "noise.cohort", "--json")
    assert code == 1 and words in [one["text"] for one in json.loads(text)["findings"]]
    code, _, error = typed("run", "s.toml", "--out", "out")
    assert code == 1 and f"Leakage check failed: {CHECK}. {words}" in " ".join(error.split())
    assert words in " ".join("".join(typed("table", "out")[1:]).split())
    assert typed("report", "out")[0] == 0 and words in (tmp_path / "out" / "report.html").read_text()
    monkeypatch.setattr("m2lgdg.study.audit.audit", lambda *_, **__: [Audited("prior", "a", 0)])
    code, _, error = typed("audit", "s.toml")
    assert code == 1 and words in " ".join(error.split())


def test_abide_is_quiet(abide_folder):
    assert failed(read(abide_folder, on_bad="exclude")) == ""
