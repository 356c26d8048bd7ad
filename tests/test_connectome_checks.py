"""Check of connectomes: what was done to them is found where it is planted, on real scans too, and nothing in sound ones."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import Cohort, check_cohort, make_cohort, read
from m2lgdg.cohort import Parcellation
from m2lgdg.commands.check import check_values
from m2lgdg.data.check import atlas_line, empty_scans, without_empty_scans
from m2lgdg.data.duplicates import find_duplicates, without_duplicates
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.findings import BY_KIND, read_finding
from m2lgdg.scans import Connectomes

ALWAYS = {"connectomes", "inputs", "note", "ROI names", "small site", "small sites"}


def cohort_of(scans, kind="correlation", **changes):
    """A cohort of the same subjects with given (roi, roi) matrices."""

    def made(cohort):
        given = dict(subjects=cohort.subjects, rois=cohort.rois, atlas=cohort.atlas, name=cohort.name, inputs=())
        return Cohort.from_connectomes(scans, cohort.labels, cohort.sites, values=kind, **given | changes)

    return made


@pytest.fixture(scope="module")
def plain():
    """Synthetic scans with fewer volumes than ROIs, as real ones often have."""
    return make_cohort("demo", n_rois=60, lengths=(45, 55), sizes={"A": 12, "B": 10, "C": 11, "D": 10}, missing=0.0)


@pytest.fixture(scope="module")
def matrices(plain):
    return np.array([np.corrcoef(one.T.astype(np.float64)) for one in plain.series])


def kinds(cohort):
    return {finding.kind for finding in check_cohort(cohort).findings} - ALWAYS


def only(cohort, kind):
    (found,) = [finding for finding in check_cohort(cohort).findings if finding.kind == kind]
    return found


def fisher(matrix):
    z = np.arctanh(np.clip(matrix, -0.999, 0.999))
    z[..., np.arange(z.shape[-1]), np.arange(z.shape[-1])] = 0.0
    return z


def changed(matrices, where, change):
    """Matrices of which some have other values off the diagonal."""
    result = matrices.copy()
    diagonal = np.eye(matrices.shape[1], dtype=bool)
    result[where] = np.where(diagonal, result[where], change(result[where]))
    return result


def partial_correlations(matrix):
    inverse = np.linalg.inv(matrix + 0.01 * np.eye(len(matrix)))
    scale = np.sqrt(np.diagonal(inverse))
    result = -inverse / np.outer(scale, scale)
    np.fill_diagonal(result, 1.0)
    return result


@pytest.mark.parametrize("kind", ["correlation", "fisher-z", "covariance", "partial-correlation"])
def test_nothing_is_found_in_sound_connectomes(plain, matrices, kind):
    spread = np.exp(np.random.default_rng(0).normal(size=60))
    made = {
        "correlation": matrices,
        "fisher-z": fisher(matrices),
        "covariance": matrices * np.outer(spread, spread),
        "partial-correlation": np.array([partial_correlations(one) for one in matrices]),
    }
    cohort = cohort_of(made[kind], kind)(plain)
    assert kinds(cohort) == set()
    result = check_cohort(cohort)
    assert result.exit_code == 0
    assert result.sites.columns.tolist() == ["site", "subjects", "patients", "controls", "with empty ROIs", "missing inputs"]
    said = f"The scans are connectomes ({kind}); volumes, TR and signals are not known and not checked."
    assert said in [finding.text for finding in result.findings]
    assert said in result._repr_html_()
    assert check_values(result, cohort)["scans"] == [kind]
    assert [read_finding(finding._asdict()) for finding in result.findings] == list(result.findings)


def test_series_and_their_connectomes_have_the_same_findings_on_subjects(plain):
    series = [np.array(one) for one in plain.series]
    series[3][:, :8] = 4.0
    series[5][:, 2] = 0.0
    series[20] = 3 * series[1] + 7
    labels = np.array(plain.labels)
    labels[[1, 20]] = 0, 1
    cohort = replace(plain, series=series, labels=labels)
    both = check_cohort(cohort), check_cohort(cohort.to_connectomes())
    of_series, of_matrices = ({f.kind: (f.site, f.subjects) for f in result.findings} for result in both)
    assert of_matrices["many empty ROIs"] == of_series["many flat ROIs"] == ("A", (plain.subjects[3],))
    assert of_matrices["empty ROI"] == of_series["flat ROI"] == ("", tuple(plain.subjects[[3, 5]]))
    assert of_matrices["duplicate, labels differ"] == of_series["duplicate, labels differ"]
    assert both[1].sites["with empty ROIs"].tolist() == both[0].sites["with flat ROIs"].tolist() == [2, 0, 0, 0]
    assert {"short scan", "few volumes", "unknown TR"} & set(of_matrices) == set()
    assert "short scan" in of_series
    text = next(finding.text for finding in both[1].findings if finding.kind == "empty ROI")
    roi = plain.rois[2]
    assert text.startswith("2 subjects have at least one empty ROI, all edges of which are zero (at A 2; most often ")
    assert f"{roi} 2" in text


def test_another_kind_is_told_by_eigenvalues(plain, matrices):
    at_b = plain.sites == "B"
    mixed = cohort_of(np.where(at_b[:, None, None], matrices - np.eye(60), fisher(matrices)), "fisher-z")(plain)
    found = only(mixed, "another kind")
    assert (found.site, found.subjects) == ("B", tuple(plain.subjects[at_b]))
    assert found.text.startswith("10 of 10 connectomes of B look like kind correlation, not fisher-z: as correlation ")
    eigenvalues = np.linalg.eigvalsh(np.tanh(matrices[at_b]) + (1 - np.tanh(1)) * np.eye(60))
    assert found.numbers["least"] == pytest.approx(eigenvalues.min(), abs=1e-5)
    assert kinds(mixed) == {"another kind"}

    whole = only(cohort_of(matrices - np.eye(60), "fisher-z")(plain), "another kind")
    assert (whole.site, whole.numbers["other"]) == ("", "correlation")
    assert len(whole.subjects) > 0.9 * len(plain)

    weak = np.array([np.corrcoef(np.random.default_rng(i).normal(size=(25, 60)).T) for i in range(len(plain))])
    assert np.abs(fisher(weak)).max() < 1  # so that range and diagonal do not tell the kind
    taken_for_correlations = cohort_of(fisher(weak), None)(plain)
    assert taken_for_correlations.values == "correlation"
    assert only(taken_for_correlations, "another kind").numbers["other"] == "fisher-z"


def test_partial_correlations_given_as_correlations(plain, matrices):
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(len(plain), 200, 60)) + 2 * rng.normal(size=(len(plain), 200, 1))
    partial = np.array([partial_correlations(np.corrcoef((one @ rng.normal(size=(60, 60))).T)) for one in signals])
    found = only(cohort_of(partial)(plain), "another kind")
    assert (found.numbers["other"], len(found.subjects)) == ("partial-correlation", len(plain))
    found = only(cohort_of(matrices, "partial-correlation")(plain), "another kind")
    assert found.numbers["other"] == "correlation"


CHANGES = {
    "zero edges": lambda x: np.where(np.abs(x) > 0.15, x, 0.0),
    "rounded edges": lambda x: np.round(x, 2),
    "clipped edges": lambda x: np.clip(x, -0.3, 0.3),
    "no negative edges": np.abs,
    "scale of edges": lambda x: 0.3 * x,
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_was_done_to_the_edges_of_a_site(plain, matrices, kind, everywhere):
    where = np.full(len(plain), True) if everywhere else plain.sites == "C"
    cohort = cohort_of(changed(matrices, where, CHANGES[kind]))(plain)
    if kind == "scale of edges":  # all sites have the same scale then
        assert (kind in kinds(cohort)) is not everywhere
        if not everywhere:
            assert only(cohort, kind).site == "C"
        return
    found = only(cohort, kind)
    assert found.numbers.get("sites") == (None if everywhere else ["C"])
    assert ("C" in found.text) is not everywhere
    for finding in check_cohort(cohort).findings:
        assert finding.text == read_finding(finding._asdict()).text
        assert not any(name in finding.anonymous for name in plain.subjects)


def test_the_numbers_in_these_sentences(plain, matrices):
    here = np.full(len(plain), True)

    def text(kind):
        return only(cohort_of(changed(matrices, here, CHANGES[kind]))(plain), kind).text

    off = matrices[:, ~np.eye(60, dtype=bool)]
    share = np.median((np.abs(off) <= 0.15).mean(axis=1))
    end = "% of the edges are exactly zero although their ROIs are not empty; were weak edges removed?"
    assert text("zero edges") == f"{100 * share:.0f} {end}"
    assert text("rounded edges") == "The edges are rounded to 2 decimals."
    assert text("clipped edges") == "The edges are cut at 0.3: several have this very value."


def test_rounded_correlations_are_seen_in_fisher_z_and_in_half_precision_they_are_not(plain, matrices):
    z = fisher(np.round(matrices, 2))
    assert "rounded edges" in kinds(cohort_of(z, "fisher-z")(plain))
    assert kinds(cohort_of(matrices.astype(np.float16).astype(np.float64))(plain)) == set()


def test_the_cut_of_fisher_z_itself_is_no_finding(plain):
    series = [np.array(one) for one in plain.series]
    for one in series:
        one[:, 1:4] = one[:, :1] * [1, 2, 3]
    z = replace(plain, series=series).to_connectomes()
    assert (np.array(list(z.connectomes)) == np.float32(np.arctanh(0.999))).sum(axis=(1, 2)).tolist() == [12] * len(plain)
    assert "clipped edges" not in kinds(z)


def test_a_site_whose_fisher_z_never_exceed_one(plain):
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(len(plain), 400, 12))  # so many volumes that eigenvalues do not tell the kind
    signals[:, :, 1] = signals[:, :, 0] + 0.4 * signals[:, :, 1]
    full = np.array([np.corrcoef(one.T) for one in signals])
    at_d = plain.sites == "D"
    mixed = np.where(at_d[:, None, None], full - np.eye(12), fisher(full))
    rois = [f"r{i}" for i in range(12)]
    cohort = cohort_of(mixed, "fisher-z", rois=rois, atlas="")(plain)
    found = only(cohort, "small values")
    assert found.text.startswith("D: no edge is above 1, but 100 % of the connectomes of other sites have one.")
    assert "small values" not in kinds(cohort_of(fisher(full), "fisher-z", rois=rois, atlas="")(plain))


@pytest.mark.parametrize("how", ["ones", "constant", "nearly zero", "rank one"])
def test_a_matrix_without_structure_is_an_unusable_subject(plain, matrices, how):
    sign = np.where(np.arange(60) % 3, 1.0, -1.0)
    edges = {"ones": 1.0, "constant": 0.4, "nearly zero": 1e-7, "rank one": np.outer(sign, sign)}[how]
    one = np.arange(len(plain)) == 7
    cohort = cohort_of(changed(matrices, one, lambda x: np.broadcast_to(edges, x.shape)))(plain)
    assert empty_scans(cohort) == [7]
    found = only(cohort, "no structure")
    assert found.subjects == (plain.subjects[7],)
    assert str(plain.subjects[7]) not in found.anonymous
    left = without_empty_scans(cohort)
    assert len(left) == len(plain) - 1
    assert (left.excluded[0].subject, left.excluded[0].kind) == (plain.subjects[7], "numerically empty scan")
    assert empty_scans(left) == []


def test_negative_eigenvalues_are_counted_and_small_ones_only_noted(plain, matrices):
    some = np.isin(np.arange(len(plain)), [2, 9, 30])
    rng = np.random.default_rng(0)

    def noise(scale):
        jitter = rng.normal(size=(60, 60)) * scale
        return lambda x: np.clip(x + jitter + jitter.T, -0.999, 0.999)

    strong = only(cohort_of(changed(matrices, some, noise(0.05)))(plain), "negative eigenvalues")
    assert strong.subjects == tuple(plain.subjects[some])
    assert (strong.severity, strong.numbers["size"]) == ("finding", len(plain))
    slight = only(cohort_of(changed(matrices, some, noise(0.002)))(plain), "small negative eigenvalues")
    assert (slight.severity, slight.subjects) == ("note", strong.subjects)


def test_covariances_are_compared_by_the_units_of_the_signal(plain, matrices):
    spread = np.exp(np.random.default_rng(1).normal(size=60))
    covariances = matrices * np.outer(spread, spread)
    covariances[plain.sites == "B"] *= 400
    found = only(cohort_of(covariances, "covariance")(plain), "units")
    assert found.text == "B: the standard deviation of the signal is 20 times that of a typical site; its units may differ."
    covariances[4, 3] = covariances[4, :, 3] = 0.0
    assert only(cohort_of(covariances, "covariance")(plain), "empty ROI").subjects == (plain.subjects[4],)


def test_an_empty_roi_that_tells_the_label(plain, matrices):
    given = matrices.copy()
    patients = np.flatnonzero(plain.labels == 1)
    given[patients, 5], given[patients, :, 5] = 0.0, 0.0
    given[patients, 5, 5] = 1.0
    cohort = cohort_of(given)(plain)
    found = only(cohort, "empty by label")
    rates = "0 % of controls and 100 % of patients (within sites)"
    assert found.text == f"ROI {plain.rois[5]} is empty for {rates}, which reveals the label."
    (failed,) = [one for one in leakage_checks(cohort) if not one["passed"]]
    assert failed["check"] == "missingness does not reveal the label"
    assert f"ROI {plain.rois[5]} is empty" in failed["detail"]


@pytest.fixture(scope="module")
def copied(plain, matrices):
    """Fisher z in which four scans are there twice: as they are, as correlations, rounded, and with noise."""
    z = fisher(matrices).astype(np.float32)
    z[12] = z[0]
    z[24] = np.where(np.eye(60, dtype=bool), 0.0, np.tanh(z[1]))
    z[36] = z[2].round(3)
    jitter = 0.05 * np.random.default_rng(0).normal(size=(60, 60))
    z[14] = np.where(np.eye(60, dtype=bool), 0.0, z[3] + jitter + jitter.T)
    labels = np.array(plain.labels)
    labels[[12, 24, 36, 14]] = labels[:4]
    return cohort_of(z, "fisher-z")(replace(plain, labels=labels))


def test_repeated_connectomes_are_found_whatever_their_kind(copied):
    pairs = {(pair.first, pair.second): pair for pair in find_duplicates(copied)}
    assert set(pairs) == {(0, 12), (1, 24), (2, 36), (3, 14)}
    assert (pairs[0, 12].exact, pairs[0, 12].how) == (True, "same matrix")
    assert [pairs[key].exact for key in ((1, 24), (2, 36), (3, 14))] == [False] * 3
    assert min(pairs[1, 24].correlation, pairs[2, 36].correlation) > 0.9999
    texts = [finding.text for finding in check_cohort(copied).findings if finding.kind == "duplicate"]
    a, b = (f"{copied.subjects[i]} ({copied.sites[i]})" for i in (0, 12))
    assert texts[0] == f"{a} and {b} have identical connectomes: the scan would be in both source and target."
    left = without_duplicates(copied)
    assert set(copied.subjects) - set(left.subjects) == set(copied.subjects[[12, 24, 36, 14]])
    assert find_duplicates(left) == []


def test_repeated_connectomes_are_leaks(copied):
    results = {one["check"]: one for one in leakage_checks(copied)}
    identical, near = (results[f"no {kind} scan on both sides"] for kind in ("identical", "near-duplicate"))
    assert not identical["passed"]
    assert not near["passed"]
    fine = leakage_checks(without_duplicates(copied))
    assert all(one["passed"] for one in fine)
    assert "no connectome of the target is also in source" in fine[2]["detail"]
    assert "(FC correlates at 0.9 or more without the global signal)" in fine[3]["detail"]


def test_copies_with_few_rois_are_found_if_they_are_exact(tiny):
    z = np.array(tiny.to_connectomes().connectomes)
    z[40] = z[3].round(3)
    z[45] = np.tanh(z[5])
    z[41] = z[4]
    z[42] = z[6] + np.where(np.eye(12), 0, 0.1 * np.random.default_rng(0).normal())  # another level, and so the same pattern
    cohort = cohort_of(z, "fisher-z")(tiny)
    assert {(p.first, p.second) for p in find_duplicates(cohort)} >= {(3, 40), (4, 41), (5, 45)}
    few = tiny.to_connectomes().select(np.arange(30))
    assert find_duplicates(few) == []


def test_connectomes_of_real_scans(abide_folder):
    """No finding on the edges of real scans; the copies among them are those found by series."""
    cohort = read(abide_folder, on_bad="exclude")
    result = check_cohort(cohort.to_connectomes())
    edges = {"no structure", "another kind", "small values", "negative eigenvalues", "small negative eigenvalues"}
    edges |= {"scale of edges", "zero edges", "no negative edges", "rounded edges", "clipped edges"}
    assert edges & {finding.kind for finding in result.findings} == set()
    assert edges < set(BY_KIND)
    assert find_duplicates(cohort.to_connectomes()) == find_duplicates(cohort) == []


def test_atlases_of_series_and_of_connectomes(plain):
    names = tuple(f"x{i}" for i in range(20))
    some = [one[:, :20] if i % 4 else None for i, one in enumerate(plain.series)]
    both = replace(plain, atlas="a", parcellations={"b": Parcellation(names, some)})
    z = both.to_connectomes()
    first_matrices = replace(both, series=z.scans)
    first_series = replace(both, parcellations={"b": z.parcellations["b"]})
    assert atlas_line(first_matrices) == "Atlases: a (60 ROIs, 43 subjects, connectomes: fisher-z), b (20 ROIs, 32 subjects)."
    assert atlas_line(first_series) == "Atlases: a (60 ROIs, 43 subjects), b (20 ROIs, 32 subjects, connectomes: fisher-z)."
    texts = {form: [f.text for f in check_cohort(form).findings] for form in (first_matrices, first_series, z)}
    short = {form: sum("fewer than 100 volumes" in text for text in found) for form, found in texts.items()}
    assert short == {first_matrices: 4, first_series: 4, z: 0}
    assert "A: 9 of 12 scans have fewer than 100 volumes" in " ".join(texts[first_matrices])
    assert any(text.startswith("11 subjects have no series of atlas b") for text in texts[first_matrices])
    assert any(text.startswith("11 subjects have no connectome of atlas b") for text in texts[first_series])
    assert any(text.startswith("Atlas b: The scans are connectomes (fisher-z)") for text in texts[first_series])
    assert check_values(check_cohort(first_series), first_series)["scans"] == ["series", "fisher-z"]
    assert "volumes" not in check_cohort(z).sites.columns
    assert check_cohort(first_matrices).sites["volumes"].tolist() == check_cohort(first_series).sites["volumes"].tolist()


def test_clinical_scales_that_were_imputed_are_proxies_by_name_and_by_value(plain, matrices):
    """As in a public copy of REST-meta-MDD: controls have small random scores, patients without one the mean."""
    rng = np.random.default_rng(0)
    scores = np.where(plain.labels == 1, np.where(rng.random(len(plain)) < 0.5, 21.17, rng.normal(22, 5, len(plain))), 0)
    scores = np.where(plain.labels == 1, scores, rng.uniform(0, 6, len(plain)))
    table = pd.DataFrame({"age": plain.phenotypes["age"], "HAMD": scores, "HAMA": scores + 2, "scale_7": scores})
    cohort = cohort_of(matrices, phenotypes=table.set_axis(plain.subjects, axis=0), inputs=["age"])(plain)
    texts = [finding.text for finding in check_cohort(cohort).findings]
    assert "Not inputs, because they reveal the diagnosis: HAMD, HAMA." in texts
    assert "Column scale_7 separates patients from controls as only a label proxy should. Is it one?" in texts


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cohort_of_connectomes_can_be_checked_in_any_order(data):
    """Few ROIs, single subjects, empty ROIs, atlases that nobody has: no error, and the same findings in another order."""
    kind = data.draw(st.sampled_from(["correlation", "fisher-z", "covariance", "partial-correlation"]))
    rois, subjects = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    given = np.array([np.corrcoef(rng.normal(size=(rois, 12))) for _ in range(subjects)])
    given = fisher(given) if kind == "fisher-z" else given * (9 if kind == "covariance" else 1)
    for i in range(subjects):
        empty = rng.permutation(rois)[: data.draw(st.integers(0, rois - 2))]
        given[i, empty], given[i, :, empty] = 0.0, 0.0
    sites, labels = rng.choice(["x", "y", "z"], subjects), rng.choice([-1, 0, 1], subjects)
    cohort = Cohort.from_connectomes(given, labels, sites, values=kind, atlas="a")
    lacking = Connectomes([None] * subjects, "correlation", 4)
    cohort = replace(cohort, parcellations={"b": Parcellation(tuple("wxyz"), lacking)} if data.draw(st.booleans()) else {})
    result = check_cohort(cohort)
    order = rng.permutation(subjects)
    again = check_cohort(cohort[order])
    assert sorted((f.kind, f.site, f.atlas, *sorted(f.subjects)) for f in result.findings) == sorted(
        (f.kind, f.site, f.atlas, *sorted(f.subjects)) for f in again.findings
    )
    for finding in result.findings:
        assert finding.text
        assert finding.anonymous
        assert read_finding(json.loads(json.dumps(finding._asdict()))).text == finding.text
    assert len(result.inclusion) == subjects


def test_the_command_lists_and_corrects_what_was_found(copied, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    z = np.array(list(copied.connectomes))
    z[30] = 1.2 * (1 - np.eye(60))
    cohort = cohort_of(z, "fisher-z")(copied)
    cohort.save("c.cohort")
    code, out, _ = typed("check", "c.cohort", "--out", "lists", "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["scans"], found["hash"]) == (1, 1, ["fisher-z"], cohort.hash)
    assert sum("same scan" in one["text"] or "identical" in one["text"] for one in found["findings"]) == 4
    assert "volumes" not in found["sites"][0]
    code, out, _ = typed("check", "c.cohort", "--out", "lists")
    assert out.startswith("Cohort demo: 43 subjects") and "connectomes (fisher-z)" in out.splitlines()[0]
    assert "--drop-bad --drop-duplicates" in out
    listed = pd.read_csv("lists/inclusion.csv").set_index("subject")["reason"]
    assert "all edges of its connectome are alike" in listed[cohort.subjects[30]]
    assert typed("convert", "c.cohort", "d.cohort", "--drop-bad", "--drop-duplicates")[0] == 0
    left = Cohort.load("d.cohort")
    assert set(cohort.subjects) - set(left.subjects) == set(cohort.subjects[[12, 24, 36, 14, 30]])
    assert left.findings is not None and left.values == "fisher-z"
    assert not {"duplicate", "no structure"} & {finding.kind for finding in left.findings}
