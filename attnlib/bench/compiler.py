"""A process that compiles kernels: a child of its own, or a fork of a server that has imported the compiler.

Importing PyTorch and Triton takes as long as two kernels take to compile. A run of the whole book starts a
process for each batch of kernels, so it starts a server first (`serve`), which imports them once: what it
forks begins at once. Without a server each process imports on its own.

Either is told what to run as `python -m MODULE` is: a module that reads its standard input.
"""

from __future__ import annotations

import gc
import os
import runpy
import secrets
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import traceback
from types import TracebackType
from typing import IO

from attnlib.bench.paths import ROOT

SERVER = "ATTNLIB_COMPILER"
"""Variable of the environment: the name of a server's socket, which is no file (unix(7): abstract)."""
IMPORTED = "torch", "triton.compiler", "triton.backends.nvidia.compiler", "triton.experimental.gluon"


def environment() -> dict[str, str]:
    """Of a process that compiles: without Triton's interpreter, and with this project to import."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env


def collect_seldom() -> None:
    """A compiler makes millions of small objects and few cycles: to look for these after each 700 objects, as
    Python does, takes a tenth of the time."""
    gc.set_threshold(100_000, 50, 100)


def start(module: str, stdin: IO, stderr: IO) -> subprocess.Popen | Fork:
    """Run a module, as `python -m` does, in a process whose standard output is a pipe, unbuffered."""
    if name := os.environ.get(SERVER):
        return Fork(name, module, stdin, stderr)
    command = [sys.executable, "-m", module]
    return subprocess.Popen(
        command, bufsize=0, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=environment()
    )


class Fork:
    """A process that a server forked, with what `subprocess.Popen` has and this project uses."""

    def __init__(self, name: str, module: str, stdin: IO, stderr: IO) -> None:
        self.returncode: int | None = None
        read, write = os.pipe()
        self.stdout = open(read, "rb", buffering=0)  # noqa: SIM115  (closed by __exit__)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.connect(f"\0{name}")
            socket.send_fds(self._server, [module.encode()], [stdin.fileno(), write, stderr.fileno()])
        finally:
            os.close(write)
        self.pid = int.from_bytes(self._server.recv(4), "little")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stdout.close()
        status = self._server.recv(1)  # nothing from a process that was killed, or crashed
        self.returncode = status[0] if status else -signal.SIGKILL
        self._server.close()


# ---------------------------------------------------------------- the server

_starting = threading.Lock()
_name: str | None = None


def serve() -> str:
    """The name of the server of this process; the server is started if there is none, and ends when this
    process does."""
    global _name
    with _starting:
        if _name is None:
            name = f"attnlib-compiler-{secrets.token_hex(8)}"
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(f"\0{name}")
                listening.listen(64)  # who comes while the server still imports waits
                command = [sys.executable, "-m", __name__, str(listening.fileno()), str(os.getpid())]
                subprocess.Popen(command, env=environment(), pass_fds=[listening.fileno()])
            _name = name
    return _name


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 64
    started_by: int

    def verify_request(self, request: socket.socket, client_address: object) -> bool:
        """This user alone may have something run."""
        credentials = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", credentials)[1] == os.getuid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.started_by:
            raise SystemExit


class _Request(socketserver.BaseRequestHandler):
    """In the fork."""

    def handle(self) -> None:
        module, files, *_ = socket.recv_fds(self.request, 256, 3)
        self.request.sendall(os.getpid().to_bytes(4, "little"))
        for place, file in enumerate(files):
            os.dup2(file, place)
            os.close(file)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (open as long as the process)
        status = 0
        try:
            runpy.run_module(module.decode(), run_name="__main__", alter_sys=True)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        self.request.sendall(bytes([status]))
        os._exit(status)  # without what the server registered for its own end


def _main() -> None:
    started_by = int(sys.argv.pop())
    listening = socket.socket(fileno=int(sys.argv.pop()))
    collect_seldom()
    for name in IMPORTED:
        __import__(name)
    server = _Server(listening.getsockname(), _Request, bind_and_activate=False)
    server.socket.close()
    server.socket, server.started_by = listening, started_by
    server.serve_forever()


if __name__ == "__main__":
    _main()
