"""Solutions of the exercises of chapter 37; kernels are functions that take the place of the kernel's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def weights(s, shift, qk_scale):  # P [64, N]
    x = s * qk_scale - gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout))[:, None]  # [64, N]
    left, right = halves(x)  # [64, N / 2] twice
    right = gl.maximum(right, -126.0)
    moved = right + 12582912.0  # [64, N / 2] n in the lowest bits
    f = right - (moved - 12582912.0)  # [64, N / 2]
    p = f * 0.0551716685295105 + 0.2426111251115799  # [64, N / 2]
    p = (p * f + 0.6932609677314758) * f + 0.9999280571937561
    n = moved.to(gl.int32, bitcast=True) << 23  # [64, N / 2]
    return whole(gl.exp2(left), (p.to(gl.int32, bitcast=True) + n).to(gl.float32, bitcast=True))


half_and_half = [weights]


def binding_rate(tensor, slots, exps, share):
    return 128 * exps / (share * tensor + slots)


def early(lines, results, operands):
    found = set()
    for i, (_, written, *_) in enumerate(lines):
        later = {name for _, _, *read in lines[i + 1 :] for name in read}
        if written in results and later & set(operands):
            found.add(written)
    return found
