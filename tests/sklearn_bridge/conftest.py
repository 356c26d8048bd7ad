"""The cohort and the fold that the tests of the bridge share."""

import pytest

import m2lgdg
from m2lgdg.splits import leave_one_site_out


@pytest.fixture(scope="session")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=2.0)


@pytest.fixture(scope="session")
def fold(cohort):
    return next(iter(leave_one_site_out(cohort)))
