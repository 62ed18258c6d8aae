"""Constants of a Gluon kernel that belong together: dataclasses that a kernel takes as one argument."""

from dataclasses import dataclass, fields

from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class Constants:
    """Base of frozen dataclasses that are a constexpr argument of a kernel, or a group within such a one.

    The compiler wants every constant wrapped in gl.constexpr, so each field is, but for groups of constants.
    In Python `plan.mask.causal.value` is the number, in a kernel `plan.mask.causal`.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Constants):
                object.__setattr__(self, field.name, gl.constexpr(value))
