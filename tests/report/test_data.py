"""The data in a report: flow of subjects, sites in numbers, mean connectomes, planted effects; every number counted again."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from m2lgdg import Cohort, InputError, make_cohort, run_study
from m2lgdg.findings import Exclusion
from m2lgdg.report.brains import planted_table
from m2lgdg.report.checklists import methods_text
from m2lgdg.report.contents import read_contents
from m2lgdg.report.data import _width, _wrapped, connectomes, flow_diagram, flow_steps, site_connectomes, site_table
from m2lgdg.report.page import write_report
from m2lgdg.report.sharing import share_study
from m2lgdg.study.description import CONNECTOMES, describe, mean_connectomes, read_connectomes, read_site_connectomes

EXCLUDED = (
    Exclusion.from_reason("x1", "north", "head motion: func_mean_fd is not below 0.2 (value 0.31)"),
    Exclusion.from_reason("x2", "north", "head motion: func_mean_fd is not below 0.2 (value 0.44)"),
    Exclusion.from_reason("x3", "gone", "no scan"),
)


@pytest.fixture(scope="module")
def cohort():
    """The tiny cohort with motion, people that were left out, and one site of four subjects."""
    tiny = make_cohort("tiny", seed=3)
    keep = np.flatnonzero((tiny.sites != "east") | (np.cumsum(tiny.sites == "east") <= 4))
    tiny = tiny.select(keep)
    rng = np.random.default_rng(0)
    table = tiny.phenotypes.assign(func_mean_fd=rng.gamma(2.0, 0.05, len(tiny)) + 0.03 * (tiny.labels == 1))
    truth = make_cohort("tiny", seed=3).truth
    return replace(tiny, phenotypes=table, excluded=EXCLUDED, truth=truth)


@pytest.fixture(scope="module")
def study(cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    cohort.save(folder / "tiny.cohort")
    content = {"cohort": str(folder / "tiny.cohort"), "methods": ["prior", "fc-logistic", "fc-svm"], "seeds": [0]}
    content |= {"targets": ["north", "south"], "explain": ["fc-logistic"]}
    assert not run_study(content, folder / "out").failed
    return folder / "out"


def test_the_flow_counts_everybody_once(study):
    contents = read_contents(study)
    steps = flow_steps(contents)
    included = 16 + 14 + 12 + 4
    patients = int((Cohort.load(study.parent / "tiny.cohort").labels == 1).sum())
    assert steps[0] == (
        [f"{included + 3} subjects listed", "of 5 sites"],
        ["3 left out", "head motion: func_mean_fd is not below 0.2: 2", "no scan: 1"],
    )
    assert steps[1] == (
        [f"{included} included", f"{patients} patients, {included - patients} controls", "of 4 sites"],
        ["16 used for training only", "of 2 sites that were no target"],
    )
    assert steps[2][0][0] == "30 tested"
    figure = flow_diagram(contents)
    words = " ".join(re.findall(r">([^<]+)</text>", figure.svg.decode()))
    for line in (line for step in steps for lines in step for line in lines):
        assert line in words
    assert "#0b0c0d" not in figure.page and "currentColor" in figure.page
    bare = replace(contents, inclusion=[])
    assert flow_diagram(bare) is None and site_table(bare) is not None


def test_a_long_file_name_stays_in_its_box():
    line = f"unusable file: {'sub-MMW0051234_' * 6}bold.nii.gz"
    wrapped = _wrapped(line, 200)
    assert "".join(wrapped).replace(" ", "") == line.replace(" ", "") and len(wrapped) > 4
    assert all(_width(one) <= 200 for one in wrapped)


def test_reasons_with_markup_stay_text(study):
    contents = read_contents(study)
    row = {"subject": "s", "site": "<b>", "status": "excluded", "kind": "<script>x</script> & more"}
    figure = flow_diagram(replace(contents, inclusion=[*contents.inclusion, row]))
    assert "<script>" not in figure.page and "&lt;script&gt;" in figure.page


def test_sites_in_numbers(study, cohort):
    table = site_table(read_contents(study))
    rows = {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.shown}
    assert list(rows) == ["all", "all patients", "all controls", "north", "south", "west", "east"]
    for name, row in rows.items():
        chosen = {"all": cohort.labels >= 0, "all patients": cohort.labels == 1, "all controls": cohort.labels == 0}
        mask = chosen.get(name, cohort.sites == name)
        part = cohort.phenotypes[mask]
        assert row["subjects"] == str(mask.sum())
        sick = int((cohort.labels[mask] == 1).sum())
        numbers = ("-", "-") if name.startswith("all ") else (f"{sick}", f"{100 * sick / mask.sum():.0f}")
        assert (row["patients"], row["patients, %"]) == numbers
        quarters = [f"{part['age'].quantile(q):.1f}" for q in (0.5, 0.25, 0.75)]
        assert row["age, years"] == "{} ({}-{})".format(*quarters)
        quarters = [f"{part['func_mean_fd'].quantile(q):.2f}" for q in (0.5, 0.25, 0.75)]
        assert row["motion, mm"] == "{} ({}-{})".format(*quarters)
        known = part["sex"].dropna()
        assert row["male, %"] == f"{100 * (known == 1).sum() / len(known):.0f}"
        lengths = sorted({len(series) for series, on in zip(cohort.series, mask, strict=True) if on})
        assert row["volumes"] == (str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}")
    assert (rows["north"]["left out"], rows["south"]["left out"], rows["all"]["left out"]) == ("2", "0", "-")
    assert [rows[site]["role"] for site in ("north", "south", "west", "east")] == ["target", "target", "source", "source"]


def test_of_an_older_folder_only_counts_are_known(study, tmp_path):
    for name in ("predictions.csv", "inclusion.csv"):
        (tmp_path / name).write_bytes((study / name).read_bytes())
    table = site_table(read_contents(tmp_path))
    assert table.header == ["Site", "subjects", "left out", "patients", "patients, %", "role"]
    assert [row[1] for row in table.shown] == ["16", "14", "12", "4"]
    assert [row[3] == "-" for row in table.shown] == [False, False, True, True]


def test_mean_connectomes_are_those_of_a_loop(cohort, tmp_path):
    fc = []
    for series in cohort.series:
        z = np.arctanh(np.clip(np.corrcoef(series.astype(float).T), -0.999, 0.999))
        fc.append(z[np.triu_indices(len(z), 1)])
    fc = np.array(fc)
    means = mean_connectomes(cohort)
    assert np.allclose(means["patients"], fc[cohort.labels == 1].mean(0), atol=1e-6)
    assert np.allclose(means["controls"], fc[cohort.labels == 0].mean(0), atol=1e-6)
    # The difference within sites is the coefficient of the label next to one intercept for each site.
    design = np.column_stack([cohort.labels == 1, *(cohort.sites == site for site in cohort.site_names)]).astype(float)
    assert np.allclose(means["difference"], np.linalg.lstsq(design, fc, rcond=None)[0][0], atol=1e-6)
    for site, mean in zip(cohort.site_names, means["sites"], strict=True):
        of_site = (cohort.sites == site) & (cohort.labels >= 0)
        assert np.isnan(mean).all() if of_site.sum() < 10 else np.allclose(mean, fc[of_site].mean(0), atol=1e-6)
    assert 0 < np.isnan(means["sites"]).any(axis=1).sum() < len(cohort.site_names)
    one_class = cohort.select(np.flatnonzero(cohort.labels == 1))
    assert mean_connectomes(one_class) == {}


def test_stored_connectomes_are_symmetric_and_damaged_ones_are_refused(study, cohort, tmp_path):
    matrices, means = read_connectomes(study), mean_connectomes(cohort)
    for name, matrix in matrices.items():
        assert np.array_equal(matrix, matrix.T) and not np.diag(matrix).any()
        assert np.allclose(matrix[np.triu_indices(12, 1)], means[name], atol=1e-3)
    figure, table = connectomes(read_contents(study))
    i = np.abs(means["difference"]).argmax()
    pairs = [(cohort.rois[a], cohort.rois[b]) for a, b in zip(*np.triu_indices(12, 1), strict=True)]
    assert tuple(table.shown[0][:2]) == pairs[i]
    assert float(table.shown[0][4]) == pytest.approx(means["difference"][i], abs=1e-3)
    assert table.shown[0][4] in figure.caption
    content = (study / CONNECTOMES).read_bytes()
    (tmp_path / CONNECTOMES).write_bytes(content[:-7])
    with pytest.raises(InputError, match="damaged"):
        read_connectomes(tmp_path)
    (tmp_path / CONNECTOMES).write_bytes(content.replace(b'"patients"', b'"patientX"'))
    with pytest.raises(InputError, match="is damaged"):
        read_connectomes(tmp_path)


def test_sites_far_from_the_others_are_named_and_small_ones_are_not_shared(study, cohort, tmp_path):
    contents, means = read_contents(study), mean_connectomes(cohort)["sites"]
    known = ~np.isnan(means).any(axis=1)
    rows = means - means[known].mean(axis=0)
    distance = {name: np.linalg.norm(row) / np.sqrt(row.size) for name, row in zip(cohort.site_names, rows, strict=True)}
    far = max((name for name, use in zip(cohort.site_names, known, strict=True) if use), key=distance.get)
    figure = site_connectomes(contents)
    assert f"{far} (root mean square {distance[far]:.3f} over edges" in figure.caption
    assert "fewer than 10 labelled subjects are left out" in figure.caption
    assert all(f">{site} (" in figure.svg.decode() for site, use in zip(cohort.site_names, known, strict=True) if use)
    facts = json.loads((study / "cohort.json").read_text())
    facts["sites"]["north"]["subjects"] += 5  # without a diagnosis, so they are not in the mean
    (tmp_path / "cohort.json").write_text(json.dumps(facts))
    for name in ("predictions.csv", CONNECTOMES):
        (tmp_path / name).write_bytes((study / name).read_bytes())
    assert ">north (16)<" in site_connectomes(read_contents(tmp_path)).svg.decode()
    share_study(study, tmp_path / "shared")
    assert read_site_connectomes(tmp_path / "shared") is None  # one site is small, and the total would reveal it
    kept = read_connectomes(tmp_path / "shared")
    assert all(np.array_equal(kept[name], matrix) for name, matrix in read_connectomes(study).items())
    large = make_cohort("tiny", seed=3, sizes={"one": 20, "two": 24})
    run_study({"cohort": large, "methods": ["prior"], "seeds": [0]}, tmp_path / "large")
    share_study(tmp_path / "large", tmp_path / "of-large")
    assert read_site_connectomes(tmp_path / "of-large").shape == (2, 66)


@pytest.mark.parametrize("groups", [{"all": {"subjects": "many"}}, {"all": {"subjects": 3}}, {"all": 5}, [1]])
def test_a_damaged_description_is_refused(study, tmp_path, groups):
    facts = json.loads((study / "cohort.json").read_text())
    (tmp_path / "cohort.json").write_text(json.dumps(facts | {"groups": groups}))
    (tmp_path / "predictions.csv").write_bytes((study / "predictions.csv").read_bytes())
    with pytest.raises(InputError, match="is damaged and cannot be read as facts about a cohort"):
        read_contents(tmp_path)


def test_planted_effects_are_counted_among_the_highest(study, cohort):
    contents = read_contents(study)
    explanation = contents.mean_explanations["fc-logistic"]
    truth = cohort.truth
    top = explanation.rois.sort_values("score", ascending=False)["roi"].head(len(truth["rois"])).tolist()
    edges = explanation.edges.sort_values("score", ascending=False).head(len(truth["edges"]))
    found = sum({a, b} in [set(edge) for edge in truth["edges"]] for a, b in zip(edges["roi"], edges["other roi"], strict=True))
    table = planted_table(contents)
    assert table.shown[0] == ["fc-logistic", str(len(set(top) & set(truth["rois"]))), str(found)]
    assert table.header[1:] == [f"of {len(truth['rois'])} planted ROIs", f"of {len(truth['edges'])} planted edges"]
    assert table.shown[1][:2] == ["difference of the class means, no model", "-"]
    assert planted_table(replace(contents, cohort=None, about_cohort=contents.about_cohort._replace(description={}))) is None


def test_the_methods_paragraph_has_the_studys_numbers_and_cites_in_order(study):
    text = methods_text(read_contents(study), motion=True)
    words = " ".join(text.paragraphs)
    assert "We included 46 subjects" in words and "3 further subjects were left out" in words
    assert "each of 2 target sites" in words and "We compared 3 methods: prior, fc-logistic [1], fc-svm [1]." in words
    assert [int(number) for number in re.findall(r"\[(\d+)\]", words)] == [1, 1, 2, 3, 4, 5]
    assert len(text.references) == 5 and "Abraham" in text.references[0] and "Janes" in text.references[3]
    versions = json.loads((study / "environment.json").read_text())
    assert f"numpy {versions['numpy']}" in words and versions["code"] in words
    assert "Janes" not in " ".join(methods_text(read_contents(study), motion=False).references)


def test_the_page_begins_with_the_answer_its_checks_the_data_and_the_table(study, figures_painted_only):
    page = write_report(study).read_text()
    ids = re.findall(r'data-section="(\w+)"', page)
    assert ids[:4] == ["answer", "trust", "data", "overall"] and {"motion", "subgroups", "planted", "methods"} < set(ids)
    parts = page.split("<section ")[1:]
    assert ['<details class="section">' in part for part in parts] == [False] * 4 + [True] * (len(parts) - 4)
    data = page.split('data-section="data"')[1].split("</section>")[0]
    assert data.index("<svg") < data.index('class="data"') < data.index("<table")
    assert "Adjusted for head motion, the AUC of" in page.split('data-section="trust"')[1].split("</section>")[0]
    assert (study / "figures" / "flow.svg").read_text().startswith("<svg") and not (study / "figures" / "flow.png").exists()


def test_small_groups_are_not_shared(study, cohort, tmp_path, figures_painted_only):
    page = write_report(study, share=tmp_path / "shared").read_text()
    cells = re.search(r"<tr><td>east</td>(.*?)</tr>", page.split('data-section="data"')[1])[1]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", cells)[0] == "4"
    north = describe(cohort)["sites"]["north"]
    assert f"{north['age'][1]:.1f} (" not in page and "median in " in page
    header = re.findall(r'<button type="button">([^<]*)</button>', page.split('data-section="data"')[1].split("</thead>")[0])
    values = dict(zip(header[1:], re.findall(r"<td[^>]*>([^<]*)</td>", cells), strict=True))
    assert (values["age, years"], values["motion, mm"]) == ("-", "-")
    rows = page.split("<caption>Sites</caption>")[1].split("</table>")[0]
    sexes = (
        [re.findall(r"<td[^>]*>([^<]*)</td>", row)[header.index("male, %")] for row in rows.split("<tr>")[5:]]
        if "male, %" in header
        else []
    )
    assert set(sexes) <= {"-"}
    share_study(study, tmp_path / "copy")
    copied = json.loads((tmp_path / "copy" / "cohort.json").read_text())["sites"]
    assert not {"age", "male", "motion", "sex_known"} & set(copied["east"]) and "age" in copied["north"]
    assert site_table(read_contents(tmp_path / "copy")).shown[-1][0] == "east"
