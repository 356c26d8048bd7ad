"""What people do every day on a laptop, by the code of an earlier commit and by this one: ratios of CPU seconds in one run.

Usage: python benchmarks/everyday.py COHORT [--base 4ba5c10] [--sites 3] [--only default peers fit table report predict]
`default`: the default alone, without tables, every site left out, one worker; also the largest difference of probabilities.
`peers`: the nine linear peers with and without phenotypes, some sites left out (`--sites 0`: all), two workers.
`fit`: the default model with its new-site calibration. `table`, `report`: of the study that `peers` left behind, or of
`--study`. `predict`: one subject, cold, against importing numpy, pandas and safetensors, and also typer with what it needs to
parse a command (`--repeats`, the least CPU time of each).
Prints one JSON line for each. CPU seconds are those of the command and all of its processes, one thread each.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEERS = """
name = "everyday"
cohort = {cohort}
seeds = [0]
targets = {targets}
methods = {methods}
"""
WITH_TYPER = """
import numpy, pandas, safetensors, typer, rich.console
from pathlib import Path
app = typer.Typer()
@app.command()
def predict(path: Path): pass
app(["a.cohort"], standalone_mode=False)
"""
PHENOTYPES = 'variants = ["phenotypes"]'
NO_TABLES = '[method.connectome-adaptive]\ntables = "none"'
METHODS = ["prior", "phenotype-logistic", "fc-logistic", "fc-svm", "fc-adaptive", "tangent-logistic", "tangent-ridge"]
METHODS += ["connectome-ensemble", "connectome-adaptive"]


def command(source, *words, folder):
    """CPU seconds, wall seconds and largest memory (GiB) of one process of `python -m m2lgdg` with this source."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # both sides run from bytecode, as an installed package does
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run([sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        sys.exit(ended.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - start, after.ru_maxrss / 2**20


def reported(name, sides, **more):
    base, ours = sides["base"], sides["ours"]
    times = {key: [round(value, 2) for value in values] for key, values in sides.items()}
    print(json.dumps({"what": name, "times less CPU": round(base[0] / ours[0], 2), "cpu, wall, GiB": times} | more), flush=True)


def sites_of(cohort, folder):
    code = "import sys; from m2lgdg.cohort import Cohort; print('\\n'.join(Cohort.load(sys.argv[1]).site_names))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code, cohort], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def studies(sources, cohort, methods, count, folder, name, jobs=2, more=PHENOTYPES):
    names = sites_of(cohort, folder)
    chosen = names[:: max(len(names) // count, 1)][:count] if count else names
    text = PEERS.format(cohort=json.dumps(str(cohort)), targets=json.dumps(chosen), methods=json.dumps(methods))
    (folder / f"{name}.toml").write_text(text + more + "\n")
    sides = {
        side: command(source, "-m", "m2lgdg", "run", f"{name}.toml", "--out", f"{name}-{side}", "--jobs", jobs, folder=folder)
        for side, source in sources.items()
    }
    reported(name, sides, sites=len(chosen), **{"largest difference": difference(*(folder / f"{name}-{one}" for one in sides))})


def difference(first, second):
    """Largest difference between the probabilities of two study folders, which hold the same cells in the same order."""
    both = [[row["proba"] for row in csv.DictReader((one / "predictions.csv").open())] for one in (first, second)]
    return max(abs(float(a) - float(b)) for a, b in zip(*both, strict=True))


def cold(sources, folder, cohort, repeats):
    """One subject predicted from a cold start, and Python importing what no such program can do without."""
    code = "import sys; from m2lgdg.cohort import Cohort; Cohort.load(sys.argv[1]).select([0]).save('one.cohort')"
    command(sources["base"], "-c", code, cohort, folder=folder)
    words = {"imports": ("-c", "import numpy, pandas, safetensors"), "with typer": ("-c", WITH_TYPER)}
    for side, source in sources.items():
        model = folder / f"model-{side}"
        if not model.exists():
            command(source, "-m", "m2lgdg", "fit", cohort, "--out", model, folder=folder)
    taken = {}
    for i in range(repeats):
        for side, source in sources.items():
            of_side = {side: ("-m", "m2lgdg", "predict", folder / f"model-{side}", "one.cohort", "--out", f"p{i}-{side}.csv")}
            for name, each in (words | of_side).items():
                taken.setdefault(name, []).append(command(source, *each, folder=folder)[0])
    least = {name: min(times) for name, times in taken.items()}
    ratios = {f"times {name}": {side: round(least[side] / least[name], 2) for side in sources} for name in words}
    print(json.dumps({"what": "predict"} | ratios | {"cpu": {name: round(one, 3) for name, one in least.items()}}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--base", default="4ba5c10")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["default", "peers", "fit", "table", "report", "predict"])
    parser.add_argument("--study", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cohort = options.cohort.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = subprocess.run(["git", "archive", options.base, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
        sources = {"base": folder / "src", "ours": folder / "ours"}
        shutil.copytree(ROOT / "src", sources["ours"])
        for source in sources.values():
            command(source, "-m", "compileall", "-q", source, folder=folder)
        if "default" in options.only:
            studies(sources, cohort, METHODS[-1:], 0, folder, "default", jobs=1, more=NO_TABLES)
        if "peers" in options.only:
            studies(sources, cohort, METHODS, options.sites, folder, "peers")
        if "fit" in options.only:
            words = ("-m", "m2lgdg", "fit", cohort, "--out")
            reported("fit", {side: command(each, *words, f"model-{side}", folder=folder) for side, each in sources.items()})
        for word in ("table", "report"):
            if word in options.only:
                study = options.study.resolve() if options.study else folder / "peers-ours"
                sides = {side: command(each, "-m", "m2lgdg", word, study, folder=folder) for side, each in sources.items()}
                reported(word, sides)
        if "predict" in options.only:
            cold(sources, folder, cohort, options.repeats)


if __name__ == "__main__":
    main()
