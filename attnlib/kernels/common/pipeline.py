"""How a kernel in Gluon shares its work and its registers among warpgroups: constants of a plan."""

from dataclasses import dataclass

from attnlib.kernels.common.constants import Constants


@dataclass(frozen=True)
class Pipeline(Constants):
    """How the work of a program is divided, and what runs beside what; fields as in `HopperConfig`."""

    warpgroups: int
    stages: int
    joint: bool
    named: bool
    late_wait: bool
    pin: bool
    keep_shift: bool = False


@dataclass(frozen=True)
class Registers(Constants):
    """Registers of a thread, after the program has shared them out anew."""

    consumer: int
    producer: int


@dataclass(frozen=True)
class WideRegisters(Registers):
    """Of a wide backward kernel, which has a warpgroup for dQ."""

    dq: int
