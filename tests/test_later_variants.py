"""A study that ran before a method had a variant lacks no cells of it."""

import pandas as pd

from m2lgdg import make
from m2lgdg.report.contents import missing_cells


def test_a_variant_of_a_field_that_did_not_exist_is_not_missing():
    rows = [{"method": name, "variant": "", "seed": 0, "target": "a"} for name in ("cdann", "fc-logistic")]
    rows.append({"method": "fc-logistic", "variant": "phenotypes", "seed": 0, "target": "a"})
    now = {name: make(name).fields() for name in ("cdann", "fc-logistic")}
    study = {"methods": list(now), "seeds": [0], "targets": ["a"], "variants": ["phenotypes"], "method": now}
    assert missing_cells(pd.DataFrame(rows), study) == ["1 cell of cdann"]
    before = {field: value for field, value in now["cdann"].items() if field != "phenotypes"}
    assert missing_cells(pd.DataFrame(rows), study | {"method": now | {"cdann": before}}) == []
    assert missing_cells(pd.DataFrame(rows[:2]), study | {"method": now | {"cdann": before}}) == ["1 cell of fc-logistic"]
