"""Slopes of phenotypes by site in the report: marks, order, what a study folder keeps and what is shared."""

import json
from dataclasses import replace

import pytest

from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.report.answer import answer
from m2lgdg.report.contents import read_contents
from m2lgdg.report.phenotypes import phenotype_slopes
from m2lgdg.report.sections import sections
from m2lgdg.report.sharing import shared_description
from m2lgdg.study.description import read_cohort_facts


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slopes") / "out"
    assert not run_study({"cohort": make_cohort("tiny", seed=3), "methods": ["prior"], "seeds": [0]}, folder).failed
    return folder


@pytest.fixture
def contents(study):
    return read_contents(study)


def test_slopes_of_phenotypes_are_drawn_by_site(contents):
    """One panel for each input; a value beyond the axis is an arrow, and sites without a value have no mark."""
    slopes = {"age": {"a": [0.5, 0.1, 0.9], "b": [-0.5, -0.9, -0.1], "c": [9.0, 8.0, 10.0]}, "sex": {"a": [0.0, -1.0, 1.0]}}
    sizes = {name: {"subjects": n, "patients": n // 2, "controls": n // 2} for name, n in {"a": 20, "b": 40, "c": 30}.items()}
    known = replace(contents, about_cohort=contents.about_cohort._replace(description={"slopes": slopes, "sites": sizes}))
    figure = phenotype_slopes(known)
    assert figure.png[1:4] == b"PNG" and figure.page.count("<title>") == 3  # of one site alone nothing is drawn
    assert "age, c: +9.00 sd (95 % interval +8.00 to +10.00)" in figure.page and "sex, a" not in figure.page
    order = [figure.page.index(f">{site}</text>") for site in "bca"]
    assert order == sorted(order)
    assert phenotype_slopes(replace(known, about_cohort=known.about_cohort._replace(description={"sites": sizes}))) is None


def test_a_study_keeps_the_slopes_and_shares_those_of_large_groups_only(contents):
    slopes = contents.description["slopes"]
    assert set(slopes) <= {"sex", "age", "education"} and all(
        len(row) == 3 for each in slopes.values() for row in each.values()
    )
    sizes = {"large": (10, 12), "few": (20, 9)}
    sites = {name: {"subjects": sum(n), "patients": n[0], "controls": n[1]} for name, n in sizes.items()}
    rows = {site: [0.123, -0.456, 0.789] for site in sizes}
    shared = shared_description({"sites": sites, "slopes": {"age": rows, "sex": rows}})
    assert shared["slopes"] == {"age": {"large": [0.1, -0.5, 0.8]}}


def test_the_section_on_the_data_has_the_figure(contents):
    (data,) = [section for section in sections(contents, answer(contents)) if section.id == "data"]
    assert [figure.name for figure in data.figures] == ["phenotype-slopes"]


def test_damaged_slopes_are_refused(study, tmp_path):
    facts = json.loads((study / "cohort.json").read_text())
    facts["slopes"]["age"]["north"] = [0.1, "high"]
    (tmp_path / "cohort.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match="damaged"):
        read_cohort_facts(tmp_path)
