"""`m2lgdg serve` with clients that send half a request: the others are answered as if these were not there."""

import asyncio
import contextlib
import http.client
import socket
import threading
import uuid

import numpy as np
import pytest
from uploads import npy

from m2lgdg import Model

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
