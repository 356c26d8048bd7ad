"""How alike M²LG-DG makes subjects: mean cosine between them in each representation, before and after training; gate weights.

Usage: python benchmarks/collapse.py COHORT TARGET [--device cuda] [--variant small] [--set field=value ...]; prints JSON lines.
"""

import argparse
import json

import torch

import m2lgdg
from m2lgdg.losses import normalised
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.study.config import method_fields


def mean_cosine(vectors):
    unit = normalised(vectors)
    return float(((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1)))


def look(network, batch):
    with torch.inference_mode():
        found = network.parts(batch)
        encoded = {"global": network.global_encoder(batch.series), "local": network.local_encoder(batch.series)}
    gate = found.pop("gate").mean(dim=0).tolist()
    logits = found.pop("logits")
    cosines = {name: round(mean_cosine(value), 6) for name, value in (encoded | found).items()}
    return {"cosine": cosines, "gate": gate, "logit_sd": float((logits[:, 1] - logits[:, 0]).std())}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cohort")
    parser.add_argument("target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    (fold,) = m2lgdg.leave_one_site_out(m2lgdg.read(options.cohort), [options.target])
    method = m2lgdg.make("m2lgdg", **method_fields("m2lgdg", options.variant, options.set))
    method.fit(fold.source, seed=0, device=options.device)
    place = torch.device(options.device)
    scaler = PhenotypeScaler.restore(fold.target.inputs, method.state_, "scaler")
    batch = method.make_batch(fold.target, scaler, place)
    batch = batch.take(torch.arange(min(64, len(batch)), device=place))
    adjacency = {"adjacency": method.state_["fitted.adjacency"]}
    torch.manual_seed(0)
    fresh = method.build(method._shape(len(fold.source.rois), len(fold.source.inputs), len(fold.source.site_names), adjacency))
    print(json.dumps({"start": look(fresh.to(place).eval(), batch)}))
    print(json.dumps({"end": look(method.network().to(place), batch), "best_epoch": method.facts_["best_epoch"]}))


if __name__ == "__main__":
    main()
