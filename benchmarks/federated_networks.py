"""Networks trained at many sites by FedAvg, FedProx and FedBN, compared with pooled training, at left-out sites.

    python benchmarks/federated_networks.py COHORT [--target SITE ...] [--method erm] [--way fedavg ...] [--out FILE.csv]

Each way is trained on all other sites of the cohort, every site a client, and predicts the target. A row is added to the CSV
file after each training; ways and targets that it has are not repeated. Prints the AUC of each way at each target.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd

import m2lgdg
from m2lgdg.federated.networks import by_site, simulate
from m2lgdg.federated.networks_plan import NetworkStudy
from m2lgdg.metrics import auc
from m2lgdg.splits import leave_one_site_out

RESERVED = ("NYU", "USM", "UM_1", "YALE")  # sites that no choice is made on: never a target here
LINEAR, POOLED, STRATEGIES = "connectome-adaptive", "pooled", ("fedavg", "fedprox", "fedbn")


def trained(way: str, source: m2lgdg.Cohort, given: argparse.Namespace) -> m2lgdg.Method:
    """A fitted method: the linear model, the network on the pooled source, or the network by a federated strategy."""
    fields = dict(m2lgdg.METHODS[given.method].variants[given.variant]) if given.variant else {}
    if way == LINEAR:
        return m2lgdg.make(LINEAR, phenotypes=bool(source.inputs)).fit(source)
    if way == POOLED:
        return m2lgdg.make(given.method, **fields).fit(source, seed=given.seed)
    fields.pop("epochs", None)
    study = NetworkStudy(
        tuple(source.site_names),
        given.method,
        fields,
        strategy=way,
        rounds=given.rounds,
        local_epochs=given.local_epochs,
        mu=given.mu,
        seed=given.seed,
        inputs=source.inputs,
    )
    return simulate(study, by_site(source))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--target", action="append", help="default: the five largest sites that are not reserved")
    parser.add_argument("--method", default="erm")
    parser.add_argument("--variant", default="")
    parser.add_argument("--way", action="append", choices=[LINEAR, POOLED, *STRATEGIES])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--local-epochs", type=int, default=2)
    parser.add_argument("--mu", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phenotypes", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("federated_networks.csv"))
    given = parser.parse_args()
    cohort = m2lgdg.read(given.cohort)
    if not given.phenotypes:
        cohort = cohort.with_inputs(())
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names if site not in RESERVED}
    targets = given.target or sorted(sizes, key=lambda site: -sizes[site])[:5]
    assert not set(targets) & set(RESERVED), "reserved sites are not targets"
    table = pd.read_csv(given.out) if given.out.exists() else pd.DataFrame(columns=["target", "method", "way"])
    name = given.method + (f":{given.variant}" if given.variant else "")
    for fold in leave_one_site_out(cohort, targets):
        for way in given.way or [LINEAR, POOLED, *STRATEGIES]:
            label = "" if way == LINEAR else name
            known = (table["target"] == fold.site) & (table["method"].fillna("") == label) & (table["way"] == way)
            if known.any():
                continue
            start = time.monotonic()
            fitted = trained(way, fold.source, given)
            proba = fitted.predict_proba(fold.target)[:, 1]
            seconds = time.monotonic() - start
            facts = fitted.facts_
            row = {
                "target": fold.site,
                "method": label,
                "way": way,
                "auc": auc(fold.target.labels, proba),
                "log_loss": float(-np.log(np.where(fold.target.labels == 1, proba, 1 - proba)).mean()),
                "rounds": facts.get("federated", {}).get("rounds", 0),
                "kept": facts.get("best_epoch", 0),
                "seconds": round(seconds, 1),
            }
            table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
            table.to_csv(given.out, index=False)
            print(row, flush=True)
    table["model"] = (table["method"].fillna("") + " " + table["way"]).str.strip()
    shown = table.pivot_table(index="model", columns="target", values="auc")
    shown["mean"] = shown.mean(axis=1)
    print(shown.round(3).to_string())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
