"""Table of README.md."""

from page_tables.committed import LINEAR, TARGETS, networks
from page_tables.results import FURTHER, both, everywhere
from page_tables.writing import block, name, table

PAGES = {"connectome-adaptive": "connectome-adaptive", "m2lgdg-connectome": "beyond", "m2lgdg": "m2lgdg"}


@block("readme-results")
def readme_results() -> list[str]:
    """All methods at NYU, USM and 18 sites, without / with phenotypes."""
    rows = []
    for method in (*reversed(LINEAR), "phenotype-logistic", *FURTHER, *networks()):
        marked = name(method) + (f" ([page](docs/{PAGES[method]}.md))" if method in PAGES else "")
        rows.append([marked, *(both(method, target) for target in TARGETS), everywhere(method)])
    return table(["method", *TARGETS, "18 sites, first cohort"], rows)
