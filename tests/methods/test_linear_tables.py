"""Tables of brain structure in linear methods: what they add, what is taken out of them, and who has none."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import m2lgdg
from m2lgdg.data.atlases.table_columns import HEAD_SIZE
from m2lgdg.methods.tables import FLAG, TableBlock, table_weights
from m2lgdg.metrics import auc
from m2lgdg.storage import InputError


def structure(cohort, effect=1.0, seed=0, columns=6):
    """A table with the label in its first columns, and age, sex and head size in all."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(cohort), columns))
    values[:, :2] += effect * cohort.labels[:, None]
    head = rng.normal(1500, 100, size=len(cohort))
    age = cohort.phenotypes["age"].to_numpy()
    values += 0.01 * (head - 1500)[:, None] + 0.05 * np.nan_to_num(age, nan=30.0)[:, None]
    frame = pd.DataFrame(values, index=cohort.subjects, columns=[f"region {i}" for i in range(columns)])
    return frame.assign(**{"Estimated Total Intra-Cranial Vol": head})


@pytest.fixture(scope="module")
def cohort():
    tiny = m2lgdg.make_cohort("tiny")
    return tiny.with_tables({"thickness": structure(tiny, effect=2.5), "noise": structure(tiny, effect=0.0, seed=1)})


@pytest.fixture(scope="module")
def fold(cohort):
    return next(iter(m2lgdg.leave_one_site_out(cohort)))


@pytest.fixture(scope="module")
def fitted(fold):
    return m2lgdg.make("connectome-adaptive", phenotypes=True).fit(fold.source)


def held_out_auc(cohort, **fields):
    scores = np.zeros(len(cohort))
    for each in m2lgdg.leave_one_site_out(cohort):
        model = m2lgdg.make("connectome-adaptive", **fields).fit(each.source)
        scores[np.isin(cohort.subjects, each.target.subjects)] = model.predict_proba(each.target)[:, 1]
    return np.mean([auc(cohort.labels[cohort.sites == site], scores[cohort.sites == site]) for site in cohort.site_names])


def test_structure_alone_finds_the_planted_effect_and_noise_does_not(cohort):
    assert held_out_auc(cohort, scan=False, tables="thickness") > 0.8
    assert held_out_auc(cohort, scan=False, tables="noise") < 0.7


def test_structure_adds_to_phenotypes(cohort):
    assert (
        held_out_auc(cohort, tables="thickness", scan=False, phenotypes=True)
        > held_out_auc(cohort, tables="none", scan=False, phenotypes=True) + 0.1
    )


def test_without_tables_nothing_changes(cohort, fold):
    plain = m2lgdg.make("connectome-adaptive", tables="none", phenotypes=True).fit(fold.source)
    bare = next(iter(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))))
    same = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(bare.source)
    np.testing.assert_array_equal(plain.predict_proba(fold.target), same.predict_proba(bare.target))


def test_weights_are_the_best_discriminant_within_sites(cohort):
    rng = np.random.default_rng(3)
    useful = cohort.labels + rng.normal(size=len(cohort))
    base = 0.5 * cohort.labels + rng.normal(size=len(cohort))
    shifted = useful + 100 * np.unique(cohort.sites, return_inverse=True)[1]  # site offsets must not count
    found = table_weights(base, [shifted, rng.normal(size=len(cohort)), -useful], cohort)

    def separation(weights):
        decision = base + weights * useful
        inside = np.concatenate([_centred(decision, cohort, label) for label in (0, 1)])
        sites = [cohort.sites == site for site in cohort.site_names]
        gaps = [decision[at & (cohort.labels == 1)].mean() - decision[at & (cohort.labels == 0)].mean() for at in sites]
        sizes = [_pair_weight(at, cohort) for at in sites]
        return -np.average(gaps, weights=sizes) / inside.std()

    best = minimize(lambda w: separation(w[0]), [0.5], method="Nelder-Mead").x[0]
    alone = table_weights(base, [shifted], cohort)
    assert alone[0] == pytest.approx(best, rel=0.01)
    assert found[2] == 0 and found[0] > 0.5


def test_in_the_weights_who_lacks_a_table_is_the_middle_of_both_classes_of_the_site(cohort):
    draw = np.random.default_rng(5)
    base, full = (cohort.labels + draw.normal(size=len(cohort)) for _ in range(2))
    lacks = draw.random(len(cohort)) < np.where(cohort.labels == 1, 0.6, 0.1)
    filled = full.copy()
    for site in cohort.site_names:
        means = [full[(cohort.sites == site) & (cohort.labels == label) & ~lacks].mean() for label in (0, 1)]
        filled[(cohort.sites == site) & lacks] = np.mean(means)
    found = table_weights(base, [np.where(lacks, np.nan, full)], cohort)
    np.testing.assert_allclose(found, table_weights(base, [filled], cohort), rtol=1e-9)
    assert found[0] > 0


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_weights_of_any_decisions_are_finite_and_none_is_negative(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 60))
    cohort = SimpleNamespace(sites=rng.choice(["a", "b"], n), labels=rng.integers(0, 2, n), site_names=["a", "b"])
    base = rng.normal(size=n) + rng.integers(-1, 2) * cohort.labels
    unit = 10.0 ** rng.integers(-12, 12)
    kinds = [base, -base, np.zeros(n), base + cohort.labels, unit * (rng.normal(size=n) + cohort.labels), rng.normal(size=n)]
    tables = [kinds[i] for i in rng.integers(0, len(kinds), int(rng.integers(1, 41)))]  # many are copies of each other
    weights = table_weights(base, tables, cohort)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    larger = np.stack(tables) * 8
    np.testing.assert_array_equal(weights @ np.stack(tables), table_weights(base, list(larger), cohort) @ larger)  # of any unit


def test_the_order_of_tables_does_not_matter(fold, fitted):
    other = fold.source._changed(tables=dict(reversed(fold.source.tables.items())))
    refitted = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(other)
    assert list(other.tables) != list(fold.source.tables) and other.hash == fold.source.hash
    for name, array in fitted.state_.items():
        np.testing.assert_array_equal(refitted.state_[name], array)


def test_a_table_that_few_have_is_not_used(fold):
    patients, controls = (np.flatnonzero(fold.source.labels == label) for label in (1, 0))
    for many, used in ((5, True), (4, False)):
        some = fold.source.subjects[np.concatenate([patients[:many], controls])]
        source = fold.source.with_tables({"t": fold.source.tables["noise"].loc[some]})
        facts = m2lgdg.make("connectome-adaptive", tables="t").fit(source).facts_
        assert ("tables" in facts) == used
    assert facts["notes"] == [f"Table t is not used: only 4 patients and {len(controls)} controls have it."]


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**-20, 2.0**30])
def test_the_unit_of_a_table_does_not_matter(fold, fitted, factor):
    def other(cohort):
        return cohort.with_tables({name: table * factor for name, table in cohort.tables.items()})

    refitted = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(other(fold.source))
    np.testing.assert_allclose(refitted.predict_proba(other(fold.target)), fitted.predict_proba(fold.target), atol=1e-9)


@pytest.mark.parametrize("size", [1.0, 1.6e9, 1e13])
def test_a_column_that_is_constant_at_each_site_is_not_used(fold, fitted, size):
    """Else rounding at source would decide about another site."""

    def longer(cohort):
        number = cohort.sites if len(set(cohort.sites)) == 1 else np.unique(cohort.sites, return_inverse=True)[1]
        date = np.full(len(cohort), 7.3) if number.dtype.kind == "U" else 1.1 + number
        return cohort.with_tables({name: table.assign(scanner=size * date) for name, table in cohort.tables.items()})

    model = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(longer(fold.source))
    assert "scanner" not in model.facts_["tables"]["thickness"]["columns"]
    np.testing.assert_array_equal(model.predict_proba(longer(fold.target)), fitted.predict_proba(fold.target))


def test_two_copies_of_a_table_count_as_one_and_a_misleading_one_not_at_all(cohort):
    rng = np.random.default_rng(4)
    base, useful = (cohort.labels + rng.normal(size=len(cohort)) for _ in range(2))
    once, twice = table_weights(base, [useful], cohort), table_weights(base, [useful, useful], cohort)
    assert twice.sum() == pytest.approx(once[0], rel=1e-6) and once[0] > 0
    misleading = rng.normal(size=len(cohort)) - cohort.labels
    assert table_weights(base, [misleading, useful], cohort)[0] == 0


def test_a_useless_scan_does_not_keep_structure_from_counting():
    rng = np.random.default_rng(0)
    labels, sites = np.arange(64) % 2, np.repeat(["a", "b", "c", "d"], 16)
    for seed in range(3):  # held-out decisions from noise are worse than chance for half of the seeds
        series = np.random.default_rng(seed).normal(size=(64, 40, 6))
        cohort = m2lgdg.Cohort.from_arrays(series, labels, sites)
        cohort = cohort.with_tables({"t": rng.normal(size=(64, 6)) + 2.0 * labels[:, None]})
        source, target = cohort.select(sites=["a", "b", "c"]), cohort.select(sites=["d"])
        model = m2lgdg.make("connectome-adaptive").fit(source)
        assert auc(target.labels, model.predict_proba(target)[:, 1]) > 0.9
        assert 0 < model.facts_["tables"]["t"]["weight"] < 100


def _centred(decision, cohort, label):
    parts = [decision[(cohort.sites == site) & (cohort.labels == label)] for site in cohort.site_names]
    return np.concatenate([part - part.mean() for part in parts])


def _pair_weight(at, cohort):
    patients, controls = (at & (cohort.labels == 1)).sum(), (at & (cohort.labels == 0)).sum()
    return patients * controls / (patients + controls)


def test_head_size_and_age_are_taken_out(fold, fitted):
    block = next(table for table in fitted.method.table_blocks() if table.name == "thickness")
    source = fitted.method.visible(fold.source)
    scaled = fitted.method.scaled_confounds(source)
    cleaned = block.features(source) - block.confounds(source, scaled) @ block["slopes"]
    sites = fold.source.sites
    for confound in block.confounds(source, scaled).T:
        for column in cleaned.T[:-1]:
            centred = [column[sites == site] - column[sites == site].mean() for site in np.unique(sites)]
            other = [confound[sites == site] - confound[sites == site].mean() for site in np.unique(sites)]
            assert abs(np.corrcoef(np.concatenate(centred), np.concatenate(other))[0, 1]) < 0.2


def test_who_has_no_table_gets_the_other_blocks_and_a_flag(fold, fitted):
    rows = fold.target.tables["thickness"].copy()
    rows.iloc[0] = np.nan
    partly = fold.target.with_tables({"thickness": rows})
    without = m2lgdg.Cohort.from_arrays(
        list(fold.target.series), fold.target.labels, fold.target.sites, fold.target.phenotypes, fold.target.rois,
        subjects=fold.target.subjects, atlas=fold.target.atlas,
    )  # fmt: skip
    full, part, none = (fitted.predict_proba(one)[:, 1] for one in (fold.target, partly, without))
    np.testing.assert_array_equal(full[1:], part[1:])
    assert part[0] != full[0]
    method = fitted.method
    flags = method.method_flags(method.visible(partly))
    assert FLAG.format("thickness") in flags[0] and FLAG.format("thickness") not in flags[1]
    assert all(FLAG.format("noise") in one for one in method.method_flags(method.visible(without)))
    absent = sum(float(block["absent"]) for block in method.table_blocks())
    plain = method.decision(method.visible(without)) - absent
    slope, offset = method.state_["calibration"]
    np.testing.assert_allclose(none, 1 / (1 + np.exp(-(slope * (plain + absent) + offset))))


def lacking(cohort, who, table="thickness"):
    """The cohort without the table of some subjects."""
    rows = cohort.tables[table].copy()
    rows[who] = np.nan
    return cohort.with_tables({table: rows})


@pytest.mark.parametrize("name", ["connectome-adaptive", "fc-logistic"])
def test_who_has_no_table_has_no_part_in_its_fit(name):
    cohort = m2lgdg.make_cohort("tiny", missing=0.0)
    cohort = cohort.with_tables({"thickness": structure(cohort)})
    site = cohort.site_names[0]
    who = (cohort.sites == site) | (np.arange(len(cohort)) % 5 == 0)
    partly, rest = lacking(cohort, who), cohort.select(~who)
    one, other = (m2lgdg.make(name, tables="thickness").fit(each).method for each in (partly, rest))
    for array in ("usual", "fill", "head", "scale"):
        np.testing.assert_allclose(one.state_[f"table.thickness.{array}"], other.state_[f"table.thickness.{array}"], rtol=1e-9)
    weights = [each.table_fits_["thickness"].weights for each in (one, other)]
    np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(one.table_fits_["thickness"].held_out[~who], other.table_fits_["thickness"].held_out, atol=1e-8)
    assert np.isnan(one.table_fits_["thickness"].held_out[who]).all()
    assert one.facts_["tables"]["thickness"]["subjects"] == (~who).sum()
    assert np.isfinite(one.predict_proba(partly)).all()


@pytest.mark.parametrize(("label", "who"), [(1, "patients"), (0, "controls")])
def test_a_table_that_only_one_class_has_is_not_used(cohort, label, who):
    told = lacking(lacking(cohort, cohort.labels != label), cohort.labels != label, "noise")
    fitted, without = (m2lgdg.make("connectome-adaptive", tables=tables).fit(told) for tables in ("all", "none"))
    np.testing.assert_array_equal(fitted.predict_proba(told), without.predict_proba(told))
    assert fitted.facts_["notes"] == [f"Table {name} is not used: only {who} have it." for name in ("noise", "thickness")]
    assert not any("no thickness" in flag for raised in fitted.flags(told) for flag in raised)
    nobody = lacking(cohort, np.ones(len(cohort), dtype=bool))
    assert "no training subject has it" in m2lgdg.make("connectome-adaptive", tables="thickness").fit(nobody).facts_["notes"][0]


@pytest.mark.parametrize("seed", range(3))
def test_who_has_a_table_is_not_learned(seed):
    """A table of noise that nine of ten patients have and one of ten controls: having it must not look like a patient."""
    tiny = m2lgdg.make_cohort("tiny", sizes=dict.fromkeys("abcdef", 40), seed=seed)
    draw = np.random.default_rng(seed)
    site = np.unique(tiny.sites, return_inverse=True)[1]
    noise = structure(tiny, effect=0.0, seed=seed) + draw.normal(size=6)[site][:, None]  # and differences between sites
    has = draw.random(len(tiny)) < np.where(tiny.labels == 1, 0.9, 0.1)
    told = lacking(tiny.with_tables({"thickness": noise}), ~has)
    fold = next(iter(m2lgdg.leave_one_site_out(told)))
    method = m2lgdg.make("connectome-adaptive").fit(fold.source).method
    (block,) = method.table_blocks()
    masked = method.visible(fold.target)
    added = block.decision(masked, method.scaled_confounds(masked))
    scan = method.decision(masked) - added
    assert 0 < (~block.present(masked)).sum() < len(masked) and np.ptp(added[~block.present(masked)]) == 0
    assert abs(auc(fold.target.labels, scan + added) - auc(fold.target.labels, scan)) < 0.05
    alone = m2lgdg.make("connectome-adaptive", scan=False).fit(fold.source).method
    assert abs(float(alone.table_blocks()[0]["absent"])) < 1e-6  # a mean subject is neither a patient nor a control


def test_a_subjects_decision_depends_on_its_own_row_only(fold, fitted):
    alone = np.concatenate([fitted.predict_proba(fold.target[i])[:, 1] for i in range(len(fold.target))])
    np.testing.assert_array_equal(alone, fitted.predict_proba(fold.target)[:, 1])


def test_save_and_load_keep_the_bits(fold, fitted, tmp_path):
    loaded = m2lgdg.Model.load(fitted.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted.predict_proba(fold.target))


def test_columns_of_a_target_may_be_in_another_order_but_not_missing(fold, fitted):
    table = fold.target.tables["thickness"]
    turned = fold.target.with_tables({"thickness": table.iloc[:, ::-1]})
    np.testing.assert_array_equal(fitted.predict_proba(turned), fitted.predict_proba(fold.target))
    with pytest.raises(InputError, match="has no column region 0"):
        fitted.predict_proba(fold.target.with_tables({"thickness": table.drop(columns="region 0")}))


VERSION_6 = [
    "Left-Thalamus-Proper",
    "Right-Thalamus-Proper",
    "lhCorticalWhiteMatterVol",
    "Left-Caudate",
    "Brain-Stem",
    "3rd-Ventricle",
]
VERSION_7 = ["Left-Thalamus", "Right-Thalamus", "lhCerebralWhiteMatterVol", *VERSION_6[3:]]


@pytest.mark.parametrize(("trained", "given"), [(VERSION_6, VERSION_7), (VERSION_7, VERSION_6)], ids=["6 to 7", "7 to 6"])
def test_columns_may_have_the_names_of_another_version_of_freesurfer(fold, trained, given):
    def named(cohort, names, head):
        return cohort.with_tables({"aseg": cohort.tables["thickness"].set_axis([*names, head], axis=1)})

    fitted = m2lgdg.make("connectome-adaptive", tables="aseg").fit(named(fold.source, trained, "eTIV"))
    same, renamed = named(fold.target, trained, "eTIV"), named(fold.target, given, "EstimatedTotalIntraCranialVol")
    other = renamed.with_tables({"aseg": renamed.tables["aseg"].iloc[:, ::-1]})  # and in another order
    assert not any(flag == FLAG.format("aseg") for raised in fitted.flags(same) for flag in raised)
    np.testing.assert_array_equal(fitted.predict_proba(other), fitted.predict_proba(same))
    assert fitted.flags(other) == fitted.flags(same)


def test_unknown_tables_and_nothing_to_learn_from_are_one_sentence(fold):
    with pytest.raises(InputError, match="has no table volume; it has thickness, noise"):
        m2lgdg.make("connectome-adaptive", tables="volume").fit(fold.source)
    bare = m2lgdg.make_cohort("tiny")
    with pytest.raises(InputError, match="has none"):
        m2lgdg.make("connectome-adaptive", tables="volume").fit(bare)
    with pytest.raises(InputError, match="without the scan needs tables or phenotypes"):
        m2lgdg.make("connectome-adaptive", "structure").fit(bare)


@pytest.mark.parametrize("name", HEAD_SIZE)
def test_head_size_is_known_by_its_usual_names(name):
    block = TableBlock("aseg", ["Left-Caudate", name.upper()], {})
    np.testing.assert_array_equal(block._head_size(np.array([[1.0, 2.0], [3.0, 4.0]])), [2.0, 4.0])


# Tables of a target that are not those of the training data.


@pytest.fixture(scope="module")
def brains():
    cohort = m2lgdg.make_cohort("tiny", sizes=dict.fromkeys("abcd", 24), n_regions=30, seed=2)
    return next(iter(m2lgdg.leave_one_site_out(cohort)))


@pytest.fixture(scope="module")
def of_brains(brains):
    return m2lgdg.make("connectome-adaptive").fit(brains.source)


def other(cohort, change):
    table = cohort.tables["thickness"].copy()
    return cohort.with_tables({"thickness": change(table)}) if change else cohort


def icv(table, factor):
    return table.assign(**{table.columns[-1]: table.iloc[:, -1] * factor})


def desikan(table):
    return table.rename(columns=lambda name: name.replace("_thickness", "_of_another_atlas_thickness"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda table: table / 1000, r"its values are about 0\.00\d+ times those of the training data"),
        (lambda table: table * 10, "its values are about 1.+ times those of the training data; they are of another unit"),
        (lambda table: icv(table, 1e3), r"the values of column \w+ are about \S+e\+0[23] times .* it has another unit"),
        (lambda table: icv(table, 1e-3), r"the values of column \w+ are about 0\.00\d+ times .* it has another unit"),
        (desikan, "has 1 of the 31 columns that the model was trained on .* another atlas or measure"),
        (lambda table: table.rename(columns=lambda name: name.replace("thickness", "area")), "another atlas or measure"),
        (lambda table: table.rename(columns={table.columns[3]: f"{table.columns[3]}_avg"}), r"is it called \w+_avg there\?"),
        (lambda table: table.drop(columns=table.columns[3]), "has no column .*, which the model was trained on"),
    ],
)
def test_a_table_of_another_unit_atlas_or_measure_is_refused(brains, of_brains, change, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        of_brains.predict_proba(other(brains.target, change))
    assert "\n" not in str(caught.value) and "thickness" in str(caught.value)
    for use in (of_brains.flags, of_brains.having_tables):
        with pytest.raises(InputError, match=sentence):
            use(other(brains.target, change))


def test_single_subjects_of_another_unit_are_decided_without(brains, of_brains):
    def some(table):
        table.iloc[:4] /= 1000
        return table

    target = other(brains.target, some)
    without = lacking(brains.target, np.arange(len(brains.target)) < 4)
    np.testing.assert_array_equal(of_brains.predict_proba(target), of_brains.predict_proba(without))
    flags = of_brains.flags(target)
    assert all(any(flag.startswith("units of thickness: values are 0.00") for flag in one) for one in flags[:4])
    assert not any("units of" in flag for one in flags[4:] for flag in one)


def test_a_source_site_in_another_unit_is_left_out_of_the_fit(brains):
    site = brains.source.site_names[0]
    at = brains.source.sites == site

    def metres(table):
        table[at] /= 1000
        return table

    one, two = (
        m2lgdg.make("connectome-adaptive").fit(each) for each in (other(brains.source, metres), lacking(brains.source, at))
    )
    np.testing.assert_array_equal(one.predict_proba(brains.target), two.predict_proba(brains.target))
    for array in ("fill", "head"):  # what takes the place of missing values, too
        np.testing.assert_array_equal(*(each.state_[f"table.thickness.{array}"] for each in (one, two)))
    assert one.facts_["tables"]["thickness"]["subjects"] == (~at).sum()
