"""The client of ``aiosched bench lag``, in a process of its own: it shares no lock with the server.

    python client.py PORT --streams 32 --seconds 8 --large-every 2 --large-bytes 800000

It opens the streams, says ``ready`` once each of them has given text, and then pings for some
seconds while the streams go on (one that ends is asked for again) and a large prompt arrives now
and then. Last it prints what it saw as one JSON object. It ends at once when its standard input
does. It needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

PING_EVERY = 0.02
WORDS = ("the", "tide", "came", "in", "slowly", "and", "boats", "rose", "while", "nobody", "saw")
# A letter of these is two bytes: of 800 KB there are few enough characters that only tokenizing
# tells whether they fit a model of 8,000 tokens.
LARGE_WORDS = ("прилив", "поднимался", "медленно,", "лодки", "в", "гавани", "одна", "за", "другой,")


class Client:
    """Talks HTTP to one port of this machine.

    Attributes:
        pings: seconds from when each was due to its answer.
        large: ``[status, seconds, text]`` of each answer to a large prompt.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.pings: list[float] = []
        self.large: list[tuple[int, float, str]] = []

    async def stream(self, number: int, started: asyncio.Event) -> None:
        """Ask for streams, one after another; ``started`` is set at the first text."""
        for turn in range(1_000_000):
            prompt = f"Stream {number}, part {turn}: {_text(WORDS, 200, seed=number)}"
            reader, writer = await self._send("/stream", prompt.encode(), "close")
            try:
                _expect(200, _status(await reader.readuntil(b"\r\n\r\n")))
                while part := await reader.read(65536):
                    if b"data:" in part:
                        started.set()
            finally:
                writer.close()

    async def ping(self) -> None:
        """Ping at fixed times, on one connection.

        A ping that had to wait for the answer to the one before counts from when it was due; one
        that this process sends late, because it was not woken earlier, from when it is sent.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        due = answered = perf_counter()
        try:
            while True:
                if answered < due:
                    await asyncio.sleep(due - answered)
                    due = perf_counter()
                writer.write(_request("/ping", b"", "keep-alive"))
                status, _ = await _response(reader)
                _expect(200, status)
                answered = perf_counter()
                self.pings.append(answered - due)
                due += PING_EVERY
        finally:
            writer.close()

    async def send_large(self, prompt: bytes, every: float) -> None:
        """Send ``prompt`` every so many seconds, the first time soon."""
        await asyncio.sleep(min(every, 1.0) / 2)
        while True:
            began = perf_counter()
            reader, writer = await self._send("/complete", prompt, "close")
            status, body = await _response(reader)
            writer.close()
            self.large.append((status, perf_counter() - began, body.decode()))
            await asyncio.sleep(max(0.0, began + every - perf_counter()))

    async def _send(
        self, path: str, body: bytes, connection: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(_request(path, body, connection))
        await writer.drain()
        return reader, writer


async def measure(
    port: int, *, streams: int, seconds: float, large_every: float, large_bytes: int
) -> dict[str, Any]:
    """One run; see the module."""
    client = Client(port)
    large = _text(LARGE_WORDS, large_bytes, seed=0).encode()[:large_bytes]
    started = [asyncio.Event() for _ in range(streams)]
    tasks = [
        asyncio.create_task(client.stream(number, event)) for number, event in enumerate(started)
    ]
    try:
        await _first_failure(tasks, asyncio.gather(*(event.wait() for event in started)))
        print("ready", flush=True)
        tasks.append(asyncio.create_task(client.ping()))
        if large_every:
            tasks.append(asyncio.create_task(client.send_large(large, large_every)))
        await _first_failure(tasks, asyncio.ensure_future(asyncio.sleep(seconds)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {"pings": client.pings, "large": client.large}


async def _first_failure(tasks: list[asyncio.Task[None]], goal: asyncio.Future[Any]) -> None:
    """Until ``goal`` is reached. Raises what ended a task before that."""
    await asyncio.wait([*tasks, goal], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            goal.cancel()
            task.result()
    with suppress(asyncio.CancelledError):
        await goal


def _request(path: str, body: bytes, connection: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a response that says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return _status(head), await reader.readexactly(length)


def _status(head: bytes) -> int:
    return int(head.split()[1])


def _expect(wanted: int, status: int) -> None:
    if status != wanted:
        raise RuntimeError(f"the server answered with status {status}")


def _text(words: Sequence[str], chars: int, seed: int) -> str:
    """``words`` in an order of its own, over and over."""
    draw = random.Random(seed)
    return " ".join(draw.choice(words) for _ in range(chars // 2))[:chars]


def _end_with_input() -> None:
    """The parent is gone, even if it was killed: a pipe ends then on every system."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's alone
    threading.Thread(target=_end_with_input, daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--large-every", type=float, default=0.0)
    parser.add_argument("--large-bytes", type=int, default=0)
    given = vars(parser.parse_args())
    print(json.dumps(asyncio.run(measure(given.pop("port"), **given))))


if __name__ == "__main__":
    main()
