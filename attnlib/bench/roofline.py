"""FLOPs, bytes and exponentials of an attention call, and the ceilings of the hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnlib.bench.shapes import Shape


def _twice_visible_pairs(shape: Shape) -> int:
    """Twice the (query, key) pairs that the mask lets through, by area.

    The area of the mask, not the count of its cells: a square causal mask is S^2 / 2 pairs, as the
    FlashAttention papers count, where the exact count is S (S + 1) / 2. Bottom-right causal: Sq*Sk - Sq^2/2
    when Sq <= Sk, else Sk^2/2.
    """
    sq, sk = shape.seqlen, shape.keys
    if not shape.causal:
        return 2 * sq * sk
    return 2 * sq * sk - sq * sq if sq <= sk else sk * sk


def flops(shape: Shape) -> int:
    """FLOPs of a forward pass: 4*B*H*Sq*Sk*D, halved when causal and square (the FlashAttention-2/3
    convention); 2*B*H*Sq*Sk*(D + Dv) where values have Dv columns.

    A product of 2*D FLOPs and one of 2*Dv for each visible pair; the softmax is not counted. For a causal
    call with Sq != Sk the pairs are the area of the bottom-right mask: Sq*Sk - Sq^2/2 when Sq <= Sk, else
    Sk^2/2.
    """
    columns = shape.head_dim + shape.value_dim
    return shape.batch * shape.heads * columns * _twice_visible_pairs(shape)


def backward_flops(shape: Shape) -> float:
    """FLOPs of a backward pass: five products instead of two, 2.5 times as many; three of them have D columns
    and two Dv. The convention of the FlashAttention papers, whatever a kernel computes."""
    own, values = shape.head_dim, shape.value_dim
    return flops(shape) * (3 * own + 2 * values) / (own + values)


def exps(shape: Shape) -> int:
    """Exponentials that the softmax needs: one for each visible score."""
    return shape.batch * shape.heads * _twice_visible_pairs(shape) // 2


def min_bytes(shape: Shape) -> int:
    """The fewest bytes that can cross HBM: q, k, v read once, out written once (no LSE)."""
    columns = shape.head_dim + shape.value_dim  # of q and out, of k and v
    rows = shape.batch * (shape.heads * shape.seqlen + shape.kv_heads * shape.keys)
    return shape.itemsize * rows * columns


def naive_bytes(shape: Shape, score_itemsize: int | None = None) -> int:
    """HBM bytes of attention in three kernels (QK^T, softmax, PV) that store S and P.

    On top of `min_bytes`, B*H*Sq*Sk scores are written, read, written again as probabilities and read again,
    each of `score_itemsize` bytes (default: the dtype of the call). A causal mask saves nothing: the whole
    matrix is stored.
    """
    scores = shape.batch * shape.heads * shape.seqlen * shape.keys
    return min_bytes(shape) + 4 * scores * (score_itemsize or shape.itemsize)


def tiled_work(
    shape: Shape, products: int, tiles_read: int, exps_per_score: int, block: int = 64
) -> dict[str, int]:
    """What a fused kernel with tiles of `block` x `block` scores asks of each unit; a tile on the diagonal
    counts as a whole.

    products, tiles_read: matrix products, and tiles of K or V that are read, for each tile of scores. Returns
    HBM (bytes if all repeated reads are served by L2), L2 (bytes), tensor (FLOPs) and exp (exponentials).
    """
    n = -(-shape.seqlen // block)  # blocks of rows
    tiles = shape.batch * shape.heads * (n * (n + 1) // 2 if shape.causal else n * n)
    return {
        "HBM": min_bytes(shape),
        "L2": tiles_read * tiles * block * shape.head_dim * shape.itemsize + min_bytes(shape) // 2,  # Q and O
        "tensor": products * tiles * 2 * block * block * shape.head_dim,
        "exp": exps_per_score * tiles * block * block,
    }


def intensity(shape: Shape, num_bytes: float | None = None) -> float:
    """FLOPs for each HBM byte; of the ideal kernel (`min_bytes`) unless the bytes are given."""
    return flops(shape) / (min_bytes(shape) if num_bytes is None else num_bytes)


@dataclass(frozen=True)
class Hardware:
    """What the data sheet promises. A measured ceiling is `dataclasses.replace(H200,
    tensor_tflops_fp16=680.0)`.

    Units: TFLOP/s (dense, no sparsity), GB/s, MB, KB, MHz, GB, W. `boost_mhz` is the clock behind the tensor
    figure: sms * 4096 FLOP per clock per SM * boost_mhz. `smem_kb_per_block` is what one block may use of
    `smem_kb_per_sm`.
    """

    name: str
    sms: int
    tensor_tflops_fp16: float
    tensor_tflops_fp8: float
    hbm_gbs: float
    l2_mb: float
    smem_kb_per_sm: int
    smem_kb_per_block: int
    registers_per_sm: int
    exp_per_clk_per_sm: int
    boost_mhz: int
    memory_gb: int
    power_w: int

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the tensor cores, not HBM, are the limit."""
        return self.tensor_tflops_fp16 * 1e3 / self.hbm_gbs

    @property
    def exps_per_second(self) -> float:
        """Exponentials a second at the boost clock."""
        return self.sms * self.exp_per_clk_per_sm * self.boost_mhz * 1e6


# NVIDIA's H100 and H200 data sheets (SXM) and the Hopper architecture white paper; 16 exp2 per clock and SM
# from the throughput table of the CUDA C++ programming guide (compute capability 9.0).
H100 = Hardware(
    name="NVIDIA H100 SXM",
    sms=132,
    tensor_tflops_fp16=989.4,
    tensor_tflops_fp8=1978.9,
    hbm_gbs=3350.0,
    l2_mb=50.0,
    smem_kb_per_sm=228,
    smem_kb_per_block=227,
    registers_per_sm=65536,
    exp_per_clk_per_sm=16,
    boost_mhz=1830,
    memory_gb=80,
    power_w=700,
)
H200 = replace(H100, name="NVIDIA H200 SXM", hbm_gbs=4800.0, memory_gb=141)  # the same chip, more memory


def attainable(flop_per_byte: float, hw: Hardware) -> float:
    """TFLOP/s that a kernel of this intensity can reach: min(tensor peak, intensity * HBM bandwidth)."""
    return min(hw.tensor_tflops_fp16, flop_per_byte * hw.hbm_gbs * 1e-3)


def exp_roof_tflops(head_dim: int, hw: Hardware) -> float:
    """TFLOP/s of a kernel that did nothing but its exponentials: each visible score is 4*D FLOPs and one exp.

    Matmul and exp run on different units and can overlap, so this is a roof of its own and not a sum.
    """
    return 4 * head_dim * hw.exps_per_second * 1e-12
