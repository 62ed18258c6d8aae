"""The host of the GPUs: its processor, and how many of its cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """That this process may use at the same time, by its affinity and the limit of its container."""
    found, limit = len(os.sched_getaffinity(0)), Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.exists() else ("max", "1")
    return found if quota == "max" else max(1, min(found, int(quota) // int(period)))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
