"""Kernels of notebooks that are forks of one process, which has imported what every notebook imports.

Importing PyTorch takes as long as half of the cells of a replayed notebook. Here it is done once: Python's
own fork server (`multiprocessing`) imports the packages, and the kernel of each notebook begins as a copy of
it. A notebook that is measured on a GPU gets a process of its own from the start.
"""

import gc
import multiprocessing
import os
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

IMPORTED = ["ipykernel.kernelapp", "torch", "matplotlib", "pandas", "seaborn"]
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""What attnlib.book.lesson sets where no GPU is. It has to be set when Triton is imported, and there it is:
PyTorch's compiler, which any operator of this package needs, imports Triton."""
_INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
"""What ipykernel sets as it starts; matplotlib reads it when it is imported."""

_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


def start_server(environment: Mapping[str, str]) -> None:
    """Start the process that kernels are forked from, unless it runs. environment: its variables, of which
    Python and the packages read some only once."""
    import torch

    interpreted = {} if torch.cuda.is_available() else INTERPRETED
    _context.set_forkserver_preload([*IMPORTED, *["torch._dynamo"] * bool(interpreted)])
    own = {**_INLINE, **environment, **interpreted}
    with _starting:  # notebooks side by side start it at once
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _run_kernel(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """The forked process: as `python -m ipykernel_launcher`, which was not started but copied. It ends when
    the server does, which ends when the process that called `start_server` does."""
    from ipykernel import kernelapp

    # What was imported lives as long as the kernel: to look through it for cycles, after each 700 objects
    # of a kernel that is interpreted, takes a tenth of the time and copies every page of the server's memory.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    hear_the_end()
    os.setsid()
    os.chdir(folder)
    interpreted = INTERPRETED if os.environ.items() >= INTERPRETED.items() else {}
    os.environ.clear()
    os.environ.update({**_INLINE, **environment, **interpreted})
    kernelapp.launch_new_instance(argv=[*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])


def hear_the_end() -> None:
    """In a forked process: close its copy of the pipe by which the server hears that its caller is gone. Else
    the server would wait for this process, and this one for the server."""
    os.close(forkserver._forkserver._forkserver_alive_fd)


class _Child:
    """A forked process, with the methods of `subprocess.Popen` that a provisioner calls."""

    stdin = stdout = stderr = None

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.pid = process, process.pid
        self.terminate, self.kill = process.terminate, process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Provisioner(LocalProvisioner):
    """Starts the kernel as a fork. It has no process group to send signals to: only the kernel gets them."""

    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
        process = _context.Process(
            target=_run_kernel, args=(arguments, str(options["cwd"]), dict(options["env"])), daemon=True
        )
        process.start()
        self.process, self.pid, self.cwd = _Child(process), process.pid, options["cwd"]
        return self.connection_info


class ForkedKernelManager(AsyncKernelManager):
    """For `nbclient.NotebookClient`, as its `kernel_manager_class`. `start_server` comes first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.provisioner = _Provisioner(kernel_id="", kernel_spec=self.kernel_spec, parent=self)
