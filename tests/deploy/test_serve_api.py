"""`POST /api/predict`: the numbers of `predict`, a status and a sentence for everything wrong, a token, and flat memory."""

import base64
import gc
import json
import tracemalloc

import anyio
import numpy as np
import pytest
from uploads import npy, text

from m2lgdg import Model, make, make_cohort
from m2lgdg.deploy.predict import predict

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
from m2lgdg.deploy.serve import app as web  # noqa: E402

HOST, TOKEN = "127.0.0.1:8765", "tok-0123456789abcdef"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PATH = "/api/predict"


@pytest.fixture(scope="module")
def cohort(atlas_cohort):
    return atlas_cohort


@pytest.fixture(scope="module")
def fitted(served_model):
    return Model.load(served_model)


@pytest.fixture(scope="module")
def two_atlases():
    from miniature import with_two_atlases

    cohort = with_two_atlases(make_cohort("tiny", seed=1))
    return cohort, make("connectome-adaptive").fit(cohort)


def client_of(fitted, token=None, public=False):
    transport = httpx.ASGITransport(web.make_app(fitted, token=token, public=public))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}")


def send(fitted, method="POST", path=PATH, *, token=None, public=False, **request):
    async def sent():
        async with client_of(fitted, token, public) as client:
            return await client.request(method, path, **request)

    return anyio.run(sent)


def known(one):
    """Phenotypes of one subject as JSON has them."""
    row = one.phenotypes.iloc[0]
    return {name: None if np.isnan(row[name]) else float(row[name]) for name in one.inputs}


def test_the_answer_is_that_of_predict(fitted, cohort):
    for i in (0, 7):
        one = cohort.select([i])
        row = predict(fitted, one, 0.9).table.iloc[0]
        given = {"phenotypes": known(one), "tr": float(one.tr[0])}
        as_json = send(fitted, json={"series": one.series[0].tolist(), **given})
        as_file = send(
            fitted,
            files={"series": ("scan.csv", text(one.series[0]))},
            data={"phenotypes": json.dumps(given["phenotypes"]), "tr": repr(given["tr"]), "explain": "true"},
        )
        for response in (as_json, as_file):
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["proba"] == pytest.approx(row["proba"], abs=1e-12)
            assert answer["decision"] == row["decision"] and answer["threshold"] == fitted.threshold
            assert [answer["low"], answer["high"]] == pytest.approx([row["low"], row["high"]], abs=1e-9)
            assert (answer["set"], answer["coverage"]) == (row["set"], 0.9)
            assert "; ".join(answer["flags"]) == row["flags"]
            assert {f"{name}_ood": round(score, 3) for name, score in answer["ood"].items()} == {
                name: row[name] for name in row.index if name.endswith("_ood")
            }
            assert answer["use"] == "Research use; not a diagnostic device."
        assert as_json.json()["explanation"] is None and as_json.json()["subject"] == "series"
        assert len(as_file.json()["explanation"]["rois"]) == 10 and as_file.json()["subject"] == "scan.csv"


def test_names_of_rois_and_of_the_atlas(fitted, cohort):
    rows, names = cohort.series[0].tolist(), list(cohort.rois)
    plain = send(fitted, json={"series": rows}).json()["proba"]
    assert send(fitted, json={"series": {"aal": rows}, "rois": {"aal": names}}).json()["proba"] == plain
    assert send(fitted, json={"series": rows, "rois": names}).json()["proba"] == plain
    swapped = [names[1], names[0], *names[2:]]
    refused = send(fitted, json={"series": rows, "rois": swapped})
    assert refused.status_code == 422
    assert refused.json() == {
        "error": f"ROI 1 is {names[0]} in the model but {names[1]} in the cohort: another atlas or order."
    }


def test_each_atlas_of_a_model(two_atlases):
    cohort, model = two_atlases
    one = cohort.select([0])
    first, second = model.members
    rows = {first: one.series[0].tolist(), second: one.parcellations[second].series[0].tolist()}
    assert send(model, json={"series": rows}).json()["proba"] == pytest.approx(model.predict_proba(one)[0, 1], abs=1e-12)
    files = {f"series.{atlas}": ("a.npy", npy(np.array(given, dtype=np.float32))) for atlas, given in rows.items()}
    assert send(model, files=files).json()["proba"] == pytest.approx(model.predict_proba(one)[0, 1], abs=1e-12)
    alone = send(model, json={"series": {second: rows[second]}}).json()
    assert alone["proba"] == pytest.approx(model.predict_proba(one.parcellation(second))[0, 1], abs=1e-12)
    assert f"atlas missing: {first}" in alone["flags"]
    unnamed = send(model, json={"series": rows[first]})
    said = f"the model has several atlases: name that of each series ({first}, {second})."
    assert (unnamed.status_code, unnamed.json()["error"]) == (422, said)
    assert set(described(model)["Upload"]["properties"]) >= {f"series.{atlas}" for atlas in model.members}


ROWS = [[float(i * k % 7) for k in range(116)] for i in range(1, 31)]
WRONG = {  # name -> JSON, sentence
    "no scan": ({}, "the request has no scan; this model takes series."),
    "a list": ([1], "The request must be an object with names and values."),
    "another kind": ({"connectome": ROWS}, "the request has a connectome, and the model takes a series."),
    "wrong atlas": ({"series": {"ho": ROWS}}, "the model was trained on atlas aal; the request has atlas ho."),
    "wrong shape": (
        {"series": [row[:90] for row in ROWS]},
        "series has 90 columns, the model was trained on 116 ROIs (aal).",
    ),
    "one row": ({"series": ROWS[0]}, "series must be a list of rows, and each row a list of numbers."),
    "ragged": ({"series": [*ROWS, [1.0]]}, "series, row 31: 1 numbers, but earlier rows have 116."),
    "text": ({"series": [["1"] * 116]}, "series, row 1 has a value that is not a number."),
    "truth": ({"series": [[True] * 116]}, "series, row 1 has a value that is not a number."),
    "null": ({"series": [[None, *row[1:]] for row in ROWS]}, "series: NaN at volume 1 of ROI Precentral_L (30 such values)."),
    "huge": ({"series": [[10**400, *row[1:]] for row in ROWS]}, "series, row 1 has a number that is too large."),
    "empty rows": ({"series": [[]]}, "series has rows of 0 numbers; there must be some, and at most 5000000 in all rows."),
    "short": ({"series": ROWS[:12]}, "the scan of subject series has 12 volumes; a prediction needs at least 20."),
    "phenotype": (
        {"series": ROWS, "phenotypes": {"iq": 3}},
        "phenotype 'iq' is not one of the model, which takes sex, age, education.",
    ),
    "phenotype as text": (
        {"series": ROWS, "phenotypes": {"age": "old"}},
        "phenotype age must be a number, or null if it is not known.",
    ),
    "age": (
        {"series": ROWS, "phenotypes": {"age": -3}},
        "Age: -3 is not in the range 0.1 to 120 years; leave the field empty if the value is not known.",
    ),
    "sex": ({"series": ROWS, "phenotypes": {"sex": 3}}, "Sex: 3 is not 1 (male) or 2 (female)."),
    "phenotypes": ({"series": ROWS, "phenotypes": [1]}, "phenotypes must be an object with names and values."),
    "table": ({"series": ROWS, "tables": {"t": {}}}, "table 't' is not one of the model, which takes no tables."),
    "field": ({"series": ROWS, "explian": True}, None),
    "explain": ({"series": ROWS, "explain": 1}, "explain must be true or false."),
    "names": ({"series": ROWS, "rois": "V1"}, "rois must be a list of names, one for each column."),
    "few names": ({"series": ROWS, "rois": ["a"]}, "series: the header names 1 ROIs but the lines have 116 columns."),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(case, fitted):
    given, sentence = WRONG[case]
    response = send(fitted, json=given)
    assert response.status_code == 422
    assert set(response.json()) == {"error"}
    assert sentence is None or response.json()["error"] == sentence
    assert response.json()["error"].endswith((".", "?"))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "The request is not valid JSON at line 1, column 1."),
        (b'{"series": [[1, 2]', "The request is not valid JSON at line 1, column 19."),
        (b'{"series": [[NaN]]}', "The request has NaN, which is not a number of JSON; write null for a missing value."),
        (b'{"series": 1, "series": 2}', "The request has 'series' twice."),
        (b"[" * 100_000, "The request is not valid JSON."),
        (b"\xff\xfe{", "The request is not valid JSON."),
        (b'{"series": {"\\ud800": 1}}', r"The request has the name '\ud800', which cannot be printed."),
        (b'{"series": [[1]], "rois": ["\\ud800"]}', r"rois has the name '\ud800', which cannot be printed."),
        (b'{"series": [[%s]]}' % (b"9" * 5000), "The request is not valid JSON."),
    ],
    ids=["empty", "cut", "nan", "twice", "deep", "bytes", "half of a pair", "half of a pair in a list", "digits"],
)
def test_hostile_json(body, sentence, fitted):
    response = send(fitted, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()) == (422, {"error": sentence})


def test_hostile_forms_and_paths(fitted):
    good = {"series": ("a.npy", npy(np.array(ROWS, dtype=np.float32)))}

    def told(status, **request):
        response = send(fitted, **request)
        assert response.status_code == status
        return response.json()["error"]

    assert told(422, files={"p1": (None, "3")}).startswith("'p1' is not a field of a request")
    assert told(422, files={"x": ("a.npy", b"1")}) == "the form has an unexpected file 'x'; this model takes series."
    assert told(422, files=good, data={"phenotypes": "{"}) == "phenotypes is not valid JSON at line 1, column 2."
    assert told(422, files=good, data={"phenotypes": '{"iq": 1}'}).startswith("phenotype 'iq' is not one of the model")
    assert told(422, files=good, data={"tr": "2000"}).startswith("TR: 2000 is not in the range")
    assert told(422, files={"series.ho": good["series"]}).endswith("trained on atlas aal; the request has atlas ho.")
    assert told(422, files={"series": ("a.mat", b"x")}).startswith("a.mat cannot be read")
    assert told(415, content=b"x", headers={"content-type": "text/csv"}).startswith("Send the subject as application/json or")
    assert told(413, content=b"x", headers={"content-type": "application/json", "content-length": "9" * 12}).startswith("The f")
    assert told(404, path="/api/nothing") == "There is no /api/nothing here."
    assert told(405, method="GET") == "GET is not allowed here."
    assert told(403, files=good, headers={"origin": "http://evil.example"}) == "Forms of other pages are refused."
    assert told(421, files=good, headers={"host": "evil.example"}).startswith("This page is served at 127.0.0.1")


def test_an_error_of_ours_tells_its_kind_and_no_content(fitted, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("secret of the subject")

    monkeypatch.setattr("m2lgdg.deploy.serve.api.result_of", broken)
    response = send(fitted, json={"series": ROWS})
    assert (response.status_code, response.json()) == (500, {"error": "The prediction failed (ZeroDivisionError)."})


def basic(password, user="me"):
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"authorization": TOKEN}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic !!!"}, 401),
        ({"authorization": b"Bearer t\xf6ken"}, 401),
        (basic("wrong"), 401),
        (basic(TOKEN), 422),
        (BEARER, 422),
        ({"authorization": f"bearer {TOKEN}"}, 422),
        (BEARER | {"origin": "http://evil.example"}, 403),
        (BEARER | {"host": "hospital.example", "origin": "https://hospital.example"}, 422),
    ],
    ids=str,
)
def test_with_a_token_nothing_is_answered_without_it(fitted, headers, status):
    async def body():
        if status == 401:
            raise AssertionError("was read")
        yield b"{}"

    sent = headers | {"content-type": "application/json", "content-length": "2"}
    response = send(fitted, token=TOKEN, public=True, content=body(), headers=sent)
    assert response.status_code == status
    assert set(response.json()) == {"error"} and TOKEN not in response.text
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/openapi.json", "/api/none"):
            assert send(fitted, "GET", path, token=TOKEN, public=True, headers=headers).status_code == 401
        page = send(fitted, "GET", "/", token=TOKEN, public=True, headers=headers)
        assert page.headers["www-authenticate"].startswith("Basic ") and fitted.name not in page.text
        assert send(fitted, "GET", "/health", token=TOKEN, public=True, headers=headers).json() == {"status": "ok"}


def test_a_token_on_loopback_leaves_the_check_of_host_names(fitted):
    assert send(fitted, "GET", "/", token=TOKEN, headers=BEARER).status_code == 200
    assert send(fitted, "GET", "/", token=TOKEN, headers=BEARER | {"host": "evil.example"}).status_code == 421
    with pytest.raises(ValueError, match="needs a token"):
        web.make_app(fitted, public=True)


def described(fitted):
    document = send(fitted, "GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    for reference in json.dumps(document).split('"$ref": "')[1:]:
        assert reference.partition('"')[0].removeprefix("#/components/schemas/") in schemas
    return schemas


def conforms(value, schema):
    """Whether a value has the form that a schema describes: those parts of JSON schema that the description uses."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if value is None:
        return "null" in wanted
    if not isinstance(value, kinds[wanted[0]]) or (isinstance(value, bool) and wanted[0] != "boolean"):
        return False
    if wanted[0] == "array":
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9) and all(
            conforms(one, schema["items"]) for one in value
        )
    if wanted[0] == "object":
        named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", [])) <= set(value) and all(
            conforms(one, named[name]) if name in named else other and (other is True or conforms(one, other))
            for name, one in value.items()
        )
    return schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99) if wanted[0] == "number" else True


def test_the_description_agrees_with_what_is_answered_and_refused(fitted, cohort):
    schemas = described(fitted)
    assert list(schemas["Subject"]["properties"]["phenotypes"]["properties"]) == fitted.facts_["inputs"]
    whole = {"series": cohort.series[0].tolist(), "phenotypes": {"sex": 1, "age": 20.5, "education": None}, "tr": 2.0}
    good = [whole, whole | {"explain": True}, {"series": {"aal": whole["series"]}, "rois": list(cohort.rois)}]
    for given in good:
        assert conforms(given, schemas["Subject"])
        response = send(fitted, json=given)
        assert response.status_code == 200 and conforms(response.json(), schemas["Prediction"])
        assert set(response.json()) == set(schemas["Prediction"]["properties"])
    for name, (given, _) in WRONG.items():
        if name not in ("few names", "huge"):  # which a schema cannot say, or which is a number
            assert not conforms(given, schemas["Subject"]), name
    refused = send(fitted, json={})
    assert conforms(refused.json(), schemas["Error"])


def test_a_connectome_is_taken_as_json(cohort):
    model = make("fc-logistic").fit(cohort.to_connectomes())
    z = np.array(cohort.to_connectomes().connectomes[3], dtype=np.float64)
    answer = send(model, json={"connectome": z.tolist()}).json()
    expected = model.predict_proba(cohort.to_connectomes().select([3]))[0, 1]
    assert answer["proba"] == pytest.approx(expected, abs=1e-6)
    refused = send(model, json={"series": ROWS})
    assert (refused.status_code, refused.json()["error"]) == (
        422,
        "the request has a series, and the model takes a connectome.",
    )
    asymmetric = z.copy()
    asymmetric[0, 1] += 1
    assert send(model, json={"connectome": asymmetric.tolist()}).status_code == 422


@pytest.mark.long
def test_300_requests_leave_no_memory_behind(fitted, cohort):
    """In bytes: what Python holds after 300 requests of many lengths, good and bad, is what it held after the first 60."""
    series = cohort.series[0]

    async def ask_for(client, count, start):
        for i in range(start, start + count):
            rows = series[: 25 + i % 30].round(2)
            if i % 3 == 0:
                files = {"series": (f"{i}.npy", npy(rows))}
                response = await client.post(PATH, files=files, data={"tr": "2"}, headers=BEARER)
            elif i % 3 == 1:
                given = {"series": rows[:, : 116 - (i % 2)].tolist(), "phenotypes": {"age": 20 + i % 9}}
                response = await client.post(PATH, json=given, headers=BEARER)
            else:
                response = await client.post(PATH, content=b"[" * i, headers={"content-type": "application/json"})
            assert response.status_code == (200 if i % 3 == 0 or i % 6 == 4 else 422 if i % 3 == 1 else 401), response.text

    async def all_of_them():
        async with client_of(fitted, TOKEN, True) as client:
            await ask_for(client, 60, 0)
            gc.collect()
            tracemalloc.start()
            try:
                await ask_for(client, 60, 60)
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                await ask_for(client, 180, 120)
                gc.collect()
                return tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()

    assert anyio.run(all_of_them) < 64 * 1024
