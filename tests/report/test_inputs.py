"""What methods see of a subject and what each input adds: pairs of variants, their differences, and the intervals of these."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

import m2lgdg
from m2lgdg.registry import Declaration, load_methods
from m2lgdg.report.answer import answer
from m2lgdg.report.contents import read_contents
from m2lgdg.report.inputs import (
    ADDED,
    BY_INPUT,
    additions,
    input_tables,
    missing_variant,
    parts_table,
    seen_by,
    structure_sentence,
    worded,
)
from m2lgdg.report.sections import facts, sections

VARIANTS = ["phenotypes", "no-structure", "structure", "structure-phenotypes", "scan-phenotypes"]
TABLES = {"thickness": {"columns": 12, "constant": 0}, "aseg": {"columns": 5, "constant": 0}}
DEFAULT = "connectome-adaptive"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study of the default with all its variants, on a cohort in which structure tells more than the scan."""
    out = tmp_path_factory.mktemp("structure")
    cohort = m2lgdg.make_cohort(
        "tiny", n_regions=12, structure_effect=2.5, without_table=0.1, edge_effect=0.5, roi_effect=0.5, seed=1
    )
    study = {"cohort": cohort, "methods": ["phenotype-logistic", "fc-logistic", DEFAULT], "seeds": [0], "min_per_class": 4}
    assert not m2lgdg.run_study(study | {"variants": {DEFAULT: VARIANTS}}, out / "out").failed
    return out / "out"


@pytest.fixture(scope="module")
def contents(folder):
    return read_contents(folder)


def test_a_study_says_what_each_method_saw(contents):
    table = "table thickness"
    assert {key: set(each.inputs) for key, each in contents.seen.items()} == {
        ("phenotype-logistic", ""): {"phenotypes"},
        ("fc-logistic", ""): {"scan"},
        (DEFAULT, ""): {"scan", table},
        (DEFAULT, "phenotypes"): {"scan", "phenotypes", table},
        (DEFAULT, "no-structure"): {"scan"},
        (DEFAULT, "structure"): {table},
        (DEFAULT, "structure-phenotypes"): {"phenotypes", table},
        (DEFAULT, "scan-phenotypes"): {"scan", "phenotypes"},
    }
    shown = dict(facts(contents))["tables of brain structure"]
    assert shown.startswith(f"thickness: {DEFAULT}, {DEFAULT} + phenotypes") and "no-structure" not in shown


def test_every_pair_that_differs_in_one_input_is_compared(contents):
    pairs = {(one.more[1], one.less[1]): one for one in contents.additions}
    assert set(pairs) == {
        *(("", "no-structure"), ("phenotypes", "scan-phenotypes")),  # structure
        *(("phenotypes", ""), ("structure-phenotypes", "structure"), ("scan-phenotypes", "no-structure")),  # phenotypes
        *(("", "structure"), ("phenotypes", "structure-phenotypes")),  # the scan
    }
    macro = contents.averaged[contents.averaged["metric"] == "AUC"].groupby(["method", "variant"])["mean"].mean()
    for (more, less), one in pairs.items():
        assert one.area == pytest.approx(macro[DEFAULT, more]) and one.before == pytest.approx(macro[DEFAULT, less])
        assert one.difference == pytest.approx(one.area - one.before)
    planted = pairs["", "no-structure"]
    assert planted.difference > 0.15 and planted.over_subjects.low > 0


def test_page_and_tables_have_the_comparison(contents, folder, figures_painted_only):
    made = {section.id: section for section in sections(contents, answer(contents))}
    assert list(made)[:5] == ["answer", "trust", "data", "overall", "inputs"]
    by_input, added = made["inputs"].tables
    assert by_input.values("Inputs")[:3] == ["scan", "structure (thickness)", "phenotypes"]
    assert by_input.values("Inputs")[-1] == "scan, phenotypes and structure (thickness)"
    assert added.values("Added")[:2] == ["structure (thickness)"] * 2
    assert "What structure (thickness) adds to scan" in made["answer"].answer.structure
    (parts,) = made["inputs"].folded
    assert parts.values("fits")[:2] == [4, 4] and min(parts.values("median")) > 0.5  # of those with another block
    text = m2lgdg.table(folder)
    assert BY_INPUT in text and ADDED in text and "structure (thickness)" in text
    assert ADDED not in m2lgdg.table(folder, sites=["north"])


def test_a_study_without_tables_has_no_such_section(linear_study, figures_painted_only):
    contents = read_contents(linear_study)
    assert "inputs" not in [section.id for section in sections(contents, answer(contents))]
    assert BY_INPUT not in m2lgdg.table(linear_study) and "tables of brain structure" not in dict(facts(contents))
    assert contents.additions == [] and contents.tables == {}


def seen_of(keys, **study):
    declared = {name: load_methods().declaration(name) for name in {key[0] for key in keys} if name != "plugin"}
    return seen_by(keys, {"inputs": ["age", "sex"], **study}, declared, TABLES)


@pytest.mark.parametrize(
    ("key", "study", "expected"),
    [
        ((DEFAULT, ""), {"method": {DEFAULT: {"tables": ["aseg"]}}}, {"scan", "table aseg"}),
        ((DEFAULT, ""), {"method": {DEFAULT: {"tables": "aseg", "phenotypes": True}}}, {"scan", "phenotypes", "table aseg"}),
        ((DEFAULT, "tables=none"), {"sweep": {DEFAULT: {"tables": ["none", "aseg"]}}}, {"scan"}),
        ((DEFAULT, "tables=aseg+thickness"), {"sweep": {DEFAULT: {"tables": [["aseg", "thickness"]]}}}, {"scan", "both"}),
        ((DEFAULT, "phenotypes"), {"inputs": []}, {"scan", "both"}),
        (("fc-logistic", ""), {"method": {"fc-logistic": {"tables": "all"}}}, {"scan", "both"}),
        (("m2lgdg-connectome", ""), {}, {"scan", "phenotypes", "both"}),
        (("m2lgdg-connectome", "no-structure"), {}, {"scan", "phenotypes"}),
        (("m2lgdg-connectome", "structure"), {}, {"both"}),
        (("m2lgdg-connectome", "no-phenotypes"), {}, {"scan", "both"}),
        (("m2lgdg-connectome", "M1"), {}, {"phenotypes", "both"}),
        (("m2lgdg-connectome", "small"), {}, {"scan", "phenotypes", "both"}),
        (("m2lgdg", "M1"), {}, {"phenotypes"}),
        (("average", ""), {}, {"scan", "phenotypes", "both"}),
        (("average", "small"), {}, {"scan", "phenotypes"}),
        (("plugin", "phenotypes"), {}, {"scan", "phenotypes"}),
        (("plugin", ""), {"method": {"plugin": {"estimator": "sklearn.svm:SVC", "features": "tables"}}}, {"both"}),
        (("plugin", ""), {"method": {"plugin": {"estimator": "sklearn.svm:SVC", "features": "phenotypes"}}}, {"phenotypes"}),
        (("plugin", ""), {"method": {"plugin": {"estimator": "sklearn.svm:SVC", "features": "fc"}}}, {"scan"}),
    ],
)
def test_fields_and_variants_say_what_is_seen(key, study, expected):
    both = {"table aseg", "table thickness"}
    assert seen_of([key], **study)[key].inputs == {*(expected - {"both"}), *(both if "both" in expected else ())}


def test_a_table_without_a_varying_column_is_not_seen_and_names_do_not_collide():
    held = {"scan": {"columns": 2, "constant": 2}, "phenotypes": {"columns": 3, "constant": 0}}
    (seen,) = seen_by([(DEFAULT, "")], {}, {DEFAULT: load_methods().declaration(DEFAULT)}, held).values()
    assert seen.inputs == {"scan", "table phenotypes"} and worded(seen.inputs) == "scan and structure (phenotypes)"


def drawn(shift, seeds=(0,), sites=4, size=40, rng=0):
    """Predictions of a method with and without a table, `shift` apart, of the same subjects."""
    rng, rows = np.random.default_rng(rng), []
    for site in range(sites):
        labels = rng.permutation(np.arange(size) % 2)
        common = rng.normal(size=size) + 0.8 * labels
        for variant, more in (("", shift), ("no-structure", 0.0)):
            for seed in seeds:
                logit = common + more * labels + 0.4 * rng.normal(size=size)
                proba = 1 / (1 + np.exp(-logit))
                rows += [(DEFAULT, variant, seed, f"t{site}", f"s{i}", labels[i], proba[i]) for i in range(size)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


SEEN = seen_of([(DEFAULT, ""), (DEFAULT, "no-structure")])


def by_site(predictions):
    areas = predictions.groupby(["variant", "target", "seed"]).apply(
        lambda cell: roc_auc_score(cell["label"], cell["proba"]), include_groups=False
    )
    return areas.groupby(level=["variant", "target"]).mean().unstack("variant")


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_interval_over_subjects_is_that_of_a_bootstrap_inside_site_and_class(seeds):
    predictions = drawn(0.5, seeds)
    (one,) = additions(SEEN, predictions, 5)
    strata = []
    for _, here in predictions.groupby("target"):
        table = here.pivot(index="subject", columns=["variant", "seed"], values="proba")
        labels = here.drop_duplicates("subject").set_index("subject")["label"].loc[table.index].to_numpy()
        patients, controls = (table.to_numpy()[labels == k].T for k in (1, 0))  # (column, subject)
        sign = np.where(table.columns.get_level_values("variant") == "", 1, -1) / len(seeds)
        strata.append(np.einsum("c,cpn->pn", sign, (patients[:, :, None] > controls[:, None]).astype(float)))
    rng = np.random.default_rng(1)
    draws = [np.mean([each[np.ix_(*(rng.choice(n, n) for n in each.shape))].mean() for each in strata]) for _ in range(2000)]
    half = (one.over_subjects.high - one.over_subjects.low) / 2
    assert half == pytest.approx(1.96 * np.std(draws), rel=0.1)
    assert one.over_subjects.low < np.mean(draws) < one.over_subjects.high


def test_the_interval_over_sites_and_p_are_those_of_the_paired_t_test():
    predictions = drawn(0.5, sites=6)
    (one,) = additions(SEEN, predictions, 5)
    areas = by_site(predictions)
    test = stats.ttest_rel(areas[""], areas["no-structure"])
    assert one.p == pytest.approx(test.pvalue) and one.sites == 6
    assert tuple(one.over_sites) == pytest.approx(tuple(test.confidence_interval()))


def test_over_one_site_and_with_the_same_predictions_nothing_is_made_up():
    (one,) = additions(SEEN, drawn(0.5, sites=1), 5)
    assert np.isnan(one.p) and np.isnan(one.over_sites.low) and one.over_subjects.low < one.difference
    assert "over sites" not in structure_sentence([one], (DEFAULT, ""))
    same = drawn(0.0)
    alike = same[same["variant"] == ""]
    (none,) = additions(SEEN, pd.concat([alike, alike.assign(variant="no-structure")]), 5)
    assert none.difference == 0 and tuple(none.over_subjects) == (0, 0) and np.isnan(none.p)


def test_sites_that_do_not_count_or_were_not_run_are_left_out():
    predictions = drawn(0.5, sites=3)
    few = predictions[(predictions["target"] != "t0") | predictions["subject"].isin(["s0", "s1", "s2", "s3"])]
    unfinished = few[(few["target"] != "t1") | (few["variant"] == "")]
    (one,) = additions(SEEN, unfinished, 5)
    assert one.sites == 1
    only = by_site(predictions).loc["t2"]
    assert one.difference == pytest.approx(only[""] - only["no-structure"])
    assert additions(SEEN, predictions[predictions["variant"] == ""], 5) == []


def test_other_fields_make_no_pair():
    keys = [("m2lgdg-connectome", variant) for variant in ("", "no-structure", "M2", "small", "scan")]
    seen = seen_of(keys)
    predictions = pd.concat([drawn(0.5).assign(method=name, variant=variant) for name, variant in keys])
    predictions = predictions.drop_duplicates(["method", "variant", "seed", "target", "subject"])
    pairs = [(one.more[1], one.less[1]) for one in additions(seen, predictions, 5)]
    assert pairs == [("", "no-structure"), ("no-structure", "scan")]


def test_a_sweep_value_that_is_the_method_itself_is_compared_once():
    names = ["none", "aseg", ["thickness", "aseg"]]
    keys = [(DEFAULT, variant) for variant in ("", "tables=none", "no-structure", "tables=aseg", "tables=thickness+aseg")]
    seen = seen_of(keys, sweep={DEFAULT: {"tables": names}})
    assert seen[keys[0]].inputs == seen[keys[-1]].inputs
    predictions = pd.concat([drawn(0.5, rng=i).assign(variant=variant).iloc[:80] for i, (_, variant) in enumerate(keys)])
    predictions = predictions.drop_duplicates(["variant", "target", "subject"])
    pairs = additions(seen, predictions, 5)
    assert [(one.more[1], one.less[1]) for one in pairs] == [("", "tables=none"), ("tables=aseg", "tables=none")]
    assert [worded(one.what) for one in pairs] == ["structure (aseg, thickness)", "structure (aseg)"]


def test_holm_is_over_all_rows():
    keys = [(DEFAULT, variant) for variant in ("", "no-structure", "phenotypes", "scan-phenotypes")]
    parts = [drawn(0.4, sites=5, rng=1), drawn(0.1, sites=5, rng=2)]
    names = {"": "phenotypes", "no-structure": "scan-phenotypes"}
    parts[1] = parts[1].assign(variant=parts[1]["variant"].map(names))
    pairs = additions(seen_of(keys), pd.concat(parts), 5)
    sites = pd.DataFrame(columns=["method", "variant", "target", "metric", "mean"])
    table = input_tables(seen_of(keys), sites, pairs)[1]
    order = np.argsort([one.p for one in pairs])
    expected, largest = np.zeros(len(pairs)), 0.0
    for rank, i in enumerate(order):
        largest = expected[i] = max(largest, min(1.0, (len(pairs) - rank) * pairs[i].p))
    np.testing.assert_allclose(table.values("p (Holm)"), expected)
    assert len(pairs) == 4


@pytest.mark.parametrize(
    ("key", "method", "line"),
    [
        ((DEFAULT, ""), {}, 'variants = ["no-structure"]'),
        ((DEFAULT, "phenotypes"), {}, 'variants = ["scan-phenotypes"]'),
        (("fc-logistic", ""), {"fc-logistic": {"tables": "all"}}, '[sweep.fc-logistic] tables = ["none"]'),
    ],
)
def test_the_report_says_how_to_find_out_what_structure_adds(key, method, line):
    declared = {key[0]: load_methods().declaration(key[0])}
    assert line in missing_variant(seen_of([(key[0], ""), key], method=method), declared, key)


def test_no_advice_where_there_is_nothing_to_find_out():
    declared = {DEFAULT: load_methods().declaration(DEFAULT)}
    assert missing_variant(SEEN, declared, (DEFAULT, "")) == ""
    bare = seen_by([(DEFAULT, "")], {}, declared, {})
    assert missing_variant(bare, declared, (DEFAULT, "")) == ""
    assert structure_sentence([], (DEFAULT, "")) == ""


def test_the_part_of_a_table_is_told_over_fits():
    learned = [{"table_parts": {"aseg": part, "thickness": 0.0}} for part in (0.5, 0.05, 0.0, 0.2)] + [{}, None]
    table = parts_table({"method": DEFAULT, "variant": "phenotypes", "learned": one} for one in learned)
    assert table.rows == [
        [f"{DEFAULT} + phenotypes", "aseg", 4, pytest.approx(0.125), 0.0, 0.5, 1],
        [f"{DEFAULT} + phenotypes", "thickness", 4, 0.0, 0.0, 0.0, 4],
    ]
    assert parts_table([{"method": DEFAULT, "variant": "", "learned": {}}]) is None


def test_a_declaration_that_is_not_known_is_no_error():
    (seen,) = seen_by(
        [("own", "no-scan")], {"method": {"own": {"scan": False}}}, {"own": Declaration({}, {}, False)}, TABLES
    ).values()
    assert seen.inputs == frozenset() and worded(seen.inputs) == "nothing"
