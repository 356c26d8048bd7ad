"""How fast folders are read, checked and converted, by the code of an earlier commit and by this one, in one run.

Usage: python benchmarks/reading.py [--abide ABIDE_pcp] [--abide2 ABIDE_2] [--base 9f18e0d] [--only ptseries ...]
`ptseries`: series of 352 parcels, of `--abide2` or `--files` made ones whose headers are as long and differ in their history.
`dtseries`: 91,282 grayordinates with a parcellation. `pconn`: connectomes of 352 parcels. `text`: 1D files of `--abide`
(default: M2LGDG_ABIDE; left out without any), also beside numpy.loadtxt. One JSON line each: CPU milliseconds a file, without
imports. The earlier commit reads some of the files (`--some`) of ptseries, since a whole release takes it a quarter of an hour;
that of pconn is a later one, since 9f18e0d did not read connectomes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
from nibabel.cifti2 import BrainModelAxis, LabelAxis, ParcelsAxis, SeriesAxis

ROOT = Path(__file__).parents[1]
SURFACES = {"CIFTI_STRUCTURE_CORTEX_LEFT": 32492, "CIFTI_STRUCTURE_CORTEX_RIGHT": 32492}
GRID, AFFINE = (91, 109, 91), np.array([[-2.0, 0, 0, 90], [0, 2, 0, -126], [0, 0, 2, -72], [0, 0, 0, 1]])
BEFORE_CONNECTOMES, CONNECTOMES = "9f18e0d", "9b2ede4"  # commits
CHILD = """
import json, sys, time
import nibabel, nilearn, pandas, scipy, sklearn
import m2lgdg, m2lgdg.data.check, m2lgdg.data.readers
folder, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
times = [time.process_time()]
cohort = m2lgdg.read(folder, on_bad="exclude", **options)
times.append(time.process_time())
m2lgdg.data.check.check_cohort(cohort)
times.append(time.process_time())
cohort.save(out)
times.append(time.process_time())
print(json.dumps([len(cohort)] + [after - before for before, after in zip(times, times[1:])]))
"""


def unpacked(commit, scratch):
    """The source of a commit."""
    folder = scratch / commit
    if not folder.exists():
        folder.mkdir()
        archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder / "src"


def measured(source, folder, scratch, options):
    """CPU milliseconds a subject of reading, of check (which reads) and of convert (which reads)."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", CHILD, str(folder), str(scratch / "out.cohort"), json.dumps(options)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=scratch)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    (scratch / "out.cohort").unlink()
    count, read, check, save = json.loads(done.stdout.splitlines()[-1])
    return {name: 1000 * value / count for name, value in (("read", read), ("check", read + check), ("convert", read + save))}


def compared(what, sources, folders, scratch, **options):
    sides = {side: measured(source, folders[side], scratch, options) for side, source in sources.items()}
    ratios = {name: round(sides["base"][name] / value, 1) for name, value in sides["ours"].items()}
    sides = {side: {name: round(value, 2) for name, value in each.items()} for side, each in sides.items()}
    print(json.dumps({"what": what, "times less CPU": ratios, "CPU ms a file": sides}), flush=True)


def parcels(names):
    """A partition of two surfaces and of 19 boxes of voxels, whose XML is as long as that of a real file."""
    each = np.array_split(np.arange(59_000), len(names) - 19)  # without the medial wall
    sides = list(SURFACES)
    vertices = [{sides[int(some[0] >= 29_500)]: some % 29_500} for some in each] + [{}] * 19
    box = np.stack(np.meshgrid(np.arange(30, 42), np.arange(40, 52), np.arange(30, 40), indexing="ij"), -1).reshape(-1, 3)
    voxels = [np.zeros((0, 3), dtype=int)] * len(each) + [box + i for i in range(19)]
    return ParcelsAxis(names, voxels, vertices, AFFINE, GRID, SURFACES)


def grayordinates():
    axis = None
    for name in SURFACES:
        part = BrainModelAxis.from_surface(np.arange(29_705), SURFACES[name], name)
        axis = part if axis is None else axis + part
    mask = np.zeros(GRID, dtype=bool)
    mask.reshape(-1)[100_000 : 100_000 + 31_872] = True
    return axis + BrainModelAxis.from_mask(mask, name="CIFTI_STRUCTURE_THALAMUS_LEFT", affine=AFFINE)


def write(path, numbers, *axes, history=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = nibabel.Cifti2Header.from_axes(axes)
    header.matrix.metadata = nibabel.cifti2.Cifti2MetaData(
        {"ParentProvenance": f"wb_command -cifti-parcellate {history} " * 20}
    )
    nibabel.Cifti2Image(numbers, header).to_filename(path)


def people(folder, count):
    rows = [f"sub-{i:04d}\t{'ABCD'[i % 4]}\t{('patient', 'control')[i // 4 % 2]}\n" for i in range(count)]
    (folder / "participants.tsv").write_text("participant_id\tsite\tdiagnosis\n" + "".join(rows))
    (folder / "dataset_description.json").write_text('{"Name": "made", "BIDSVersion": "1.8.0"}')


def made(folder, count, kind, names):
    """A folder of BIDS derivatives. The XML of the first file is that of all but for the history, so it is written once."""
    random, suffix = np.random.default_rng(0), {"ptseries": "timeseries", "dtseries": "bold", "pconn": "boldmap"}[kind]
    shape = {"ptseries": (180, len(names)), "dtseries": (40, 91_282), "pconn": (len(names), len(names))}[kind]
    axis = grayordinates() if kind == "dtseries" else parcels(names)
    first = axis if kind == "pconn" else SeriesAxis(0, 2.0, shape[0])
    content = b""
    for i in range(count):
        path = folder / f"sub-{i:04d}" / "func" / f"sub-{i:04d}_task-rest_seg-Gordon_{suffix}.{kind}.nii"
        series = random.normal(size=(150, shape[1]) if kind == "pconn" else shape)
        numbers = (np.corrcoef(series.T) if kind == "pconn" else series).astype(np.float32)
        if not content:
            write(path, numbers, first, axis, history=f"sub-{i:04d}")
            content = path.read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = numbers.tobytes(order="F")
        path.write_bytes(content[: -len(stored)].replace(b"sub-0000", f"sub-{i:04d}".encode()) + stored)
    people(folder, count)
    return folder


def some_of(folder, count, scratch):
    """The same folder with some of its CIFTI-2 files, which are links."""
    part = scratch / "some"
    files = sorted(folder.glob("**/*.ptseries.nii"))
    for file in folder.glob("**/*"):
        if file.is_file() and (file not in files or file in files[:: max(len(files) // count, 1)][:count]):
            target = part / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    return part


def beside_loadtxt(folder):
    import m2lgdg

    files = sorted(folder.glob("**/*_rois_aal.1D"))
    size = sum(len(file.read_bytes()) for file in files)  # both sides then read from the page cache
    times = {}
    reading = {
        "loadtxt": lambda: [np.loadtxt(file) for file in files],
        "read": lambda: m2lgdg.read(folder, atlas="aal", on_bad="exclude"),
    }
    for name, work in reading.items():
        start = time.process_time()
        work()
        times[name] = round(time.process_time() - start, 2)
    found = {"what": "beside loadtxt", "files": len(files), "megabytes": round(size / 1e6, 1), "CPU seconds": times}
    print(json.dumps(found | {"times faster": round(times["loadtxt"] / times["read"], 2)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--abide", type=Path, default=os.environ.get("M2LGDG_ABIDE"))
    parser.add_argument("--abide2", type=Path)
    parser.add_argument("--base", default=BEFORE_CONNECTOMES)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--some", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=["ptseries", "dtseries", "pconn", "text"])
    options = parser.parse_args()
    from m2lgdg.data.atlases import regions

    names = list(regions("gordon352")["name"])
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sources = {"base": unpacked(options.base, scratch), "ours": ROOT / "src"}
        if "ptseries" in options.only:
            real = options.abide2 and options.abide2.resolve()
            whole = real or made(scratch / "ptseries", options.files, "ptseries", names)
            folders = {"base": some_of(whole, options.some, scratch), "ours": whole}
            table = next(iter(sorted(whole.glob("**/ABIDEII_Composite_Phenotypic*.csv"))), None)
            given = {"kind": "abide-ii", "participants": str(table)} if table else {}
            compared("ptseries", sources, folders, scratch, **given)
            shutil.rmtree(scratch / "ptseries", ignore_errors=True)
        if "dtseries" in options.only:
            folder = made(scratch / "dtseries", options.some // 2, "dtseries", names)
            labels = {i: (f"roi {i}", (1, 1, 1, 1)) for i in range(353)}
            keys = np.sort(np.arange(91_282) % 353)[None].astype(np.float32)
            write(scratch / "atlas.dlabel.nii", keys, LabelAxis(["parcels"], [labels]), grayordinates())
            image = str(scratch / "atlas.dlabel.nii")
            compared("dtseries", sources, dict.fromkeys(sources, folder), scratch, atlas_image=image)
            shutil.rmtree(folder)
        if "pconn" in options.only:
            if options.base == BEFORE_CONNECTOMES:
                sources["base"] = unpacked(CONNECTOMES, scratch)
            folder = made(scratch / "pconn", options.some, "pconn", names)
            compared("pconn", sources, dict.fromkeys(sources, folder), scratch, kind="connectomes")
            sources["base"] = unpacked(options.base, scratch)
        if "text" in options.only and options.abide:
            folder = Path(options.abide).resolve()
            compared("text", sources, dict.fromkeys(sources, folder), scratch, atlas="aal")
            beside_loadtxt(folder)


if __name__ == "__main__":
    main()
