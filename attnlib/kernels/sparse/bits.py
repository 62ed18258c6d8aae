"""A step's bits in the registers of a warpgroup, as the accumulator of its scores lies there (chapter 30)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def hide(s, words, value: gl.constexpr):
    """s [64, N] with `value` where a bit is 0; words: in shared memory [64, 4], of `block_mask.tiles`, of 32
    bits or of 16.

    The fence is for the copy that overwrites the words: a load belongs to the generic proxy and a copy to the
    async proxy, and a barrier does not order one after the other.
    """
    own = words.load(gl.SliceLayout(1, gl.SliceLayout(3, _parts(s).type.layout)))
    if words.dtype == gl.int16:
        own = own.to(gl.int32) & 0xFFFF
    fence_async_shared()
    return _where(s, own, value)


@gluon.jit
def hide_by(s, words_ptr, value: gl.constexpr):
    """The same with the words [64, 4] in global memory."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, _parts(s).type.layout))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    return _where(s, gl.load(words_ptr + row * 4 + word), value)


@gluon.jit
def _parts(s):
    """Rows, eights of columns, the pair within, the column within that."""
    return s.reshape([64, s.shape[1] // 8, 4, 2])


@gluon.jit
def _where(s, own, value: gl.constexpr):
    """A thread has two rows and, of N columns, N / 4 that have their bits in one word. So it has two words,
    `own`, and which bit an element has is known to the compiler."""
    parts = _parts(s)
    layout: gl.constexpr = parts.type.layout
    own = own[:, None, :, None]  # [64, 1, 4, 1]
    N: gl.constexpr = s.shape[1]
    eights = gl.arange(0, N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    bit = 1 << (2 * eights[None, :, None, None] + second[None, None, None, :])  # [1, N / 8, 1, 2]
    parts = gl.where((own & bit) != 0, parts, value)
    return gl.convert_layout(parts.reshape([64, N]), s.type.layout)
