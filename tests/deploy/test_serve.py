"""The page for one subject: the same values as `predict`, a sentence for everything wrong, and nothing written anywhere.

Over ASGI, without a socket; tests/test_serve_browser.py has the real server and a real browser.
"""

import contextlib
import html
import os
import re
import sys
import threading

import anyio
import numpy as np
import pandas as pd
import pytest
from test_contract import small
from uploads import BEGIN, BOUNDARY, FIELDS, FILES, FORMS, good, npy, text

import m2lgdg.explain.gradients  # noqa: F401  (its bytecode is written before anything is watched)
from m2lgdg import Cohort, InputError, Model, make, make_cohort
from m2lgdg.explain.attribution import explain_subject

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
from m2lgdg.deploy.serve import app as web  # noqa: E402
from m2lgdg.deploy.serve import intake  # noqa: E402
from m2lgdg.deploy.serve.result import result_of  # noqa: E402
from m2lgdg.deploy.serve.upload import LARGEST, example_file, one_subject  # noqa: E402

HOST = "127.0.0.1:8765"
OPENED = []  # what was opened for writing while `watching`
WATCHING = threading.Event()


def _audit(event, arguments):
    if WATCHING.is_set() and event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        OPENED.append(arguments[0])


sys.addaudithook(_audit)


@pytest.fixture(scope="module")
def cohort(atlas_cohort):
    return atlas_cohort


@pytest.fixture(scope="module")
def folder(served_model):
    return served_model


@pytest.fixture(scope="module")
def fitted(folder):
    loaded = Model.load(folder)
    result_of(loaded, subject_of(loaded, "x.npy", npy(np.random.default_rng(0).normal(size=(60, 116))), {}, ""))  # warm caches
    return loaded


@pytest.fixture(autouse=True)
def nothing_is_written(request, fitted):
    """No test of this file opens any file for writing while a request is answered."""
    OPENED.clear()
    yield
    assert OPENED == []


def send(fitted, method="POST", path="/", *, patience=60.0, **request):
    """The response to one request of any kind."""

    async def sent():
        transport = httpx.ASGITransport(web.make_app(fitted, patience))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            WATCHING.set()
            try:
                return await client.request(method, path, **request)
            finally:
                WATCHING.clear()

    return anyio.run(sent)


def ask(fitted, content, data=None, name="scan.npy", headers=None):
    """The response to the page's own form."""
    return send(fitted, files={"series": (name, content)}, data={"explain": "1"} | (data or {}), headers=headers or {})


def subject_of(fitted, name, content, phenotypes, tr):
    """Cohort of one uploaded file, in the only atlas of the model."""
    (atlas,) = fitted.members
    return one_subject(fitted, {atlas: (name, content)}, phenotypes, tr)


def alert(response):
    found = re.search(r'role="alert"><p>(.*?)</p>', response.text, flags=re.DOTALL)
    return html.unescape(found[1]) if found else response.text.strip()


def words(response):
    return " ".join(html.unescape(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", response.text, flags=re.DOTALL)).split())


def bare(cohort):
    """The first subject, of whom nothing but the scan is known."""
    return Cohort(cohort.series[:1], ["a"], [""], [-1], cohort.rois, atlas="aal")


class TestAnswer:
    def test_values_are_those_of_predict(self, fitted, cohort):
        for i in (0, 7, 20):
            one = cohort.select([i])
            given = one.phenotypes.iloc[0]
            data = {
                f"p{k}": f"{given[name]:.17g}" for k, name in enumerate(fitted.facts_["inputs"]) if not np.isnan(given[name])
            }
            response = ask(fitted, content=npy(one.series[0]), data=data | {"tr": f"{one.tr[0]:.17g}"})
            assert response.status_code == 200, alert(response)
            proba = fitted.predict_proba(one)[0, 1]
            low, high = (end[0] for end in fitted.new_site_.interval([proba], 0.9))
            said = words(response)
            assert f"Prediction {proba:.2f} probability of being a patient, interval {low:.2f} to {high:.2f}" in said
            assert f"Decision: {'patient' if proba >= fitted.threshold else 'control'} ," in said
            for kind, score in fitted.ood_scores(one).items():
                assert f"{kind} {score[0]:.2f}" in said
            for line in [*fitted.compare(one), *fitted.flags(one)[0]]:
                assert line in said
            for roi in explain_subject(fitted, one).rois["roi"].head(10):
                assert roi in said
            assert said.count("Research use; not a diagnostic device.") == 2
            assert '<img alt="Glass brain' in response.text

    @pytest.mark.parametrize("name", ["scan.csv", "scan.tsv", "scan.txt", "scan.1D", "SCAN.CSV", "scan.NPY"])
    def test_every_format_gives_the_same_to_the_bit(self, fitted, cohort, name):
        series = cohort.series[5]
        separator = {"c": ",", "t": "\t"}.get(name.lower().split(".")[1][0], " ") if "txt" not in name else " "
        content = npy(series) if name.lower().endswith("npy") else text(series, separator)
        one = subject_of(fitted, name, content, {"age": "30"}, "2.5")
        np.testing.assert_array_equal(one.series[0], series)
        assert one.tr[0] == 2.5
        assert one.phenotypes["age"].tolist() == [30.0]
        assert one.phenotypes[["sex", "education"]].isna().all(axis=None)

    def test_codes_of_the_atlas_are_names(self, fitted, cohort):
        from m2lgdg.data.atlases import regions

        header = "\t".join(f"#{code}" for code in regions("aal")["code"]) + "\n"
        one = subject_of(fitted, "a.1D", header.encode() + text(cohort.series[0], "\t"), {}, "")
        assert one.rois == cohort.rois

    def test_missing_phenotypes_are_accepted_and_flagged(self, fitted, cohort):
        said = words(ask(fitted, content=npy(cohort.series[0])))
        assert "phenotypes missing: sex age education" in said
        assert f"Prediction {fitted.predict_proba(bare(cohort))[0, 1]:.2f} prob" in said

    def test_an_explanation_can_be_left_out(self, fitted, cohort, monkeypatch):
        monkeypatch.setattr("m2lgdg.deploy.serve.result.explain_subject", lambda *_: 1 / 0)
        response = send(fitted, files={"series": ("a.npy", npy(cohort.series[0]))}, data={"p1": "20"})
        assert response.status_code == 200
        assert "Most important ROIs Not requested." in words(response)
        assert " checked" not in response.text
        assert " checked" in send(fitted, "GET").text

    def test_a_network_is_explained_by_gradients(self, cohort):
        fitted = make("m2lgdg", **small("m2lgdg")).fit(cohort)
        response = ask(fitted, npy(cohort.series[0]))
        said = words(response)
        assert f"Prediction {fitted.predict_proba(bare(cohort))[0, 1]:.2f} prob" in said
        assert "Integrated gradients of the predicted class's logit" in said
        assert explain_subject(fitted, bare(cohort), steps=16).rois["roi"][0] in said
        assert '<img alt="Glass brain' in response.text

    def test_a_large_file_stays_in_memory(self, fitted):
        content = text(np.random.default_rng(1).normal(size=(1500, 116)))
        assert len(content) > 2**21
        assert ask(fitted, name="long.csv", content=content).status_code == 200

    def test_a_model_without_distribution_calibration_or_gradient_says_so(self, cohort):
        prior = make("prior").fit(cohort)
        response = ask(prior, content=npy(cohort.series[0]))
        said = words(response)
        assert "No interval: the model has no new-site calibration." in said
        assert "Not known: the model was saved without its source distribution." in said
        assert "Not explained: method prior cannot be explained: it is neither a network nor a linear method." in said
        assert "<img" not in response.text

    def test_an_atlas_without_places_gets_a_list(self):
        cohort = make_cohort("tiny", n_rois=12, seed=3)
        said = words(ask(make("fc-logistic").fit(cohort), content=npy(cohort.series[0])))
        assert "The centroids of this atlas are not known" in said
        assert cohort.rois[0] in said

    def test_the_contributions_of_a_linear_method_sum_to_its_decision(self, cohort):
        with_diagonal = ("tangent", "log_euclidean")
        for name in ("fc-logistic", "connectome-ensemble", "connectome-adaptive"):
            fitted = make(name, phenotypes=True).fit(cohort, source_distribution=True)
            means = {block: fitted._features(block, cohort).mean(axis=0, dtype=np.float64) for block in fitted.blocks}
            found = [explain_subject(fitted, cohort.select([i])) for i in (0, 1)]
            n = len(cohort.rois)
            seen = fitted.visible(cohort.select([0, 1]))
            by_hand = np.zeros(n)
            for block in fitted.blocks:
                values = fitted._features(block, seen)[0] - means[block]
                added = np.abs(fitted.state_["calibration"][0] * values * fitted.state_[f"{block}.weights"])
                if block == "amplitude":
                    by_hand += added
                    continue
                pairs = [(row, column) for row in range(n) for column in range(row + (block not in with_diagonal), n)]
                for k, pair in enumerate(pairs):
                    for roi in set(pair):
                        by_hand[roi] += added[k] / (n - 1)
            table = found[0].rois.set_index("roi")["score"].reindex(cohort.rois)
            np.testing.assert_allclose(table, by_hand, rtol=1e-9)
            if name == "fc-logistic":  # the difference of two subjects' contributions is that of their logits
                total = [one.edges["direction"].sum() + one.phenotypes["direction"].sum() for one in found]
                proba = fitted.predict_proba(seen)[:, 1]
                logits = np.log(proba / (1 - proba))
                assert total[1] - total[0] == pytest.approx(logits[1] - logits[0], rel=1e-6)


@pytest.mark.parametrize("case", FILES)
def test_hostile_files(case, fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, content, status, sentence = FILES[case]
    response = ask(fitted, name=name, content=content)
    assert response.status_code == status
    assert sentence is None or alert(response) == sentence
    assert "<script>alert" not in response.text
    assert list(tmp_path.iterdir()) == []  # no file, and nothing of Evil


@pytest.mark.parametrize("case", FIELDS)
def test_hostile_fields(case, fitted):
    data, sentence = FIELDS[case]
    response = ask(fitted, content=npy(good()), data=data)
    assert response.status_code == 422
    assert alert(response) == sentence
    assert "<script>alert" not in response.text
    assert "<img" not in response.text


@pytest.mark.parametrize("case", FORMS)
def test_hostile_forms(case, fitted):
    sent, status, sentence = FORMS[case]
    response = send(fitted, **sent)
    assert response.status_code == status
    assert sentence is None or alert(response) == sentence


def test_a_length_that_is_too_large_is_refused_unread(fitted):
    async def body():
        raise AssertionError("was read")
        yield b""

    for length in (str(LARGEST * 2), "9" * 400):
        response = send(fitted, content=body(), headers=BOUNDARY | {"content-length": length})
        assert response.status_code == 413
        assert alert(response) == "The file is larger than the limit of 20 MB."


def test_an_endless_body_is_left_early(fitted):
    given = []

    async def body():
        yield BEGIN
        while True:
            given.append(1)
            yield bytes(2**20)

    response = send(fitted, content=body(), headers=BOUNDARY)
    assert response.status_code == 413
    assert alert(response) == "The file is larger than the limit of 20 MB."
    assert len(given) == 21


def test_a_body_that_never_comes_is_given_up(fitted):
    async def body():
        yield BEGIN
        await anyio.sleep_forever()

    response = send(fitted, content=body(), headers=BOUNDARY, patience=0.05)
    assert response.status_code == 408
    assert alert(response) == "The upload took too long."


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:8765"}, 421),
        ({"host": "127.0.0.1.evil.example:8765"}, 421),
        ({"host": "192.168.0.7:8765"}, 421),
        ({"host": ""}, 421),
        ({"host": "127.0.0.1@evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": f"https://{HOST}"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": f"http://{HOST}"}, 403),
        ({"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}, 200),
        ({"host": "localhost:8765", "origin": "http://localhost:8765"}, 200),
        ({"host": "[::1]:8765", "origin": "http://[::1]:8765"}, 200),
        ({}, 200),
    ],
    ids=str,
)
def test_only_our_own_page_is_answered(fitted, headers, status, monkeypatch):
    asked = []
    real = web.result_of
    monkeypatch.setattr(web, "result_of", lambda *given, **options: asked.append(1) or real(*given, **options))
    response = ask(fitted, content=npy(good()), headers=headers)
    assert response.status_code == status
    assert len(asked) == (status == 200)
    if status == 421:
        assert response.text == "This page is served at 127.0.0.1 and localhost only.\n"
        assert send(fitted, "GET", headers=headers).status_code == 421
    if status == 403:
        assert response.text == "Forms of other pages are refused.\n"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 200), ("GET", "/../etc/passwd", 404), ("PUT", "/", 405)])
def test_every_response_is_sealed(fitted, method, path, status):
    response = send(fitted, method, path)
    assert response.status_code == status
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert "unsafe" not in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "set-cookie" not in response.headers
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", response.text)


def test_one_is_computed_at_a_time_and_few_may_wait(fitted, monkeypatch):
    hold, running, most, statuses = threading.Event(), [], [], []
    ready = result_of(fitted, subject_of(fitted, "a.npy", npy(good()), {}, ""))

    def slow(*_, **__):
        running.append(1)
        most.append(len(running))
        hold.wait(60)
        running.pop()
        return ready

    monkeypatch.setattr(web, "result_of", slow)

    async def all_of_them():
        transport = httpx.ASGITransport(web.make_app(fitted))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:

            async def one():
                response = await client.post("/", files={"series": ("a.npy", npy(good()))}, timeout=None)
                statuses.append((response.status_code, alert(response) if response.status_code != 200 else ""))
                assert response.headers.get("retry-after") == ("10" if response.status_code == 503 else None)
                hold.set()  # the first that is answered was refused: only then may the others go on

            async with anyio.create_task_group() as group:
                for _ in range(intake.AT_ONCE + 1):
                    group.start_soon(one)

    anyio.run(all_of_them)
    assert statuses[0] == (503, "The server is busy with other uploads; try again in 10 seconds.")
    assert [status for status, _ in statuses[1:]] == [200] * intake.AT_ONCE
    assert max(most) == 1


def test_a_form_that_is_idle_gives_way_if_memory_is_short_and_an_honest_one_is_told(fitted, monkeypatch):
    monkeypatch.setattr(intake, "MOST_BYTES", 2 * len(npy(good())))
    ended = {}

    async def all_of_them():
        transport = httpx.ASGITransport(web.make_app(fitted))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:

            async def half(name):
                async def body():
                    yield BEGIN + bytes(len(npy(good())))
                    await anyio.sleep(5 if name == "idle" else 0.5)
                    yield b"\r\n--b--\r\n"

                response = await client.post("/", content=body(), headers=BOUNDARY, timeout=None)
                ended[name] = response.status_code

            async with anyio.create_task_group() as group:
                group.start_soon(half, "slow")
                await anyio.sleep(0.1)
                answer = await client.post("/", files={"series": ("a.npy", npy(good()))}, timeout=None)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            monkeypatch.setattr(intake, "IDLE", 0.05)
            async with anyio.create_task_group() as group:
                group.start_soon(half, "idle")
                await anyio.sleep(0.2)
                answer = await client.post("/", files={"series": ("a.npy", npy(good()))}, timeout=None)
                assert answer.status_code == 200

    anyio.run(all_of_them)
    assert ended == {"slow": 422, "idle": 408}


def test_a_parcellated_cifti_is_read_as_the_model_was_trained(fitted, cohort):
    import nibabel

    axes = (
        nibabel.cifti2.SeriesAxis(0, 2, len(cohort.series[5])),
        nibabel.cifti2.ParcelsAxis.from_brain_models(
            [(name, nibabel.cifti2.BrainModelAxis.from_mask(np.ones(1), "CortexLeft")) for name in cohort.rois]
        ),
    )
    content = nibabel.Cifti2Image(np.array(cohort.series[5]), nibabel.Cifti2Header.from_axes(axes)).to_bytes()
    for name in ("scan.ptseries.nii", "SCAN.PTSERIES.NII"):
        one = subject_of(fitted, name, content, {}, "")
        np.testing.assert_array_equal(one.series[0], cohort.series[5])
        assert one.rois == cohort.rois
    assert ask(fitted, content, name="scan.ptseries.nii").status_code == 200
    for i in range(0, len(content), len(content) // 40):  # never anything but a sentence
        for damaged in (content[:i], content[:i] + b"\xff\xff" + content[i + 2 :]):
            with contextlib.suppress(InputError):
                subject_of(fitted, "scan.ptseries.nii", damaged, {}, "")


def test_an_error_of_ours_tells_its_kind_and_no_content(fitted, monkeypatch, capfd):
    def broken(*_, **__):
        raise ZeroDivisionError("secret of the subject")

    monkeypatch.setattr(web, "result_of", broken)
    response = ask(fitted, content=npy(good()))
    assert response.status_code == 500
    assert alert(response) == "The prediction failed (ZeroDivisionError)."
    assert "secret" not in response.text + "".join(capfd.readouterr())


def test_values_that_overflow_end_in_a_sentence_or_a_probability(fitted):
    for scale in (1e-38, 5e37):
        response = ask(fitted, content=npy((good() * scale).astype(np.float32)))
        assert response.status_code in (200, 422), alert(response)


def test_names_in_a_hostile_model_stay_text(cohort):
    name = "<script>alert(1)</script>"
    table = cohort.phenotypes.assign(**{name: np.arange(len(cohort)) % 7.0})
    hostile = Cohort(cohort.series, cohort.subjects, cohort.sites, cohort.labels, cohort.rois, table, (name,), atlas="<b>atlas")
    fitted = make("phenotype-logistic").fit(hostile)
    response = ask(fitted, content=npy(cohort.series[0]), data={"p0": "3"})
    assert response.status_code == 200
    assert name in words(response)
    assert "<b>atlas" not in response.text
    assert "<script>alert" not in response.text


def test_other_hosts_and_a_missing_extra_are_one_sentence(folder, monkeypatch, typed):
    def run(*arguments):
        code, _, err = typed("serve", *arguments)
        return code, err.strip()

    needs = "can be reached from other machines and needs a token of 16 letters or more: set M2LGDG_TOKEN, or give --token;"
    monkeypatch.delenv("M2LGDG_TOKEN", raising=False)
    for host in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        code, said = run(folder, "--host", host)
        assert code == 2 and said.startswith(f"m2lgdg: --host {host} {needs}")
    for token in ("short", "with a space in it", "tökentökentökentöken"):
        code, said = run(folder, "--host", "0.0.0.0", "--token", token)
        assert code == 2 and said.startswith("m2lgdg: --token needs 16 letters or more") and token not in said
    monkeypatch.setenv("M2LGDG_TOKEN", "x" * 15)
    assert run(folder)[1].startswith("m2lgdg: --token needs 16 letters or more")
    monkeypatch.delenv("M2LGDG_TOKEN")
    code, said = run(folder, "--host", "nowhere.invalid", "--token", "x" * 16)
    assert (code, said.partition(" is not an")[0]) == (2, "m2lgdg: --host nowhere.invalid")
    port = "--port 70000 on 127.0.0.1 cannot be used (a port is 0 to 65535); choose another."
    assert run(folder, "--port", 70000) == (2, f"m2lgdg: {port}")
    assert run(folder / "none", "--port", 0)[1].endswith("is not a model folder (no method.json).")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(folder) == (2, 'm2lgdg: the page needs uvicorn; install it with: pip install "m2lgdg[serve]".')


def test_the_subject_has_no_site_label_or_other_column(fitted):
    one = subject_of(fitted, "a.npy", npy(good()), {"age": "9", "label": "1"}, "")
    assert one.labels.tolist() == [-1]
    assert one.sites.tolist() == [""]
    pd.testing.assert_frame_equal(
        one.phenotypes,
        pd.DataFrame({"sex": [np.nan], "age": [9.0], "education": [np.nan]}, index=pd.Index(["a.npy"], dtype=object)),
    )


def test_a_model_of_two_atlases_takes_a_file_for_each():
    from miniature import with_two_atlases

    cohort = with_two_atlases(make_cohort("tiny", seed=1))
    model = make("connectome-adaptive").fit(cohort, source_distribution=True)
    one = cohort.select([0])
    scans = {"series": one.series[0], "series-1": one.parcellations["mixed"].series[0]}

    def ask_for(**fields):
        return send(model, files={field: (f"{field}.npy", npy(scan)) for field, scan in fields.items()})

    both = ask_for(**scans)
    assert both.status_code == 200
    whole = model.predict_proba(one)[0, 1]
    assert f"<strong>{whole:.2f}</strong>" in both.text and "atlas missing" not in both.text
    second = ask_for(**{"series-1": scans["series-1"]})
    alone = model.predict_proba(one.parcellation("mixed"))[0, 1]
    assert f"<strong>{alone:.2f}</strong>" in second.text and "atlas missing: first-one" in second.text
    assert ask_for(series=scans["series-1"]).status_code == 422
    assert ask_for(**scans | {"series-2": scans["series"]}).status_code == 400


@pytest.fixture(scope="module")
def of_connectomes(cohort):
    return make("fc-logistic").fit(cohort.to_connectomes(), source_distribution=True, new_site_calibration=True)


def test_a_synthetic_scan_can_be_tried(fitted, of_connectomes):
    """By its button, whatever file is chosen; a model of connectomes has no such button."""
    page = send(fitted, "GET")
    assert page.text.count('name="example"') == 1 and "synthetic scan:" not in page.text
    series = np.loadtxt(example_file(116)[1].decode().splitlines(), delimiter=",")
    assert series.shape == (200, 116)
    whole = fitted.predict_proba(Cohort([series], ["a"], [""], [-1], fitted.facts_["rois"], atlas="aal"))[0, 1]
    answer = send(fitted, files={"series": ("scan.npy", b"broken")}, data={"example": "1"})
    assert answer.status_code == 200 and f"<strong>{whole:.2f}</strong>" in answer.text and "nobody" in answer.text
    assert 'name="example"' not in send(of_connectomes, "GET").text
    assert send(of_connectomes, files={"connectome": ("a.npy", b"1")}, data={"example": "1"}).status_code == 400


def pconn(matrix, rois):
    import nibabel

    models = [(name, nibabel.cifti2.BrainModelAxis.from_mask(np.ones(1), "CortexLeft")) for name in rois]
    axis = nibabel.cifti2.ParcelsAxis.from_brain_models(models)
    return nibabel.Cifti2Image(matrix.astype(np.float32), nibabel.Cifti2Header.from_axes((axis, axis))).to_bytes()


def named(matrix, rois, separator):
    return pd.DataFrame(matrix, index=list(rois), columns=list(rois)).to_csv(sep=separator).encode()


def test_a_connectome_is_answered_in_every_format(of_connectomes, cohort):
    """The same probability as for the series; correlations and Fisher z are the same, a file that names its ROIs is matched."""
    expected = make("fc-logistic").fit(cohort, source_distribution=True, new_site_calibration=True)
    one = cohort.select([5])
    z = np.array(one.to_connectomes().connectomes[0], dtype=np.float64)
    r = np.tanh(z) + np.eye(len(z))
    half, infinite = np.triu(r), z + np.diag(np.full(len(z), np.inf))
    given = {
        "z.npy": npy(z),
        "r.npy": npy(r),
        "R.NPY": npy(r.astype(np.float32)),
        "half.npy": npy(half),
        "infinite.npy": npy(infinite),
        "r.csv": text(r),
        "r.txt": text(r, " "),
        "r.1D": text(r, " "),
        "named.csv": named(r, cohort.rois, ","),
        "named.tsv": named(r, cohort.rois, "\t"),
        "r.pconn.nii": pconn(r, cohort.rois),
    }
    proba = expected.predict_proba(one)[0, 1]
    for name, content in given.items():
        files = {of_connectomes.facts_["atlas"]: (name, content)}
        subject = one_subject(of_connectomes, files, {}, "")
        np.testing.assert_allclose(of_connectomes.predict_proba(subject)[0, 1], proba, atol=1e-5, err_msg=name)
    shown = send(of_connectomes, files={"connectome": ("r.npy", npy(r))}, data={"explain": "1"})
    assert shown.status_code == 200 and f"<strong>{proba:.2f}</strong>" in shown.text
    assert "File: r.npy, connectome, used as fisher-z." in shown.text and "volumes" not in shown.text.split("<main")[1]
    score = expected.ood_scores(one)["connectivity"][0]
    assert f"{score:.2f}" in shown.text and "short scan" not in shown.text


def test_the_form_asks_for_a_connectome(of_connectomes, fitted):
    page = send(of_connectomes, "GET").text
    assert 'name="connectome"' in page and ".pconn.nii" in page and ".ptseries.nii" not in page
    assert "connectomes (fisher-z) of 116 ROIs" in page and "Drop a file with a connectome here" in page
    assert 'name="tr"' not in page and "one row and one column per ROI" in page and "it is taken as fisher-z." in page
    page = send(fitted, "GET").text
    assert 'name="series"' in page and 'name="tr"' in page and "connectome" not in page.split("</style>")[1]


def test_empty_rois_of_a_connectome_are_flagged(of_connectomes, cohort):
    z = np.array(cohort.to_connectomes().connectomes[5])
    z[7] = z[:, 7] = 0.0
    shown = send(of_connectomes, files={"connectome": ("z.npy", npy(z))})
    assert "empty rois: 1" in shown.text and "without any connection" in shown.text
    z[7] = z[:, 7] = np.nan  # as pipelines leave them
    assert "empty rois: 1" in send(of_connectomes, files={"connectome": ("z.npy", npy(z))}).text


TAKES = "the model was trained on connectomes (fisher-z) of 116 ROIs"
MATRICES = {  # name -> file name, change of the Fisher z, sentence
    "a series": ("s.npy", lambda z: good(), f"s.npy has shape (60, 116), and {TAKES}; give the matrix of the subject, not a"),
    "a series of as many volumes": ("s.npy", lambda z: good()[:1] + np.arange(116)[:, None] * z, "s.npy: the matrix is not"),
    "a stack": ("s.npy", lambda z: z[None], f"s.npy has shape (1, 116, 116), and {TAKES}"),
    "a triangle": ("s.npy", lambda z: z[np.triu_indices(116, 1)], f"s.npy has shape (6670,), and {TAKES}"),
    "other rois": ("s.npy", lambda z: z[:90, :90], f"s.npy has 90 ROIs, and {TAKES}."),
    "not symmetric": ("s.npy", lambda z: z + np.eye(116)[::-1] * np.arange(116), "s.npy: the matrix is not symmetric: between"),
    "NaN": ("s.npy", lambda z: np.where(np.add.outer(np.arange(116), np.arange(116)) == 1, np.nan, z), "s.npy: NaN between"),
    "covariances": ("s.npy", lambda z: z + np.diag(np.arange(1, 117)), "s.npy: the matrix looks like covariance, and the"),
    "zero": ("s.npy", lambda z: 0 * z, "s.npy: the connectome is zero everywhere."),
    "words": ("s.npy", lambda z: z.astype("U8"), "s.npy contains <U8 values, not real numbers."),
    "infinite": ("s.npy", lambda z: np.where(z == z.max(), np.inf, z), "s.npy: an infinite value between ROI"),
}  # fmt: skip


@pytest.mark.parametrize("case", MATRICES)
def test_hostile_matrices(case, of_connectomes, cohort):
    name, change, sentence = MATRICES[case]
    z = np.array(cohort.to_connectomes().connectomes[5], dtype=np.float64)
    response = send(of_connectomes, files={"connectome": (name, npy(change(z)))})
    assert response.status_code == 422 and alert(response).startswith(sentence) and alert(response).endswith(".")


def test_a_scan_of_the_other_kind_is_one_sentence(of_connectomes, fitted, cohort):
    z = np.array(cohort.to_connectomes().connectomes[5])
    refused = alert(ask(fitted, npy(z)))
    assert refused == "scan.npy is a connectome, and the model was trained on time series; give the series of the ROIs."
    refused = alert(ask(fitted, b"x", name="scan.pconn.nii"))
    assert refused == "scan.pconn.nii cannot be read: it holds a connectome, and the model takes a series."
    refused = alert(send(of_connectomes, files={"connectome": ("scan.ptseries.nii", b"x")}))
    assert refused == "scan.ptseries.nii cannot be read: it holds a series, and the model takes a connectome."
    refused = alert(send(of_connectomes, files={"series": ("scan.npy", npy(z))}))
    assert refused == "The form has a part 'series'; this model takes 'connectome'."
    refused = alert(send(fitted, files={"connectome": ("scan.npy", npy(z))}))
    assert refused == "The form has a part 'connectome'; this model takes 'series'."
    swapped = named(np.tanh(z), [*cohort.rois[1::-1], *cohort.rois[2:]], ",")
    refused = alert(send(of_connectomes, files={"connectome": ("scan.csv", swapped)}))
    assert refused == f"ROI 1 is {cohort.rois[0]} in the model but {cohort.rois[1]} in the cohort: another atlas or order."
    refused = alert(send(of_connectomes, files={"connectome": ("a", b"")}))
    assert refused == "a cannot be read: a connectome file ends in .1D, .txt, .csv, .tsv, .npy or .pconn.nii."
    assert "save the connectome as .npy" in alert(send(of_connectomes, files={"connectome": ("a.mat", b"x")}))
