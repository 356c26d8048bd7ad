"""Numbers in messages: exact totals, bounds, and the kinds of sums."""

from pathlib import Path

import numpy as np
import pytest

from m2lgdg.federated import sums
from m2lgdg.federated.plan import SUMS, Form
from m2lgdg.federated.site import KINDS
from m2lgdg.storage import InputError

DOCS = Path(__file__).parents[2] / "docs" / "federated.md"


@pytest.mark.parametrize("size", [5, 8])
def test_sums_are_exact_in_any_order(size):
    form = Form((3, 4), np.full((3, 1), 1000.0), size)
    values = np.random.default_rng(0).uniform(-30, 30, (20, 3, 4))
    arrays = [sums.to_bytes(sums.to_words(one, form, ""), form) for one in values]
    total = sums.add(arrays, form)
    assert (sums.add(arrays[::-1], form) == total).all()
    np.testing.assert_allclose(sums.to_numbers(total, form), values.sum(axis=0), atol=20 * 1000 * 2.0 ** (2 - 8 * size))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 11.0])
def test_values_that_no_sum_may_have(bad):
    with pytest.raises(InputError, match="sum of ages"):
        sums.to_words(np.array([bad]), Form((1,), np.array(10.0)), "sum of ages")


def test_every_kind_of_sum_is_explained():
    assert set(SUMS) == set(KINDS)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert set(SUMS) <= {row.split("`")[1] for row in rows}
