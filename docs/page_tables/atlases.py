"""Tables of docs/atlases.md."""

from m2lgdg.data.atlases import about, regions
from page_tables.committed import paired
from page_tables.writing import block, interval, number, table

ATLASES = {"aal": "AAL", "ho": "Harvard-Oxford", "cc200": "CC200", "ez": "Eickhoff-Zilles", "tt": "Talairach-Tournoux"}
ATLASES |= {"dosenbach160": "Dosenbach 160"}
ATLAS_STUDIES = ("atlases/linear", "atlases/phenotypes")
UNSEEN = ("NYU", "USM", "UM_1", "YALE")  # sites kept out of the searches


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
