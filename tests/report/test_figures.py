"""Figures that are drawn in less time show the same: the glass brain is that of nilearn, training curves keep every line."""

import html
import io
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from m2lgdg import make
from m2lgdg.report import figures
from m2lgdg.report.brains import BLUE, GREY, HALF, RED, TOP, glass_brain, top_edges
from m2lgdg.report.drawing import colour
from m2lgdg.report.figures import DISTINCT, ROWS, calibration_by_target, decision_curves, forest, roc_by_target
from m2lgdg.report.tables import plain
from m2lgdg.report.training import training_curves
from m2lgdg.study.predictions import sweep_variant
from m2lgdg.study.stats import cell_scores, over_seeds, site_scores


@pytest.fixture
def rois():
    rng = np.random.default_rng(0)
    places = rng.uniform((-60, -90, -40), (60, 60, 60), (TOP, 3))
    places[0, 0] = 0.0  # on the midline: shown from both sides
    return pd.DataFrame(places, columns=["x", "y", "z"]).assign(roi="r", score=np.linspace(1, 0.2, TOP))


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_the_glass_brain_is_that_of_nilearn(rois):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from nilearn.plotting import plot_markers

    figure = plt.figure(figsize=(9, 2.6))
    plot_markers(
        (np.arange(TOP) < HALF).astype(float), rois[["x", "y", "z"]].to_numpy(), node_size=30 + 110 * np.linspace(1, 0, TOP),
        node_cmap=ListedColormap([GREY, RED]), node_vmin=0.0, node_vmax=1.0, alpha=0.85, display_mode="lyrz", figure=figure,
        colorbar=False,
    )  # fmt: skip
    reference = io.BytesIO()
    figure.savefig(reference, format="png", dpi=110, facecolor="white")
    plt.close(figure)
    ours, theirs = pixels(glass_brain("one", rois, columns=4, ranks=False).png), pixels(reference.getvalue())
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).mean() < 0.5  # of 255: lines are joined instead of drawn piece by piece
    red = [(image[:, :, 0] - image[:, :, 1] > 80) for image in (ours, theirs)]
    assert red[1].sum() > 1000 and (red[0] != red[1]).mean() < 2e-4


def test_edges_are_drawn_between_centroids_in_the_colour_of_their_direction(rois):
    rois = rois.assign(roi=[f"r{i}" for i in range(TOP)], x=[-30.0 if i % 2 else 30.0 for i in range(TOP)])
    ends = [(f"r{i}", f"r{j}") for i in range(TOP) for j in range(i + 1, TOP)][: TOP + 5]
    edges = pd.DataFrame(ends, columns=["roi", "other roi"]).assign(score=np.linspace(3, 1, TOP + 5))
    edges["direction"] = np.r_[2.0, -2.0, 0.0, np.ones(TOP + 2)]
    drawn = {}
    for form, given in (("brain", rois), ("circle", rois.drop(columns=["x", "y", "z"]))):
        drawn[form] = top_edges("one", edges, given).svg.decode()
    lines = re.findall(rf"stroke: ({RED}|{BLUE}|{GREY}); stroke-width: ([0-9.]+)", drawn["circle"])
    assert [colour for colour, _ in lines] == [RED, BLUE, GREY] + [RED] * (TOP - 3)
    widths = [float(width) for _, width in lines]
    assert widths == sorted(widths, reverse=True) and (widths[0], widths[-1]) == (3.0, 0.6)
    # From the sides, edges within a hemisphere only: even or odd numbers at both ends.
    within = sum((int(a[1:]) - int(b[1:])) % 2 == 0 for a, b in ends[:TOP])
    assert sum(drawn["brain"].count(f"stroke: {colour}; stroke-opacity") for colour in (RED, BLUE, GREY)) == 2 * TOP + within
    assert top_edges("one", edges.assign(score=0.0), rois) is None and top_edges("one", edges.head(0), rois) is None


def test_drawing_a_glass_brain_does_not_import_nilearn(rois, tmp_path):
    rois.to_csv(tmp_path / "rois.csv", index=False)
    code = "import sys, pandas; from m2lgdg.report.brains import glass_brain; glass_brain('one', pandas.read_csv('rois.csv')); "
    code += "print([name for name in ('nilearn', 'sklearn') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ended.stdout == "[]\n"


def test_training_curves_have_a_line_for_every_training_and_nothing_is_cut_off():
    runs = [[{"loss": 1e7 / (epoch + 1), "val_auc": 0.5 + epoch / 99} for epoch in range(length)] for length in (9, 20, 33)]
    flat = [[{"loss": 0.998500 + epoch / 1e6, "val_auc": 0.5} for epoch in range(9)]]
    figure = training_curves({"a": runs, "b": flat}, {})
    text = figure.svg.decode()
    lines = text.split('id="LineCollection_1"')[1].split("</g>")[0]
    assert lines.count("<path") == 3
    for words in ("a, 3 trainings: training loss", "b, 1 training: training loss", "validation AUC", "epoch", "1e7"):
        assert f">{words}<" in text
    image = pixels(figure.png)
    for edge in (image[:, :2], image[:, -2:], image[:2], image[-2:]):
        assert edge.min() == 255


def predicted(methods, sites=("A", "B")):
    rng, rows = np.random.default_rng(0), []
    for method in methods:
        for site in sites:
            rows += [(method, "", 0, site, f"{site}{i}", i % 2, rng.uniform(0.3 * (i % 2), 1)) for i in range(30)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def numbered(keys):
    return {key: i for i, key in enumerate(keys)}


def test_a_method_has_one_colour_in_all_figures():
    table = predicted(["one", "two", "three"])
    mean, scores = over_seeds(table), site_scores(cell_scores(table))
    keys = [(name, "") for name in ("one", "two", "three")]
    hues = {keys[1]: 0, keys[0]: 1, keys[2]: 2}
    subset = [keys[2], keys[0]]  # in another order, and not all
    drawn = [forest(mean, scores, subset, hues=hues), roc_by_target(mean, subset, subset, hues)]
    drawn += [calibration_by_target(mean, subset, hues), decision_curves(mean, subset, hues)]
    drawn += [forest(mean, scores, subset * 30, hues=hues)]  # too many for single sites: means
    history = [[{"loss": 1.0 / (epoch + 1), "val_auc": 0.6} for epoch in range(9)]] * 2
    for figure in drawn:
        text = figure.svg.decode()
        assert colour(1) in text and colour(2) in text and colour(0) not in text, figure.name
    training = training_curves({"three": history}, hues).svg.decode()
    assert colour(2) in training and colour(0) not in training


def test_the_forest_is_sorted_and_in_percent():
    table = predicted(["worse", "better"], sites=("hard", "easy"))
    sharp = {"worse": 0.1, "better": 0.4}
    ease = {"hard": 0.0, "easy": 0.5}
    table["proba"] = 0.5 + (table["label"] - 0.5) * (table["method"].map(sharp) + table["target"].map(ease)) / 2
    noise = np.random.default_rng(1).normal(scale=0.2, size=len(table))
    table["proba"] = np.clip(table["proba"] + noise, 0, 1)
    scores = site_scores(cell_scores(table))
    areas = scores[scores["metric"] == "AUC"].set_index(["method", "target"])["mean"]
    assert areas["better"].mean() > areas["worse"].mean() and areas[:, "easy"].mean() > areas[:, "hard"].mean()
    keys = [("worse", ""), ("better", "")]
    figure = forest(over_seeds(table), scores, keys, hues=numbered(keys))
    text = figure.svg.decode()
    assert text.index(">easy<") < text.index(">hard<") and text.index(">better<") < text.index(">worse<")
    assert f"better, easy: AUC {100 * areas['better', 'easy']:.1f} (95 % interval" in figure.page
    assert "AUC at the unseen site (%)" in text


def test_a_figure_is_laid_out_once(monkeypatch):
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from m2lgdg.report.drawing import draw

    calls, execute = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: calls.append(execute(self, figure)))
    figure = draw("one", "caption", "alt", (3, 2), lambda sheet: sheet.canvas.add_subplot().set_ylabel("a long label"))
    assert len(calls) == 1 and b"a long label" in figure.svg
    pixels = np.asarray(Image.open(io.BytesIO(figure.png)).convert("L"))
    assert pixels[:, :3].min() == 255 and pixels[:, :40].min() < 100  # the label has room at the left, and nothing is cut off


def test_reports_import_neither_nilearn_nor_scikit_learn():
    heavy = ("nilearn.plotting", "sklearn", "torch", "scipy.stats")
    code = f"import sys, m2lgdg.report.page; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_many_methods_are_named_at_their_rows_and_few_stand_out_of_the_curves():
    own = predicted(["good"])
    many = pd.concat([own.assign(method=f"method {i:02d}") for i in range(DISTINCT + 1)])
    keys = [(name, "") for name in many.method.unique()]
    mean, scores, hues = over_seeds(many), site_scores(cell_scores(many)), numbered(keys)
    rows = forest(mean, scores, keys, hues=hues).svg.decode()
    curves = roc_by_target(mean, keys, keys[:2], hues)
    assert [rows.count(f">{name}<") for name, _ in keys] == [2] * len(keys)  # once a target, and no legend
    assert [curves.svg.decode().count(f">{name}<") for name, _ in keys] == [1, 1] + [0] * (DISTINCT - 1)
    assert "Grey: the other 9 methods" in curves.caption
    sites = pd.concat([many.assign(target=f"site {i}") for i in range(ROWS // len(keys) + 1)])
    means = forest(over_seeds(sites), site_scores(cell_scores(sites)), keys, hues=hues)
    assert [means.svg.decode().count(f">{name}<") for name, _ in keys] == [1] * len(keys)
    assert "Mean AUC over target sites" in means.caption
    fewer = keys[:DISTINCT]
    assert forest(mean, scores, fewer, hues=hues).svg.decode().count(">method 03<") == 1  # in the legend
    curves = roc_by_target(mean, fewer, fewer[:2], hues)
    assert curves.svg.decode().count(">method 03<") == 1 and "Grey" not in curves.caption


def test_of_many_sites_and_methods_the_mean_has_its_interval():
    rng = np.random.default_rng(0)
    own = predicted(["good"], sites=("A",))
    both = [own.assign(method=f"m{k}", target=f"s{i}", proba=rng.random(30)) for k in range(12) for i in range(11)]
    scores = site_scores(cell_scores(pd.concat(both)))
    keys = [(f"m{k}", "") for k in range(12)]
    drawn = forest(over_seeds(pd.concat(both)), scores, keys, hues=numbered(keys))
    areas = scores[(scores.metric == "AUC") & (scores.method == "m3")]["mean"]
    half = 2.228 * areas.std() / 11**0.5  # Student's t with ten degrees of freedom
    assert f"m3: mean AUC {100 * areas.mean():.1f} ± {100 * half:.1f} (95 % interval), 11 sites" in html.unescape(drawn.page)


@pytest.mark.parametrize("names", [("a b", "a-b"), ("漢", "字"), ("", "-"), ("x" * 80, "x" * 81)])
def test_two_names_never_become_one_file(names):
    first, second = map(plain, names)
    assert first != second
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", one) for one in (first, second))


def test_labels_of_many_swept_fields_do_not_overlap(monkeypatch):
    sheets = []

    def drawn(name, caption, alt, size, paint):
        sheets.append(figures.Sheet(Figure(figsize=size, dpi=100, layout="constrained")))
        paint(sheets[0])
        sheets[0].canvas.draw_without_rendering()

    monkeypatch.setattr(figures, "draw", drawn)
    swept = tomllib.loads((Path(__file__).parents[2] / "studies" / "abide-sensitivity.toml").read_text())
    axes, default = swept["sweep"]["m2lgdg"], make("m2lgdg").fields()
    rng = np.random.default_rng(0)
    changed = [sweep_variant(name, value) for name, values in axes.items() for value in values if value != default[name]]
    cells = [(variant, target, seed) for variant in ("", *changed) for target in swept["targets"] for seed in swept["seeds"]]
    scores = pd.DataFrame(cells, columns=["variant", "target", "seed"]).assign(method="m2lgdg")
    scores = pd.concat(scores.assign(metric=one, value=rng.random(len(scores))) for one in ("AUC", "ACC", "F1"))
    figures.sensitivity_curves("m2lgdg", scores, axes, default)
    lowest = sheets[0].canvas.axes[-len(axes) :]
    assert [panel.get_xlabel() for panel in lowest] == list(axes)
    for panel in lowest:
        labels = panel.get_xticklabels()
        assert [float(label.get_text()) for label in labels] == sorted(axes[panel.get_xlabel()])
        boxes = [label.get_window_extent() for label in labels if label.get_rotation() == 0]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_values_of_a_sweep_that_are_lists_are_drawn(predictions, figures_painted_only):
    scores = cell_scores(predictions[predictions.method == "good"])
    parts = [scores.assign(variant=name) for name in ("", "tables=none", "tables=a+b")]
    axes = {"tables": ["none", ["b", "a"], ["a", "b"]]}
    drawn = figures.sensitivity_curves("good", pd.concat(parts), axes, {"tables": "all"}).svg.decode()
    assert "tables = a + b: AUC 100.0" in drawn and "tables = none: AUC 100.0" in drawn and "tables = b + a: AUC nan" in drawn
    assert "tables = all (default): AUC 100.0" in drawn
