"""Run a function for many subjects in parallel, with bit-identical results for any number of threads.

Used by `connectivity` and `preprocess`, whose matrices are too small for the threads of BLAS to be efficient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results of `work` for each item, in order, on as many threads as BLAS has (numpy releases Python's lock)."""
    from threadpoolctl import threadpool_info, threadpool_limits

    threads = min((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
    with threadpool_limits(1, "blas"):  # also for one item: the last bits of a product depend on the number of BLAS threads
        if min(threads, len(items)) <= 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, items)
