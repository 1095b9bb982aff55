"""RPC servers on the loopback address, and links to them that count what travels and can fail.

    python tests/servers.py --servers 2 --rate 1gbit     # what a step sends to each server, and how long it takes

trains a model over servers on this machine, by default without a limit. `--rate` is of tc, in a network namespace of
its own; both directions of the loopback device share it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyharness.base import system
from pyharness.training import tiny, train

HOST = "127.0.0.1"
GREETING = 36
"""Bytes of a server's answer to HELLO: a size, the version, and what the connection can."""

COMMANDS = {
    0: "ALLOC_BUFFER",
    1: "GET_ALIGNMENT",
    2: "GET_MAX_SIZE",
    3: "BUFFER_GET_BASE",
    4: "FREE_BUFFER",
    5: "BUFFER_CLEAR",
    6: "SET_TENSOR",
    7: "SET_TENSOR_HASH",
    8: "GET_TENSOR",
    9: "COPY_TENSOR",
    10: "GRAPH_COMPUTE",
    11: "GET_DEVICE_MEMORY",
    12: "INIT_TENSOR",
    13: "GET_ALLOC_SIZE",
    14: "HELLO",
    15: "DEVICE_COUNT",
    16: "GRAPH_RECOMPUTE",
    17: "MEMSET_TENSOR",
    200: "SUPPORT",
}
"""Commands of ggml's protocol 7, and of the patch."""


class Server:
    """A server with CPU backends, on a port of its own."""

    def __init__(self, program: Path, log: Path, environment: dict[str, str] | None = None, threads: int = 1) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        self.endpoint, self._log = f"{HOST}:{self.port}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [program, "-H", HOST, "-p", str(self.port), "-t", str(threads)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | system.search(program.parent) | (environment or {}),
            )
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port)):
                return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{program} does not listen: {self.messages}")

    @property
    def messages(self) -> str:
        """What the server has said."""
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


class Link:
    """A port that hands every connection on to a server, and counts the client's commands.

    `greeting` may change the server's answer to HELLO (version in bytes 0 to 2, the patch's in byte 3). `failing` is
    called before the command `fail` goes through for that time; `stall()` lets nothing more through."""

    def __init__(
        self,
        port: int,
        greeting: Callable[[bytearray], None] = lambda _: None,
        fail: tuple[str, int] = ("", 0),
        failing: Callable[[], None] = lambda: None,
    ) -> None:
        self.messages: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received = 0
        self._port, self._greeting, self._fail, self._failing = port, greeting, fail, failing
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server((HOST, 0))
        self._sockets = [self._listener]
        self.endpoint = f"{HOST}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stall(self) -> None:
        """Nothing comes through any more; no connection ends."""
        self._open.clear()

    def close(self) -> None:
        """Ends every connection."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.set()
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection((HOST, self._port))
                self._sockets.append(server)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for target in (self._up, self._down):
                    thread = threading.Thread(target=target, args=(client, server))
                    thread.start()
                    self._threads.append(thread)

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """Client to server: a byte of command, 8 bytes of size, so many bytes."""
        header, rest = b"", 0
        for data in self._read(client, server):
            at = 0
            while at < len(data):
                if rest == 0:
                    take = 9 - len(header)
                    header += data[at : at + take]
                    at += take
                    if len(header) < 9:
                        break
                    rest = int.from_bytes(header[1:], "little")
                    self._count(COMMANDS[header[0]], 9 + rest)
                    header = b""
                step = min(rest, len(data) - at)
                rest -= step
                at += step
            if not self._send(server, data):
                return

    def _count(self, name: str, size: int) -> None:
        self.messages[name] += 1
        self.sent[name] += size
        if (name, self.messages[name]) == self._fail:
            self._failing()

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        greeting = bytearray()
        for data in self._read(server, client):
            if len(greeting) < GREETING:  # the first answer, after 8 bytes of its size
                greeting += data
                if len(greeting) < GREETING:
                    continue
                answer = greeting[8:]
                self._greeting(answer)
                data = bytes(greeting[:8] + answer)
            self.received += len(data)
            if not self._send(client, data):
                return

    def _read(self, end: socket.socket, other: socket.socket) -> Iterator[bytes]:
        with contextlib.suppress(OSError):
            while data := end.recv(1 << 20):
                yield data
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def _send(self, end: socket.socket, data: bytes) -> bool:
        self._open.wait()
        try:
            end.sendall(data)
        except OSError:
            return False
        return True


def main() -> int:
    """Prints what a step sends to each server and how long it takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=tiny.SHAPES, default="llama")
    parser.add_argument("--words", type=int, default=0, help="entries of the tokenizer that are kept (default: all)")
    parser.add_argument("--servers", type=int, default=1, help="0: train in one process (default: 1)")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2, help="of the process and of each server")
    parser.add_argument("--fa", choices=("on", "off"), default="on")
    parser.add_argument("--rate", metavar="RATE", help="of the loopback device, as tc takes it: 1gbit, 10gbit")
    parser.add_argument("--program", type=Path, help="flash-attn-train, beside ggml-rpc-server (default: build it)")
    args = parser.parse_args()
    if args.rate and "TC_RATE" not in os.environ:
        shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {args.rate} burst 128kb latency 50ms && "
        command = ["unshare", "-rn", "sh", "-c", shape + 'exec "$@"', "sh", sys.executable, *sys.argv]
        return subprocess.run(command, env=os.environ | {"TC_RATE": args.rate}).returncode

    program = args.program or train.prepare("cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        text, model = Path(folder, "text"), Path(folder, "model.gguf")
        text.write_text(train.corpus(), encoding="utf-8")
        tiny.write(model, dataclasses.replace(tiny.SHAPES[args.shape], words=args.words), train.vocabulary())
        logs = [Path(folder, f"{i}.log") for i in range(args.servers)]
        servers = [Server(program.parent / train.SERVER, log, threads=args.threads) for log in logs]
        for server in servers:
            stack.callback(server.kill)
        # counted links are slower than the limit, so times are taken without them
        for counted in (False, True) if servers else (False,):
            links = [stack.enter_context(contextlib.closing(Link(s.port))) for s in servers] if counted else []
            ends = [end.endpoint for end in links or servers]
            marks: list[list[tuple[Counter[str], Counter[str], int]]] = []

            def mark(line: str, links: list[Link] = links, marks: list[object] = marks) -> None:  # type: ignore[assignment]
                if line.startswith("step"):
                    marks.append([(link.messages.copy(), link.sent.copy(), link.received) for link in links])

            where: dict[str, Any] = {"rpc": ",".join(ends)} if ends else {"device": "none"}
            options: dict[str, Any] = {"steps": args.steps, "ctx": args.ctx, "fa": args.fa, "threads": args.threads}
            run = train.require(train.execute(program, model, text, say=mark, **options, **where))
            if not counted:
                for event in run.all("layers"):
                    print(f"{event['device']} ({event['description']}): layers {event['layers']}", end="")
                    print(", output" if event["output"] else "")
                times = run.seconds[2:]
                spread = f"{min(times):.3f} .. {max(times):.3f}"
                print(f"step {statistics.median(times):.3f} s ({spread}), rate {args.rate or 'unlimited'}", end=", ")
                print(f"loss {run.losses[-1]:.6f}")
                continue
            steps = len(marks) - 2
            for i, server in enumerate(servers):
                (m0, s0, r0), (m1, s1, r1) = marks[1][i], marks[-1][i]
                total = sum((s1 - s0).values())
                print(f"a step: {total / steps:.0f} bytes to {server.endpoint}, {(r1 - r0) / steps:.0f} back")
                for name, n in sorted((m1 - m0).items()):
                    print(f"  {name:16} {n / steps:7.1f} messages {(s1 - s0)[name] / steps:12.0f} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
