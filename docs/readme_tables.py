"""The table of results and the figure of README.md, from the committed predictions.

Usage: python docs/readme_tables.py [--check]. The table is written between `<!-- results -->` and `<!-- end of results -->`,
the figure to docs/images/forest.png and forest-dark.png. With --check nothing is written, and a table that differs from the
results is reported.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from page_tables.committed import TARGETS, TWENTY, TWENTY_NETWORKS, Model, as_in_paper, by_seed, by_site, complete, predictions
from page_tables.three_sets import DEFAULT, DEPRESSION, FIVE, FOUR, NETWORK, PEER, chosen
from scipy.stats import t as student

from m2lgdg.metrics import delong_interval, delong_test
from m2lgdg.registry import PAPER, SIMPLE, load_methods
from m2lgdg.study.stats import holm

ROOT = Path(__file__).resolve().parents[1]
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "images" / "forest.png"
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.S)
SHADES = {"light": ("#1f2328", "white", "#5b6570"), "dark": ("#e6edf3", "none", "#9aa4af")}  # text, page, grey
SETS = {  # studies, and the sites on which nothing was chosen
    "ABIDE I": ((TWENTY, "abide-default/network", *TWENTY_NETWORKS), FOUR),
    "ABIDE II": (("abide-ii/linear", "abide-ii/peers", "abide-ii/network"), FIVE),
    "depression": ((f"{DEPRESSION}/linear", f"{DEPRESSION}/present", f"{DEPRESSION}/networks", f"{DEPRESSION}/more"), []),
}
WITHOUT_BRAIN = tuple((study, "phenotype-logistic", "") for study in (TWENTY, "abide-ii/linear", f"{DEPRESSION}/linear"))
EARLIER = {("depression", "genm")}  # its form with phenotypes was mended since
ALWAYS = ("m2lgdg", "m2lgdg-connectome", "mm-gtunets")  # networks that take phenotypes by default
BLUE, ORANGE = "#2f81c7", "#d9822b"  # readable on both


# The table


def at_target(target: str, *models: Model) -> str:
    """Mean AUC over seeds at a site, with its sd if there are several seeds."""
    values = by_seed(*models)[target]
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def published(target: str) -> str:
    """AUC of M²LG-DG in the paper."""
    table = pd.read_csv(ROOT / "studies" / "paper-abide.csv").set_index(["method", "target", "metric"])["value"]
    return f"{table['m2lgdg', target, 'AUC']:.1f}"


def averaged(study: str, method: str, target: str) -> pd.Series:
    """Probability of each subject of a site, averaged over seeds, by (subject, label)."""
    rows = predictions(study)
    rows = rows[(rows["method"] == method) & (rows["variant"] == "") & (rows["target"] == target)]
    return rows.groupby(["subject", "label"])["proba"].mean()


def two_sites() -> tuple[list[str], str]:
    """95 % interval of M²LG-DG's AUC at each site, and a sentence on its DeLong tests against its rivals."""
    study, intervals, tests = "paper/networks", [], []
    rivals = [name for name in PAPER if name != "m2lgdg"]
    for target in TARGETS:
        own = averaged(study, "m2lgdg", target)
        labels = own.index.get_level_values("label").to_numpy()
        low, high = delong_interval(labels, own.to_numpy())
        intervals.append(f"{100 * low:.0f} to {100 * high:.0f}")
        for name in rivals:
            difference, p = delong_test(labels, own.to_numpy(), averaged(as_in_paper(name)[0], name, target).to_numpy())
            tests.append((f"`m2lgdg` is {'above' if difference > 0 else 'below'} `{name}` at {target}", p))
    remaining = [words for (words, _), p in zip(tests, holm([p for _, p in tests]), strict=True) if p < 0.05]
    sentence = (
        f"Of {len(tests)} DeLong tests against {len(rivals)} methods of the paper, twelve of them without phenotypes, "
        f"{('none', 'one')[len(remaining)] if len(remaining) < 2 else len(remaining)} "
        f"{'remains' if len(remaining) < 2 else 'remain'} after Holm's correction"
        f"{': ' if remaining else ''}{', '.join(remaining)}."
    )
    return intervals, sentence


def table() -> str:
    """Mean AUC of models on three data sets, then what the paper's method is at its two sites."""
    rows = {
        "[`connectome-adaptive`](docs/connectome-adaptive.md), default": [chosen(DEFAULT)],
        "[`m2lgdg-connectome`](docs/choosing.md), a network": [chosen(NETWORK)],
        "both averaged (`plus`)": [chosen(NETWORK), chosen(DEFAULT)],
        "[`tangent-pearson-ridge`](docs/methods.md), linear": [chosen(PEER)],
        "[`fc-logistic`](docs/methods.md), linear": [chosen("fc-logistic")],
        "[phenotypes alone](docs/trust.md#baselines-without-imaging)": [WITHOUT_BRAIN],
    }
    lines = [["mean AUC in percent", "ABIDE I (20)", "its four", "ABIDE II (14)", "its five", "depression (12)"], ["---"] * 6]
    for title, models in rows.items():
        first, second, third = (by_site(*one) for one in zip(*models, strict=True))
        values = (first, first[FOUR], second, second[FIVE], third)
        lines.append([title, *(f"{part.mean():.1f}" for part in values)])
    grid = "".join(re.sub(r" +", " ", f"| {' | '.join(line)} |\n") for line in lines)
    return (
        grid
        + "\n"
        + textwrap.fill(" ".join([networks_sentence(), paper_sentence(), structure_sentence()]), 100, break_on_hyphens=False)
        + "\n"
    )


def networks_sentence() -> str:
    """The other networks of the figure at the 20 sites of ABIDE I."""
    frame = forest_rows().query("set == 'ABIDE I'")
    others = [row for row in frame.itertuples() if kind(row.method) == "network" and row.method != NETWORK]
    areas = [row.mean for row in others]
    return (
        f"The {len(areas)} other networks, [trained once](docs/results.md#networks-at-20-sites), have {min(areas):.1f} to "
        f"{max(areas):.1f} on ABIDE I."
    )


def paper_sentence() -> str:
    """M²LG-DG, and phenotypes alone, at the paper's sites; how many of its rivals differ from it."""
    intervals, tests = two_sites()
    own, alone = ("paper/networks", "m2lgdg", ""), ("paper/linear", "phenotype-logistic", "")
    places = [
        f"{at_target(target, own)} at {target} (95 % interval {interval}; the paper has {published(target)}, phenotypes alone "
        f"{at_target(target, alone)})"
        for target, interval in zip(TARGETS, intervals, strict=True)
    ]
    return f"On the paper's 884 subjects, five trainings of [`m2lgdg`](docs/results.md) have {' and '.join(places)}. {tests}"


def structure_sentence() -> str:
    """What brain structure adds at the 20 sites of ABIDE I."""
    linear, network = ("abide-structure/linear", "connectome-adaptive"), ("abide-structure/plus", "m2lgdg-connectome", "")
    without, whole = by_site((*linear, "scan-phenotypes")).mean(), by_site((*linear, "phenotypes")).mean()
    return (
        f"With [brain structure](docs/structure.md), a former default rose from {without:.1f} to {whole:.1f} "
        f"at the 20 sites, and `plus` in two atlases had {by_site(network).mean():.1f}."
    )


# The figure


def forest_rows() -> pd.DataFrame:
    """Mean AUC over sites, half its 95 % interval and the mean at untouched sites for each method with phenotypes, by set."""
    rows = []
    for place, (studies, apart) in SETS.items():
        for study in studies:
            for _, method, variant in complete(study):
                always = method in ALWAYS or method in load_methods().with_role("phenotypes")
                told = method == "prior" or (place, method) in EARLIER or [place, method] in [row[:2] for row in rows]
                if told or variant != ("" if always else "phenotypes"):
                    continue
                sites = by_site((study, method, variant))
                half = student.ppf(0.975, len(sites) - 1) * sites.std(ddof=1) / np.sqrt(len(sites))
                rows.append([place, method, sites.mean(), half, sites[apart].mean() if apart else np.nan, len(sites)])
    frame = pd.DataFrame(rows, columns=["set", "method", "mean", "half", "untouched", "sites"])
    first = frame[frame["set"] == next(iter(SETS))].set_index("method")["mean"]
    return frame.assign(order=frame["method"].map(first)).sort_values("order", ascending=False).dropna(subset=["order"])


def kind(method: str) -> str:
    """Kind of a method, as the legend names it."""
    known = load_methods()
    if method in known.with_role("phenotypes"):
        return "phenotypes alone"
    simple = (*known.with_role(*SIMPLE), "combat-logistic")
    return "linear on connectivity" if method in simple else "network"


def figure(path: Path = FIGURE) -> None:
    """Forest plot of all methods on three sets, for light pages and, as NAME-dark.png, for dark ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    frame = forest_rows()
    for shade, (text, page, grey) in SHADES.items():
        colours = {
            "text.color": text,
            "axes.labelcolor": text,
            "axes.titlecolor": text,
            "xtick.color": text,
            "ytick.color": text,
        }
        with plt.rc_context({"font.size": 12, **colours}):
            drawn = _forest(frame, {"linear on connectivity": BLUE, "network": ORANGE, "phenotypes alone": grey})
            target = path if shade == "light" else path.with_stem(f"{path.stem}-dark")
            drawn.savefig(target, dpi=160, facecolor=page, metadata={"Software": None})
            plt.close(drawn)


def _forest(frame: pd.DataFrame, colours: dict[str, str]) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names, grey = list(dict.fromkeys(frame["method"])), colours["phenotypes alone"]
    size = (9.6, 0.32 * len(names) + 1.5)
    drawn, panels = plt.subplots(1, len(SETS), figsize=size, layout="constrained", facecolor="none", sharey=True, sharex=True)
    for axes, place in zip(panels, SETS, strict=True):
        own = frame[frame["set"] == place]
        for row in own.itertuples():
            y, colour = names.index(row.method), colours[kind(row.method)]
            axes.errorbar(row.mean, y, xerr=row.half, fmt="o", markersize=6, color=colour, elinewidth=1.8)
            axes.plot(row.untouched, y, "D", markersize=5, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.4)
        axes.axvline(50, color=grey, linewidth=1, linestyle=":")
        axes.set_title(f"{place}: {own['sites'].max()} sites", fontsize=12)
        axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlim=(48, 90), facecolor="none")
        axes.tick_params(length=0)
        axes.grid(axis="x", color=grey, alpha=0.25)
        axes.spines[:].set_visible(False)
    drawn.supxlabel("AUC (%) at left-out sites: mean and its 95 % interval; 50 is chance", fontsize=12)
    handles = [Line2D([], [], color=own, linewidth=3, label=name) for name, own in colours.items()]
    untouched = {"marker": "D", "markersize": 5, "markerfacecolor": "none", "linewidth": 0}
    handles.append(Line2D([], [], color=grey, label="mean of sites on which nothing was chosen", **untouched))
    drawn.legend(
        handles=handles, frameon=False, fontsize=11, ncols=4, loc="outside upper center", columnspacing=1, handlelength=1
    )
    return drawn


def rewritten(text: str) -> str:
    """README.md with the table of the present results."""
    return BLOCK.sub(lambda match: match[1] + table() + match[2], text)


def main() -> int:
    """Write table and figure, or report a table that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table differs from the results")
    check, text = parser.parse_args().check, README.read_text(encoding="utf-8")
    now = rewritten(text)
    if check:
        print("Differs: README.md" if now != text else "README.md has the table of the results.")
        return int(now != text)
    README.write_text(now, encoding="utf-8")
    figure()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
