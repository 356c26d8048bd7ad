"""CPU time of a fit of the default with the tables of a cohort, as a ratio to a fit without them.

python benchmarks/structure_cost.py COHORT [REPEATS]: both fits in turn, each computing all features, in the first atlas.
"""

import sys
from time import process_time

import numpy as np

from m2lgdg import Cohort
from m2lgdg.methods import linear
from m2lgdg.registry import create


def seconds(cohort: Cohort, tables: str) -> float:
    """CPU time of one fit that shares nothing with the one before."""
    for shared in (linear._ROWS, linear._BLOCKS):
        shared.results.clear()
    begun = process_time()
    create("connectome-adaptive", phenotypes=True, tables=tables).fit(cohort)
    return process_time() - begun


if __name__ == "__main__":
    cohort = Cohort.load(sys.argv[1], in_memory=True)
    cohort = cohort.parcellation(cohort.atlases[0])
    ratios = []
    for repeat in range(int(sys.argv[2]) if sys.argv[2:] else 5):
        site = cohort.site_names[repeat % len(cohort.site_names)]
        source = cohort.select(cohort.sites != site)
        order = ("all", "none") if repeat % 2 else ("none", "all")
        spent = {}
        for tables in order:
            spent[tables] = seconds(source, tables)
        ratios.append(spent["all"] / spent["none"])
        print(f"without tables {spent['none']:.2f} s, with {', '.join(cohort.tables)} {spent['all']:.2f} s")
    print(f"median ratio {np.median(ratios):.3f}")
