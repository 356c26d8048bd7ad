"""Tables of docs/atlases.md."""

from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd

from m2lgdg.data.atlases import about, regions
from m2lgdg.metrics import auc, logit
from page_tables.committed import averaged, paired, predictions
from page_tables.writing import block, interval, number, table

ATLASES = {"aal": "AAL", "ho": "Harvard-Oxford", "cc200": "CC200", "ez": "Eickhoff-Zilles", "tt": "Talairach-Tournoux"}
ATLASES |= {"dosenbach160": "Dosenbach 160"}
ATLAS_STUDIES = ("atlases/linear", "atlases/phenotypes")
UNSEEN = ("NYU", "USM", "UM_1", "YALE")  # sites that no choice was made on


@block("atlases")
def included_atlases() -> list[str]:
    """Names, sizes, codes and licences of the included atlases."""
    rows = []
    for atlas, facts in about().items():
        known = regions(atlas)
        codes = known["code"].tolist()
        numbered = codes == [str(i + 1) for i in range(len(codes))]
        names = ", ".join(f"`{other}`" for other in (atlas, *facts.get("aliases", ())))
        keys = f"1 to {len(codes)}" if numbered else ", ".join([*codes[:3], "...", codes[-1]])
        networks = len(set(known["network"]) - {""})
        rows.append([names, facts["title"], str(len(codes)), keys, str(networks or ""), facts["licence"]])
    return table(["name", "atlas", "ROIs", "codes", "networks", "licence of the atlas"], rows)


@block("atlas-sources")
def atlas_sources() -> list[str]:
    """Where the tables of the included atlases come from."""
    rows = [
        [f"`{atlas}`", facts["reference"], facts["source"], facts["made"], facts["lobe"]] for atlas, facts in about().items()
    ]
    return table(["name", "reference", "source", "centroids and names", "lobe"], rows)


@cache
def by_atlas(study: str) -> pd.DataFrame:
    """Logits of `connectome-adaptive` in each atlas, by (target, subject, label)."""
    frame = predictions(study)
    frame = frame.assign(logit=logit(frame["proba"].to_numpy()), atlas=frame["variant"].str.removeprefix("atlases="))
    return frame.pivot(index=["target", "subject", "label"], columns="atlas", values="logit")


@cache
def atlas_auc(study: str, *atlases: str) -> float:
    """Mean AUC over sites, in percent, of the mean logit over these atlases."""
    mean = by_atlas(study)[list(atlases)].mean(axis=1)
    areas = [auc(part.index.get_level_values("label").to_numpy(), part.to_numpy()) for _, part in mean.groupby("target")]
    return 100 * float(np.mean(areas))


@block("atlases-averaged")
def atlases() -> list[str]:
    """Mean AUC over 20 sites in single atlases, in two and in all, with differences from AAL."""
    rows = []
    variants = {f"atlases={atlas}": title for atlas, title in ATLASES.items()}
    variants |= {"atlases=aal+ho": "AAL and Harvard-Oxford", "": "all six"}
    for variant, title in variants.items():
        cells_of_row = [title]
        for study in ATLAS_STUDIES:
            test = paired((study, "connectome-adaptive", variant), (study, "connectome-adaptive", "atlases=aal"))
            better = "" if variant == "atlases=aal" else interval(test["difference"], *test["interval"])
            counts = "" if not better else "{} of {}".format(test["counts"][0], sum(test["counts"]))
            cells_of_row += [number(test["means"][0], 2), better, counts]
        rows.append(cells_of_row)
    header = ["atlases", "scan", "minus AAL", "sites above AAL", "with phenotypes", "minus AAL", "sites above AAL"]
    return table(header, rows)


@block("atlases-pairs")
def atlas_pairs() -> list[str]:
    """Mean AUC of all pairs of atlases, next to the mean of the two alone."""
    rows = []
    for pair in combinations(ATLASES, 2):
        row = [" + ".join(ATLASES[atlas] for atlas in pair)]
        for study in ATLAS_STUDIES:
            alone = float(np.mean([atlas_auc(study, atlas) for atlas in pair]))
            row += [number(atlas_auc(study, *pair), 2), number(alone, 2)]
        rows.append(row)
    return table(["pair", "scan", "mean of the two", "with phenotypes", "mean of the two"], rows)


@block("atlases-sites")
def atlas_sites() -> list[str]:
    """AUC with phenotypes at the four sites that no choice was made on."""
    areas = averaged(ATLAS_STUDIES[1])["connectome-adaptive"]
    variants = {"atlases=aal": "AAL", "atlases=ho": "Harvard-Oxford", "atlases=aal+ho": "both", "": "all six"}
    rows = [[title, *(number(areas.loc[site, variant]) for site in UNSEEN)] for variant, title in variants.items()]
    return table(["atlases", *UNSEEN], rows)
