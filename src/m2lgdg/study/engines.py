"""Engines that run cells: serially, in local processes (joblib), or on a Dask cluster, with identical results.

An engine takes items and a function, and yields (item, result) to the study runner in the order in which they finish. An error
that the function raises ends the run, and so does closing the generator.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from typing import Any, Literal, TypeVar

from m2lgdg.storage import InputError, needing, one_line

Engine = Literal["serial", "joblib", "dask"]
Item = TypeVar("Item")
Results = Generator[tuple[Item, str | None], None, None]
Work = Callable[[Any], str | None]  # returns the reason for a failure, or None
PATIENCE = 30  # seconds without any worker of its own, after which a run with Dask gives up
WORKER_LOST = (
    "worker lost: its process was killed, perhaps for lack of memory; run the same command again, with fewer --jobs if it "
    "happens again"
)


def serial(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Results[Item]:
    """Run the items one after another in this process."""
    for item in items:
        yield item, work(item)


def processes(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Results[Item]:
    """Run in `jobs` local processes. If one is killed its item is reported as lost, and a new process takes its place."""
    workers = _Workers(items, work, jobs)
    try:
        for i in range(min(jobs, len(items))):
            workers.start_next(i)
        while workers.running:
            for future in futures.wait(workers.running, return_when=futures.FIRST_COMPLETED).done:
                i, item = workers.running.pop(future)
                if workers.waiting:
                    workers.start_next(i)
                lost = isinstance(future.exception(), futures.BrokenExecutor)
                yield item, WORKER_LOST if lost else future.result()
    finally:
        workers.close()


class _Workers:
    """Pools of one process each, so that a lost process takes only its own item with it; each keeps to one target."""

    def __init__(self, items: Sequence[Any], work: Work, jobs: int) -> None:
        self.waiting, self.work, self.environment = list(items), work, _worker_environment(jobs)
        self.targets: dict[int, Any] = {}  # last target of each process
        self.pools: dict[int, Any] = {}
        self.running: dict[futures.Future[str | None], tuple[int, Any]] = {}  # pool and item

    def take(self, i: int) -> Any:
        """Next item for the i-th process: of its own target, else of one that no process has, else any."""
        targets = [getattr(item, "target", None) for item in self.waiting]
        taken = set(self.targets.values())
        same = (k for k, target in enumerate(targets) if i in self.targets and target == self.targets[i])
        free = (k for k, target in enumerate(targets) if target not in taken)
        chosen = next(same, next(free, 0))
        self.targets[i] = targets[chosen]
        return self.waiting.pop(chosen)

    def start_next(self, i: int) -> None:
        """Run the next item in the i-th process, which is started if there is none or the last one was lost."""
        item = self.take(i)
        try:
            future = self.pools[i].submit(self.work, item)
        except (KeyError, futures.BrokenExecutor):
            from joblib.externals.loky import ProcessPoolExecutor

            self.pools[i] = ProcessPoolExecutor(max_workers=1, initializer=_prepare_worker, env=self.environment)
            future = self.pools[i].submit(self.work, item)
        self.running[future] = (i, item)

    def close(self) -> None:
        """End all processes, those that run an item by force."""
        for future in self.running:  # loky fails in a thread of its own if a pool is killed before it has taken its item
            while not (future.running() or future.done()):
                time.sleep(0.001)
        for pool in self.pools.values():
            pool.shutdown(kill_workers=bool(self.running))


def _worker_environment(jobs: int) -> dict[str, str]:
    """Threads of numerical libraries in a worker: an equal number of the cores, unless the user has set another number."""
    from joblib import cpu_count

    threads = str(max(cpu_count() // jobs, 1))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return {name: os.environ.get(name, threads) for name in (*names, "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS")}


def _prepare_worker() -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends this one, so that it prints no traceback."""
    from joblib.externals.loky import process_executor

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_executor._MAX_MEMORY_LEAK_SIZE = sys.maxsize  # PyTorch and a cohort that were loaded are not a leak


def dask(items: Sequence[Item], work: Work, jobs: int, scheduler: str | None) -> Results[Item]:
    """Run on the cluster at a scheduler's address, or on a temporary cluster of `jobs` local worker processes.

    The workers must see the study folder and the cohort file under the same paths.
    """
    with needing("cluster", "engine dask"):
        from dask import distributed
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
        completed, alive = api.as_completed(list(waiting)), time.monotonic()
        while waiting:
            batch = completed.next_batch(block=False)
            for future in batch:
                raised = future.exception()
                if isinstance(raised, InputError):  # it ends the run, such as a full disk
                    raise raised
                yield waiting.pop(future), f"worker lost: {one_line(raised)}" if raised else future.result()
            if batch or scheduler or client.scheduler_info()["workers"]:  # jobs of a cluster may still be in its queue
                alive = time.monotonic()
            elif time.monotonic() > alive + PATIENCE:
                yield from ((item, WORKER_LOST) for item in waiting.values())
                return
            time.sleep(0 if batch else 0.05)
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


ENGINES: dict[str, Callable[..., Results[Any]]] = {"serial": serial, "joblib": processes, "dask": dask}
