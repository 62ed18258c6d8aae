"""SM clock and board power while something runs, read through NVML.

NVML comes with the driver and its Python binding, `pynvml`, with the package nvidia-ml-py. Where either is
missing every value is None: clocks and watts explain a measurement, they are not part of it.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from typing import Any

INTERVAL_S = 0.01
BURST_INTERVAL_S = 0.002
"""Between two samples: of a long run, and of a window of some ten milliseconds."""
MIN_UPDATES = 6
"""Updates of the energy counter, about ten in a second, that its mean power is taken over at least."""


@functools.cache
def _device() -> tuple[Any, Any] | None:
    """(pynvml, handle of the current CUDA device), or None where NVML can't be used."""
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        try:
            # By UUID: NVML numbers the GPUs of the machine, CUDA those that CUDA_VISIBLE_DEVICES leaves.
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # no package, no driver, no permission: all mean the same here
        return None


def device_info() -> dict[str, Any]:
    """Driver version and power limit (W) of the current GPU, None where unknown."""
    info: dict[str, Any] = {"driver": None, "power_limit_w": None}
    device = _device()
    if device is None:
        return info
    nvml, handle = device
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        info["driver"] = driver.decode() if isinstance(driver, bytes) else driver
        info["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    except Exception:
        pass
    return info


def read() -> tuple[float, float] | None:
    """(SM clock in MHz, board power in W) now; None where unknown."""
    device = _device()
    if device is None:
        return None
    nvml, handle = device
    try:
        clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        return float(clock), nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except Exception:
        return None


def energy() -> float | None:
    """Energy in J that the board has used since its driver was loaded; None where it is not counted."""
    device = _device()
    if device is None:
        return None
    nvml, handle = device
    try:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:
        return None


class Sampler:
    """Sample the SM clock and the power in a thread for the length of a `with` block.

    On Hopper NVML reports power averaged over about a second: the watts of a run that is shorter also show
    what ran before it. `medians` are of all samples, or of the second half, when the clock has settled.
    `mean_watts` comes from the energy counter, which counts nothing from before, but needs a longer run.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self.samples: list[tuple[float, float]] = []
        self.energy: list[tuple[float, float]] = []  # (s, J) when the counter was seen to change
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            sample = read()
            if sample is None:
                return
            self.samples.append(sample)
            joules = energy()
            if joules is not None and (not self.energy or joules != self.energy[-1][1]):
                self.energy.append((time.perf_counter(), joules))
            self._stop.wait(self.interval_s)

    def __enter__(self) -> Sampler:
        if _device() is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def medians(self, settled: bool = False) -> tuple[float | None, float | None]:
        """(SM clock in MHz, power in W), medians; of the second half of the samples when `settled`."""
        samples = self.samples[len(self.samples) // 2 :] if settled else self.samples
        if not samples:
            return None, None
        return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)

    def mean_watts(self) -> float | None:
        """Mean power in W between the first and the last update of the energy counter; None if it had fewer
        than `MIN_UPDATES`, in half a second or so. Between updates the counter stands still: read at any two
        moments, it would be off by what the board takes in a tenth of a second."""
        updates = self.energy[1:]  # the first reading is no update
        if len(updates) < MIN_UPDATES:
            return None
        (start, before), (end, after) = updates[0], updates[-1]
        return (after - before) / (end - start)
