"""Six hospitals train one model by files and through Flower: the same bits, and the probabilities of the pooled fit.

    python benchmarks/federated.py [COHORT] [--folder DIR]
    python benchmarks/federated.py [COHORT] --leave-out-each
    python benchmarks/federated.py [COHORT] --processes [--kill]

Without a cohort, a synthetic one of six sites is used. Every site of the cohort is a client. Exits with 1 if a bit differs, or
if a probability differs from that of the pooled fit by more than 1e-6. `--leave-out-each` trains without each site in turn, in
one process and without files, and compares the probabilities at that site with those of the pooled fit. `--processes` runs the
study through Flower's own processes on this machine, a SuperNode for every site; `--kill` kills a SuperNode in one round and
the server app in another.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import m2lgdg
from m2lgdg.cohort import Cohort
from m2lgdg.federated import exchange
from m2lgdg.federated.messages import fingerprint
from m2lgdg.federated.plan import Settings
from m2lgdg.federated.simulation import simulate
from m2lgdg.metrics import auc

ALLOWED = 1e-6
NODE_TIMEOUT = 120.0  # seconds that the server waits for a killed site
SIZES = {"Aarhus": 40, "Bergen": 32, "Cork": 28, "Delft": 24, "Evora": 20, "Fermo": 18}


class LocalGrid:
    """A Flower grid in one process: hands each message to the client app of its node; a node in `dead` does not answer.

    `configs` are the node configs. Each node has one context, which keeps its records from message to message.
    """

    def __init__(self, client_app, configs):
        from flwr.app import RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        self.client_app, self.dead, self.sent = client_app, set(), 0
        self.contexts = {
            node: SimpleNamespace(node_config=config, run_config={}, node_id=node, state=RecordDict())
            for node, config in enumerate(configs, start=1)
        }
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # set by Flower's processes otherwise

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent += 1
            if node in self.dead:
                continue
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            replies.append(self.client_app(message, self.contexts[node]))
        return replies


def folders(root, sites):
    """Node configs of the sites whose folders are in `root`."""
    return [{"site-folder": str(root / site), "fingerprint": agreed(root, sites)} for site in sites]


def agreed(root: Path, sites: Iterable[str]) -> str:
    """Fingerprint of the members, which the sites compare by telephone; their join messages are in the study after this."""
    for site in sites:
        shutil.copy(root / site / "outbox" / f"{site}.json", root / "study" / "joins")
    return fingerprint(exchange.standing(root / "study").plan)


def context(**config):
    """Context of a server app, with a run config."""
    return SimpleNamespace(run_config={name.replace("_", "-"): str(value) for name, value in config.items()}, node_config={})


def by_files(root: Path, sites: list[str]) -> Path:
    """Model of a study whose sites have joined; `root` holds the folder of the study and of each site."""
    members = agreed(root, sites)
    progress = exchange.standing(root / "study")
    while progress.request is not None:
        for site in sites:
            exchange.step(root / site, root / "study", root / "study" / "answers", members)
        progress = exchange.combine(root / "study")
    return exchange.save_model(root / "study", progress)


def through_flower(root: Path, sites: list[str]) -> Path:
    from m2lgdg.federated import flower

    flower.server_app(LocalGrid(flower.client_app, folders(root, sites)), context(study_folder=root / "study"))
    return root / "study" / "model"


def through_processes(root: Path, sites: list[str], kill: bool) -> Path:
    """Model of a study by a SuperLink and SuperNodes; with `kill`, a node and the server app are killed on the way."""
    from flower_processes import Federation

    federation = Federation(root / "flower", root, sites, agreed(root, sites))
    model, requests = root / "study" / "model", root / "study" / "requests"
    start, seen = time.monotonic(), 0
    try:
        federation.run(NODE_TIMEOUT if kill else 3600.0)
        print(f"run submitted after {time.monotonic() - start:.0f} s", flush=True)
        while not (model / "card.md").exists():
            time.sleep(0.5)
            count = len(list(requests.glob("request-*.safetensors")))
            if count > seen:
                seen = count
                print(f"round {count} after {time.monotonic() - start:.0f} s", flush=True)
                if kill and count == 3:
                    end_with_a_killed_node(federation, sites[1])
                elif kill and count == 5:
                    end_with_a_killed_server(federation)
            elif not federation.server_apps() and not (model / "card.md").exists():
                time.sleep(10)
                if not federation.server_apps() and not (model / "card.md").exists():
                    raise RuntimeError(f"the server app ended without a model: {federation.details()}")
        return model
    finally:
        federation.close()


def end_with_a_killed_node(federation: Any, site: str) -> None:
    """Kill a SuperNode in a round: the run ends with a sentence. Start it and the run again."""
    federation.kill_node(site)
    print(f"killed the SuperNode of {site}", flush=True)
    while federation.server_apps():
        time.sleep(1)
    ended = f"site {site} did not answer" in federation.details()
    print(f"the run ended {'with a sentence that names the site' if ended else 'WITHOUT a sentence'}", flush=True)
    federation.start_node(site)
    federation.run(NODE_TIMEOUT)


def end_with_a_killed_server(federation: Any) -> None:
    """Kill the server app in a round, and run it again."""
    for process in federation.server_apps():
        os.kill(process, signal.SIGKILL)
    print("killed the server app", flush=True)
    federation.run(NODE_TIMEOUT)


def traffic(root: Path, sites: list[str]) -> str:
    sent = max(sum(path.stat().st_size for path in root.rglob(f"study/answers/*-{site}.safetensors")) for site in sites)
    received = sum(path.stat().st_size for path in (root / "study" / "requests").iterdir())
    return f"{sent / 1e6:.1f} MB sent and {received / 1e6:.1f} MB received by each site"


def simulated(cohort: Cohort, **settings: Any) -> m2lgdg.Model:
    """Federated fit in one process, each site of the cohort a client."""
    study = Settings("0" * 32, tuple(cohort.site_names), **{"inputs": cohort.inputs} | settings)
    return simulate(study, {site: cohort.select(sites=[site]) for site in cohort.site_names})


def leave_out_each(cohort: Cohort) -> float:
    """Print AUC and largest difference of a probability at every site that is left out; the largest of all."""
    print(f"{'left out':10s} {'subjects':>8s} {'rounds':>6s} {'AUC':>6s} {'pooled':>6s} {'difference':>10s}")
    differences, scores = [], []
    for site in cohort.site_names:
        source, target = cohort.select(cohort.sites != site), cohort.select(sites=[site])
        fitted = simulated(source)
        pooled = pooled_fit(source, fitted.method.site_folds)
        given, expected = fitted.predict_proba(target)[:, 1], pooled.predict_proba(target)[:, 1]
        differences.append(float(np.abs(given - expected).max()))
        scores.append([auc(target.labels, given), auc(target.labels, expected)])
        rounds, both = fitted.facts_["federated"]["rounds"], f"{scores[-1][0]:6.4f} {scores[-1][1]:6.4f}"
        print(f"{site:10s} {len(target):8d} {rounds:6d} {both} {differences[-1]:10.1e}", flush=True)
    means = np.nanmean(scores, axis=0)
    print(f"mean AUC {means[0]:.4f}, pooled {means[1]:.4f}; largest difference {max(differences):.1e}")
    return max(differences)


def bits(fitted: m2lgdg.Model) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in fitted.state_.items()}


def pooled_fit(cohort: Cohort, site_folds: int) -> m2lgdg.Model:
    fields = {"phenotypes": bool(cohort.inputs), "site_folds": site_folds, "tables": "none"}
    return m2lgdg.make("connectome-adaptive", **fields).fit(cohort)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cohort", nargs="?", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--leave-out-each", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    cohort = (
        m2lgdg.read(given.cohort)
        if given.cohort
        else m2lgdg.make_cohort("mild", sizes=SIZES, n_rois=40, n_disease_rois=16, further_atlas="")
    )
    cohort = cohort.select(cohort.labels >= 0)
    if given.leave_out_each:
        return 0 if leave_out_each(cohort) <= ALLOWED else 1
    sites = cohort.site_names
    ways: dict[str, Callable[[Path, list[str]], Path]] = {"files": by_files}
    states, worst = [], 0.0
    if given.processes:
        ways = {"processes": lambda root, sites: through_processes(root, sites, given.kill)}
        states.append(bits(simulated(cohort)))
    elif importlib.util.find_spec("flwr") is None:
        print("Flower is not installed, so the study is run by files only")
    else:
        ways["Flower"] = through_flower
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        first = folder / "joined"
        start = time.monotonic()
        exchange.init(first / "study", sites, inputs=cohort.inputs)
        for site in sites:
            exchange.join(first / "study", cohort.select(sites=[site]), site, first / site)
        print(f"{cohort}; joined in {time.monotonic() - start:.0f} s", flush=True)
        for name, way in ways.items():
            root = shutil.copytree(first, folder / name)
            start = time.monotonic()
            fitted = m2lgdg.Model.load(way(root, sites))
            seconds = time.monotonic() - start
            expected = pooled_fit(cohort, fitted.method.site_folds)
            difference = float(np.abs(fitted.predict_proba(cohort) - expected.predict_proba(cohort)).max())
            worst = max(worst, difference)
            states.append(bits(fitted))
            rounds = fitted.facts_["federated"]["rounds"]
            print(f"by {name}: {rounds} rounds, {traffic(root, sites)}, {seconds:.0f} s, largest difference {difference:.1e}")
    same = all(state == states[0] for state in states)
    print("The same bits." if same else "The bits DIFFER.")
    return 0 if same and worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
