"""What this installation can do: versions, devices, threads, and what is missing for which command.

`m2lgdg doctor` prints it, and people paste it into reports of problems: it has no path, user or host name.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from m2lgdg.storage import EXTRAS, importable, install_command, missing_libraries

CORE = ("numpy", "scipy", "pandas", "scikit-learn", "matplotlib", "nilearn", "nibabel", "pydantic", "typer", "safetensors")
USES = {  # extra -> what needs it
    "networks": "network methods in run, fit, predict and explain",
    "onnx": "export to ONNX",
    "serve": "serve",
    "cluster": "run --engine dask and run --scheduler",
    "skops": "saved models of scikit-learn estimators",
    "optuna": "ranges in [tune] of study files",
    "matlab": "MATLAB 7.3 files",
    "federated": "federate",
    "flower": "federated training over a network",
}
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def examine() -> dict[str, Any]:
    """Versions, devices, threads, extras and problems of this installation, as plain values."""
    from m2lgdg import __version__

    optional = dict.fromkeys(name for names in EXTRAS.values() for name in names)
    return {
        "m2lgdg": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: _version(name) for name in (*CORE, *optional, "triton")},
        "cores": available_cores(),
        "threads": _blas_threads(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "devices": _devices(),
        "file_locks": importable("fcntl"),
        "extras": {
            extra: {"for": use, "missing": missing_libraries(extra), "install": install_command(extra)}
            for extra, use in USES.items()
        },
        "problems": problems(),
    }


def problems() -> list[str]:
    """Requirements of the package itself that are not met, one sentence each."""
    from packaging.requirements import Requirement

    try:
        listed = [Requirement(line) for line in requires("m2lgdg") or []]
    except PackageNotFoundError:  # run from a folder without an installation
        return []
    sentences = []
    for requirement in listed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None:
            sentences.append(f"{requirement.name} is not installed; m2lgdg needs {requirement}.")
        elif not requirement.specifier.contains(installed, prereleases=True):
            sentences.append(f"{requirement.name} {installed} is installed; m2lgdg needs {requirement}.")
    return sentences


def available_cores() -> int:
    """CPU cores that this process may use, which a cluster can limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return None


def _blas_threads() -> dict[str, int]:
    import scipy.linalg  # noqa: F401  (loads the libraries)
    from threadpoolctl import threadpool_info

    return {f"{pool['internal_api']} {pool.get('version') or ''}".strip(): pool["num_threads"] for pool in threadpool_info()}


def _devices() -> list[dict[str, Any]]:
    """Names for --device, with model and memory of each GPU."""
    cpu: dict[str, Any] = {"name": "cpu", "model": platform.machine()}
    if "torch" in missing_libraries("networks"):
        return [cpu]
    import torch

    found = [cpu]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(i)
        found.append({"name": f"cuda:{i}", "model": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
    return [*found, {"name": "mps", "model": "Apple"}] if torch.backends.mps.is_available() else found
