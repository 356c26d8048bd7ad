"""Run a function for many subjects in parallel, with bit-identical results for any number of threads.

Used by `connectivity` and `preprocess`, whose matrices are too small for the threads of BLAS to be efficient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results of `work` for each item, in order, on as many threads as BLAS has (numpy releases Python's lock)."""
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")  # once, because it looks through all loaded libraries
    threads = _fewest_threads(blas.info())
    with blas.limit(
        limits=1, user_api="blas"
    ):  # also for one item: the last bits of a product depend on the number of BLAS threads
        if min(threads, len(items)) <= 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, items)


def _fewest_threads(pools: list[dict[str, Any]]) -> int:
    return min((int(pool["num_threads"]) for pool in pools), default=1)
