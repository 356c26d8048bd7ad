"""What phenotypes say of the label at each site, as a figure of the report's section on the data.

The numbers are those of `data/phenotype_slopes.py`, which a study folder keeps in cohort.json.
"""

from __future__ import annotations

from m2lgdg.report.contents import Contents
from m2lgdg.report.data import MOST_SITES
from m2lgdg.report.drawing import FAINT, WIDTH, Figure, Sheet, colour, draw, short

MOST_INPUTS, INPUTS_ACROSS = 9, 3
FARTHEST = 6.0  # sd that an axis shows; what is beyond is an arrow


def phenotype_slopes(contents: Contents) -> Figure | None:
    """Patients minus controls in each input at each site, with intervals; None if fewer than two sites are known."""
    known = {column: by_site for column, by_site in contents.description.get("slopes", {}).items() if len(by_site) > 1}
    if not known:
        return None
    sizes = {name: group["subjects"] for name, group in contents.description.get("sites", {}).items()}
    every = {site for by_site in known.values() for site in by_site}
    sites = sorted(every, key=lambda site: (-sizes.get(site, 0), site))[:MOST_SITES]
    columns, lines = list(known)[:MOST_INPUTS], -(-len(list(known)[:MOST_INPUTS]) // INPUTS_ACROSS)
    most = min(max(abs(end) for column in columns for row in known[column].values() for end in row), FARTHEST)

    def paint(sheet: Sheet) -> None:
        axes = sheet.canvas.subplots(lines, min(len(columns), INPUTS_ACROSS), squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat[len(columns) :]:
            axis.remove()
        for axis, column in zip(axes.flat, columns, strict=False):
            axis.axvline(0, color=FAINT, lw=1, ls=":")
            for y, site in enumerate(sites):
                if site in known[column]:
                    value, low, high = known[column][site]
                    hue = FAINT if low <= 0 <= high else colour(1 if value > 0 else 0)
                    axis.plot([low, high], [y, y], color=hue, lw=1.3)
                    shape = "o" if abs(value) <= most else ">" if value > 0 else "<"
                    (dot,) = axis.plot([min(max(value, -most), most)], [y], shape, color=hue, ms=4.5)
                    sheet.tip(dot, f"{column}, {site}: {value:+.2f} sd (95 % interval {low:+.2f} to {high:+.2f})")
            axis.set_title(short(column, 20), fontsize=10)
            axis.set_yticks(range(len(sites)), [short(site, 14) for site in sites], fontsize=9)
            axis.set(xlim=(-1.05 * most, 1.05 * most), ylim=(len(sites) - 0.5, -0.5))
        for i in range(max(len(columns) - axes.shape[1], 0), len(columns)):  # nothing below it
            axes.flat[i].tick_params(labelbottom=True)
        sheet.canvas.supxlabel("patients minus controls (sd)", fontsize=9)

    caption = (
        "What inputs say of the label at each site: patients minus controls in units of the sd within sites and classes (the "
        "log odds per sd of a linear discriminant), with 95 % t intervals; largest site first. Coloured: intervals without 0, "
        "blue below and orange above. If a direction is not the same everywhere, it may not hold at a new site."
    )
    left = [f"the first {MOST_INPUTS} of {len(known)} inputs"] if len(known) > MOST_INPUTS else []
    left += [f"the {MOST_SITES} largest of {len(every)} sites"] if len(every) > MOST_SITES else []
    caption += f" Shown are {' and '.join(left)}." if left else ""
    size = (WIDTH, 0.9 + lines * (0.4 + 0.19 * len(sites)))
    return draw("phenotype-slopes", caption, "Patients minus controls in each input at each site", size, paint)
