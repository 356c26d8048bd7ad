"""The same work for many subjects, on as many threads as BLAS would take, with the same result for any number of them.

Used where a subject is a few small matrices: BLAS's own threads would spend their time on meeting each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def on_threads(work: Callable[[Given], Made], given: Sequence[Given]) -> Iterator[Made]:
    """What `work` makes of each, in order; numpy lets go of Python's lock while it computes."""
    from threadpoolctl import threadpool_info, threadpool_limits

    threads = min((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
    with threadpool_limits(1, "blas"):  # also for one subject: the last bits of a product depend on its number of threads
        if min(threads, len(given)) <= 1:
            yield from map(work, given)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, given)
