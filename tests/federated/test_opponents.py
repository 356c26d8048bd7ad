"""Opponents of a federated study, played with the real code: what each line of the table in docs/federated.md says."""

import json
import multiprocessing
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hospitals import SIZES, agreed, answer_all, by_site, changed, forged, request_of, study_of
from safetensors.numpy import load, load_file

from m2lgdg.federated import exchange, keys, messages, sums
from m2lgdg.federated.coordinator import coordinate, total
from m2lgdg.federated.plan import Ask, Plan
from m2lgdg.federated.site import Site, prepared
from m2lgdg.storage import InputError, read_tensors

PAGE = Path(__file__).parents[2] / "docs" / "federated.md"


@pytest.fixture
def first(begun, tmp_path):
    """The study at its first request, which no site has answered."""
    root = Path(shutil.copytree(begun, tmp_path / "first"))
    for folder in ("study/answers", "study/totals", *(f"{site}/received" for site in SIZES)):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    for path in [*root.glob("*/outbox/answer-*"), *root.glob("study/requests/request-01-00[234]*")]:
        path.unlink()
    return root


def plain_sums(root, site, number=1, asks=None):
    """Fixed-point sums of a site for a request, before its masks, and the plan."""
    sent = [messages.read_request(request_of(root, i), exchange.open_study(root / site), "") for i in range(1, number + 1)]
    plan = Plan(exchange.open_study(root / site), sent[0].members)
    own = Site(plan, site, read_tensors(root / site / exchange.FEATURES, exchange.SUBJECTS)[1])
    for one in sent:
        own.known |= one.request.values
    request = replace(sent[-1].request, asks=asks) if asks else sent[-1].request
    return own.answer(request), plan


def refused(root, content, message, site="north", **given):
    before = sorted((root / site).rglob("*"))
    with pytest.raises(InputError, match=message):
        exchange.answer(root / site, content, "the request", **given)
    assert sorted((root / site).rglob("*")) == before  # nothing is sent and nothing remembered


# A curious coordinator


def ages_below(years):
    """Asks for the number of subjects below some ages, in the places of the search for the median."""
    cuts = np.resize(sums.ordered(np.asarray(years, dtype=np.float64)), (2, 31)).view(np.int64)
    return Ask("search", "age", {"cuts": cuts})


def age_request(root, years):
    """The first request of the study, signed by the coordinator, with ages of its own choice."""
    content = request_of(root, 1)
    asks = json.loads(messages.read_message(content, messages.REQUEST, "")[0]["asks"])
    return forged(root, content, arrays={f"ask {asks.index(['search', 'age'])} cuts": ages_below(years).arguments["cuts"]})


def test_ages_of_a_site_cannot_be_read(first):
    """The coordinator asks one site for the ages of its subjects, and the others for nothing: no site answers either."""
    fingerprint = agreed(first)
    for site, years in (("north", np.arange(10.0, 41.0)), ("south", np.zeros(31))):
        refused(
            first, age_request(first, years), "cuts is not what the totals of the sites lead to", site, fingerprint=fingerprint
        )


def test_masks_cancel_only_if_all_sites_are_asked_the_same(first, monkeypatch):
    """The same, with sites that answer any question: what the coordinator adds up is noise."""
    monkeypatch.setattr(exchange, "adopt", lambda own, sent, where: None)
    fingerprint, curious, neutral = agreed(first), age_request(first, np.arange(10.0, 41.0)), age_request(first, np.zeros(31))
    plan = exchange.standing(first / "study").plan
    form = plan.form(ages_below([0.0]))

    def added(question):
        copy = shutil.copytree(first, first.parent / f"copy{len(list(first.parent.iterdir()))}")
        answers = {
            site: exchange.answer(copy / site, question[site], "", fingerprint=fingerprint).read_bytes() for site in SIZES
        }
        return sums.add((load(content)["search.age"] for content in answers.values()), form)

    same = added(dict.fromkeys(SIZES, curious))
    assert (same >= 0).all() and (same <= sum(SIZES.values())).all()  # counts over all sites
    different = added(dict.fromkeys(SIZES, neutral) | {"north": curious})
    assert (np.abs(different[:-1].astype(float)) > 2.0**40).mean() > 0.9  # and not the counts of north


def test_an_answer_looks_random_and_the_total_is_exact(root):
    """The coordinator holds all messages: it can read the total of a sum and nothing of one site."""
    answer_all(root)
    answers = {site: load_file(root / "study" / "answers" / exchange.answer_name(1, 4, site)) for site in SIZES}
    plain = {site: plain_sums(root, site, 4) for site in SIZES}
    plan = plain["north"][1]
    assert exchange.combine(root / "study").round == 5
    totals = load_file(root / "study" / "totals" / "totals-01-004.safetensors")
    asks = messages.read_request(request_of(root, 4), plan.study, "").request.asks
    assert set(totals) == {ask.key for ask in asks}
    for ask in asks:
        key, form = ask.key, plan.form(ask)
        for site in SIZES:
            assert (answers[site][key] != sums.to_bytes(plain[site][0][key], form)).mean() > 0.9
        if not form.by_fold:
            exact = sums.add((sums.to_bytes(plain[site][0][key], form) for site in SIZES), form)
            assert (totals[key] == exact).all()


def test_no_site_sends_its_sums_of_a_fold_in_clear(finished):
    """Sums by fold are masked, too, and the folds have three sites or more."""
    numbers = [i for i in range(1, 30) if b"association.steady" in request_answer(finished, i)[:20_000]]
    plain, plan = plain_sums(finished, "north", numbers[0])
    assert min(list(plan.fold_of.values()).count(fold) for fold in plan.fold_of.values()) >= 3
    sent = load(request_answer(finished, numbers[0]))
    assert (
        sent["association.steady"] != sums.to_bytes(plain["association.steady"], plan.form(Ask("association", "steady")))
    ).all()


def request_answer(root, number, site="north"):
    return (root / site / "outbox" / exchange.answer_name(1, number, site)).read_bytes()


# A lying coordinator, or anyone who can write into its folder


@pytest.mark.parametrize("number", [1, 4])
def test_a_request_that_the_coordinator_did_not_sign(first, root, number):
    folder = first if number == 1 else root
    content, stranger = request_of(folder, number), keys.new_signing_key()[0]
    for wrong in (
        changed(content, head={"signature": "00" * 64}),
        changed(content, key=stranger),
        changed(content, head={"more": "x"}),
    ):
        refused(folder, wrong, "is not signed by the coordinator", fingerprint=agreed(folder))


def arrays_of(content, prefix):
    return {name: array for name, array in load(content).items() if name.startswith(prefix)}


def test_no_other_question_than_that_of_the_program(finished):
    """Every float of every request is the program's own to six digits, and every integer and name exactly."""
    for number in (2, 16, 20, len(list((finished / "study" / "requests").iterdir()))):
        content = request_of(finished, number)
        for name, array in arrays_of(content, ("ask", "value")).items():
            step = 1 if array.dtype.kind == "i" else 1e-3 * max(np.abs(array).max(), 1.0)
            other = np.array(array + step, dtype=array.dtype)
            refused(finished, forged(finished, content, arrays={name: other}), "is not what the totals of the sites lead to")
            if array.dtype.kind == "f":
                nan = forged(finished, content, arrays={name: np.full_like(array, np.nan)})
                refused(finished, nan, "is not what the totals of the sites lead to")
        head = messages.read_message(content, messages.REQUEST, "")[0]
        asks = json.loads(head["asks"])
        for other in ([*asks, ["usable", "amplitude"]], asks[1:], [["rows", "steady"], *asks[1:]], [["spread", "steady"]]):
            refused(
                finished, forged(finished, content, head={"asks": json.dumps(other)}), "other sums|not part of the protocol"
            )
    refused(finished, forged(finished, content, arrays={"value more": np.zeros(3)}), "arrays that are not part of the protocol")


def test_no_question_after_the_end(finished):
    last = max(int(path.stem[-3:]) for path in (finished / "study" / "requests").iterdir())
    content = request_of(finished, last)
    previous = messages.read_request(content, exchange.open_study(finished / "north"), "").hash
    answers = {f"answer {site}": np.frombuffer(request_answer(finished, last, site), np.uint8) for site in SIZES}
    more = forged(finished, content, head={"round": str(last + 1), "previous": previous}, arrays=answers)
    refused(finished, more, "but the study is finished")


def test_totals_cannot_be_altered(root):
    """Every site adds the answers itself, and each is signed by its site."""
    content = request_of(root, 4)
    south = arrays_of(content, "answer south")["answer south"].tobytes()
    own = arrays_of(content, "answer north")["answer north"].tobytes()
    other_sums = {name: array + 1 for name, array in load(south).items()}
    stranger = keys.new_signing_key()[0]
    earlier = (root / "study" / "answers" / exchange.answer_name(1, 2, "south")).read_bytes()
    for site, answer, message in (
        ("south", changed(south, arrays=other_sums), "is not signed by site 'south'"),
        ("south", changed(south, arrays=other_sums, key=stranger), "is not signed by site 'south'"),
        ("south", earlier, "answers another request than that of round 3"),
        ("south", own, "is not signed by site 'north' with the key"),
        ("north", changed(own, arrays=other_sums), "does not hold the answer that this site sent"),
    ):
        wrong = forged(root, content, arrays={f"answer {site}": np.frombuffer(answer, np.uint8)})
        refused(root, wrong, message)
    refused(root, forged(root, content, drop=["answer south"]), "are not those of all members")


def test_rounds_in_their_order_and_each_once(finished, root):
    """Requests are chained: no round is skipped, repeated with other content, or taken from another history."""
    refused(root, request_of(finished, 6), "round 4 of attempt 1 was not answered by this site; answer it first")
    refused(root, forged(root, request_of(root, 4), head={"previous": "0" * 64}), "does not follow the request of round 3")
    refused(root, forged(root, request_of(root, 3), head={"round": "4"}), "does not follow the request of round 3")
    refused(root, forged(root, request_of(root, 4), head={"round": "121"}), "round 121 of attempt 1 is not allowed")
    refused(root, forged(root, request_of(root, 4), head={"study": "b"}), "belongs to another study")
    members = messages.read_message(request_of(root, 1), messages.REQUEST, "")[0]["members"]
    refused(
        root, forged(root, request_of(root, 4), head={"members": members}), "the members of the study changed between rounds"
    )
    exchange.answer(root / "north", request_of(root, 4), "")
    twin = forged(root, request_of(root, 4), head={"asks": nearly(root, 4)})
    refused(root, twin, "differs from the request of round 4 that was answered before")


def nearly(root, number):
    """The same asks in other bytes: a second request of a round that the program would also have made."""
    return json.dumps(json.loads(messages.read_message(request_of(root, number), messages.REQUEST, "")[0]["asks"]), indent=1)


def test_two_histories_do_not_meet(first):
    """Two versions of one request: the masks of the sites that got one do not cancel those of the others."""
    fingerprint = agreed(first)
    twin = forged(first, request_of(first, 1), head={"asks": nearly(first, 1)})
    for i, site in enumerate(SIZES):
        content = twin if i < 3 else request_of(first, 1)
        path = exchange.answer(first / site, content, "", fingerprint=fingerprint)
        shutil.copy(path, first / "study" / "answers")
    with pytest.raises(InputError, match="answers another request than that of round 1"):
        exchange.combine(first / "study")


def forged_members(root, change):
    head = messages.read_message(request_of(root, 1), messages.REQUEST, "")[0]
    return forged(root, request_of(root, 1), head={"members": json.dumps(change(json.loads(head["members"])))})


def with_key(site):
    public, signing = keys.new_mask_key()[1], keys.new_signing_key()[1]

    def change(members):
        return [one | ({"key": public, "signing": signing} if one["site"] == site else {}) for one in members]

    return change


def test_forged_keys_and_members(first):
    fingerprint, honest = agreed(first), request_of(first, 1)
    refused(first, honest, "have the fingerprint .* by telephone")  # nothing before the sites agreed
    refused(first, forged_members(first, with_key("south")), "have the fingerprint", fingerprint=fingerprint)
    refused(
        first, forged_members(first, with_key("north")), "with the counts and the keys that it joined", fingerprint=fingerprint
    )
    more = forged_members(
        first, lambda members: [one | {"patients": one["patients"] + (one["site"] == "south")} for one in members]
    )
    refused(first, more, "have the fingerprint", fingerprint=fingerprint)
    strange = forged_members(first, lambda members: [one | {"site": one["site"].replace("south", "mars")} for one in members])
    refused(first, strange, "mars is not a site of this study", fingerprint=fingerprint)
    twice = forged_members(first, lambda members: [members[0], *members[:-1]])
    refused(first, twice, "takes part twice|with the counts", fingerprint=fingerprint)
    refused(first, forged_members(first, lambda members: members * 10), "has 70 members", fingerprint=fingerprint)
    exchange.answer(first / "north", honest, "", fingerprint=fingerprint.upper())
    refused(first, forged_members(first, with_key("south")), "differs from|does not follow|not signed", fingerprint=fingerprint)
    exchange.answer(first / "north", honest, "")  # the fingerprint was given once


def test_attempts_without_a_site(first, root):
    """The first attempt has all sites, a later one the consent of every remaining site, and none fewer than six."""
    fewer = forged_members(first, lambda members: [one for one in members if one["site"] != "west"])
    refused(first, fewer, "attempt 1 without west, which is not the protocol")
    exchange.combine(root / "study", without=["west"])
    content, fingerprint = request_of(root, 1, attempt=2), agreed(root)
    refused(
        root,
        content,
        "without west; .* so answer only if all remaining sites agree, with --without west",
        fingerprint=fingerprint,
    )
    refused(root, content, "begins without west", fingerprint=fingerprint, without=["south"])
    head = messages.read_message(content, messages.REQUEST, "")[0]
    other_keys = forged(root, content, head={"members": json.dumps(with_key("south")(json.loads(head["members"])))})
    refused(root, other_keys, "other counts or keys than in attempt 1", fingerprint=fingerprint, without=["west"])
    five = [one for one in json.loads(head["members"]) if one["site"] != "south"]
    small = forged(root, content, head={"members": json.dumps(five), "attempt": "3"})
    refused(root, small, "5 sites take part", fingerprint=fingerprint, without=["west", "south"])
    exchange.answer(root / "north", content, "", fingerprint=fingerprint, without=["west"])
    refused(root, request_of(root, 4), "is of attempt 1, and this site went on to a later one")


@pytest.mark.parametrize("patients", [10**6, 2 * 10**5])
def test_a_small_request_takes_little_memory(first, patients):
    """Counts that a request claims are compared with their limits before anything of their size is made."""
    claimed = forged_members(
        first, lambda members: [one | ({"patients": patients} if one["site"] != "north" else {}) for one in members]
    )
    tracemalloc.start()
    refused(first, claimed, "a study has at most 1000000", fingerprint=agreed(first))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(claimed) < 20_000 and peak < 2**24


# Two processes, or a crash


def _answer(root, content, barrier, results):
    barrier.wait()
    try:
        results.put(exchange.answer(root / "north", content, "").read_bytes())
    except InputError as error:
        results.put(str(error))


def test_processes_at_the_same_time_send_one_answer(root):
    """Four processes answer two versions of one round: one version is answered, with the same bytes."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    versions = [request_of(root, 4), forged(root, request_of(root, 4), head={"asks": nearly(root, 4)})]
    processes = [context.Process(target=_answer, args=(root, versions[i % 2], barrier, results)) for i in range(4)]
    for process in processes:
        process.start()
    given = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len({one for one in given if isinstance(one, bytes)}) == 1
    assert all("differs from the request of round 4" in one for one in given if isinstance(one, str))


def test_a_crash_after_the_claim(root, finished, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(messages, "write_answer", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exchange.answer(root / "north", request_of(root, 4), "")
    twin = forged(root, request_of(root, 4), head={"asks": nearly(root, 4)})
    refused(root, twin, "differs from the request of round 4")
    assert exchange.answer(root / "north", request_of(root, 4), "").read_bytes() == request_answer(finished, 4)


# Sites that put together what they know


def unmasked(root, site, number, known):
    """Sums of a site as the sites `known`, who share a secret with it each, can unmask them."""
    plan, asked = (
        plain_sums(root, site, number)[1],
        messages.read_request(request_of(root, number), exchange.open_study(root / site), ""),
    )
    arrays = load(request_answer(root, number, site))
    result = {}
    for ask in asked.request.asks:
        form = plan.form(ask)
        if form.bytes != 8:
            continue
        words = arrays[ask.key].view(np.uint64)
        for other in known:  # the mask of a pair, from the key of the site that gave its own away
            private = json.loads((root / other / "private" / "site.json").read_text())["key"]
            both = [one for one in plan.members if one.site in (site, other)]
            pair = SimpleNamespace(study=plan.study, members=both, fold_of=plan.fold_of, form=plan.form)
            words = words + keys.masked(np.zeros(form.shape, dtype=np.uint64), pair, other, private, ask, asked.hash)
        result[ask.key] = words
    return result


def test_all_sites_but_one_learn_the_sums_of_that_one(finished):
    plain, _ = plain_sums(finished, "north", 4)
    learned = unmasked(finished, "north", 4, set(SIZES) - {"north"})
    assert learned and all((learned[key] == plain[key]).all() for key in learned)


def test_all_sites_but_two_learn_the_sum_of_the_two(finished):
    others = set(SIZES) - {"north", "south"}
    north, south = (unmasked(finished, site, 4, others) for site in ("north", "south"))
    plain = [plain_sums(finished, site, 4)[0] for site in ("north", "south")]
    for key in north:
        assert (north[key] != plain[0][key]).mean() > 0.9
        assert (north[key] + south[key] == plain[0][key] + plain[1][key]).all()


def test_the_other_sites_of_a_fold_learn_its_association(finished):
    """Sums by fold are masked among the sites of the fold, so the others of the fold are enough."""
    number = next(i for i in range(1, 30) if b"association.steady" in request_answer(finished, i)[:20_000])
    plain, plan = plain_sums(finished, "north", number)
    same = {site for site, fold in plan.fold_of.items() if fold == plan.fold_of["north"]} - {"north"}
    learned = unmasked(finished, "north", number, same)
    assert (learned["association.steady"] == plain["association.steady"]).all()
    fewer = unmasked(finished, "north", number, sorted(same)[1:])
    assert (fewer["association.steady"] != plain["association.steady"]).all()


def steered(root, number, lie):
    """All answer a round, and `south`, who works with the coordinator, then replaces its sums by others that it signs."""
    answer_all(root)
    path = root / "study" / "answers" / exchange.answer_name(1, number, "south")
    key = json.loads((root / "south" / "private" / "site.json").read_text())["signing"]
    path.write_bytes(changed(path.read_bytes(), arrays=lie(load(path.read_bytes())), key=key))
    shutil.copy(path, root / "south" / "outbox")
    return exchange.combine(root / "study")


def test_a_coordinator_with_a_site_chooses_totals(first):
    """The two lead the search for the median age to another place; the counts there are of all sites together."""
    before = steered(first, 1, lambda arrays: {"search.age": arrays["search.age"] + np.append(np.full(62, -200), 0)})
    answer_all(first)
    assert exchange.combine(first / "study").round == 3
    cuts = next(ask.arguments["cuts"] for ask in before.asked.asks if ask.key == "search.age")
    ages = [plain_sums(first, site, 2)[0]["search.age"].view(np.int64) for site in SIZES]
    totals = load_file(first / "study" / "totals" / "totals-01-002.safetensors")["search.age"]
    assert (totals == np.sum(ages, axis=0)).all() and totals.max() <= sum(SIZES.values())
    assert cuts.view(np.uint64).min() > sums.ordered(np.array([100.0]))[0]  # no age is there


def test_a_site_that_lies_does_not_single_out_missing_values(cohort):
    """With a value for missing ages that is far from all others, a sum would show the other values of a subject without one."""
    study = study_of(cohort)
    joined = {site: prepared(study, part, site) for site, part in by_site(cohort).items()}
    site = Site(Plan(study, tuple(member for member, _ in joined.values())), "north", joined["north"][1])
    others = {f"moments.{name}": np.zeros(2) for name in cohort.inputs}  # constant
    for fill, mean, sd in ((1000.0, 30.0, 10.0), (-1e300, 30.0, 10.0), (30.0, 30000.0, 10.0)):
        site.known = others | {"fill.age": np.array(fill), "moments.age": np.array([mean, sd])}
        with pytest.raises(InputError, match="the value for missing age is far from its mean"):
            site.features("phenotypes")
    site.known = others | {"fill.age": np.array(28.0), "moments.age": np.array([30.0, 10.0])}
    assert np.isfinite(site.features("phenotypes")).all()


def test_every_site_sees_the_totals(finished):
    """What a site keeps has the totals that the coordinator has, and no array with a row for a subject of another site."""
    for number in (5, 20):
        kept = {
            name.removeprefix("total "): array
            for name, array in arrays_of(
                (finished / "south" / "received" / f"round-01-{number:03d}.safetensors").read_bytes(), "total "
            ).items()
        }
        totals = load_file(finished / "study" / "totals" / f"totals-01-{number - 1:03d}.safetensors")
        assert set(kept) == set(totals) and all((kept[key] == totals[key]).all() for key in totals)


def test_rounding_of_another_processor_is_not_a_lie(cohort):
    """The program may differ in its last digits between two machines: the site takes over those that were sent."""
    study = study_of(cohort)
    joined = {site: prepared(study, part, site) for site, part in by_site(cohort).items()}
    plan = Plan(study, tuple(member for member, _ in joined.values()))
    sites = {site: Site(plan, site, arrays) for site, (_, arrays) in joined.items()}
    leading, following, rng = coordinate(plan), coordinate(plan), np.random.default_rng(0)
    asked, own = next(leading), next(following)
    for _ in range(30):
        for array in [*asked.values.values(), *(one for ask in asked.asks for one in ask.arguments.values())]:
            if array.dtype.kind == "f":
                array *= 1 + 1e-9 * rng.standard_normal(array.shape)
        exchange.adopt(own, asked, "the request")
        answers = {}
        for name, site in sites.items():
            words = site.answer(own)
            answers[name] = {ask.key: sums.to_bytes(words[ask.key], plan.form(ask)) for ask in own.asks}
        totals = total(plan, own, answers)
        asked, own = leading.send(totals), following.send(totals)


def test_the_page_names_what_is_tested():
    """Every row of the table of opponents in docs/federated.md names its tests."""
    text = PAGE.read_text()
    rows = [line for line in text[text.index("| opponent |") :].split("\n\n")[0].splitlines()[2:]]
    named = [[part for part in row.split("`") if part.startswith("test_")] for row in rows]
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(rows) >= 10 and all(named) and all(f"def {name}(" in written for row in named for name in row)
    assert "secure" not in text.lower()
