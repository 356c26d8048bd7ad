"""The server of `m2lgdg serve`: rubbish, other names, half-sent requests, which stop nobody, and Ctrl-C."""

import asyncio
import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from uploads import npy

from m2lgdg import METHODS, Model, make
from m2lgdg.registry import load_methods

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from m2lgdg.deploy.serve import app as web  # noqa: E402
from m2lgdg.deploy.serve import connections  # noqa: E402
from m2lgdg.deploy.serve.connections import Connection  # noqa: E402
from m2lgdg.deploy.serve.run import bound, run  # noqa: E402

HEADERS = (
    "POST / HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 5000\r\n\r\n"
)
HALVES = {
    "nothing": "",
    "first line": "POST / HT",
    "headers": "GET / HTTP/1.1\r\nHost: 127.0.0.1",
    "body": HEADERS + "--b\r\nContent-Disposition: form-data",
}


@pytest.fixture(scope="module")
def port(served_model):
    """The port of the server of `m2lgdg serve`, in a thread."""
    started, listening = [], threading.Event()
    before = uvicorn.Server.startup

    async def startup(self, *arguments, **options):
        await before(self, *arguments, **options)
        started.append(self)

    on = bound("127.0.0.1", 0)
    thread = threading.Thread(target=run, args=(Model.load(served_model), on, lambda address: listening.set()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "startup", startup)
        thread.start()
        listening.wait()
        asked(on.getsockname()[1])  # the server has started
    yield on.getsockname()[1]
    started[0].should_exit = True
    thread.join()
    on.close()


def asked(port, method="GET", **request):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    client.request(method, "/", **request)
    response = client.getresponse()
    text = response.read().decode()
    client.close()
    return response.status, text


def form(series):
    mark = uuid.uuid4().hex
    head = f'--{mark}\r\nContent-Disposition: form-data; name="series"; filename="scan.npy"\r\n\r\n'.encode()
    body = head + npy(series) + f"\r\n--{mark}--\r\n".encode()
    return {"body": body, "headers": {"Content-Type": f"multipart/form-data; boundary={mark}"}}


@pytest.mark.parametrize("half", HALVES)
def test_forty_half_sent_requests_stop_nobody(half, port, atlas_cohort):
    slow = []
    for _ in range(40):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(HALVES[half].format(port).encode())
        slow.append(client)
    assert asked(port)[0] == 200
    status, text = asked(port, "POST", **form(np.asarray(atlas_cohort.series[0])))
    assert status == 200 and "probability of being a patient" in text
    for client in slow:
        client.close()


def test_twelve_honest_uploads_at_once_are_all_answered(port, atlas_cohort):
    sent = form(np.tile(np.asarray(atlas_cohort.series[0]), (40, 1)))
    with ThreadPoolExecutor(12) as pool:
        answers = [one.result() for one in [pool.submit(asked, port, "POST", **sent) for _ in range(12)]]
    assert [status for status, _ in answers] == [200] * 12


def test_half_a_request_is_given_up_in_time(port, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE", 0.01)
    client = socket.create_connection(("127.0.0.1", port), timeout=300)
    client.sendall(b"GET / HT")
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    client.close()


def test_a_request_that_is_being_answered_keeps_its_place():
    """Of a full server, the client that has been idle for longest is disconnected, unless it waits for its answer."""

    class Cycle:
        more_body, response_complete = False, False

    class Transport(asyncio.Transport):
        def __init__(self):
            super().__init__({})
            self.aborted = False

        def abort(self):
            self.aborted = True

    async def fill():
        server = uvicorn.Server(uvicorn.Config(web.Guard(None)))
        made = []
        for i in range(connections.MOST + 1):
            one = Connection(server.config, server.server_state, {}, asyncio.get_running_loop())
            one.connection_made(Transport())
            one.active = float(i)
            one.cycle = Cycle() if i == 0 else None
            made.append(one)
        return [one.transport.aborted for one in made]

    aborted = asyncio.run(fill())
    assert aborted == [i == 1 for i in range(connections.MOST + 1)]


def test_the_server_refuses_other_names_and_huge_bodies(port):
    for headers, status in (({"Host": "evil.example"}, 421), ({}, 200)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/", headers=headers)
        response = connection.getresponse()
        assert response.status == status
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Server"] is None
        connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("POST", "/")
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()  # and not a byte of it
    assert connection.getresponse().status == 413
    connection.close()


def test_rubbish_on_the_wire_does_not_end_the_server(port):
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"A" * 200_000,
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
            wire.sendall(sent)
    assert asked(port)[0] == 200


def test_a_port_that_is_taken_is_told(port, served_model, typed):
    code, _, err = typed("serve", served_model, "--port", port)
    assert (code, err) == (2, f"m2lgdg: --port {port} on 127.0.0.1 cannot be used (address already in use); choose another.\n")


STUCK = '''
import threading
from m2lgdg.method import Method, method

@method("stuck")
class Stuck(Method):
    """Never answers."""

    def learn(self, source, **_):
        self.facts_["inputs"] = []

    def score(self, target):
        print("computing", flush=True)
        threading.Event().wait()
'''


def test_ctrl_c_ends_a_computation_too(atlas_cohort, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    load_methods((str(tmp_path / "stuck.py"),))
    make("stuck").fit(atlas_cohort).save(tmp_path / "model")
    np.save(tmp_path / "scan.npy", atlas_cohort.series[0])
    command = [sys.executable, "-u", "-m", "m2lgdg.cli", "serve", str(tmp_path / "model"), "--port", "0"]
    command += ["--plugin", str(tmp_path / "stuck.py")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = re.search(r"http://\S+", running.stdout.readline())[0]
    running.stdout.readline()
    begin = b'--b\r\nContent-Disposition: form-data; name="series"; filename="a.npy"\r\n\r\n'
    connection = http.client.HTTPConnection("127.0.0.1", int(server.rstrip("/").rsplit(":", 1)[1]), timeout=60)
    body = begin + (tmp_path / "scan.npy").read_bytes() + b"\r\n--b--\r\n"
    connection.request("POST", "/", body, {"Content-Type": "multipart/form-data; boundary=b"})
    assert running.stdout.readline() == "computing\n"
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=120)
    connection.close()
    METHODS.pop("stuck")
    assert (running.returncode, rest) == (0, "Stopped; nothing was written.\n")
