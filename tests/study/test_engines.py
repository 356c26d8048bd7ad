"""docs/cluster.md holds: a run by a scheduler's address, the job array's shards, the job script that dask-jobqueue makes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from m2lgdg import make_cohort, run_study
from m2lgdg.study.engines import _Workers
from m2lgdg.study.predictions import read_predictions

TEXT = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
BASH = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(ARRAY,) = [script for script in BASH if "--array" in script]


@pytest.fixture
def study(tmp_path):
    make_cohort("tiny", seed=3).save(tmp_path / "tiny.cohort")
    methods = ["prior", "phenotype-logistic", "fc-logistic"]
    return {"cohort": str(tmp_path / "tiny.cohort"), "methods": methods, "seeds": [0], "variants": ["phenotypes"]}


@pytest.fixture
def address(tmp_path):
    """A scheduler and a worker, as a user starts them, each a process of its own."""
    reported = tmp_path / "scheduler.json"
    where = ["--scheduler-file", str(reported)]
    commands = (
        ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", *where],
        ["worker", "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path), *where],
    )
    started = [
        subprocess.Popen([sys.executable, "-m", "dask", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        from distributed import Client

        while not reported.is_file():  # the scheduler writes its address when it listens
            assert started[0].poll() is None
            time.sleep(0.05)
        with Client(scheduler_file=str(reported), timeout="60s") as client:
            client.wait_for_workers(1, timeout=60)
            found = client.scheduler.address
        yield found
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=60)


@pytest.mark.long
def test_a_run_by_address_gives_the_bytes_of_a_serial_one(study, address, tmp_path):
    run_study(study, tmp_path / "serial", engine="serial")
    summary = run_study(study, tmp_path / "dask", scheduler=address)
    assert (summary.done, summary.failed) == (16, [])
    assert (tmp_path / "dask" / "predictions.csv").read_bytes() == (tmp_path / "serial" / "predictions.csv").read_bytes()


@pytest.mark.parametrize("script", BASH)
def test_the_scripts_are_valid(script):
    found = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_tasks_of_the_array_run_every_cell_once(study, tmp_path):
    """The script itself is run for every task, with an m2lgdg that only says what it was asked for."""
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", ARRAY).groups())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text('m2lgdg() { echo "$*"; }\n')
    ran = Counter()
    for task in range(first, last + 1):
        given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": str(task)}
        reported = subprocess.run(["bash"], input=ARRAY, env=given, capture_output=True, text=True, check=True).stdout
        command, _, shard = reported.strip().rpartition(" --shard ")
        assert command == "run studies/abide-paper.toml --out runs/abide-paper"
        out = tmp_path / f"shard-{task}"  # a folder each, to see what each shard runs
        assert run_study(study, out, shard=shard).failed == []
        table = read_predictions(out)
        ran.update(table[["method", "variant", "target", "seed"]].drop_duplicates().itertuples(index=False, name=None))
    run_study(study, tmp_path / "whole")
    whole = read_predictions(tmp_path / "whole")[["method", "variant", "target", "seed"]].drop_duplicates()
    assert ran == dict.fromkeys(whole.itertuples(index=False, name=None), 1)
    assert len(ran) == 16


SBATCH = """#!/bin/bash
cp "$1" job.sh  # as SLURM does: whoever submitted the script may delete it at once
setsid bash job.sh > job.log 2>&1 &
echo "$!" >> jobs
echo "Submitted batch job $!"
"""


@pytest.mark.long
def test_the_python_of_the_page_runs_a_study(study, tmp_path, monkeypatch, capsys):
    """With an sbatch that starts the job at once, here, and one job instead of eight."""
    monkeypatch.chdir(tmp_path)
    tools = {
        "sbatch": SBATCH,
        "scancel": '#!/bin/bash\nkill -- "-$1"\n',
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
    }
    place = tmp_path / ".venv" / "bin"
    place.mkdir(parents=True)
    for name, script in (tools | {"activate": ""}).items():
        (place / name).write_text(script)
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    (tmp_path / "studies").mkdir()
    lines = [f"{key} = {json.dumps(value)}" for key, value in study.items()]
    (tmp_path / "studies" / "abide-paper.toml").write_text("\n".join(lines))
    names = {}
    exec(PYTHON[0], names)
    try:
        exec(PYTHON[1].replace("jobs=8", "jobs=1"), names)
    finally:
        names["cluster"].close()
        for job in (tmp_path / "jobs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(job), signal.SIGKILL)
    assert capsys.readouterr().out == "16 cells done, 0 failed\n"
    run_study(study, tmp_path / "serial", engine="serial")
    ran, quiet = (tmp_path / out / "predictions.csv" for out in ("runs/abide-paper", "serial"))
    assert ran.read_bytes() == quiet.read_bytes()


def test_a_process_keeps_to_one_target():
    class Item:
        def __init__(self, target):
            self.target = target

    waiting = _Workers([Item(target) for target in "aaabbbcc"], print, 2)
    taken = {0: "", 1: ""}
    for i in (0, 1, 0, 1, 0, 1, 0, 0):
        taken[i] += waiting.take(i).target
    assert taken == {0: "aaacc", 1: "bbb"}
    last = _Workers([Item("a"), Item("a")], print, 2)
    assert [last.take(i).target for i in (0, 1)] == ["a", "a"]  # nothing else is left
