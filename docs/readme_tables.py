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
from page_tables.committed import (
    LITTLE_MOTION,
    NETWORK_AT_TWENTY,
    TARGETS,
    TWENTY,
    TWENTY_NETWORKS,
    Model,
    by_seed,
    by_site,
    complete,
    scores,
)
from page_tables.structure import LINEAR, LINEAR_BARE, TWO_ATLASES, TWO_BARE, added_to_the_default
from page_tables.three_sets import DEFAULT, DEPRESSION, FIVE, FOUR, NETWORK, PEER, chosen
from page_tables.writing import name, number
from page_tables.writing import table as lines_of
from scipy.stats import t as student

from m2lgdg.metrics import auc, delong_interval
from m2lgdg.registry import SIMPLE, load_methods

ROOT = Path(__file__).resolve().parents[1]
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "images" / "forest.png"
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.S)
SHADES = {"light": ("#1f2328", "white", "#5b6570"), "dark": ("#e6edf3", "none", "#9aa4af")}  # text, page, grey
SETS = {  # studies, and the sites that were kept out of the search
    "ABIDE I": ((TWENTY, NETWORK_AT_TWENTY, *TWENTY_NETWORKS), FOUR),
    "ABIDE II": (("abide-ii/linear", "abide-ii/peers", "abide-ii/network"), FIVE),
    "depression": ((f"{DEPRESSION}/linear", f"{DEPRESSION}/networks", f"{DEPRESSION}/genm", f"{DEPRESSION}/more"), []),
}
WITHOUT_BRAIN = tuple((study, "phenotype-logistic", "") for study in (TWENTY, "abide-ii/linear", f"{DEPRESSION}/linear"))
ALWAYS = ("m2lgdg", NETWORK, "mm-gtunets")  # networks that take phenotypes by default
ALL_PHENOTYPES = ("ABIDE I", "mm-gtunets")  # takes sex and age by default; the others have IQ there
BLUE, ORANGE = "#2f81c7", "#d9822b"  # readable on both


# The table


def published(target: str) -> str:
    """AUC of M²LG-DG in the paper."""
    table = pd.read_csv(ROOT / "studies" / "paper-abide.csv").set_index(["method", "target", "metric"])["value"]
    return f"{table['m2lgdg', target, 'AUC']:.1f}"


def table() -> str:
    """Mean AUC of models on three data sets, then what the paper's method is at its two sites."""
    rows = {
        "[`connectome-adaptive`](docs/connectome-adaptive.md), default": [chosen(DEFAULT)],
        "[`m2lgdg-connectome`](docs/choosing.md), a network": [chosen(NETWORK)],
        "both averaged (`plus`)": [chosen(NETWORK), chosen(DEFAULT)],
        "[`tangent-pearson-ridge`](docs/methods.md), linear": [chosen(PEER)],
        "[`fc-svm`](docs/methods.md), linear": [chosen("fc-svm")],
        "[`fc-logistic`](docs/methods.md), linear": [chosen("fc-logistic")],
        "phenotypes alone": [WITHOUT_BRAIN],
    }
    lines = []
    for title, models in rows.items():
        first, second, third = (by_site(*one) for one in zip(*models, strict=True))
        lines.append([title, *(number(part.mean()) for part in (first, first[FOUR], second, second[FIVE], third))])
    header = ["mean AUC in percent", "ABIDE I (20)", "4 of them", "ABIDE II (14)", "5 of them", "depression (12)"]
    parts = [*lines_of(header, lines), "", *wrapped(networks_sentence()), "", *wrapped(structure_sentence()), ""]
    return "\n".join([*parts, *paper_lines()]) + "\n"


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(text, 100, break_on_hyphens=False)


def networks_sentence() -> str:
    """The other networks of the figure at the 20 sites of ABIDE I."""
    frame = forest_rows().query("set == 'ABIDE I'")
    others = [row for row in frame.itertuples() if kind(row.method) == "network" and row.method != NETWORK]
    low, last = others[-2:]  # the last is at chance
    return (
        f"On ABIDE I, {len(others)} other networks ([hardly tuned](docs/results.md#fairness-of-the-comparison)) are below all "
        f"linear models of the scan: {name(last.method)} has {number(last.mean)}, the others {number(low.mean)} to "
        f"{number(others[0].mean)}."
    )


def paper_lines() -> list[str]:
    """M²LG-DG at the paper's sites: single trainings, their average, the paper, and phenotypes alone."""
    own: Model = ("paper/networks", "m2lgdg", "")
    trained, rows = by_seed(own), []
    alone = by_site((LITTLE_MOTION, "phenotype-logistic", ""))
    for target in TARGETS:
        labels, proba = scores(own, (target,)).to_numpy().T
        low, high = delong_interval(labels, proba)
        each = f"{number(trained[target].mean())} ± {number(trained[target].std(ddof=1))}"
        mean = f"{number(100 * auc(labels, proba))} ({100 * low:.0f} to {100 * high:.0f})"
        rows.append([target, each, mean, published(target), number(alone[target])])
    header = [f"{len(trained)} trainings", "averaged (95 %, DeLong)", "paper", "phenotypes alone"]
    return lines_of(["[`m2lgdg`](docs/results.md)", *header], rows)


def structure_sentence() -> str:
    """What brain structure adds at the 20 sites of ABIDE I."""
    means = [number(by_site(one).mean()) for one in (LINEAR, LINEAR_BARE, TWO_ATLASES, TWO_BARE)]
    one, two = (added_to_the_default()[row][-1] for row in ("all three", "all three, two atlases"))
    return (
        f"With [brain structure](docs/structure.md), its settings chosen on 16 of the sites, the default has {means[0]} "
        f"instead of {means[1]} (p {one}), in two atlases {means[2]} instead of {means[3]} (p {two}; both corrected)."
    )


# The figure


def forest_rows() -> pd.DataFrame:
    """Mean AUC over sites, half its 95 % interval and the mean at sites kept out of the searches, with phenotypes, by set."""
    rows = []
    for place, (studies, apart) in SETS.items():
        for study in studies:
            for _, method, variant in complete(study):
                always = method in ALWAYS or method in load_methods().with_role("phenotypes")
                wanted = "all-phenotypes" if (place, method) == ALL_PHENOTYPES else "" if always else "phenotypes"
                told = method == "prior" or [place, method] in [row[:2] for row in rows]
                if told or variant != wanted:
                    continue
                sites = by_site((study, method, variant))
                half = student.ppf(0.975, len(sites) - 1) * sites.std(ddof=1) / np.sqrt(len(sites))
                rows.append([place, method, sites.mean(), half, sites[apart].mean() if apart else np.nan, len(sites)])
    frame = pd.DataFrame(rows, columns=["set", "method", "mean", "half", "apart", "sites"])
    first = frame[frame["set"] == next(iter(SETS))].set_index("method")["mean"]  # then those that were not run there
    return frame.assign(order=frame["method"].map(first)).sort_values(["order", "mean"], ascending=False)


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
    size = (6.8, 0.28 * len(names) + 1.9)  # narrow, so that a phone can show its words
    drawn, panels = plt.subplots(1, len(SETS), figsize=size, layout="constrained", facecolor="none", sharey=True, sharex=True)
    for axes, place in zip(panels, SETS, strict=True):
        own = frame[frame["set"] == place]
        for row in own.itertuples():
            y, colour = names.index(row.method), colours[kind(row.method)]
            axes.errorbar(row.mean, y, xerr=row.half, fmt="o", markersize=5, color=colour, elinewidth=1.8)
            axes.plot(row.apart, y, "D", markersize=5, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.4)
        axes.axvline(50, color=grey, linewidth=1, linestyle=":")
        axes.set_title(f"{place}\n{own['sites'].max()} sites", fontsize=12)
        axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlim=(44, 89), facecolor="none")
        axes.tick_params(length=0)
        axes.grid(axis="x", color=grey, alpha=0.25)
        axes.spines[:].set_visible(False)
    title = (
        "AUC (%) at left-out sites: mean over sites and its 95 % interval; 50 is chance.\n"
        "No mark: not run with phenotypes. On ABIDE I most networks have one training."
    )
    drawn.supxlabel(title, fontsize=11, x=0.01, ha="left")
    handles = [Line2D([], [], color=own, linewidth=3, label=name) for name, own in colours.items()]
    diamond = {"marker": "D", "markersize": 5, "markerfacecolor": "none", "linewidth": 0}
    handles.append(Line2D([], [], color=grey, label="mean of sites kept out of our searches", **diamond))
    drawn.legend(
        handles=handles, frameon=False, fontsize=11, ncols=2, loc="outside upper center", columnspacing=1, handlelength=1
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
