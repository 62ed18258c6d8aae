"""Kernels that are forks of a server: none stays when the process that started the server is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

CALLER = """\
import multiprocessing, os, time
from attnlib.book import forked_kernel

def fork():
    forked_kernel.hear_the_end()
    print(os.getpid(), os.getppid(), flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)

if __name__ == "__main__":
    multiprocessing.get_context("forkserver").Process(target=fork, daemon=True).start()
    time.sleep(60)
"""


def there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a zombie that nobody has waited for is gone
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_a_forked_kernel_and_its_server_end_with_their_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as caller:
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(pids) == 2 and all(map(there, pids))
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        until = time.monotonic() + 20
        while any(map(there, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        left = [pid for pid in pids if there(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left
