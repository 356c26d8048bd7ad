"""What arrives at the server: bytes of forms and of JSON within limits of size, time and number, and one computation at a time.

The page (`app.py`) and the API (`api.py`) share one `Intake`. Nothing is written to disk, and a request above a limit ends in a
`Refused` with a sentence and an HTTP status.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from m2lgdg.deploy.serve.structure import LARGEST_TABLE, MOST_FILES
from m2lgdg.deploy.serve.upload import LARGEST
from m2lgdg.storage import InputError, one_line

ENVELOPE = 2**16  # bytes of a form without its file
LONGEST_FIELD = 200
AT_ONCE = 16  # requests that are computed or wait for it
MOST_BYTES = 16 * LARGEST  # of all requests that are arriving, waiting or computed
IDLE = 2.0  # seconds without a byte, after which a request gives way if there is no memory for another
PATIENCE = 60.0  # seconds for a request to arrive
RETRY = 10  # seconds after which a client that was sent away may try again
BUSY = f"The server is busy with other uploads; try again in {RETRY} seconds."
MEGABYTES = LARGEST // 2**20
TOO_LARGE = f"The file is larger than the limit of {MEGABYTES} MB."
GONE = 499  # status of a client that has gone, which reads no answer
Given = TypeVar("Given")
Answer = TypeVar("Answer")


class Refused(Exception):
    """A request that cannot be answered, with a sentence and an HTTP status."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


class _InMemory(MultiPartParser):
    spool_max_size = 2 * LARGEST  # by default, starlette writes files above 1 MB to disk

    def close(self) -> None:
        """Close every file; starlette does so only if parsing fails."""
        for file in self._files_to_close_on_error:
            file.close()


class Intake:
    """Requests that are arriving, waiting or computed."""

    def __init__(self, most: int, patience: float = PATIENCE) -> None:
        self.most, self.patience = most, patience  # bytes and seconds of a request
        self.inside, self.turn = 0, anyio.Lock()
        self.reading: dict[anyio.CancelScope, float] = {}  # requests that are arriving, and when their last bytes came
        self.bytes: dict[Request, int] = {}  # of each request in memory

    async def answer(
        self, request: Request, read: Callable[[Request], Awaitable[Given]], compute: Callable[[Given], Answer]
    ) -> Answer:
        """Read a request, and compute its answer in a thread when it is its turn; whatever fails is a `Refused`."""
        try:
            self._need_place()
            given = await read(request)
            self._need_place()  # others may have arrived meanwhile
            self.inside += 1
            try:
                async with self.turn:
                    return await anyio.to_thread.run_sync(compute, given, abandon_on_cancel=True)
            finally:
                self.inside -= 1
        except Refused:
            raise
        except InputError as error:
            raise Refused(f"{one_line(error)}.", 422) from None
        except ClientDisconnect:
            raise Refused("The client has gone.", GONE) from None
        except Exception as error:  # the message may contain uploaded data, so only the type is shown
            raise Refused(f"The prediction failed ({type(error).__name__}).", 500) from None
        finally:
            self.bytes.pop(request, None)

    def _need_place(self) -> None:
        if self.inside >= AT_ONCE:
            raise Refused(BUSY, 503)

    async def form(
        self,
        request: Request,
        take: Callable[[FormData], Awaitable[Given]],
        *,
        most_files: int,
        most_fields: int,
        longest: int = LONGEST_FIELD,
    ) -> Given:
        """What `take` has of a multipart form, whose files are closed after it."""
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refused("The form must be sent as multipart/form-data.", 415)
        self._need_length(request)
        scope = anyio.CancelScope(deadline=anyio.current_time() + self.patience)
        parser = _InMemory(
            request.headers,
            self._chunks(request, scope),
            max_files=most_files,
            max_fields=most_fields,
            max_part_size=longest,
        )
        self.reading[scope] = anyio.current_time()
        try:
            with scope:
                return await take(await parser.parse())
            raise Refused("The upload took too long.", 408)
        except MultiPartException as error:
            raise Refused(f"The form cannot be read ({error.message.rstrip('.')}).") from None
        finally:
            self.reading.pop(scope, None)
            parser.close()

    async def body(self, request: Request) -> bytes:
        """All bytes of a request."""
        self._need_length(request)
        scope = anyio.CancelScope(deadline=anyio.current_time() + self.patience)
        self.reading[scope] = anyio.current_time()
        try:
            with scope:
                return b"".join([chunk async for chunk in self._chunks(request, scope)])
            raise Refused("The upload took too long.", 408)
        finally:
            self.reading.pop(scope, None)

    def _need_length(self, request: Request) -> None:
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self.most:
            raise Refused(TOO_LARGE, 413)

    async def _chunks(self, request: Request, scope: anyio.CancelScope) -> AsyncGenerator[bytes, None]:
        """Chunks of the body, refused as soon as they exceed a limit, whatever length was declared."""
        async for chunk in request.stream():
            self.reading[scope] = anyio.current_time()
            self.bytes[request] = self.bytes.get(request, 0) + len(chunk)
            if self.bytes[request] > self.most:
                raise Refused(TOO_LARGE, 413)
            if sum(self.bytes.values()) > MOST_BYTES:
                slowest = min(self.reading, key=self.reading.__getitem__)
                if self.reading[slowest] > anyio.current_time() - IDLE:
                    raise Refused(BUSY, 503)
                slowest.cancel()
            yield chunk


def need_small(tables: Mapping[str, list[UploadFile]]) -> None:
    """Refuse more files of a table, or larger ones, than the limits allow."""
    for name, own in tables.items():
        if len(own) > MOST_FILES:
            raise Refused(f"There are {len(own)} files for table {name}; the limit is {MOST_FILES}.")
        if any((file.size or 0) > LARGEST_TABLE for file in own):
            raise Refused(f"A file of table {name} is larger than the limit of {LARGEST_TABLE // 2**20} MB.", 413)
