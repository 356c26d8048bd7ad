"""Studies that the tests of federated training share."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hospitals import SIZES, answer_all, by_site, finish, make_study, study_of

import m2lgdg
from m2lgdg.federated import exchange
from m2lgdg.federated.simulation import simulate

pytest.importorskip("cryptography")


@pytest.fixture(scope="session")
def cohort():
    """Seven small hospitals with what real ones have: missing phenotypes and standardised scans."""
    tiny = m2lgdg.make_cohort("tiny", seed=3, sizes=SIZES)
    table = tiny.phenotypes.copy()
    table.loc[tiny.sites == "east", "education"] = np.nan
    table.iloc[2, table.columns.get_loc("age")] = np.nan
    table.iloc[20, table.columns.get_loc("sex")] = np.nan
    series = list(tiny.series)
    for i in (1, 30):
        series[i] = (series[i] - series[i].mean(axis=0)) / series[i].std(axis=0)
    return replace(tiny, phenotypes=table, series=series)


@pytest.fixture(scope="session")
def fitted(cohort):
    """The fit from sums in one process."""
    return simulate(study_of(cohort), by_site(cohort))


@pytest.fixture(scope="session")
def begun(cohort, tmp_path_factory):
    """Folders of a study at its fourth request, for tests that go on from there."""
    root = tmp_path_factory.mktemp("begun")
    make_study(cohort, root)
    for _ in range(3):
        answer_all(root)
        exchange.combine(root / "study")
    return root


@pytest.fixture
def root(begun, tmp_path):
    return Path(shutil.copytree(begun, tmp_path / "copy"))


@pytest.fixture(scope="session")
def finished(begun, tmp_path_factory):
    """Folders of the same study after its end; tests do not change them."""
    root = Path(shutil.copytree(begun, tmp_path_factory.mktemp("finished") / "copy"))
    finish(root)
    return root
