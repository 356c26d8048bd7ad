"""Makes the tables of `src/m2lgdg/data/atlases` from public atlas images and published tables.

Usage: `python experiments/atlas_tables.py FOLDER`. The folder holds the files that `about.json`, next to the tables,
names under `made`. A centroid is the mean of the voxels of a region; `src/m2lgdg/data/atlases/aal.tsv` gives the names and
codes of AAL.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import nibabel
import nilearn
import numpy as np
import pandas as pd
from scipy.spatial import cKDTree

TABLES = Path(__file__).parents[1] / "src" / "m2lgdg" / "data" / "atlases"
COORDINATES = Path(nilearn.__file__).parent / "datasets" / "data"
COLUMNS = ["name", "code", "x", "y", "z", "hemisphere", "lobe", "network"]
RADIUS = 5.0  # mm of the spheres of Dosenbach and Power
BEHIND = -63.0  # mm; the fusiform gyrus behind this y is occipital
ONE_SIDE = 0.8  # proportion of a region on one side of x = 0 from which it counts as left or right

# Lobes by words of a region's name; the first line that fits counts.
LOBES = {
    "cerebellum": r"cerebel|vermis|culmen|declive|tuber|tonsil|semi_lunar|fastigium|nodule|uvula|pyramis",
    "brainstem": r"brain.?stem",
    "subcortical": r"thalamus|caudate|putamen|pallidum|accumbens|lentiform|claustrum|ventraldc",
    "insula": r"insula|_ins_",
    "limbic": r"cingul|hippocamp|parahip|amygdala|uncus|subcallosal|pericallosal|entorhinal",
    "temporal": r"tempor|bankssts|(?<!occipital_)fusifor|heschl|planum|g_temp|s_oc-temp|collat_transv|lat_fis-post",
    "occipital": r"occipital|calcarine|(?<!pre)cuneus|cuneal|lingual|s_oc_",
    "parietal": r"pariet(?!o_occipital)|(?<!tri)angular|supra_?mar|precune|postcentral|jensen",
    "frontal": r"front|precentral|rolandic|supp_motor|sma|olfact|rect[ua]|orbital|paracentral|juxtaposit|central_operc"
    r"|subcentral|medial_gyrus|lat_fis-ant|s_central|^pars(oper|orb|tri)",
}

HARVARD_OXFORD = re.split(
    "/",  # cortical regions in the order of their labels 1 to 48
    "Frontal Pole/Insular Cortex/Superior Frontal Gyrus/Middle Frontal Gyrus/Inferior Frontal Gyrus pars triangularis/"
    "Inferior Frontal Gyrus pars opercularis/Precentral Gyrus/Temporal Pole/Superior Temporal Gyrus anterior/"
    "Superior Temporal Gyrus posterior/Middle Temporal Gyrus anterior/Middle Temporal Gyrus posterior/"
    "Middle Temporal Gyrus temporooccipital/Inferior Temporal Gyrus anterior/Inferior Temporal Gyrus posterior/"
    "Inferior Temporal Gyrus temporooccipital/Postcentral Gyrus/Superior Parietal Lobule/Supramarginal Gyrus anterior/"
    "Supramarginal Gyrus posterior/Angular Gyrus/Lateral Occipital Cortex superior/Lateral Occipital Cortex inferior/"
    "Intracalcarine Cortex/Frontal Medial Cortex/Juxtapositional Lobule Cortex/Subcallosal Cortex/Paracingulate Gyrus/"
    "Cingulate Gyrus anterior/Cingulate Gyrus posterior/Precuneous Cortex/Cuneal Cortex/Frontal Orbital Cortex/"
    "Parahippocampal Gyrus anterior/Parahippocampal Gyrus posterior/Lingual Gyrus/Temporal Fusiform Cortex anterior/"
    "Temporal Fusiform Cortex posterior/Temporal Occipital Fusiform Cortex/Occipital Fusiform Gyrus/Frontal Operculum Cortex/"
    "Central Opercular Cortex/Parietal Operculum Cortex/Planum Polare/Heschls Gyrus/Planum Temporale/Supracalcarine Cortex/"
    "Occipital Pole",
)
NUCLEI = dict(  # codes of FreeSurfer, left and right
    zip(
        [(10, 49), (11, 50), (12, 51), (13, 52), (17, 53), (18, 54), (26, 58)],
        ["Thalamus", "Caudate", "Putamen", "Pallidum", "Hippocampus", "Amygdala", "Accumbens"],
        strict=True,
    )
)
MACRO_LABELS = re.split(
    "/",  # of the Anatomy Toolbox; each is left (odd) and right (even), the vermis is one region each
    "Precentral Gyrus/Superior Frontal Gyrus/Superior Orbital Gyrus/Middle Frontal Gyrus/Middle Orbital Gyrus/"
    "Inferior Frontal Gyrus p. Opercularis/Inferior Frontal Gyrus p. Triangularis/Inferior Frontal Gyrus p. Orbitalis/"
    "Rolandic Operculum/SMA/Olfactory Cortex/Superior Medial Gyrus/Mid Orbital Gyrus/Rectal Gyrus/Insula Lobe/"
    "Anterior Cingulate Cortex/Middle Cingulate Cortex/Posterior Cingulate Cortex/Hippocampus/ParaHippocampal Gyrus/Amygdala/"
    "Calcarine Gyrus/Cuneus/Lingual Gyrus/Superior Occipital Gyrus/Middle Occipital Gyrus/Inferior Occipital Gyrus/"
    "Fusiform Gyrus/Postcentral Gyrus/Superior Parietal Lobule/Inferior Parietal Lobule/SupraMarginal Gyrus/Angular Gyrus/"
    "Precuneus/Paracentral Lobule/Caudate Nucleus/Putamen/Pallidum/Thalamus/Heschls Gyrus/Superior Temporal Gyrus/"
    "Temporal Pole/Middle Temporal Gyrus/Medial Temporal Pole/Inferior Temporal Gyrus/Cerebelum Crus 1/Cerebelum Crus 2/"
    "Cerebelum III/Cerebelum IV-V/Cerebelum VI/Cerebelum VII/Cerebelum VIII/Cerebelum IX/Cerebelum X",
)
SCATTERED = r"Unknown|Cerebral-White-Matter|vessel|hypointensities|CSF"  # structures of FreeSurfer without one place
VERMIS = ["1 2", "3", "4 5", "6", "7", "8", "9", "10"]
TALAIRACH = {  # codes of AFNI's TT_Daemon; a file has 01 (right) or 02 (left) after them
    **{20: "Posterior Cingulate", 21: "Anterior Cingulate", 22: "Subcallosal Gyrus", 24: "Transverse Temporal Gyrus"},
    **{25: "Uncus", 26: "Rectal Gyrus", 27: "Fusiform Gyrus", 28: "Inferior Occipital Gyrus", 29: "Inferior Temporal Gyrus"},
    **{30: "Insula", 31: "Parahippocampal Gyrus", 32: "Lingual Gyrus", 33: "Middle Occipital Gyrus", 34: "Orbital Gyrus"},
    **{35: "Middle Temporal Gyrus", 36: "Superior Temporal Gyrus", 37: "Superior Occipital Gyrus"},
    **{39: "Inferior Frontal Gyrus", 40: "Cuneus", 41: "Angular Gyrus", 42: "Supramarginal Gyrus", 43: "Cingulate Gyrus"},
    **{44: "Inferior Parietal Lobule", 45: "Precuneus", 46: "Superior Parietal Lobule", 47: "Middle Frontal Gyrus"},
    **{48: "Paracentral Lobule", 49: "Postcentral Gyrus", 50: "Precentral Gyrus", 51: "Superior Frontal Gyrus"},
    **{52: "Medial Frontal Gyrus", 53: "Uvula of Vermis", 54: "Pyramis of Vermis", 55: "Tuber of Vermis"},
    **{56: "Declive of Vermis", 57: "Culmen of Vermis", 58: "Cerebellar Tonsil", 59: "Inferior Semi-Lunar Lobule"},
    **{60: "Fastigium", 61: "Nodule", 62: "Uvula", 63: "Pyramis", 64: "Tuber", 65: "Declive", 66: "Culmen"},
    **{67: "Cerebellar Lingual", 70: "Lentiform Nucleus", 75: "Claustrum", 76: "Thalamus", 77: "Caudate"},
}


def plain(name: str) -> str:
    """A name in letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def lobe_of(name: str) -> str:
    """Lobe of an anatomical name; empty if no word of it tells the lobe."""
    return next((lobe for lobe, words in LOBES.items() if re.search(words, name.lower())), "")


class Region(NamedTuple):
    """A region of AAL; the fusiform gyrus behind `BEHIND` counts as occipital, as in Harvard-Oxford."""

    name: str
    lobe: str


class Anatomy:
    """AAL and, where it has no label, the brain stem of Harvard-Oxford; gives any voxel its nearest region."""

    def __init__(self, folder: Path) -> None:
        aal = pd.read_csv(TABLES / "aal.tsv", sep="\t")
        self.aal = dict(zip(aal["code"], aal["name"], strict=True))
        points, codes = voxels(folder / "aal_mask_pad.nii.gz")
        stem, labels = voxels(folder / "HarvardOxford-sub-maxprob-thr25-2mm_YCG.nii")
        stem = stem[np.isin(labels, (1016, 1116))]
        stem = stem[cKDTree(points).query(stem)[0] > 3.0]
        known = [Region(self.aal[code], self._lobe(self.aal[code], at[1])) for code, at in zip(codes, points, strict=True)]
        known += [Region("Brain_Stem", "brainstem")] * len(stem)
        self.points = np.r_[points, stem]
        self.regions = sorted(set(known))
        numbers = {region: i for i, region in enumerate(self.regions)}
        self.numbers = np.array([numbers[region] for region in known])
        deep = np.array([region.lobe in ("subcortical", "cerebellum", "brainstem") for region in known])
        self.trees = {False: (cKDTree(self.points), self.numbers), True: (cKDTree(self.points[~deep]), self.numbers[~deep])}

    @staticmethod
    def _lobe(name: str, y: float) -> str:
        return "occipital" if name.startswith("Fusiform") and y < BEHIND else lobe_of(name)

    def region(self, points: np.ndarray, cortical: bool = False) -> Region:
        """The region that is nearest to most of these points."""
        tree, numbers = self.trees[cortical]
        return self.regions[int(np.bincount(numbers[tree.query(points)[1]]).argmax())]


def voxels(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Places in mm and labels of the voxels of an atlas."""
    image = nibabel.squeeze_image(nibabel.load(path))
    labels = np.asarray(image.dataobj).astype(int)
    at = np.argwhere(labels)
    return nibabel.affines.apply_affine(image.affine, at), labels[labels != 0]


def side_of(x: np.ndarray) -> str:
    """L, R, or M for a region with a fifth or more of its voxels on the other side."""
    left, right = (x < 0).mean() + (x == 0).mean() / 2, (x > 0).mean() + (x == 0).mean() / 2
    return "L" if left >= ONE_SIDE else "R" if right >= ONE_SIDE else "M"


def sphere(centre: np.ndarray) -> np.ndarray:
    """Points of a sphere around a centre, 1 mm apart."""
    steps = np.arange(-RADIUS, RADIUS + 1)
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3)
    return centre + grid[(grid**2).sum(1) <= RADIUS**2]


def table_of_image(path: Path, names: dict[int, str], anatomy: Anatomy) -> pd.DataFrame:
    """Regions of an image that have names, in ascending order of their labels; a name without a lobe gets that of AAL."""
    points, labels = voxels(path)
    rows = []
    for code in sorted(set(labels.tolist()) & set(names)):
        own = points[labels == code]
        lobe = lobe_of(names[code]) or anatomy.region(own, cortical=True).lobe
        middle = "Vermis" in names[code] or not names[code].endswith(("_L", "_R"))
        rows.append((names[code], code, *own.mean(0).round(1), "M" if middle else names[code][-1], lobe, ""))
    return pd.DataFrame(rows, columns=COLUMNS)


def clusters(path: Path, anatomy: Anatomy) -> pd.DataFrame:
    """Regions of an image without names: each is called by the AAL region of most of its voxels and its label."""
    points, labels = voxels(path)
    rows = []
    for code in np.unique(labels).tolist():
        own = points[labels == code]
        region, side = anatomy.region(own), side_of(own[:, 0])
        called = f"{region.name if side != 'M' else re.sub('_[LR]$', '', region.name)}_{code}"
        rows.append((called, code, *own.mean(0).round(1), side, region.lobe, ""))
    return pd.DataFrame(rows, columns=COLUMNS)


def harvard_oxford(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    """The version of the ABIDE release: 14 nuclei, 96 cortical regions, and the overlap of two regions (3401 + 54)."""
    names = {
        100 * (i + 1) + k: f"{plain(name)}_{side}" for i, name in enumerate(HARVARD_OXFORD) for k, side in ((1, "R"), (2, "L"))
    }
    for (left, right), name in NUCLEI.items():
        names |= {left: f"{name}_L", right: f"{name}_R"}
    names[3455] = "Parahippocampal_Gyrus_anterior_R+Amygdala_R"
    return table_of_image(folder / "ho_mask_pad.nii.gz", names, anatomy)


def harvard_oxford_dpabi(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    """The version of DPABI: 96 cortical regions, left before right, then the brain stem and 14 nuclei."""
    cortex = {
        10 * (i + 1) + k: f"{plain(name)}_{side}" for i, name in enumerate(HARVARD_OXFORD) for k, side in ((0, "L"), (1, "R"))
    }
    deep = {1016: "Brain_Stem_L", 1116: "Brain_Stem_R"}
    for i, ((left, right), name) in enumerate(NUCLEI.items(), start=2):
        deep |= {1000 * i + left: f"{name}_L", 1000 * i + right: f"{name}_R"}
    parts = [("cort", cortex), ("sub", deep)]
    images = [
        table_of_image(folder / f"HarvardOxford-{part}-maxprob-thr25-2mm_YCG.nii", names, anatomy) for part, names in parts
    ]
    return pd.concat(images)


def eickhoff_zilles(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    names = [f"{plain(name)}_{side}" for name in MACRO_LABELS for side in "LR"] + [plain(f"Vermis {part}") for part in VERMIS]
    return table_of_image(folder / "ez_mask_pad.nii.gz", dict(enumerate(names, start=1)), anatomy)


def talairach(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    names = {100 * code + k: f"{plain(name)}_{side}" for code, name in TALAIRACH.items() for k, side in ((1, "R"), (2, "L"))}
    return table_of_image(folder / "tt_mask_pad.nii.gz", names, anatomy)


def destrieux(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    labels = pd.read_csv(folder / "labels_destrieux.csv")
    names = {
        int(code): f"{name[7:]}_{name[4].upper()}"
        for code, name in zip(labels["index"], labels["name"], strict=True)
        if re.match(r"ctx_[lr]h_(?!Unknown)", name)
    }
    return table_of_image(folder / "atlas_destrieux.nii.gz", names, anatomy)


def desikan_killiany(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    names = {
        code: f"{name[7:]}_{name[4].upper()}" for code, name in _freesurfer(folder) if re.match("ctx-.h-(?!unknown)", name)
    }
    return table_of_image(folder / "atlas_desikan_killiany.nii.gz", names, anatomy)


def aseg(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    """Subcortical structures of the same image, ventricles and corpus callosum, of which the latter two have no lobe."""
    known = [(code, name) for code, name in _freesurfer(folder) if not re.search(f"ctx|{SCATTERED}", name)]
    names = {code: re.sub(r"^(L|R)[a-z]+-(.+?)(-Proper)?$", r"\2_\1", name) for code, name in known}
    table = table_of_image(folder / "atlas_desikan_killiany.nii.gz", names, anatomy)
    return table.assign(lobe=[lobe_of(name) for name in table["name"]])


def _freesurfer(folder: Path) -> list[tuple[int, str]]:
    labels = pd.read_csv(folder / "labels_desikan_killiany.csv")
    return list(zip(labels["index"].tolist(), labels["name"], strict=True))


def dosenbach(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    """160 published centres, and the overlap of ROIs 108 and 115, which is a region of its own in the ABIDE release."""
    published = pd.read_csv(COORDINATES / "dosenbach_2010.csv")
    rows = [
        _of_centre(f"{plain(row.name)}_{row.number}", row.number, np.array([row.x, row.y, row.z]), row.network, anatomy)
        for row in published.itertuples(index=False, name="Roi")
    ]
    points, labels = voxels(folder / "rois_3mm.nii.gz")
    overlap = points[labels == 223].mean(0).round(1)
    rows.append(_of_centre("post_cingulate_108+115", 223, overlap, "default", anatomy))
    return pd.DataFrame(rows, columns=COLUMNS)


def power(anatomy: Anatomy) -> pd.DataFrame:
    centres = pd.read_csv(COORDINATES / "power_2011.csv").to_numpy(dtype=float)
    rows = [_of_centre("", int(roi), np.array(centre), "", anatomy) for roi, *centre in centres]
    return pd.DataFrame(rows, columns=COLUMNS)


def _of_centre(name: str, code: int, centre: np.ndarray, network: str, anatomy: Anatomy) -> tuple[object, ...]:
    """Row of a sphere around a published centre; without a name it is called by its AAL region and code."""
    own = sphere(np.asarray(centre, dtype=float))
    region, side = anatomy.region(own), side_of(own[:, 0])
    called = f"{region.name if side != 'M' else re.sub('_[LR]$', '', region.name)}_{code}"
    return (name or called, code, *centre, side, region.lobe, network)


def gordon(folder: Path, anatomy: Anatomy) -> pd.DataFrame:
    """Published centroids and communities; lobes by the voxels of the image. A parcel of the surface is on one side."""
    centres = pd.read_csv(folder / "gordon2014_333.csv", sep=" ").to_numpy()
    networks = pd.read_csv(folder / "gordon2014_333_network.csv", keep_default_na=False)["Community"]
    points, labels = voxels(folder / "gordon2014_333.nii")
    rows = []
    for (code, *centre), network in zip(centres, networks, strict=True):
        side = "L" if centre[0] < 0 else "R"
        lobe = anatomy.region(points[labels == code], cortical=True).lobe
        rows.append((f"{network}_{side}_{code:.0f}", int(code), *centre, side, lobe, network))
    return pd.DataFrame(rows, columns=COLUMNS)


def schaefer(folder: Path, anatomy: Anatomy, count: int) -> pd.DataFrame:
    stem = folder / f"Schaefer2018_{count}Parcels_7Networks_order_FSLMNI152_1mm"
    published = pd.read_csv(f"{stem}.Centroid_RAS.csv")
    points, labels = voxels(Path(f"{stem}.nii.gz"))
    rows = []
    for code, name, *_ in published.itertuples(index=False):
        own, short = points[labels == code], name.removeprefix("7Networks_")
        lobe = anatomy.region(own, cortical=True).lobe
        rows.append((short, code, *own.mean(0).round(1), short[0], lobe, short.split("_")[1]))
    return pd.DataFrame(rows, columns=COLUMNS)


def main(folder: Path) -> None:
    anatomy = Anatomy(folder)
    tables = {
        "aal": table_of_image(folder / "aal_mask_pad.nii.gz", anatomy.aal, anatomy),
        "ho": harvard_oxford(folder, anatomy),
        "harvard-oxford": harvard_oxford_dpabi(folder, anatomy),
        "cc200": clusters(folder / "CC200.nii.gz", anatomy),
        "cc400": clusters(folder / "CC400.nii.gz", anatomy),
        "ez": eickhoff_zilles(folder, anatomy),
        "tt": talairach(folder, anatomy),
        "destrieux": destrieux(folder, anatomy),
        "desikan-killiany": desikan_killiany(folder, anatomy),
        "aseg": aseg(folder, anatomy),
        "dosenbach160": dosenbach(folder, anatomy),
        "power264": power(anatomy),
        "gordon333": gordon(folder, anatomy),
        **{f"schaefer{count}": schaefer(folder, anatomy, count) for count in (100, 200, 300, 400)},
    }
    for name, table in tables.items():
        table.to_csv(TABLES / f"{name}.tsv", sep="\t", index=False, float_format="%.1f")
        print(name, len(table), table["lobe"].value_counts().to_dict(), table["hemisphere"].value_counts().to_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
