"""The tables of atlases against real scans: a shifted, permuted or mirrored table would not fit their connectivity.

Connectivity falls with the distance between two regions, and a region is strongly connected with its mirror image. The series
are those of the folder that M2LGDG_ABIDE names, of each atlas that it holds.
"""

import numpy as np
import pytest
from scipy.stats import spearmanr

from m2lgdg.data.atlases import regions, roi_names
from m2lgdg.data.readers.arrays import read_table

SCANS = 40
# Highest rank correlation of FC and distance, and lowest proportion of regions with their partner among the five strongest.
MEASURED = {"aal": (-0.45, 0.9), "ho": (-0.38, 0.75), "cc200": (-0.33, 0.75), "ez": (-0.44, 0.8), "tt": (-0.4, 0.85)}
MEASURED["dosenbach160"] = (-0.22, 0.5)


@pytest.fixture(scope="module", params=MEASURED)
def scanned(request, abide_folder):
    """Atlas, its table in the order of the files, and the mean FC of some scans."""
    atlas = request.param
    paths = sorted(abide_folder.glob(f"**/*_rois_{atlas}.1D"))
    paths = paths[:: max(1, len(paths) // SCANS)][:SCANS]
    if len(paths) < 36:
        pytest.skip(f"the folder has no series of atlas {atlas}")
    read = [read_table(path) for path in paths]
    (header,) = {tuple(header) for header, _ in read}
    table = regions(atlas)
    assert header == tuple(table["code"])
    assert roi_names(header, atlas) == tuple(table["name"])
    with np.errstate(all="ignore"):
        matrices = [np.corrcoef(series.T.astype(float)) for _, series in read]  # nan for a flat ROI
    return atlas, table, np.nanmean(np.arctanh(np.clip(matrices, -0.999, 0.999)), axis=0)


def fall(matrix, places):
    """Rank correlation of FC and distance."""
    rows, columns = np.triu_indices(len(places), 1)
    distance = np.linalg.norm(places[rows] - places[columns], axis=1)
    return spearmanr(matrix[rows, columns], distance, nan_policy="omit").statistic


def test_connectivity_falls_with_distance(scanned):
    atlas, table, matrix = scanned
    places = table[["x", "y", "z"]].to_numpy()
    here = fall(matrix, places)
    assert here < MEASURED[atlas][0]
    assert here < fall(matrix, np.roll(places, 1, axis=0)) - 0.05
    assert here < fall(matrix, np.roll(places, 2, axis=0)) - 0.05
    assert abs(fall(matrix, np.random.default_rng(0).permutation(places))) < 0.1


def test_a_region_is_connected_with_its_mirror_image(scanned):
    atlas, table, matrix = scanned
    places = table[["x", "y", "z"]].to_numpy()
    gaps = np.linalg.norm((places * [-1, 1, 1])[:, None] - places[None], axis=2)
    np.fill_diagonal(gaps, np.inf)
    partner = gaps.argmin(axis=1)
    others = np.where(np.eye(len(table), dtype=bool), -np.inf, np.nan_to_num(matrix, nan=-1.0))
    ranks = (others > others[np.arange(len(table)), partner][:, None]).sum(axis=1) + 1
    lateral = table["x"].abs() > 8
    assert (ranks[lateral] <= 5).mean() > MEASURED[atlas][1]
