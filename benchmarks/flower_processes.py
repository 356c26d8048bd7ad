"""Flower's own processes on one machine: a SuperLink and a SuperNode for every site, for `benchmarks/federated.py --processes`.

Flower starts a new Python process for every message to a site, which spends three seconds of CPU time on imports. Hospitals
have a machine each; for many sites on one machine, a process that has imported everything forks these clients (`--fork`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

APP = Path(__file__).parents[1] / "examples" / "flower"
PRELOADED = (
    "m2lgdg.federated.flower",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "safetensors.numpy",
    "sklearn.model_selection",
    "scipy.special",
)
SHIM = """#!/bin/sh
exec {python} -S -E {file} --send {socket} "$@"
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Federation:
    """A SuperLink and SuperNodes; `folder` gets their logs, `root` has the folder of the study and of each site."""

    def __init__(self, folder: Path, root: Path, sites: Iterable[str], fingerprint: str) -> None:
        self.folder, self.root, self.sites, self.fingerprint = folder, root, list(sites), fingerprint
        self.commands = Path(sys.executable).parent
        self.port, *ports = free_ports(len(self.sites) + 1)
        self.ports = dict(zip(self.sites, ports, strict=True))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        shims, home = folder / "bin", folder / "home"
        for made in (shims, home):
            made.mkdir(parents=True)
        path = f"{shims}{os.pathsep}{self.commands}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {
            "PATH": path,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        address = folder / "fork.sock"
        shim = shims / "flwr-clientapp"
        shim.write_text(SHIM.format(python=sys.executable, file=shlex.quote(str(Path(__file__).resolve())), socket=address))
        shim.chmod(0o755)
        self.others.append(self._start("fork", sys.executable, Path(__file__).resolve(), "--fork", address))
        self.others.append(
            self._start(
                *("superlink", self.commands / "flower-superlink", "--insecure", "--port", self.port),
                "--disable-runtime-dependency-installation",
            )
        )
        for site in self.sites:
            self.start_node(site)

    def _start(self, log: str, *words: object) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{log}.log", "ab") as file:
            return subprocess.Popen(
                [str(word) for word in words], stdout=file, stderr=file, env=self.environment, start_new_session=True
            )

    def start_node(self, site: str) -> None:
        config = f'site-folder="{self.root / site}" fingerprint="{self.fingerprint}"'
        words = ("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", self.ports[site], "--node-config", config)
        self.nodes[site] = self._start(f"node-{site}", self.commands / "flower-supernode", *words)

    def kill_node(self, site: str) -> None:
        """Kill a SuperNode and its processes, as a power cut does."""
        process = self.nodes.pop(site)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, timeout: float) -> None:
        """Submit the run of the study; it goes on in the background."""
        config = f'study-folder="{self.root / "study"}" timeout={timeout}'
        command = [self.commands / "flwr", "run", APP, "here", "--run-config", config]
        for _ in range(60):  # until the SuperLink listens
            done = subprocess.run([str(word) for word in command], env=self.environment, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(2)
        raise RuntimeError(done.stdout + done.stderr)

    def server_apps(self) -> list[int]:
        """Processes of the server app of this SuperLink."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if any(word.endswith(b"flwr-serverapp") for word in words) and f"127.0.0.1:{self.port}".encode() in words:
                found.append(int(entry.name))
        return found

    def details(self) -> str:
        """Sentences with which runs ended, as `flwr list` prints them."""
        words = [str(self.commands / "flwr"), "list", "here", "--format", "json"]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout

    def close(self) -> None:
        for process in [*self.nodes.values(), *self.others]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fork_clients(address: str) -> None:
    """Fork a client for the words that each connection sends."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    for module in PRELOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    while True:
        connection, _ = server.accept()
        with connection:
            words = json.loads(connection.makefile().readline())
            if os.fork():
                continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = ["flwr-clientapp", *words]
        code = 1
        try:
            flwr_clientapp()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(code)


def send(address: str, words: list[str]) -> None:
    """Ask the process of `fork_clients` for a client, as soon as it listens."""
    for _ in range(600):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(address)
            except OSError:
                time.sleep(0.1)
                continue
            client.sendall(json.dumps(words).encode() + b"\n")
            return
    raise SystemExit(f"nothing listens at {address}")


if __name__ == "__main__":
    if sys.argv[1] == "--send":
        send(sys.argv[2], sys.argv[3:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--fork", required=True)
        fork_clients(parser.parse_args().fork)
