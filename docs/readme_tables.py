"""The table of results and the figure of README.md, from the committed predictions.

Usage: python docs/readme_tables.py [--check]. The table is written between `<!-- results -->` and `<!-- end of results -->`,
the figure to docs/images/forest.png and forest-dark.png. With --check nothing is written, and a table that differs from the
results is reported.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from page_tables.atlases import UNSEEN
from page_tables.committed import ALL_SITES, TARGETS, Model, as_in_paper, by_seed, by_site, predictions
from scipy.stats import t as student

from m2lgdg.metrics import delong_interval, delong_test
from m2lgdg.registry import PAPER, SIMPLE, load_methods
from m2lgdg.study.stats import holm

ROOT = Path(__file__).resolve().parents[1]
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "images" / "forest.png"
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.S)
SHADES = {"light": ("#1f2328", "white", "#5b6570"), "dark": ("#e6edf3", "none", "#9aa4af")}  # text, page, grey
LINEAR, NETWORK = "#2f81c7", "#d9822b"  # readable on both


# The table


def at_target(target: str, *models: Model) -> str:
    """Mean AUC over seeds at a site, with its sd if there are several seeds."""
    values = by_seed(*models)[target]
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def over_sites(*models: Model) -> str:
    """Mean AUC over all sites of a study, with their number."""
    values = by_site(*models)
    return f"{values.mean():.1f} ({len(values)})"


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
        f"Of {len(tests)} DeLong tests of `m2lgdg` against {len(rivals)} methods of the paper, twelve of them without "
        f"phenotypes, "
        f"{('none', 'one')[len(remaining)] if len(remaining) < 2 else len(remaining)} "
        f"{'remains' if len(remaining) < 2 else 'remain'} after Holm's correction"
        f"{': ' if remaining else ''}{', '.join(remaining)}."
    )
    return intervals, sentence


def table() -> str:
    """The results that matter, and a sentence on what two sites can decide."""
    network = [(study, "m2lgdg-connectome", "") for study in ("paper/connectome", "all-sites/connectome")]
    newest = [f"abide-structure/{study}" for study in ("paper", "linear")]
    default = [(f"abide-default/{study}", "connectome-adaptive", "phenotypes") for study in ("paper", "linear")]
    former = [(study, "connectome-adaptive", "scan-phenotypes") for study in newest]
    structure = [(study, "connectome-adaptive", "phenotypes") for study in newest]
    logistic = [(study, "fc-logistic", "phenotypes") for study in ("paper/linear", "all-sites/linear")]
    without_brain = [(study, "phenotype-logistic", "") for study in newest]

    def row(title: str, *models: list[Model]) -> list[str]:
        """Values of a model at the paper's sites and at all, each from its study; of several models, of their mean logit."""
        two, every = zip(*models, strict=True)
        return [title, *(at_target(target, *two) for target in TARGETS), over_sites(*every)]

    paper = row("[`m2lgdg`](docs/results.md), the paper's", [("paper/networks", "m2lgdg", ""), (ALL_SITES, "m2lgdg", "")])
    intervals, sentence = two_sites()
    rows = [
        [paper[0], *(f"{paper[i]} [{published(target)}]" for i, target in enumerate(TARGETS, start=1)), paper[3]],
        ["... 95 % interval of its five trainings, averaged", *intervals, ""],
        row("[`m2lgdg-connectome`](docs/choosing.md), on connectomes", network),
        row("[`connectome-adaptive`](docs/connectome-adaptive.md), the default", default),
        row("... with [brain structure](docs/structure.md)", structure),
        row("[both](docs/choosing.md#at-20-sites), variant `plus`", network, former),
        [
            "... with [brain structure, in two atlases](docs/structure.md#in-the-network)",
            *("", ""),
            over_sites(("abide-structure/plus", "m2lgdg-connectome", "")),
        ],
        row("[`fc-logistic`](docs/methods.md), a linear peer", logistic),
        row("[phenotypes alone](docs/trust.md#baselines-without-imaging)", without_brain),
        [
            "[depression](docs/rest-meta-mdd.md) (REST-meta-MDD, connectomes): the default",
            *("", ""),
            over_sites(("rest-meta-mdd-connectomes/linear", "connectome-adaptive", "phenotypes")),
        ],
        [
            "[ABIDE II](docs/choosing.md#three-data-sets) (352 ROIs): the default",
            *("", ""),
            over_sites(("abide-ii/linear", "connectome-adaptive", "phenotypes")),
        ],
    ]
    lines = [["AUC in percent", *TARGETS, "all sites"], ["---"] * 4, *rows]
    grid = "".join(re.sub(r" +", " ", f"| {' | '.join(line)} |\n") for line in lines)
    four = [f"{by_site(models[1])[list(UNSEEN)].mean():.1f}" for models in (network, default)]
    sentence += " At the four sites of 20 on which nothing was chosen, "
    sentence += "`m2lgdg-connectome` has {}, the default {}.".format(*four)
    return grid + "\n" + textwrap.fill(sentence, 100, break_on_hyphens=False) + "\n"


# The figure


def forest_rows(study: str = ALL_SITES) -> pd.DataFrame:
    """Mean AUC over sites and half its 95 % interval for each method and variant of a study, the best method first."""
    config = json.loads((ROOT / "results" / study / "study.json").read_text(encoding="utf-8"))
    rows = []
    for method, variant in predictions(study)[["method", "variant"]].drop_duplicates().itertuples(index=False):
        if method == "prior" or variant not in ("", "phenotypes"):
            continue
        sites = by_site((study, method, variant))
        half = student.ppf(0.975, len(sites) - 1) * sites.std(ddof=1) / np.sqrt(len(sites))
        alone = method in load_methods().with_role("phenotypes")
        sees = alone or variant == "phenotypes" or config["method"].get(method, {}).get("phenotypes") is not False
        rows.append([method, sees, sites.mean(), half, len(sites)])
    frame = pd.DataFrame(rows, columns=["method", "phenotypes", "mean", "half", "sites"])
    return frame.assign(best=frame.groupby("method")["mean"].transform("max")).sort_values(
        ["best", "phenotypes"], ascending=False
    )


def kind(method: str) -> str:
    """Kind of a method, as the legend names it."""
    known = load_methods()
    if method in known.with_role("phenotypes"):
        return "no brain"
    return "linear on connectivity" if method in known.with_role(*SIMPLE) else "network"


def figure(path: Path = FIGURE) -> None:
    """Forest plot of all methods, for light pages and, as NAME-dark.png, for dark ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    frame = forest_rows()
    for shade, (text, page, grey) in SHADES.items():
        colours = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
        with plt.rc_context({"font.size": 12, **colours}):
            drawn = _forest(frame, {"linear on connectivity": LINEAR, "network": NETWORK, "no brain": grey})
            target = path if shade == "light" else path.with_stem(f"{path.stem}-dark")
            drawn.savefig(target, dpi=160, facecolor=page, metadata={"Software": None})
            plt.close(drawn)


def _forest(frame: pd.DataFrame, colours: dict[str, str]) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names, grey = list(dict.fromkeys(frame["method"])), colours["no brain"]
    drawn, axes = plt.subplots(figsize=(7.6, 0.3 * len(names) + 1.6), layout="constrained", facecolor="none")
    for row in frame.itertuples():
        pair = (frame["method"] == row.method).sum() > 1
        y = names.index(row.method) + (0 if not pair else -0.17 if row.phenotypes else 0.17)
        own = colours[kind(row.method)]
        style = {"color": own, "markerfacecolor": own if row.phenotypes else "none", "markeredgewidth": 1.5, "elinewidth": 1.8}
        axes.errorbar(row.mean, y, xerr=row.half, fmt="o", markersize=5.5, **style)
    axes.axvline(50, color=grey, linewidth=1, linestyle=":")
    axes.text(50.3, len(names) - 0.42, "chance", va="bottom", fontsize=10.5)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), facecolor="none")
    axes.set_xlabel(f"AUC (%) at left-out sites: mean of {frame['sites'].max()} sites, 95 % interval")
    axes.tick_params(length=0)
    axes.grid(axis="x", color=grey, alpha=0.25)
    axes.spines[:].set_visible(False)
    handles = [Line2D([], [], color=own, linewidth=3, label=name) for name, own in colours.items()]
    for label, face in (("with phenotypes", grey), ("scan alone", "none")):
        handles.append(Line2D([], [], color=grey, marker="o", markerfacecolor=face, linewidth=0, label=label))
    drawn.legend(
        handles=handles, frameon=False, fontsize=11, ncols=5, loc="outside upper center", columnspacing=1, handlelength=1
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
