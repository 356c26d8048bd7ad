"""Tables of brain structure on the page for one subject: which files are taken, what they change, and what is refused."""

import re

import anyio
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve import OPENED, WATCHING, alert, words
from uploads import npy

from m2lgdg import Cohort, InputError, make, make_cohort
from m2lgdg.deploy.serve.structure import LARGEST_TABLE, MOST_FILES, expected_tables, rows_of
from m2lgdg.explain.attribution import explain_subject

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
from m2lgdg.deploy.serve import app as web  # noqa: E402
from m2lgdg.deploy.serve.upload import one_subject  # noqa: E402

HOST = "127.0.0.1:8765"
REGIONS = ["bankssts", "insula", "precentral"]
THICKNESS = [f"{side}_{region}_thickness" for side in ("lh", "rh") for region in REGIONS]
THICKNESS += ["lh_MeanThickness_thickness", "rh_MeanThickness_thickness", "eTIV"]
VOLUMES = ["Left-Hippocampus", "Right-Hippocampus", "Left-Thalamus-Proper", "IntraCranialVol"]
OTHERS = ["score a", "score b"]
COLUMNS = {"thickness": THICKNESS, "aseg": VOLUMES, "own": OTHERS}
SURFACE = """# Title Surface-based statistics
# subjectname {subject}
# hemi {side}
# AnnotationFile ../../label/{side}.{atlas}.annot
# Measure Cortex, MeanThickness, Mean Thickness, 2.5, mm
# Measure EstimatedTotalIntraCranialVol, eTIV, Estimated Total Intracranial Volume, {size}, mm^3
# ColHeaders StructName NumVert SurfArea GrayVol ThickAvg ThickStd MeanCurv GausCurv FoldInd CurvInd
"""
ASEG = """# Title Segmentation Statistics
# subjectname {subject}
# Measure EstimatedTotalIntraCranialVol, eTIV, Estimated Total Intracranial Volume, 1500000.25, mm^3
# ColHeaders  Index SegId NVoxels Volume_mm3 StructName normMean normStdDev normMin normMax normRange
  1  17  4200  4210.0  Left-Hippocampus   70.0   7.0  40 100  60
  2  53  4100  4110.0  Right-Hippocampus  70.0   7.0  40 100  60
  3  10  7000  7010.0  Left-Thalamus      70.0   7.0  40 100  60
"""
SIZE = "1500000.25"
WRONG = (
    "does not fit table thickness of the model (thickness, Desikan-Killiany), as it has no column such as "
    "lh_bankssts_thickness of the same atlas; give lh.aparc.stats and rh.aparc.stats or a table with one row."
)


def surface(side, subject="sub-01", atlas="aparc", size=SIZE, regions=None, thickness=("2.5", "3.0", "2.75")):
    """A stats file of the cortex."""
    lines = [
        f"{region} 1500 1000 2500 {value} 0.5 0.1 0.02 10 1.0"
        for region, value in zip(regions or REGIONS, thickness, strict=True)
    ]
    text = SURFACE.format(side=side, subject=subject, atlas=atlas, size=size) + "\n".join(lines) + "\n"
    return f"{side}.{atlas}.stats", text.encode()


def aseg(subject="sub-01"):
    return "aseg.stats", ASEG.format(subject=subject).encode()


def one_row(columns, values, name="row.csv", **others):
    frame = pd.DataFrame([values], columns=columns).assign(**others)
    return name, frame.to_csv(index=False, sep="\t" if name.endswith(".tsv") else ",").encode()


BOTH = [surface("lh"), surface("rh")]


def planted(cohort):
    draw = np.random.default_rng(0)
    label = np.maximum(cohort.labels, 0)[:, None].astype(float)
    tables = {
        "thickness": draw.normal(2.6, 0.2, (len(cohort), len(THICKNESS))) - 0.15 * label,
        "aseg": draw.normal(5000, 500, (len(cohort), len(VOLUMES))) + 250 * label,
        "own": draw.normal(size=(len(cohort), 2)) + 0.7 * label,
    }
    tables["thickness"][:, -1] = tables["aseg"][:, -1] = draw.normal(1.5e6, 1e5, len(cohort))
    frames = {name: pd.DataFrame(values, cohort.subjects, COLUMNS[name]) for name, values in tables.items()}
    return cohort.with_tables(frames)


@pytest.fixture(scope="module")
def cohort():
    return planted(make_cohort("tiny", seed=2, sizes=dict.fromkeys("abcd", 50)))


@pytest.fixture(scope="module")
def fitted(cohort):
    model = make("connectome-adaptive").fit(cohort, source_distribution=True)
    assert all(one["weight"] > 0 for one in model.facts_["tables"].values())
    return model


def ask(fitted, cohort, tables=(), data=None):
    """The response to the form with the scan of the first subject and (field, file) of tables; no file is written."""
    OPENED.clear()

    async def sent():
        transport = httpx.ASGITransport(web.make_app(fitted))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            files = [("series", ("scan.npy", npy(cohort.series[0]))), *tables]
            WATCHING.set()
            try:
                return await client.post("/", files=files, data={"p0": "1", "p1": "30"} | (data or {}))
            finally:
                WATCHING.clear()

    response = anyio.run(sent)
    assert OPENED == []
    return response


def proba_of(fitted, cohort, **tables):
    """Of the first subject, by the method."""
    frames = {name: pd.DataFrame([values], ["a"], COLUMNS[name]) for name, values in tables.items()}
    phenotypes = pd.DataFrame({"sex": [1.0], "age": [30.0]}, index=["a"])
    one = Cohort(cohort.series[:1], ["a"], [""], [-1], cohort.rois, phenotypes, ("sex", "age"), tables=frames)
    return fitted.predict_proba(one)[0, 1]


def computed(fitted, cohort, tables):
    """The probability of the form, all digits."""
    (atlas,) = fitted.members
    files = {name: own for name, own in tables.items() if own}
    phenotypes = {"sex": "1", "age": "30"}
    return fitted.predict_proba(one_subject(fitted, {atlas: ("scan.npy", npy(cohort.series[0]))}, phenotypes, "", files))[0, 1]


def shown(response):
    assert response.status_code == 200, alert(response)
    return re.search(r'class="big"><strong>(.*?)</strong>', response.text)[1]


def test_what_the_columns_say_of_a_table(fitted):
    volumes, own, thickness = expected_tables(fitted)
    assert (thickness.files, thickness.what) == ("lh.aparc.stats and rh.aparc.stats", "thickness, Desikan-Killiany")
    assert (volumes.files, volumes.what) == ("aseg.stats", "volume, aseg")
    assert (own.files, own.what) == ("", "columns score a, score b")


def test_the_form_asks_for_tables_only_if_the_model_takes_them(fitted, cohort):
    page = ask(fitted, cohort)
    assert [f'id="table-{i}"' in page.text for i in range(4)] == [True, True, True, False]
    assert "Thickness, Desikan-Killiany: lh.aparc.stats and rh.aparc.stats of FreeSurfer, or a table with one row." in words(
        page
    )
    assert 'accept=".csv,.tsv,.txt"' in page.text and 'accept=".stats,.csv,.tsv,.txt"' in page.text
    assert "12 ROIs (synthetic), with tables aseg and own and thickness." in words(page)
    without = make("connectome-adaptive", tables="none", phenotypes=True).fit(cohort)
    plain = ask(without, cohort)
    assert "table" not in words(plain).lower().replace("structure", "table") and 'id="table-2"' not in plain.text
    refused = ask(without, cohort, [("table-2", aseg())])
    assert refused.status_code == 400 and "Maximum number of files is 1" in alert(refused)


def test_values_are_those_of_the_method_with_these_tables(fitted, cohort):
    cortex = [2.5, 3.0, 2.75] * 2 + [2.5, 2.5, 1500000.25]
    volumes = [4210.0, 4110.0, 7010.0, 1500000.25]  # by the names of an earlier version of FreeSurfer
    every = [*(("table-2", one) for one in BOTH), ("table-0", aseg()), ("table-1", one_row(OTHERS, [0.5, 1.5]))]
    page = ask(fitted, cohort, every)
    whole = proba_of(fitted, cohort, thickness=cortex, aseg=volumes, own=[0.5, 1.5])
    given = {"thickness": BOTH, "aseg": [aseg()], "own": [one_row(OTHERS, [0.5, 1.5])]}
    assert computed(fitted, cohort, given) == pytest.approx(whole, abs=1e-12) and shown(page) == f"{whole:.2f}"
    said = words(page)
    assert "thickness 9 of 9 values, from lh.aparc.stats and rh.aparc.stats." in said
    assert "aseg 4 of 4 values, from aseg.stats." in said
    assert "decided without" not in said
    alone = ask(fitted, cohort, [("table-0", aseg())])
    some, none = proba_of(fitted, cohort, aseg=volumes), proba_of(fitted, cohort)
    assert computed(fitted, cohort, {"aseg": [aseg()]}) == pytest.approx(some, abs=1e-12) and shown(alone) == f"{some:.2f}"
    said = words(alone)
    assert "thickness not given; decided without it." in said and "no own: decided without it the table was not given" in said
    assert computed(fitted, cohort, {}) == pytest.approx(none, abs=1e-12) and shown(ask(fitted, cohort)) == f"{none:.2f}"
    assert abs(whole - some) > 1e-3 < abs(some - none)


@pytest.mark.parametrize(
    "file",
    [
        one_row(THICKNESS, [2.5, 3.0, 2.75] * 2 + [2.5, 2.5, 1500000.25], "all.tsv"),
        one_row(["participant_id", *THICKNESS, "site"], ["7", *[2.5, 3.0, 2.75] * 2, 2.5, 2.5, 1500000.25, 4], "all.csv"),
        one_row(THICKNESS[::-1], [1500000.25, 2.5, 2.5, *[2.75, 3.0, 2.5] * 2], "all.txt"),
    ],
)
def test_a_table_of_one_row_is_the_same_as_stats_files(fitted, cohort, file):
    both = computed(fitted, cohort, {"thickness": BOTH})
    assert computed(fitted, cohort, {"thickness": [file]}) == pytest.approx(both, abs=1e-12)
    assert abs(both - computed(fitted, cohort, {})) > 1e-3


def test_what_is_missing_is_said(fitted, cohort):
    right = surface("rh", regions=["insula"], thickness=["3.0"])
    some = ask(fitted, cohort, [("table-2", BOTH[0]), ("table-2", right)])
    place = "thickness 7 of 9 values, from lh.aparc.stats and rh.aparc.stats; the mean of the training subjects takes the place"
    assert place in words(some)
    given = [2.5, 3.0, 2.75, np.nan, 3.0, np.nan, 2.5, 2.5, 1500000.25]
    expected = proba_of(fitted, cohort, thickness=given)
    assert computed(fitted, cohort, {"thickness": [BOTH[0], right]}) == pytest.approx(expected, abs=1e-12)
    few = ask(fitted, cohort, [("table-2", one_row(THICKNESS, [2.5, "NaN", "", "n/a", "", "", "", "", ""]))])
    assert "thickness 1 of 9 values, from row.csv; decided without it." in words(few)
    assert "no thickness: decided without it" in words(few) and shown(few) == shown(ask(fitted, cohort))


def test_the_regions_of_tables_are_explained(fitted, cohort):
    page = ask(fitted, cohort, [("table-0", aseg())], {"explain": "1"})
    rows = re.findall(
        r"<tr><td>([^<]*)</td><td>([^<]*) sd</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page.text
    )
    (atlas,) = fitted.members
    one = one_subject(fitted, {atlas: ("a.npy", npy(cohort.series[0]))}, {"sex": "1", "age": "30"}, "", {"aseg": [aseg()]})
    regions = explain_subject(fitted, one).regions
    assert {row[4] for row in rows} == {"aseg"} and len(rows) == (
        regions["score"] > 1e-9
    ).sum() == 3  # not the size of the head
    for row, expected in zip(rows, regions.to_dict("records"), strict=False):
        assert (row[0], float(row[2])) == (expected["region"], pytest.approx(expected["score"], rel=0.01))
        assert row[3] == ("patient" if expected["contribution"] > 0 else "control")
    assert "Top regions of tables" not in ask(fitted, cohort, [], {"explain": "1"}).text


def test_an_average_takes_the_tables_of_its_methods(cohort):
    model = make("average", methods=("fc-logistic", "connectome-adaptive")).fit(cohort)
    page = ask(model, cohort, [("table-0", aseg())], {"explain": "1"})
    assert "aseg 4 of 4 values, from aseg.stats. own not given; decided without it." in words(page)
    assert shown(page) == f"{computed(model, cohort, {'aseg': [aseg()]}):.2f}"


def test_a_table_without_weight_is_said_to_have_none(cohort):
    model = make("connectome-adaptive").fit(cohort)
    model.facts_["tables"]["own"]["weight"] = 0.0
    assert "own not given; decided without it. It has no weight in this model." in words(ask(model, cohort))


DESTRIEUX = ["G_and_S_frontomargin", "G_cuneus", "S_central"]
HOSTILE = {  # field, files, status, sentence (its beginning)
    "another atlas": (2, [surface("lh", atlas="aparc.a2009s", regions=DESTRIEUX)], 422,
        f"lh.aparc.a2009s.stats (thickness, Destrieux) {WRONG}"),
    "another atlas with the same names": (2, [surface("lh", atlas="aparc.DKTatlas")], 422,
        "lh.aparc.DKTatlas.stats (thickness, aparc.DKTatlas) does not fit table thickness of the"),
    "another atlas, renamed": (2, [("lh.aparc.stats", surface("lh", atlas="aparc.DKTatlas")[1])], 422,
        "lh.aparc.stats (thickness, aparc.DKTatlas) does not fit table thickness of the"),
    "another measure": (2, [("a.tsv", b"lh.aparc.area\tlh_bankssts_area\tlh_insula_area\ns1\t1000\t2000\n")], 422,
        "a.tsv (area, desikan-killiany, freesurfer) does not fit table thickness of the"),
    "volumes for thickness": (2, [aseg()], 422, "aseg.stats has no thickness; its columns are Index, SegId"),
    "surface for volumes": (0, [BOTH[0]], 422, "lh.aparc.stats (volume, Desikan-Killiany) does not fit table aseg of the"),
    "stats for other columns": (1, [aseg()], 422, "aseg.stats is a stats file of FreeSurfer, and table own is not (columns"),
    "other columns": (1, [one_row(["x"], [1])], 422, "row.csv (numbers) does not fit table own of the model (columns score a,"),
    "one hemisphere": (2, [BOTH[0]], 422,
        "table thickness: lh.aparc.stats has no column such as rh_bankssts_thickness; give lh.aparc.stats and rh.aparc.stats"),
    "one hemisphere of a table": (2, [one_row(THICKNESS[3:], [2.5, 3.0, 2.75, 2.5, 2.5, 1500000.25])], 422,
        "table thickness: row.csv has no column such as lh_bankssts_thickness; give lh.aparc.stats and rh.aparc.stats"),
    "one hemisphere twice": (2, [BOTH[0], ("lh.copy.stats", BOTH[0][1])], 422,
        "table thickness: lh.aparc.stats and lh.copy.stats both have lh_bankssts_thickness; give lh.aparc.stats and rh."),
    "a hemisphere under the other's name": (2, [BOTH[0], ("rh.aparc.stats", BOTH[0][1])], 422,
        "rh.aparc.stats is of the hemisphere lh by its header; rename it."),
    "hemispheres of two subjects": (2, [BOTH[0], surface("rh", subject="sub-02")], 422,
        "lh.aparc.stats is of subject sub-01 and rh.aparc.stats of sub-02; give the files of one."),
    "hemispheres of two heads": (2, [BOTH[0], surface("rh", size="1400000")], 422,
        "table thickness: lh.aparc.stats and rh.aparc.stats both have EstimatedTotalIntraCranialVol, with different values"),
    "two rows": (1, [("t.csv", b"id,score a,score b\n1,2,3\n2,3,4\n")], 422, "t.csv has the rows of 2 subjects; give that of"),
    "two rows without ids": (1, [("t.csv", b"score a,score b\n2,3\n3,4\n")], 422, "t.csv has no column of ids"),
    "a column twice": (1, [("t.csv", b"score a,score a,score b\n2,3,4\n")], 422, "t.csv: column score a appears twice."),
    "a region twice": (2, [surface("lh", regions=["insula", "insula", "precentral"])], 422,
        "lh.aparc.stats: region lh_insula_thickness is listed twice."),
    "text": (1, [("t.csv", b"score a,score b\nlow,<script>alert(1)</script>\n")], 422, "t.csv: subject"),
    "a label": (1, [("t.csv", b"id,score a,DX_GROUP\n1,2,3\n")], 422, "t.csv: column DX_GROUP reveals the diagnosis;"),
    "infinite": (2, [surface("lh", thickness=("inf", "2", "3"))], 422, "lh.aparc.stats: the value of lh_bankssts_thickness is"),
    "header only": (1, [("t.csv", b"score a,score b\n")], 422, "t.csv has a header and no row."),
    "empty": (1, [("t.csv", b"")], 422, "t.csv is empty."),
    "binary": (0, [("aseg.stats", bytes(range(256)) * 8)], 422, "aseg.stats is not a stats file of FreeSurfer: it has no"),
    "binary table": (1, [("t.csv", bytes(range(256)) * 8)], 422, "t.csv is not a text file."),
    "not UTF-8": (1, [("t.csv", b"score a,score b\n\xff,2\n")], 422, "t.csv cannot be read as a table ("),
    "another kind": (1, [("t.xlsx", b"PK")], 422, "t.xlsx cannot be read: a table ends in .stats, .csv, .tsv or .txt."),
    "no name": (1, [("", b"a")], 400, None),
    "too many cells": (1, [("t.csv", b"a," * 20_001)], 422, "t.csv has more than 20000 cells; give the row of one subject."),
    "too large": (1, [("t.csv", b"a" * (LARGEST_TABLE + 1))], 413, "A file of table own is larger than the limit of 1 MB."),
    "too many": (1, [(f"{i}.csv", b"a") for i in range(MOST_FILES + 1)], 400, "There are 5 files for table own;"),
    "far too many": (1, [(f"{i}.csv", b"a") for i in range(40)], 400, "The form cannot be read (Too many files."),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tables(case, fitted, cohort):
    field, files, status, sentence = HOSTILE[case]
    response = ask(fitted, cohort, [(f"table-{field}", one) for one in files])
    assert response.status_code == status, alert(response)
    assert sentence is None or alert(response).startswith(sentence)
    assert alert(response).endswith(".") and "<script>alert" not in response.text


def test_files_of_different_tables_are_of_one_subject(fitted, cohort):
    response = ask(fitted, cohort, [*(("table-2", one) for one in BOTH), ("table-0", aseg("sub-02"))])
    assert alert(response) == "aseg.stats is of subject sub-02 and lh.aparc.stats of sub-01; give the files of one."
    named = one_row(["id", *OTHERS], ["01", 1, 2])  # as matched in cohorts: sub-01 and 01
    assert ask(fitted, cohort, [("table-0", aseg()), ("table-1", named)]).status_code == 200


@settings(max_examples=40, deadline=None)
@given(
    content=st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)),
    name=st.sampled_from(["a.stats", "a.csv"]),
)
def test_any_bytes_are_a_row_or_a_sentence(fitted, content, name):
    tables = expected_tables(fitted)
    for one in tables:
        try:
            assert rows_of(tables, {one.name: [(name, content)]}, "x")[one.name].shape == (1, len(one.columns))
        except InputError as error:
            assert str(error).endswith(".")
