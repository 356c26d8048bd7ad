"""Which epoch should a network keep? Its AUC at unseen ABIDE sites in every epoch, and in those that some rules would keep.

The sites other than NYU, USM, UM_1 and YALE are in five folds of whole sites, as in connectome_settings.py; the four are in
source only and are never scored. Each training runs through all epochs. One CSV row per training, epoch and site, with AUC and
loss on source-validation subjects; a training that the file has already is not run again. A rule is the first epoch that can be
kept and the patience; the epoch kept is the one with the highest source-validation AUC, as in `m2lgdg.deep`.

epoch-choice-m2dc.csv next to this file has `m2dc` on the paper's ABIDE subjects (docs/generalization.md).

Usage: python benchmarks/epoch_choice.py COHORT --out FILE.csv [--method m2dc] [--seeds 0 1] [--device cuda] [--part 0/1];
       with --part i/n, process i of n writes FILE-i.csv. --summary FILE.csv ... prints mean AUC by rule.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from connectome_settings import FOLDS, folds_of

import m2lgdg
from m2lgdg.deep import PhenotypeScaler
from m2lgdg.metrics import auc

FIRST = (1, 6, 11, 16, 21, 26, 31)  # first epoch that can be kept, from 1
PATIENCE = (10, 20, 60)
COLUMNS = ("method", "fold", "seed", "epoch", "val_auc", "val_loss", "site", "auc")


def watched(name, target, source):
    """The method with the AUC at each site of `target` in the history of its training, as `val_` and the site."""
    method = m2lgdg.make(name)
    scaler = PhenotypeScaler.fit(source, method.taken(source))
    parts = {site: target.sites == site for site in target.site_names}

    class Watched(type(method)):
        def validate(self, network, batch):
            record = super().validate(network, batch)
            if not hasattr(self, "target"):
                self.target = self.make_batch(target, scaler, batch.label.device)
            decision = self._decision(network, self.target)
            return record | {f"val_{site}": auc(target.labels[part], decision[part]) for site, part in parts.items()}

    return Watched(patience=method.epochs)


def rows_of(name, cohort, sites, seed, device):
    """(epoch, validation AUC and loss, site, AUC) of one training on all sites but those of a fold."""
    here = np.isin(cohort.sites, sites)
    source, target = cohort.select(~here), cohort.select(here)
    fitted = watched(name, target, source).fit(source, seed=seed, device=device)
    for epoch, record in enumerate(fitted.facts_["history"], start=1):
        for site in sites:
            yield epoch, record["val_auc"], record["val_loss"], site, round(100 * record[f"val_{site}"], 2)


def train(cohort, options):
    part, parts = map(int, options.part.split("/"))
    out = options.out if parts == 1 else options.out.with_stem(f"{options.out.stem}-{part}")
    table = pd.read_csv(out) if out.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(zip(table["method"], table["fold"], table["seed"], strict=True))
    folds = folds_of(cohort)
    jobs = [(fold, seed) for seed in options.seeds for fold in range(FOLDS)][part::parts]
    for fold, seed in [job for job in jobs if (options.method, *job) not in done]:
        rows = rows_of(options.method, cohort, folds[fold], seed, options.device)
        lines = pd.DataFrame([(options.method, fold, seed, *row) for row in rows], columns=COLUMNS)
        lines.to_csv(out, mode="a", header=not out.exists(), index=False)
        print(f"{options.method}, fold {fold}, seed {seed}: done", flush=True)


def kept(epochs, first, patience):
    """The epoch that a rule keeps: the best by validation AUC and then loss, until `patience` epochs bring no better one."""
    best = None
    for epoch in epochs.itertuples():
        if epoch.epoch < first:
            continue
        rank = (epoch.val_auc, -epoch.val_loss)
        if best is None or rank > best[0]:
            best = rank, epoch.epoch
        elif epoch.epoch - best[1] >= patience:
            break
    return best[1]


def rules(table):
    """Mean AUC over sites and seeds by rule, its sd over trainings, the lowest training, and the mean epoch kept."""
    rows = []
    for first in FIRST:
        for patience in PATIENCE:
            trainings = []
            for _, training in table.groupby(["fold", "seed"]):
                epoch = kept(training.drop_duplicates("epoch").sort_values("epoch"), first, patience)
                trainings.append(training[training["epoch"] == epoch])
            chosen = pd.concat(trainings)
            means = [training["auc"].mean() for training in trainings]
            epochs = [training["epoch"].iloc[0] for training in trainings]
            numbers = (chosen["auc"].mean(), np.std(means, ddof=1), min(means), np.mean(epochs))
            rows.append((first, patience, *np.round(numbers, 1)))
    return pd.DataFrame(rows, columns=["first epoch", "patience", "AUC", "sd", "lowest", "epoch kept"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("epoch-choice.csv"))
    parser.add_argument("--method", default="m2dc")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--summary", type=Path, nargs="*")
    options = parser.parse_args()
    if options.summary:
        table = pd.concat([pd.read_csv(path) for path in options.summary])
        print(rules(table).to_string(index=False))
        print(table.groupby("epoch")["auc"].mean().round(1).iloc[4::5].to_string())
        return
    if options.cohort is None:
        parser.error("name a cohort, or --summary FILE.csv ...")
    cohort = m2lgdg.read(options.cohort)
    train(cohort.select(cohort.labels >= 0), options)


if __name__ == "__main__":
    main()
