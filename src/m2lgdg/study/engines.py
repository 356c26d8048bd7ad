"""Engines that run cells: serially, in local processes (joblib), or on a Dask cluster, with identical results.

An engine takes items and a function, and yields (item, result) to the study runner in the order in which they finish.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, Literal, TypeVar

from m2lgdg.storage import InputError, one_line

Engine = Literal["serial", "joblib", "dask"]
Item = TypeVar("Item")
Work = Callable[[Any], str | None]  # returns the reason for a failure, or None


def serial(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """Run the items one after another in this process."""
    for item in items:
        yield item, work(item)


def processes(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """Run in `jobs` local processes. If one is killed the others end too, and unfinished items are reported as lost."""
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=jobs, return_as="generator_unordered", initializer=_ignore_interrupts)
    unfinished = dict(enumerate(items))
    try:
        for position, result in pool(delayed(_numbered)(work, i, item) for i, item in enumerate(items)):
            yield unfinished.pop(position), result
    except BrokenExecutor:
        reason = (
            "worker lost: a process was killed, perhaps for lack of memory; run the same command again, with fewer --jobs if "
            "it happens again"
        )
        yield from ((item, reason) for item in unfinished.values())


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends this one, so that it prints no traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _numbered(work: Work, position: int, item: Any) -> tuple[int, str | None]:
    return position, work(item)


def dask(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """Run on the cluster at a scheduler's address, or on a temporary cluster of `jobs` local worker processes.

    The workers must see the study folder and the cohort file under the same paths.
    """
    try:
        from dask import distributed
    except ImportError:
        raise InputError("engine dask needs an extra; install it with: pip install 'm2lgdg[cluster]'.") from None
    api: Any = distributed
    # The dashboard is off. The rest of Dask's web server takes any free local port, so that two studies do not collide.
    quiet = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
    cluster = None if scheduler else api.LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True, **quiet)
    try:
        client = api.Client(scheduler or cluster, timeout="20s")
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler} ({one_line(error)}).") from None
    try:
        waiting = {client.submit(work, item, pure=False): item for item in items}
        for future in api.as_completed(list(waiting)):
            lost = future.exception()  # the work itself never raises, so this is a lost worker
            yield waiting[future], f"worker lost: {one_line(lost)}" if lost else future.result()
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


ENGINES: dict[str, Callable[..., Iterator[tuple[Any, str | None]]]] = {"serial": serial, "joblib": processes, "dask": dask}
