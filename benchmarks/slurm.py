"""Do the scripts of docs/cluster.md run on SLURM, and is anything lost with a job, a node or the process that waits for them?

    make slurm    (or: python benchmarks/slurm.py [--folder build/slurm])

Starts SLURM with two nodes on this machine, as this user and apart from any other SLURM, and submits the scripts of the page
as they stand there, with a small study. Job array: one task's job is killed and submitted again, and a node with a running task
dies. Dask: the process that waits for the workers is killed and started again, and a worker's job is killed. Then compares
predictions.csv byte by byte with a run without SLURM; exits with 1 if they differ. On Debian: apt-get install slurm-wlm munge.
"""

import argparse
import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import m2lgdg
from m2lgdg.study.plan import distinct, make_cells
from m2lgdg.study.records import Records
from m2lgdg.study.runner import checked, on_device, study_cohort

PAGE = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
STUDY, OUT = "studies/abide-paper.toml", "runs/abide-paper"  # as in the page
NODES = ("node1", "node2")
CORES = 2  # of a node, as SLURM is told: room for one task of the array, or for two workers
KEYS = """
cohort = "demo.cohort"
methods = ["phenotype-logistic", "fc-logistic", "tangent-ridge", "connectome-adaptive"]
variants = ["phenotypes"]
seeds = [0]
"""
# Whole "GPUs" and memory that only SLURM believes in: the scripts of the page ask for them.
CONFIGURATION = """
ClusterName=m2lgdg
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={run}/munge.socket
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
ReturnToService=2
GresTypes=gpu
PartitionName=gpu Nodes=ALL Default=YES State=UP
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/slurm"))
    options = parser.parse_args()
    os.environ["PATH"] += os.pathsep + "/usr/sbin"  # the daemons are there, where only root looks
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        sys.exit(f"SLURM is not installed: {', '.join(missing)} not found; on Debian: apt-get install slurm-wlm munge")
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder)
    os.chdir(folder)
    print("without SLURM ...", flush=True)
    m2lgdg.run_study(STUDY, "runs/local", engine="serial")
    wrong = 0
    for name, run in {"job array": job_array, "Dask": dask}.items():
        with Slurm(folder) as slurm:
            start = time.monotonic()
            run(slurm)
            seconds = time.monotonic() - start
        same = Path(OUT, "predictions.csv").read_bytes() == Path("runs/local/predictions.csv").read_bytes()
        wrong += not same
        print(f"{name}: predictions {'are the same bytes' if same else 'DIFFER'}, {seconds:.0f} s", flush=True)
        Path(OUT).rename(f"runs/{name.replace(' ', '-')}")
    sys.exit(1 if wrong else 0)


def prepare(folder):
    """The folder that the page's scripts are submitted from: an environment, a study, a place for logs."""
    for name in ("studies", "logs", "runs"):
        (folder / name).mkdir(parents=True)
    (folder / ".venv").symlink_to(sys.prefix)
    m2lgdg.make_cohort("demo", seed=3).save(folder / "studies" / "demo.cohort")
    (folder / STUDY).write_text(KEYS)
    (script,) = [text for text in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "--array" in text]
    (folder / "study.sbatch").write_text(script)
    (folder / "study.py").write_text("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))


def job_array(slurm):
    """The array of the page; one task is killed and submitted again, another loses its node and is queued again by SLURM."""
    tasks = int(re.search(r"--array=1-(\d+)", PAGE)[1])
    job = slurm("sbatch", "--parsable", "study.sbatch").strip()
    shards = {task: cells_of(task, tasks) for task in range(1, tasks + 1)}
    _, killed = slurm.in_between(job, shards)
    slurm("scancel", "--signal=KILL", "--full", f"{job}_{killed}")
    slurm.until(lambda: (job, killed) not in slurm.running(), "the killed task to end")
    print(f"killed the job of task {killed} with {sum(map(done, shards[killed]))} of {len(shards[killed])} cells", flush=True)
    node, lost = slurm.in_between(job, {task: cells for task, cells in shards.items() if task != killed})
    slurm.lose(node)
    print(f"{node} died under task {lost} with {sum(map(done, shards[lost]))} of {len(shards[lost])} cells", flush=True)
    slurm.until(lambda: slurm.states().get(node, "").startswith("down"), "the dead node to be noticed")
    slurm.until(lambda: not slurm.queue(), "the other tasks")
    left = {task: sum(not done(cell) for cell in cells) for task, cells in shards.items()}
    print(f"cells left: { ({task: count for task, count in left.items() if count}) }", flush=True)
    if not left[killed] or any(count for task, count in left.items() if task != killed):
        sys.exit("only the killed task was expected to have cells left; see logs/")
    slurm.start_node(node)
    again = slurm("sbatch", "--parsable", f"--array={killed}", "study.sbatch").strip()
    slurm.until(lambda: not slurm.queue(), f"task {killed}, submitted again as {again}")


def dask(slurm):
    """The Python of the page; it is killed and started again, and then a worker's job is killed."""
    cells = cells_of(1, 1)
    first = slurm.start([sys.executable, "study.py"], "first.log")
    slurm.until(lambda: sum(map(done, cells)) > 2, "three cells", first)
    first.kill()
    first.wait()
    slurm("scancel", f"--user={getpass.getuser()}")  # its workers have nobody to ask for cells any more
    slurm.until(lambda: not slurm.queue(), "the workers to end")
    before = sum(map(done, cells))
    print(f"killed the process that waits for the workers with {before} of {len(cells)} cells", flush=True)
    second = slurm.start([sys.executable, "study.py"], "second.log")
    slurm.until(lambda: sum(map(done, cells)) > before + 2, "three more cells", second)
    (job, _), *_ = sorted(slurm.running())
    slurm("scancel", "--signal=KILL", "--full", job)
    print(f"killed the job of a worker with {sum(map(done, cells))} of {len(cells)} cells", flush=True)
    slurm.until(lambda: second.poll() is not None, "the study to end")
    reported = Path("logs", "second.log").read_text()
    if second.returncode or f"{len(cells) - before} cells done, 0 failed" not in reported:
        sys.exit(f"the study on Dask ended with {second.returncode}: {reported[-2000:]}")


@cache
def planned():
    """All cells of the study, and where their records will be."""
    study = on_device(checked(STUDY))
    cohort = study_cohort(study)
    return distinct(make_cells(study, cohort)), Records.of(Path(OUT), cohort)


def cells_of(task, tasks):
    """Cells of a task of the array."""
    return planned()[0][task - 1 :: tasks]


def done(cell):
    return planned()[1].done(cell)


class Slurm:
    """A SLURM of two nodes on this machine, with files, ports and a key of its own; calling it runs one of SLURM's commands."""

    def __init__(self, folder):
        self.folder, self.processes = folder, {}

    def __enter__(self):
        self.run = Path(tempfile.mkdtemp(prefix="m2lgdg-slurm-"))  # a socket's path must be short
        for name in ("state", *NODES):
            (self.run / name).mkdir()
        key, ports = self.run / "munge.key", iter(free_ports(1 + len(NODES)))
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname()
        text = CONFIGURATION.format(host=host, port=next(ports), user=getpass.getuser(), run=self.run)
        size = f"CPUs={CORES} RealMemory=65536 Gres=gpu:{CORES}"
        text += "".join(f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={next(ports)} {size}\n" for node in NODES)
        (self.run / "slurm.conf").write_text(text)
        for i in range(CORES):
            (self.run / f"gpu{i}").touch()
        (self.run / "gres.conf").write_text(f"AutoDetect=off\nNodeName=node[1-2] Name=gpu File={self.run}/gpu[0-{CORES - 1}]\n")
        os.environ["SLURM_CONF"] = str(self.run / "slurm.conf")
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        places = [f"--{name}={self.run / file}" for name, file in (files | {"log-file": "munged.log"}).items()]
        try:
            self.start(["munged", "--foreground", "--force", *places], "munged.log")
            self.until((self.run / "munge.socket").exists, "munged")
            self.start(["slurmctld", "-D", "-c"], "slurmctld.log")
            for node in NODES:
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if "slurmctld.log" in self.processes:
            with contextlib.suppress(subprocess.SubprocessError):
                self("scancel", f"--user={getpass.getuser()}")
                self.until(lambda: not self.queue(), "jobs to end", seconds=30)
        for process in reversed(self.processes.values()):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self.belonging(lambda names: True):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.run, ignore_errors=True)
        del os.environ["SLURM_CONF"]

    def __call__(self, *command):
        """Output of one of SLURM's commands."""
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if ended.returncode:
            raise subprocess.SubprocessError(f"{' '.join(command)}: {ended.stderr.strip()}")
        return ended.stdout

    def start(self, command, log, **environment):
        with (self.folder / "logs" / log).open("w") as said:
            made = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | environment)
        self.processes[log] = made
        return made

    def start_node(self, node):
        self.start(["slurmd", "-D", "-N", node], f"{node}.log", M2LGDG_NODE=node)
        # A node that was down comes back by itself, since ReturnToService=2.
        self.until(lambda: self.states().get(node) == "idle", node, self.processes[f"{node}.log"], seconds=60)

    def lose(self, node):
        """Kill all processes of a node at once: its daemon, that of each job, and the jobs."""
        self.processes[f"{node}.log"].kill()
        self.processes[f"{node}.log"].wait()
        for process in self.belonging(lambda names: node in (names.get("M2LGDG_NODE"), names.get("SLURMD_NODENAME"))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def belonging(self, chosen):
        """Processes of this SLURM, but for its daemons and their waiting parent, by their environment; the newest last."""
        ours = {os.getpid(), *(process.pid for process in self.processes.values())}
        for place in sorted(Path("/proc").glob("[0-9]*"), key=lambda place: int(place.name)):
            try:
                words = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            names = dict(word.split("=", 1) for word in words if "=" in word)
            if names.get("SLURM_CONF") == str(self.run / "slurm.conf") and int(place.name) not in ours and chosen(names):
                yield int(place.name)

    def queue(self):
        """State, job and task of what waits or runs; the tasks that still wait are one row."""
        return [line.split() for line in self("squeue", "--noheader", "--format=%T %F %K %N").splitlines()]

    def running(self):
        """Node of each (job, task) that runs."""
        return {
            (row[1], int(row[2]) if row[2].isdigit() else 0): row[3] for row in self.queue() if row[0] == "RUNNING" and row[3:]
        }

    def states(self):
        """State of each node, such as idle or down*; none as long as SLURM does not answer."""
        try:
            return dict(line.split() for line in self("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines())
        except subprocess.SubprocessError:
            return {}

    def in_between(self, job, shards):
        """Node and task that runs and has some of its cells, but not all."""
        found = []

        def look():
            for (name, task), node in self.running().items():
                if name == job and task in shards and 0 < sum(map(done, shards[task])) < len(shards[task]):
                    found.append((node, task))
            return found

        self.until(look, "a task to be in between")
        return found[0]

    def until(self, true, what, process=None, seconds=600):
        """Wait until something is true; an error after too long, or if the process ends before."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end or (process is not None and process.poll() is not None):
                raise subprocess.SubprocessError(f"waited for {what} in vain; see {self.folder / 'logs'}")
            time.sleep(0.1)


def free_ports(count):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    main()
