"""Federated networks: FedAvg, FedProx and FedBN against averages by hand, training of one site, and pooled statistics."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import m2lgdg
from m2lgdg.deep import DeepMethod
from m2lgdg.federated import networks
from m2lgdg.federated.networks import Client, by_site, lead, simulate
from m2lgdg.federated.networks_plan import NetworkStudy, Request, checked, normalisation_names
from m2lgdg.method import Method
from m2lgdg.metrics import auc, platt
from m2lgdg.report.card import write_card
from m2lgdg.storage import InputError

SMALL = {"widths": (8, 4), "warmup": 1, "learning_rate": 3e-3}
CONNECTOME = {name: value for name, value in m2lgdg.METHODS["m2lgdg-connectome"].variants["small"].items() if name != "epochs"}
CONNECTOME |= {"hidden": 8, "local_channels": (8,), "imaging_width": 16, "shared_width": 16, "warmup": 1}
METHODS = [("erm", SMALL, ()), ("m2lgdg-connectome", CONNECTOME, ("sex", "age", "education"))]


@pytest.fixture(scope="module")
def tiny():
    return m2lgdg.make_cohort("tiny")


def study(cohort, **settings):
    given = {"fields": SMALL, "rounds": 2, "local_epochs": 2} | settings
    return NetworkStudy(tuple(cohort.site_names), **given)


def network_of(fitted):
    return {name: value for name, value in fitted.state_.items() if name.startswith("network.")}


def same(first, second):
    assert set(first) == set(second)
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def distance(first, second):
    return max(float(np.abs(first[name].astype(float) - second[name]).max()) for name in first)


def answers_of(settings, cohort, rounds):
    """Requests and answers of a study, round by round, and the fitted method if it ended."""
    clients = {site: Client(settings, one, site) for site, one in by_site(cohort).items()}
    work = lead(settings, [client.participant for client in clients.values()])
    request, seen = next(work), []
    for _ in range(rounds):
        replies = {site: client.answer(request) for site, client in clients.items()}
        seen.append((request, replies))
        request = work.send(replies)
    return clients, work, request, seen


# ---------------------------------------------------------------- the same as training without a federation


@pytest.mark.parametrize(("name", "fields", "inputs"), METHODS)
def test_one_site_and_one_round_is_the_training_of_this_site(tiny, name, fields, inputs, monkeypatch):
    cohort = tiny.select(sites=["north"]).with_inputs(inputs)
    fields = fields | {"warmup": 3}  # then only the last epoch can be kept
    settings = study(cohort, method=name, fields=fields, rounds=1, local_epochs=3, inputs=inputs)
    clients, _, last, _ = answers_of(settings, cohort, 2)
    method = m2lgdg.make(name, **fields, epochs=3)
    prepare = type(method).prepare

    def prepared(self, train, features):
        """Both fit the same arrays, but the pooled fit rounds rows to float32: training starts from those of the site."""
        fitted = prepare(self, train, features)
        for key, value in fitted.items():
            np.testing.assert_allclose(last.arrays[f"fitted.{key}"], value, rtol=1e-4, atol=1e-6)
        if name != "erm":
            np.testing.assert_allclose(clients["north"].method._offsets, self._offsets, atol=1e-6)
            self._offsets = clients["north"].method._offsets
        return {key: last.arrays[f"fitted.{key}"] for key in fitted}

    monkeypatch.setattr(type(method), "prepare", prepared)
    plain = network_of(method.fit(cohort, seed=0))
    assert same(plain, {key: last.arrays[key] for key in plain})


@pytest.mark.parametrize(("name", "fields", "inputs"), METHODS)
def test_statistics_are_those_of_the_pooled_training_subjects(tiny, name, fields, inputs):
    cohort = tiny.with_inputs(inputs)
    settings = study(cohort, method=name, fields=fields, inputs=inputs)
    clients, _, request, _ = answers_of(settings, cohort, 1)
    chosen = np.concatenate([client.cohort.subjects[client.training] for client in clients.values()])
    pooled = cohort.select(np.isin(cohort.subjects, chosen))
    method = m2lgdg.make(name, **fields)
    method.facts_ = {"inputs": list(inputs)}
    method._source, method._head = pooled, None
    expected = method.prepare(pooled, method.features(pooled, torch.device("cpu")))
    for key, value in expected.items():
        np.testing.assert_allclose(request.arrays[f"fitted.{key}"], value, rtol=2e-4, atol=1e-6)
        assert request.arrays[f"fitted.{key}"].dtype == value.dtype
    assert request.arrays["counts"].tolist() == np.bincount(pooled.labels).tolist()
    if inputs:
        age = inputs.index("age")
        values = pooled.phenotypes["age"].astype(float).to_numpy().copy()
        for site in pooled.site_names:  # sites impute their own median
            here = pooled.sites == site
            values[here & np.isnan(values)] = np.nanmedian(values[here])
        assert request.arrays["scaler.mean"][age] == pytest.approx(values.mean())
        assert request.arrays["scaler.scale"][age] == pytest.approx(values.std())


def test_calibration_is_platt_scaling_of_all_validation_decisions(tiny):
    settings = study(tiny, fields=SMALL | {"validation_share": 0.4}, rounds=3)
    fitted = simulate(settings, by_site(tiny))
    decisions, labels = [], []
    for site, cohort in by_site(tiny).items():
        client = Client(settings, cohort, site)
        held_out = client.cohort.select(client.validation)
        decisions.append(fitted.decision(held_out))
        labels.append(held_out.labels)
    expected = platt(np.concatenate(decisions), np.concatenate(labels))
    np.testing.assert_allclose(fitted.state_["calibration"], expected, rtol=5e-3, atol=5e-3)


# ---------------------------------------------------------------- the strategies


def test_a_round_is_the_mean_by_number_of_subjects(tiny):
    cohort = tiny.select(sites=["north", "east"])
    settings = study(cohort, rounds=1)
    _, _, last, seen = answers_of(settings, cohort, 2)
    (_, statistics), (request, replies) = seen
    assert request.kind == "train" and last.kind == "evaluate"
    counts = [statistics[site]["counts"][0].sum() for site in cohort.site_names]
    assert counts[0] != counts[1]
    trained = [replies[site] for site in cohort.site_names]
    for name, value in last.arrays.items():
        if name.startswith("network."):
            by_hand = np.average(np.stack([one[name].astype(float) for one in trained]), axis=0, weights=counts)
            np.testing.assert_allclose(value, by_hand, rtol=1e-6, atol=1e-8)
    assert distance(network_of(SimpleNamespace(state_=trained[0])), network_of(SimpleNamespace(state_=trained[1]))) > 1e-4


def test_fedprox_without_mu_is_fedavg_and_with_mu_is_not(tiny):
    cohort = tiny.select(sites=["north", "south"])
    plain, zero, some = (
        network_of(simulate(study(cohort, strategy=strategy, mu=mu), by_site(cohort)))
        for strategy, mu in (("fedavg", 0.5), ("fedprox", 0.0), ("fedprox", 5.0))
    )
    assert same(plain, zero)
    assert not same(plain, some)


@pytest.mark.parametrize(("name", "fields", "inputs"), METHODS)
def test_a_huge_mu_keeps_the_global_weights(tiny, name, fields, inputs):
    """Steps of Adam have the size of the learning rate, whatever the gradient: the weights stay a few rates away."""
    cohort, rate = tiny.select(sites=["north"]).with_inputs(inputs), 1e-3
    fields = fields | {"learning_rate": rate, "weight_decay": 0.0, "warmup": 0}
    moved = {}
    for strategy in ("fedavg", "fedprox"):
        given = {"method": name, "fields": fields, "inputs": inputs, "strategy": strategy, "mu": 1e6, "local_epochs": 30}
        _, _, _, seen = answers_of(study(cohort, **given), cohort, 2)
        request, replies = seen[1]
        trained = [key for key, value in replies["north"].items() if value.dtype == np.float32 and "running" not in key]
        moved[strategy] = distance({key: replies["north"][key] for key in trained}, request.arrays)
    assert moved["fedprox"] < 5 * rate and moved["fedavg"] > 15 * rate


def test_a_proximal_step_is_its_formula(tiny):
    """Two steps of gradient descent by hand: w - rate (gradient + mu (w - w_global))."""
    network = torch.nn.Linear(3, 1, bias=False)
    start = network.weight.detach().clone()
    x, rate, mu = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), 0.1, 0.7
    by_hand = start.clone()
    for _ in range(2):
        gradient = (2 * (by_hand @ x.T)[0][:, None] * x).sum(0, keepdim=True)
        by_hand = by_hand - rate * (gradient + mu * (by_hand - start))
    networks._pull(network, mu)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(network.weight.detach(), by_hand)


@pytest.mark.parametrize(("name", "fields", "inputs"), METHODS)
def test_fedbn_leaves_normalisation_at_the_site(tiny, name, fields, inputs, monkeypatch):
    cohort = tiny.select(sites=["north", "south"]).with_inputs(inputs)
    settings = study(cohort, method=name, fields=fields, strategy="fedbn", inputs=inputs)
    started, begin = [], DeepMethod.begin

    def spy(self, network, *arguments):
        started.append((networks.weights_of(network), normalisation_names(network)))
        return begin(self, network, *arguments)

    monkeypatch.setattr(DeepMethod, "begin", spy)
    _, _, last, seen = answers_of(settings, cohort, 3)
    first, second = seen[1], seen[2]
    for i, site in enumerate(cohort.site_names):
        weights, own = started[2 + i]
        assert own and len(own) < len(weights)
        for key, value in weights.items():
            expected = first[1][site][key] if key in own else second[0].arrays[key]
            assert value.tobytes() == expected.tobytes(), key
        assert any(first[1][site][key].tobytes() != second[0].arrays[key].tobytes() for key in own)
    own = started[0][1]
    counts = [seen[0][1][site]["counts"][0].sum() for site in cohort.site_names]
    for key in own:  # an unseen site gets the mean over sites
        by_hand = np.average([second[1][site][key].astype(float) for site in cohort.site_names], axis=0, weights=counts)
        if last.arrays[key].dtype == np.float32:
            np.testing.assert_allclose(last.arrays[key], by_hand, rtol=1e-5, atol=1e-7)


def test_the_contrastive_loss_is_zero_at_one_site(tiny):
    name, fields, inputs = METHODS[1]
    cohort = tiny.select(sites=["north"]).with_inputs(inputs)
    with_term, without = (
        simulate(study(cohort, method=name, fields=fields | {"contrastive_weight": weight}, inputs=inputs), by_site(cohort))
        for weight in (0.5, 0.0)
    )
    assert same(network_of(with_term), network_of(without))
    assert with_term.facts_["notes"] == [networks.NO_CONTRAST] and without.facts_["notes"] == []


# ---------------------------------------------------------------- what it learns


@pytest.fixture(scope="module")
def planted():
    sizes = {"Aarhus": 60, "Bergen": 48, "Cork": 40, "Delft": 40}
    return m2lgdg.make_cohort(
        "demo", sizes=sizes, n_rois=30, n_disease_rois=8, n_disease_edges=60, edge_effect=1.5
    ).with_inputs(())


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedbn"])
def test_a_planted_signal_is_found_at_an_unseen_site(planted, strategy):
    source, target = planted.select(planted.sites != "Delft"), planted.select(sites=["Delft"])
    settings = study(source, strategy=strategy, fields={"widths": (16, 8), "warmup": 2, "learning_rate": 3e-3}, rounds=8)
    proba = simulate(settings, by_site(source)).predict_proba(target)[:, 1]
    assert auc(target.labels, proba) > 0.8


def test_permuted_labels_stay_at_chance(planted):
    source, target = planted.select(planted.sites != "Delft"), planted.select(sites=["Delft"])
    areas = []
    for seed in range(4):
        labels = source.labels.copy()
        for site in source.site_names:
            here = np.flatnonzero(source.sites == site)
            labels[here] = np.random.default_rng(seed).permutation(labels[here])
        permuted = source._changed(labels=labels)
        settings = study(source, fields={"widths": (16, 8), "warmup": 2, "learning_rate": 3e-3}, rounds=4, seed=seed)
        areas.append(auc(target.labels, simulate(settings, by_site(permuted)).predict_proba(target)[:, 1]))
    assert abs(np.mean(areas) - 0.5) < 0.2


def test_a_saved_model_predicts_the_same_and_its_card_says_who_took_part(tiny, tmp_path):
    fitted = simulate(study(tiny, strategy="fedprox", mu=0.1), by_site(tiny))
    folder = fitted.save(tmp_path / "model")
    assert (Method.load(folder).predict_proba(tiny) == fitted.predict_proba(tiny)).all()
    text = (write_card(folder) / "card.md").read_text()
    for part in (*tiny.site_names, "FedProx", "mu 0.1", "2 of 2 local epochs", "weights of each site's network"):
        assert part in text
    about = json.loads((folder / "method.json").read_text())["facts"]["federated"]
    assert about["rounds"] == 2 and about["masks"] is False and about["network"]["strategy"] == "fedprox"


def test_the_same_seed_gives_the_same_bits(tiny):
    first, again, other = (network_of(simulate(study(tiny, seed=seed), by_site(tiny))) for seed in (1, 1, 2))
    assert same(first, again) and not same(first, other)


# ---------------------------------------------------------------- refusals


def test_a_client_refuses_what_is_not_the_protocol(tiny):
    clients, _, request, _ = answers_of(study(tiny), tiny, 1)
    client, good = clients["north"], dict(request.arrays)
    name = "network.classifier.weight"
    spoiled = {
        "not finite": good | {name: np.full_like(good[name], np.nan)},
        "is not": good | {name: good[name][:, :1]},
        "of type float32": good | {name: good[name].astype(np.float64)},
        "classifier.weight is missing": {key: value for key, value in good.items() if key != name},
        "extra is missing or not expected": good | {"extra": good[name]},
        "network.extra is missing or not expected": good | {"network.extra": good[name]},
    }
    for message, arrays in spoiled.items():
        with pytest.raises(InputError, match=message):
            client.answer(Request("train", 0, arrays))
    for kind, number in (("code", 0), ("train", -1), ("train", 3), ("train", 2)):
        with pytest.raises(InputError, match=r"not part of the protocol|ends after 2 rounds"):
            client.answer(Request(kind, number, good))
    with pytest.raises(InputError, match="extra is missing or not expected"):
        client.answer(Request("statistics", 0, {"extra": np.zeros(1)}))
    with pytest.raises(InputError, match="follows an evaluation"):
        client.answer(Request("calibrate", 0, {"point": np.ones(4)}))


def test_the_coordinator_refuses_a_wrong_answer(tiny):
    def answered(change):
        clients = {site: Client(study(tiny), one, site) for site, one in by_site(tiny).items()}
        work = lead(study(tiny), [client.participant for client in clients.values()])
        request = next(work)
        request = work.send({site: client.answer(request) for site, client in clients.items()})
        answers = {site: client.answer(request) for site, client in clients.items()}
        change(answers)
        work.send(answers)

    name = "network.encoder.0.weight"
    changes = {
        "site north did not answer": lambda answers: answers.pop("north"),
        "site north: array .* not finite": lambda answers: answers["north"][name].__setitem__((0, 0), np.nan),
        "site north: array .* is not": lambda answers: answers["north"].__setitem__(name, np.zeros(3, dtype=np.float32)),
        "site north: array .* missing": lambda answers: answers["north"].pop(name),
    }
    for message, change in changes.items():
        with pytest.raises(InputError, match=message):
            answered(change)


def test_objects_are_not_arrays():
    with pytest.raises(InputError, match="of type float64"):
        checked({"a": np.array([object()])}, {"a": ((1,), np.float64)}, "the answer")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "m2lgdg"}, "not a federated network"),
        ({"strategy": "fedsgd"}, "is not one of fedavg"),
        ({"mu": -1.0}, "mu is -1"),
        ({"rounds": 0}, "at least 1"),
        ({"fields": {"epochs": 3}}, "epochs follow from rounds"),
        ({"fields": {"width": 3}}, "has no field width"),
        ({"fields": {"phenotypes": True}}, "name them as inputs"),
        ({"fields": {"validation_by": "site"}}, "validation_by"),
        ({"method": "m2lgdg-connectome", "fields": {"plus": True}, "inputs": ("age",)}, "field plus"),
        ({"sites": ("a", "a")}, "lists one twice"),
        ({"sites": ("../a",)}, "use letters"),
    ],
)
def test_a_study_that_cannot_be_federated(settings, message):
    with pytest.raises(InputError, match=message):
        NetworkStudy(**{"sites": ("north", "south"), "rounds": 20} | settings)


def test_a_site_that_cannot_take_part(tiny):
    settings = study(tiny, least_subjects=12)
    with pytest.raises(InputError, match="has 10 labelled subjects"):
        Client(settings, tiny.select(sites=["east"]), "east")
    with pytest.raises(InputError, match="not a site of this study"):
        Client(settings, tiny.select(sites=["east"]), "Oslo")
    with pytest.raises(InputError, match="choose the subjects of one"):
        Client(settings, tiny, "north")
    with pytest.raises(InputError, match="not those of the study"):
        next(lead(settings, [Client(settings, tiny.select(sites=["north"]), "north").participant]))


def test_a_study_file_is_read_back(tiny, tmp_path):
    settings = study(tiny, method="m2lgdg-connectome", fields=CONNECTOME, inputs=("sex", "age"), strategy="fedprox", mu=0.2)
    read = NetworkStudy.load(settings.save(tmp_path / "study.json"))
    assert read.id == settings.id and read.create().fields() == settings.create().fields()
    (tmp_path / "study.json").write_text('{"sites": ["a"], "code": "x"}')
    with pytest.raises(InputError, match="not the file of a federated network"):
        NetworkStudy.load(tmp_path / "study.json")


# ---------------------------------------------------------------- through Flower


@pytest.fixture
def flower(tiny, tmp_path):
    pytest.importorskip("flwr")
    from flower_grid import LocalGrid, context

    from m2lgdg.federated import networks_flower

    def make(**settings):
        path = study(tiny, **settings).save(tmp_path / "study.json")
        cohort = tmp_path / "cohort.safetensors"
        tiny.save(cohort)
        config = {"study-file": str(path), "cohort-file": str(cohort)}
        grid = LocalGrid(networks_flower.client_app, [config | {"site": site} for site in tiny.site_names])
        return grid, context(study_file=path, model_folder=tmp_path / "model"), tmp_path / "model"

    return networks_flower, make


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedbn"])
@pytest.mark.parametrize(("name", "fields", "inputs"), METHODS)
def test_flower_gives_the_same_bits(tiny, flower, strategy, name, fields, inputs):
    apps, make = flower
    settings = {"strategy": strategy, "method": name, "fields": fields, "inputs": inputs}
    grid, context, folder = make(**settings)
    apps.server_app(grid, context)
    expected = simulate(study(tiny, **settings), by_site(tiny))
    assert same(Method.load(folder).state_, expected.state_)


def test_flower_refuses_other_messages_and_ends_without_a_site(tiny, flower):
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    apps, make = flower
    grid, context, folder = make()
    number = study(tiny).id
    for content, message in (
        ({"kind": "train", "round": 0}, "not part of the protocol"),
        ({"study": "other", "kind": "train", "round": 0}, "another study"),
        ({"study": number, "kind": "code", "round": 0}, "not part of the protocol"),
        ({"study": number, "kind": "train", "round": 0}, "missing or not expected"),
    ):
        records = RecordDict({"m2lgdg": ConfigRecord(content), "arrays": ArrayRecord()})
        reply = grid.send_and_receive([Message(content=records, message_type="query", dst_node_id=1)])[0]
        assert message in reply.content["m2lgdg"]["refused"]
    send = grid.send_and_receive

    def spoil(messages, **options):
        replies = send(messages, **options)
        if grid.sent > 9:
            name = "network.classifier.bias"
            arrays = apps.arrays_of(replies[0].content["arrays"], "the answer")
            if name in arrays:
                replies[0].content["arrays"] = apps.array_record(arrays | {name: arrays[name] * np.float32(np.nan)})
        return replies

    grid.send_and_receive = spoil
    with pytest.raises(InputError, match=r"site east: array network\.classifier\.bias has a number that is not finite"):
        apps.server_app(grid, context)
    grid.send_and_receive, grid.dead = send, {2}
    with pytest.raises(InputError, match="node 2 did not answer"):
        apps.server_app(grid, context)
    assert not folder.exists()
