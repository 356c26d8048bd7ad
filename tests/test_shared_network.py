"""The methods that stand on our own FC network: which they are, and that lists and tables say so."""

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS
from m2lgdg.methods.erm import SiteMethod
from m2lgdg.registry import FC_NETWORK


def test_the_list_is_that_of_the_classes():
    assert set(FC_NETWORK) == {name for name in METHODS if issubclass(METHODS[name], SiteMethod)}


@pytest.mark.parametrize("name", FC_NETWORK)
def test_each_says_so_in_its_first_line(name):
    assert "our FC network" in METHODS[name].__doc__.splitlines()[0]


def test_tables_have_a_footnote(typed, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {
            "method": method,
            "variant": "",
            "seed": 0,
            "target": site,
            "subject": f"{site}{i}",
            "label": i % 2,
            "proba": rng.random(),
        }
        for method in ("mixup", "fc-logistic", "cdann")
        for site in ("a", "b", "c")
        for i in range(12)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "predictions.csv", index=False)
    code, printed, _ = typed("table", tmp_path)
    assert code == 0
    (line,) = [line for line in printed.splitlines() if "own FC network" in line]
    assert "mixup, cdann: the algorithm on m2lgdg's own FC network" in line and "fc-logistic:" not in line
