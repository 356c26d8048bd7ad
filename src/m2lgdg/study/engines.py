"""Where cells run: one after the other, in local processes (joblib), or on a Dask cluster. Same work, same results.

An engine takes items and a function and yields (item, result) as they finish; the study runner neither knows nor cares how.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, Literal, TypeVar

from m2lgdg.storage import InputError, one_line

Engine = Literal["serial", "joblib", "dask"]
Item = TypeVar("Item")
Work = Callable[[Any], str | None]  # returns the reason of a failure, or None


def serial(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """One after the other, in this process."""
    for item in items:
        yield item, work(item)


def processes(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """In `jobs` processes of this machine. Where one is killed the others end too: what they had not done is told as lost."""
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=jobs, return_as="generator_unordered", initializer=_deaf_to_interrupts)
    left = dict(enumerate(items))
    try:
        for position, result in pool(delayed(_numbered)(work, i, item) for i, item in enumerate(items)):
            yield left.pop(position), result
    except BrokenExecutor:
        reason = (
            "worker lost: a process was killed, perhaps for want of memory; run the same again, with fewer --jobs if need be"
        )
        yield from ((item, reason) for item in left.values())


def _deaf_to_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal: this one is ended by its parent, instead of telling of it in a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _numbered(work: Work, position: int, item: Any) -> tuple[int, str | None]:
    return position, work(item)


def dask(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Iterator[tuple[Item, str | None]]:
    """On the cluster of a scheduler's address, or on a cluster of `jobs` local worker processes started for the occasion.

    The workers must see the study's folder and the cohort file under the same paths.
    """
    try:
        from dask import distributed
    except ImportError:
        raise InputError("the dask engine needs the extra: pip install 'm2lgdg[cluster]'.") from None
    api: Any = distributed
    # Dask's page is off; what is left of its web server takes any free port of this machine, so that no two studies meet there.
    quiet = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
    own = None if scheduler else api.LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True, **quiet)
    try:
        client = api.Client(scheduler or own, timeout="20s")
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler} ({one_line(error)}).") from None
    try:
        waiting = {client.submit(work, item, pure=False): item for item in items}
        for future in api.as_completed(list(waiting)):
            lost = future.exception()  # the work itself never raises, so this is the worker's end
            yield waiting[future], f"worker lost: {one_line(lost)}" if lost else future.result()
    finally:
        client.close()
        if own is not None:
            own.close()


ENGINES: dict[str, Callable[..., Iterator[tuple[Any, str | None]]]] = {"serial": serial, "joblib": processes, "dask": dask}
