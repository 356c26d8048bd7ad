"""Synthetic cohorts of a preset, made once and kept in the machine's temporary folder: what several benchmarks measure on."""

import tempfile
from pathlib import Path

import m2lgdg


def preset_path(name="rest-meta-mdd"):
    """The file of a synthetic cohort."""
    path = Path(tempfile.gettempdir()) / f"m2lgdg-{name}-{m2lgdg.__version__}.cohort"
    if not path.exists():
        m2lgdg.make_cohort(name).save(path)
    return path


def preset(name="rest-meta-mdd"):
    """The cohort, memory-mapped."""
    return m2lgdg.Cohort.load(preset_path(name))
