"""Words that a producer warp tells its consumers through shared memory. Chapter 15 teaches them.

A store is one of all lanes of the producer, so a word has several places, which all get it. Consumers read
the first one. When places are used again is in the docstring of each kernel.

`mem.next_tile` has the words of two tiles, COUNT of each, and of a tile the first word is the first row, -1
after the last tile; `mem.drawn` says that they are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def new_words(N: gl.constexpr, LANES: gl.constexpr = 32, dtype: gl.constexpr = gl.int32):
    """Room for N words: [N, LANES]."""
    return gl.allocate_shared_memory(dtype, [N, LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put_word(places, word):
    """The producer stores a word in its places, [LANES]."""
    places.store(gl.full(places.shape, word, places.dtype, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def word_in(places, WARPS: gl.constexpr = 4):
    """The word in these places, for WARPS warps that read it."""
    return gl.max(places.slice(0, 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def tell(mem, b, words, COUNT: gl.constexpr):
    """The producer tells of a tile whose number is `b` modulo 2: the first COUNT of `words`."""
    for w in gl.static_range(COUNT):
        put_word(mem.next_tile.index(b * COUNT + w), words[w])
    mbarrier.arrive(mem.drawn.index(b), count=1)


@gluon.jit
def told(mem, number, w, COUNT: gl.constexpr):
    """Word w of what a consumer has waited for with `await_tile`."""
    return word_in(mem.next_tile.index((number & 1) * COUNT + w))


@gluon.jit
def await_tile(mem, number, COUNT: gl.constexpr):
    """Wait until the producer has told of a tile: its first row, -1 after the last tile."""
    b = number & 1
    mbarrier.wait(mem.drawn.index(b), (number >> 1) & 1)
    return told(mem, number, 0, COUNT)
