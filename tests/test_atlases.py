"""Included atlases: what their tables hold, against real scans too; ROIs by name in check, run, explain and report; own places.

Connectivity falls with the distance between two regions, and a region is strongly connected with its mirror image: a shifted,
permuted or mirrored table would not fit the scans of the folder that M2LGDG_ABIDE names.
"""

import dataclasses
from importlib.resources import files
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from m2lgdg import InputError, make, make_cohort, read
from m2lgdg.cohort import Parcellation
from m2lgdg.data import atlases
from m2lgdg.data.atlases import read_centroids
from m2lgdg.data.check import check_cohort
from m2lgdg.data.readers.arrays import read_table
from m2lgdg.explain.attribution import explain
from m2lgdg.explain.explanation import Explanation
from m2lgdg.method import Method
from m2lgdg.report.brains import glass_brain

COUNTS = {
    **{"aal": 116, "ho": 111, "harvard-oxford": 112, "cc200": 200, "cc400": 392, "ez": 116, "tt": 97, "destrieux": 148},
    **{"desikan-killiany": 68, "aseg": 35},
    **{
        "dosenbach160": 161,
        "power264": 264,
        "gordon333": 333,
        "gordon352": 352,
        "schaefer100": 100,
        "schaefer200": 200,
        "schaefer300": 300,
    },
    "schaefer400": 400,
}
KNOWN = [  # a region, its code, its centroid to 6 mm, hemisphere, lobe and network, from the publications and atlas viewers
    ("aal", "Precentral_L", "2001", (-39, -6, 51), "L", "frontal", ""),
    ("aal", "Vermis_3", "9110", (2, -40, -11), "M", "cerebellum", ""),
    ("ho", "Frontal_Pole_R", "101", (26, 52, 9), "R", "frontal", ""),
    ("ho", "Parahippocampal_Gyrus_anterior_R+Amygdala_R", "3455", (21, 0, -21), "R", "limbic", ""),
    ("harvard-oxford", "Frontal_Pole_L", "10", (-25, 53, 8), "L", "frontal", ""),
    ("ez", "Thalamus_R", "78", (13, -18, 8), "R", "subcortical", ""),
    ("tt", "Cuneus_L", "4002", (-13, -85, 20), "L", "occipital", ""),
    ("destrieux", "G_cuneus_R", "12111", (6, -82, 19), "R", "occipital", ""),
    ("destrieux", "S_central_L", "11146", (-38, -20, 46), "L", "frontal", ""),
    ("desikan-killiany", "insula_R", "2035", (38, 0, 0), "R", "insula", ""),
    ("desikan-killiany", "precentral_L", "1024", (-39, -10, 43), "L", "frontal", ""),
    ("aseg", "Thalamus_L", "10", (-12, -19, 7), "L", "subcortical", ""),
    ("aseg", "Hippocampus_R", "53", (26, -22, -14), "R", "limbic", ""),
    ("aseg", "3rd-Ventricle", "14", (0, -10, -2), "M", "", ""),
    ("dosenbach160", "mFC_31", "31", (0, 15, 45), "M", "frontal", "cingulo-opercular"),
    ("power264", "Frontal_Sup_Orb_R_3", "3", (24, 32, -18), "R", "frontal", ""),
    ("gordon333", "Default_L_1", "1", (-11, -52, 36), "L", "parietal", "Default"),
    ("gordon352", "HIPPOCAMPUS_LEFT", "340", (-25, -23, -14), "L", "limbic", ""),
    ("gordon333", "Visual_R_166", "166", (22, -85, 24), "R", "occipital", "Visual"),
    ("schaefer100", "RH_Default_PFCdPFCm_1", "96", (6, 48, 0), "R", "", "Default"),
    ("schaefer400", "LH_Vis_1", "1", (-32, -42, -20), "L", "temporal", "Vis"),
]


@pytest.fixture(params=COUNTS)
def atlas(request):
    return request.param


@pytest.fixture
def table(atlas):
    return atlases.regions(atlas)


def test_every_table_is_described_and_small():
    assert set(atlases.about()) == set(COUNTS)
    folder = files("m2lgdg.data.atlases")
    assert {path.name.removesuffix(".tsv") for path in folder.iterdir() if path.name.endswith(".tsv")} == set(COUNTS)
    for facts in atlases.about().values():
        assert {"title", "reference", "source", "licence", "made", "lobe"} <= set(facts)
    assert sum(len(path.read_bytes()) for path in folder.iterdir() if path.name.endswith((".tsv", ".json"))) < 300_000
    names = [name for atlas, facts in atlases.about().items() for name in (atlas, *facts.get("aliases", ()))]
    assert len(names) == len(set(names))


def test_properties_of_a_table(atlas, table):
    assert len(table) == COUNTS[atlas]
    assert table["name"].is_unique
    assert table["code"].is_unique
    assert not table["name"].str.isdigit().any()
    assert set(table["lobe"]) <= {*atlases.LOBES, *[""] * (atlas == "aseg")}  # ventricles are in no lobe
    assert set(table["hemisphere"]) <= {"L", "R", "M"}
    assert (table.loc[table["hemisphere"] == "L", "x"] < 0).all()
    assert (table.loc[table["hemisphere"] == "R", "x"] > 0).all()
    assert table.loc[table["hemisphere"] == "M", "x"].abs().max() <= 9 or not (table["hemisphere"] == "M").any()
    assert table["x"].abs().max() < 72
    assert table["y"].between(-108, 76).all()
    assert table["z"].between(-65, 85).all()
    codes = table["code"].astype(int)
    whole = "harvard-oxford" in atlas or codes.is_monotonic_increasing
    assert whole  # the order of the columns of a file


def test_pairs_of_regions_are_mirrored(table):
    ends = {side: table[table["name"].str.endswith(f"_{side}")] for side in "LR"}
    left, right = (part.set_index(part["name"].str[:-2])[["x", "y", "z"]] for part in (ends["L"], ends["R"]))
    pairs = left.index.intersection(right.index)
    gaps = np.linalg.norm(left.loc[pairs] * [-1, 1, 1] - right.loc[pairs], axis=1)
    assert not len(pairs) or np.median(gaps) < 7
    assert (gaps < 16).all()


def test_lobes_are_where_they_should_be(table):
    """Frontal regions are in front of occipital ones, the cerebellum is below."""
    centre = table.groupby("lobe")[["y", "z"]].mean()
    if "frontal" in centre.index:  # not of aseg
        assert centre.loc["frontal", "y"] > centre.loc["parietal", "y"] > centre.loc["occipital", "y"]
        assert centre.loc["parietal", "z"] > centre.loc["temporal", "z"]
    assert (table.loc[table["lobe"] == "occipital", "y"] < -38).all()
    assert (table.loc[table["lobe"] == "frontal", "y"] > -48).all()
    for lobe, highest in (("cerebellum", 12), ("brainstem", 5)):
        assert (table.loc[table["lobe"] == lobe, "z"] < highest).all()
    assert table.loc[table["lobe"] == "insula", "x"].abs().between(20, 55).all()


@pytest.mark.parametrize(("atlas", "name", "code", "centre", "side", "lobe", "network"), KNOWN)
def test_known_regions(atlas, name, code, centre, side, lobe, network):
    row = atlases.regions(atlas).set_index("name").loc[name]
    assert (row["code"], row["hemisphere"], row["network"]) == (code, side, network)
    assert row["lobe"] == lobe or not lobe
    assert np.linalg.norm(row[["x", "y", "z"]].to_numpy(float) - centre) < 6


def test_lobes_of_parcellations_agree_with_anatomical_neighbours():
    """The lobe of an unnamed cluster is that of AAL around it: for most clusters also that of the nearest AAL centroid."""
    aal = atlases.regions("aal")
    for atlas in ("cc200", "power264", "schaefer200", "gordon333"):
        table = atlases.regions(atlas)
        gaps = np.linalg.norm(table[["x", "y", "z"]].to_numpy()[:, None] - aal[["x", "y", "z"]].to_numpy()[None], axis=2)
        assert (aal["lobe"].to_numpy()[gaps.argmin(1)] == table["lobe"]).mean() > 0.75


def test_codes_of_a_header_become_names(atlas, table):
    codes = tuple(table["code"])
    assert atlases.roi_names(codes, atlas) == tuple(table["name"])
    assert atlases.roi_names(codes[::-1], atlas) == tuple(table["name"])[::-1]
    assert atlases.roi_names(tuple(table["name"]), atlas) == tuple(table["name"])
    assert atlases.roi_names(codes, "other") == codes


def test_small_codes_are_named_only_if_all_are_there():
    codes = tuple(atlases.regions("cc200")["code"])
    assert atlases.roi_names(codes[:-1], "cc200") == codes[:-1]
    assert atlases.roi_names(("10", "11"), "ho") == ("10", "11")
    assert atlases.roi_names(("2001", "x"), "aal") == ("Precentral_L", "x")
    with_overlap = tuple(atlases.regions("dosenbach160")["code"])
    assert with_overlap[-1] == "223"
    assert atlases.roi_names(with_overlap[:-1], "dosenbach160")[-1] == "post_occipital_160"


def test_positions():
    assert atlases.names_by_position("cc200", 200) == tuple(atlases.regions("cc200")["name"])
    assert atlases.names_by_position("craddock200", 200) == atlases.names_by_position("CC200", 200)
    assert len(atlases.names_by_position("dosenbach160", 160)) == 160
    assert len(atlases.names_by_position("dosenbach160", 161)) == 161
    assert atlases.names_by_position("cc200", 190) is None
    assert atlases.names_by_position("unknown", 200) is None


@pytest.mark.parametrize(
    ("atlas", "written", "code"),
    [
        ("schaefer100", "7Networks_LH_Vis_1", "1"),
        ("schaefer100", "LH_Vis_1", "1"),
        ("gordon352", "1_L_Default", "1"),
        ("Gordon2014FreeSurferSubcortical", "333_R_VentralAttn", "333"),
        ("Gordon2014FreeSurferSubcortical", "DIENCEPHALON_VENTRAL_RIGHT", "352"),
        ("destrieux", "ctx_lh_G_cuneus", "11111"),
        ("destrieux", "rh_G_cuneus", "12111"),
        ("destrieux", "L G_cuneus", "11111"),
    ],
)
def test_other_spellings_have_places(atlas, written, code):
    places = atlases.places(atlas, (written, "something else"))
    assert places["code"].tolist()[0] == code
    assert np.isnan(places["x"].tolist()[1])
    assert atlases.places(atlas, ("something else",)) is None
    assert atlases.places("", (written,)) is None


def test_groups():
    rois = ("Vermis_3", "Precentral_L", "Insula_R", "elsewhere")
    assert atlases.groups("aal", rois) == ("cerebellum", "frontal", "insula", "")
    assert atlases.groups("aal", rois, "hemisphere") == ("M", "L", "R", "")
    assert atlases.groups("unknown", rois) == ("",) * 4
    table = atlases.regions("gordon333")
    assert atlases.groups("gordon333", tuple(table["name"]), "network") == tuple(table["network"])
    codes = tuple(atlases.regions("ho")["code"])  # of a cohort that an earlier version read
    assert atlases.groups("ho", codes) == tuple(atlases.regions("ho")["lobe"])
    with pytest.raises(InputError, match="grouped by lobe, network, hemisphere, not by colour"):
        atlases.groups("aal", rois, "colour")


def test_codes_that_belong_to_one_atlas_are_recognised():
    one = {name for name in COUNTS if atlases.recognised(tuple(atlases.regions(name)["code"])) == name}
    assert one == {"aal", "ho", "harvard-oxford", "cc400", "tt", "destrieux", "desikan-killiany", "aseg", "dosenbach160"}
    assert atlases.recognised(("1", "2")) is None
    assert atlases.recognised(tuple(str(i + 1) for i in range(200))) is None  # cc200 and schaefer200


def write_folder(folder, columns, header=None, dataset=None, volumes=24):
    """A lab's folder with three sites; the first two columns of patients move together."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = [(f"s{i:02d}", "ABC"[i % 3], ("patient", "control")[i // 3 % 2], 20 + i, i % 2 + 1) for i in range(18)]
    lines = ["\t".join(map(str, row)) for row in (("participant_id", "site", "diagnosis", "age", "sex"), *rows)]
    (folder / "participants.tsv").write_text("\n".join(lines) + "\n")
    for subject, _, label, *_ in rows:
        series = rng.standard_normal((volumes, columns)).astype(np.float32)
        if label == "patient":
            series[:, 1] = series[:, 0] + 0.1 * series[:, 1]
        if header is None:
            np.save(folder / f"{subject}.npy", series)
        else:
            np.savetxt(folder / f"{subject}.csv", series, "%.4f", ",", header=",".join(header), comments="")
    if dataset is not None:
        (folder / "dataset.toml").write_text(dataset)
    return folder


@pytest.mark.parametrize("atlas", ["ho", "dosenbach160", "schaefer200"])
def test_an_atlas_names_a_folder_and_its_explanation(atlas, table, tmp_path):
    folder = write_folder(tmp_path / "lab", len(table))
    cohort = read(folder, atlas=atlas)
    assert (cohort.atlas, cohort.rois) == (atlas, tuple(table["name"]))
    assert not [each for each in check_cohort(cohort).findings if each.kind == "ROI names"]
    explained = explain(make("fc-logistic").fit(cohort, seed=0), cohort)
    assert set(explained.edges.iloc[0][["roi", "other roi"]]) == set(table["name"][:2])
    assert explained.about_rois() == []
    places = explained.rois.set_index("roi")[["x", "y", "z"]].loc[table["name"].tolist()]
    np.testing.assert_allclose(places, table[["x", "y", "z"]])
    lobes = explained.by_group("lobe")
    assert lobes["score"].sum() == pytest.approx(explained.rois["score"].sum())
    assert dict(zip(lobes["lobe"], lobes["rois"], strict=True)) == table["lobe"].value_counts().to_dict()
    assert len(explained.by_group("network")) == len(set(table["network"]) - {""})


def test_names_of_files_stay_and_other_numbers_are_noted(tmp_path):
    other = [f"17Networks_{i}" for i in range(200)]
    folder = write_folder(tmp_path / "named", 200, header=other, dataset='atlas = "schaefer200"\n')
    assert read(folder).rois == tuple(other)  # a header of another order is never renamed by position
    folder = write_folder(tmp_path / "wide", 112, dataset='atlas = "ho"\n')
    cohort = read(folder)
    assert cohort.rois == tuple(str(i + 1) for i in range(112))
    assert "ROIs without names: the included atlas ho has 111 ROIs, the files have 112 columns" in cohort.notes
    codes = atlases.regions("ho")["code"].tolist()
    folder = write_folder(tmp_path / "codes", 111, header=codes)
    cohort = read(folder)
    assert cohort.rois == tuple(codes)
    (note,) = [each.text for each in check_cohort(cohort).findings if each.kind in ("ROI names", "atlas codes")]
    assert note.endswith('they are the codes of the included atlas ho: name it in dataset.toml (atlas = "ho").')
    assert read(folder, atlas="ho").rois == tuple(atlases.regions("ho")["name"])
    with pytest.raises(InputError, match=r"s00\.csv: 111 ROI columns, but aal names 116"):
        read(folder, atlas="aal")


def test_a_model_of_codes_takes_a_cohort_of_names_and_the_other_way_round(tmp_path):
    """Earlier versions read Harvard-Oxford by its codes and Power by numbers; their models and cohort files still fit."""
    for atlas, before in (("ho", tuple(atlases.regions("ho")["code"])), ("harvard-oxford", tuple(map(str, range(1, 113))))):
        named = read(write_folder(tmp_path / atlas, COUNTS[atlas]), atlas=atlas)
        earlier = dataclasses.replace(named, rois=before)
        for trained, applied in ((earlier, named), (named, earlier)):
            fitted = Method.load(make("fc-logistic").fit(trained, seed=0).save(tmp_path / f"{atlas}-model"))
            np.testing.assert_array_equal(fitted.predict_proba(applied), fitted.predict_proba(trained))
        turned = dataclasses.replace(named, rois=before[::-1])
        with pytest.raises(InputError, match=r"ROI 1 is .* in the cohort: another atlas or order"):
            fitted.predict_proba(turned)
        elsewhere = dataclasses.replace(earlier, atlas="")
        with pytest.raises(InputError, match=r"ROI 1 is .* in the cohort: another atlas or order"):
            make("fc-logistic").fit(named, seed=0).predict_proba(elsewhere)


def numbered(cohort, atlas, word=""):
    """The cohort with numbers for names of ROIs."""
    return dataclasses.replace(cohort, rois=tuple(f"{word}{i + 1}" for i in range(len(cohort.rois))), atlas=atlas, truth=None)


@pytest.mark.parametrize("word", ["", "ROI_"])
def test_numbers_are_rois_of_an_atlas_only_with_its_name(tiny, word):
    model = make("fc-logistic").fit(numbered(tiny, "craddock200", word))
    with pytest.raises(InputError, match=r"trained on atlas craddock200, the cohort has atlas Schaefer200; .* only numbers"):
        model.predict_proba(numbered(tiny, "Schaefer200", word))
    same = model.predict_proba(numbered(tiny, "cc200", word))
    flag = "rois by number: atlas not named"
    unnamed = numbered(tiny, "", word)
    np.testing.assert_array_equal(model.predict_proba(unnamed), same)
    assert all(flag in raised for raised in model.flags(unnamed))
    assert not any(flag in raised for raised in model.flags(numbered(tiny, "CC200", word)))
    assert all(flag in raised for raised in make("fc-logistic").fit(unnamed).flags(unnamed))
    assert not any(flag in raised for raised in make("fc-logistic").fit(tiny).flags(tiny))


def test_an_unnamed_cohort_that_fits_two_members_is_refused(tiny):
    first = numbered(tiny, "one")
    both = dataclasses.replace(first, parcellations={"two": Parcellation(first.rois, first.series)})
    model = make("fc-logistic", atlases="all").fit(both)
    assert len(model.predict_proba(first)) == len(tiny)
    with pytest.raises(InputError, match="are those of one and two; give its atlas a name"):
        model.predict_proba(numbered(tiny, ""))


def test_predict_says_that_rois_were_matched_by_number(tiny, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("fc-logistic").fit(numbered(tiny, "one")).save("model")
    for atlas, code in (("", 0), ("one", 0), ("two", 2)):
        numbered(tiny, atlas).save("c.cohort")
        ended, text, _ = typed("predict", "model", "c.cohort", "--out", "p.csv", "--overwrite")
        noted = "ROIs were matched by their numbers (atlas of the model: one, of the cohort: not named)" in " ".join(
            text.split()
        )
        assert (ended, noted) == (code, atlas == "")


def test_explanations_of_earlier_versions_get_places(tmp_path):
    named = read(write_folder(tmp_path / "lab", 111), atlas="ho")
    earlier = dataclasses.replace(named, rois=tuple(atlases.regions("ho")["code"]))
    explained = explain(make("fc-logistic").fit(earlier, seed=0), earlier)
    explained.save(tmp_path / "why")
    scores = pd.read_csv(tmp_path / "why" / "roi.csv", dtype=str)
    scores.drop(columns=["code", "x", "y", "z"]).to_csv(tmp_path / "why" / "roi.csv", index=False)
    loaded = Explanation.load(tmp_path / "why")
    pd.testing.assert_frame_equal(loaded.rois[["roi", "x", "y", "z"]], explained.rois[["roi", "x", "y", "z"]])
    assert loaded.about_rois() == [
        "The cohort has the codes of the ROIs of atlas ho: convert its files again to have their names."
    ]


@pytest.mark.parametrize("atlas", ["cc400", "gordon333"])
def test_brains_are_drawn(atlas, table):
    rois = table.rename(columns={"name": "roi"}).assign(score=np.linspace(1, 0, len(table)))
    assert glass_brain("x", rois) is not None
    assert glass_brain("x", rois.assign(x=np.nan)) is None


def test_the_commands_name_rois_and_draw_brains(tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "lab", 97, volumes=60)
    series = np.load(folder / "s00.npy")
    np.save(folder / "s00.npy", np.where(np.arange(97) == 4, 1, series))
    _, text, _ = typed("check", folder, "--atlas", "tt")
    assert "Subcallosal_Gyrus_R" in text  # the flat ROI
    assert typed("convert", folder, "lab.cohort", "--atlas", "tt")[0] == 0
    Path("study.toml").write_text(
        'cohort = "lab.cohort"\nmethods = ["fc-logistic"]\ntargets = ["A"]\nseeds = [0]\nexplain = true\n'
    )
    code, _, error = typed("run", "study.toml", "--out", "out")
    assert code == 0, error
    assert typed("report", "out")[0] == 0
    page = Path("out/report.html").read_text()
    assert "Posterior_Cingulate_R" in page
    assert "Glass brain with the top ROIs" in page
    assert "ROI scores by lobe, fc-logistic" in page
    assert "No brain can be drawn" not in page
    make("fc-logistic").fit(read("lab.cohort"), seed=0).save("model")
    code, text, _ = typed("explain", "model", "lab.cohort", "--out", "why")
    assert code == 0
    top = pd.read_csv("why/roi.csv")["roi"][0]
    assert top in set(atlases.regions("tt")["name"])
    assert top in text
    assert "Sum of ROI scores by lobe: " in text
    assert typed("card", "model")[0] == 0
    assert "atlas: tt (Talairach-Tournoux of the Talairach Daemon)" in Path("model/card.md").read_text()


def test_where_no_brain_can_be_drawn_a_sentence_says_so(tiny):
    other = dataclasses.replace(make_cohort("tiny"), atlas="brodmann", truth=None)
    sentences = explain(make("fc-logistic").fit(other, seed=0), other).about_rois()
    assert len(sentences) == 1
    assert "no MNI coordinates for all ROIs of atlas brodmann: give them with --rois" in sentences[0]


def test_lobes_of_a_model_of_several_atlases(tmp_path):
    whole = read(write_folder(tmp_path / "lab", 111), atlas="ho")
    rng = np.random.default_rng(1)
    second = Parcellation(tuple(atlases.regions("tt")["name"]), [rng.standard_normal((24, 97)) for _ in whole.series])
    both = dataclasses.replace(whole, parcellations={"tt": second})
    explained = explain(make("fc-logistic", atlases="all").fit(both, seed=0), both)
    lobes = explained.by_group("lobe")
    assert lobes.groupby("atlas")["rois"].sum().to_dict() == {"ho": 111, "tt": 97}
    assert lobes["score"].sum() == pytest.approx(explained.rois["score"].sum())
    assert [line.split(":")[0] for line in explained.about_lobes()] == [
        "Sum of ROI scores by lobe (ho)",
        "Sum of ROI scores by lobe (tt)",
        "Mean over atlases",
    ]
    assert explained.about_rois() == []


SCANS = 40
# Highest rank correlation of FC and distance, and lowest proportion of regions with their partner among the five strongest.
MEASURED = {"aal": (-0.45, 0.9), "ho": (-0.38, 0.75), "cc200": (-0.33, 0.75), "ez": (-0.44, 0.8), "tt": (-0.4, 0.85)}
MEASURED["dosenbach160"] = (-0.22, 0.5)


@pytest.fixture(scope="module", params=MEASURED)
def scanned(request, abide_folder):
    """Atlas, its table in the order of the files, and the mean FC of some scans."""
    atlas = request.param
    paths = sorted(abide_folder.glob(f"**/*_rois_{atlas}.1D"))
    paths = paths[:: max(1, len(paths) // SCANS)][:SCANS]
    if len(paths) < 36:
        pytest.skip(f"the folder has no series of atlas {atlas}")
    read = [read_table(path) for path in paths]
    (header,) = {tuple(header) for header, _ in read}
    table = atlases.regions(atlas)
    assert header == tuple(table["code"])
    assert atlases.roi_names(header, atlas) == tuple(table["name"])
    with np.errstate(all="ignore"):
        matrices = [np.corrcoef(series.T.astype(float)) for _, series in read]  # nan for a flat ROI
    return atlas, table, np.nanmean(np.arctanh(np.clip(matrices, -0.999, 0.999)), axis=0)


def fall(matrix, places):
    """Rank correlation of FC and distance."""
    rows, columns = np.triu_indices(len(places), 1)
    distance = np.linalg.norm(places[rows] - places[columns], axis=1)
    return spearmanr(matrix[rows, columns], distance, nan_policy="omit").statistic


def test_connectivity_falls_with_distance(scanned):
    atlas, table, matrix = scanned
    places = table[["x", "y", "z"]].to_numpy()
    here = fall(matrix, places)
    assert here < MEASURED[atlas][0]
    assert here < fall(matrix, np.roll(places, 1, axis=0)) - 0.05
    assert here < fall(matrix, np.roll(places, 2, axis=0)) - 0.05
    assert abs(fall(matrix, np.random.default_rng(0).permutation(places))) < 0.1


def test_a_region_is_connected_with_its_mirror_image(scanned):
    atlas, table, matrix = scanned
    places = table[["x", "y", "z"]].to_numpy()
    gaps = np.linalg.norm((places * [-1, 1, 1])[:, None] - places[None], axis=2)
    np.fill_diagonal(gaps, np.inf)
    partner = gaps.argmin(axis=1)
    others = np.where(np.eye(len(table), dtype=bool), -np.inf, np.nan_to_num(matrix, nan=-1.0))
    ranks = (others > others[np.arange(len(table)), partner][:, None]).sum(axis=1) + 1
    lateral = table["x"].abs() > 8
    assert (ranks[lateral] <= 5).mean() > MEASURED[atlas][1]


def test_a_table_gives_names_codes_and_places(tmp_path):
    path = tmp_path / "rois.tsv"
    path.write_text("name\tcode\tx\ty\tz\nB\t07\t1\t2\t3\nA\t01\t-4.5\t5\t6\n")
    table = read_centroids(path, ["A", "B"]).set_index("name")
    assert table.loc["A"].tolist() == ["01", -4.5, 5.0, 6.0]
    assert table.loc["B", "code"] == "07"
    (tmp_path / "rois.csv").write_text("name,x,y,z\nA,1,2,3\n")
    assert read_centroids(tmp_path / "rois.csv", ["A"]).to_numpy().tolist() == [["A", "", 1, 2, 3]]


def test_an_image_gives_centroids_in_the_order_of_its_labels(tmp_path):
    volume = np.zeros((20, 20, 20), dtype=np.int16)
    volume[2:5, 2:5, 2:5] = 40
    volume[12:15, 8:11, 4:7] = 7
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    affine[:3, 3] = (-20, -10, 0)
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "atlas.nii.gz")
    table = read_centroids(tmp_path / "atlas.nii.gz", ["first", "second"])
    assert table["name"].tolist() == ["first", "second"]
    assert table["code"].tolist() == ["7", "40"]
    np.testing.assert_allclose(table[["x", "y", "z"]].to_numpy(), [[6, 8, 10], [-14, -4, 6]], atol=2.0)
    with pytest.raises(InputError, match="has 2 regions, but the cohort has 3 ROIs"):
        read_centroids(tmp_path / "atlas.nii.gz", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name\tx\ty\nA\t1\t2\n", "has no column z"),
        ("name\tx\ty\tz\nA\t1\t2\t3\n", "has no coordinates for 1 ROI, B"),
        ("name\tx\ty\tz\nA\tleft\t2\t3\nB\t1\t1\t1\n", "has no coordinates for 1 ROI, A"),
        ("", "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, text, words):
    (tmp_path / "rois.tsv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_centroids(tmp_path / "rois.tsv", ["A", "B"])


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    (tmp_path / "atlas.nii.gz").write_bytes(b"no image")
    for name in ("atlas.nii.gz", "none.nii.gz", "none.tsv"):
        with pytest.raises(InputError, match=name):
            read_centroids(tmp_path / name, ["A"])
