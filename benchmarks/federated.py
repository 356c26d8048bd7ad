"""Five hospitals train one model by files and through Flower: the same bits, and the probabilities of the pooled fit.

    python benchmarks/federated.py [COHORT] [--folder DIR]

Without a cohort, a synthetic one of five sites is used. Every site of the cohort is a client. Exits with 1 if a bit differs, or
if a probability differs from that of the pooled fit by more than 1e-6.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.federated import exchange
from m2lgdg.method import Method

ALLOWED = 1e-6
SIZES = {"Aarhus": 40, "Bergen": 32, "Cork": 28, "Delft": 24, "Evora": 20}


def by_files(root: Path, sites: list[str]) -> Path:
    """Model of a study whose sites have joined; `root` holds the folder of the study and of each site."""
    for site in sites:
        shutil.copy(root / site / "outbox" / f"{site}.json", root / "study" / "joins")
    progress = exchange.combine(root / "study")
    while progress.request is not None:
        for site in sites:
            exchange.step(root / site, root / "study", root / "study" / "answers")
        progress = exchange.combine(root / "study")
    return exchange.save_model(root / "study", progress)


def through_flower(root: Path, sites: list[str]) -> Path:
    from flower_grid import LocalGrid, context

    from m2lgdg.federated import flower

    flower.server_app(LocalGrid(flower.client_app, [root / site for site in sites]), context(root / "study"))
    return root / "study" / "model"


def traffic(root: Path, sites: list[str]) -> str:
    sent = max(sum(path.stat().st_size for path in root.rglob(f"study/answers/*-{site}.safetensors")) for site in sites)
    received = sum(path.stat().st_size for path in (root / "study" / "requests").iterdir())
    return f"{sent / 1e6:.1f} MB sent and {received / 1e6:.1f} MB received by each site"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cohort", nargs="?", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-masks", action="store_true")
    given = parser.parse_args()
    cohort = (
        m2lgdg.read(given.cohort) if given.cohort else m2lgdg.make_cohort("mild", sizes=SIZES, n_rois=40, n_disease_rois=16)
    )
    cohort = cohort.select(cohort.labels >= 0)
    sites = cohort.site_names
    pooled = m2lgdg.make("connectome-adaptive", phenotypes=bool(cohort.inputs)).fit(cohort)
    expected = pooled.predict_proba(cohort)[:, 1]
    ways = {"files": by_files}
    if importlib.util.find_spec("flwr") is None:
        print("Flower is not installed, so the study is run by files only")
    else:
        ways["Flower"] = through_flower
    states, worst = [], 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        first = folder / "joined"
        start = time.monotonic()
        exchange.init(first / "study", sites, inputs=cohort.inputs, masks=not given.no_masks)
        for site in sites:
            exchange.join(first / "study", cohort.select(sites=[site]), site, first / site)
        print(f"{cohort}; joined in {time.monotonic() - start:.0f} s")
        for name, way in ways.items():
            root = shutil.copytree(first, folder / name)
            start = time.monotonic()
            fitted = Method.load(way(root, sites))
            seconds = time.monotonic() - start
            difference = float(np.abs(fitted.predict_proba(cohort)[:, 1] - expected).max())
            worst = max(worst, difference)
            states.append({key: value.tobytes() for key, value in fitted.state_.items()})
            rounds = fitted.facts_["federated"]["rounds"]
            print(f"by {name}: {rounds} rounds, {traffic(root, sites)}, {seconds:.0f} s, largest difference {difference:.1e}")
    same = all(state == states[0] for state in states)
    print("The same bits." if same else "The bits DIFFER.")
    return 0 if same and worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
