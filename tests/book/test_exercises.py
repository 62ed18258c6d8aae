"""Exercises that write kernels: a mistake planted in a solution is refused, with a message that helps."""

import pytest
from chosen import first_of_each

from attnlib.bench.sources import load_source
from attnlib.book import lesson

LAUNCH_OF_SOFTMAX = (
    "softmax_once_kernel[(rows,)](s, p, columns, BLOCK=triton.next_power_of_2(columns), num_warps=4)"
)
FENCE = "fence_async_shared()  # what threads wrote becomes visible to the copy engine\n"
Q_IS_READ = "        mbarrier.arrive(mem.q_free.index(W), count=1)  # the last product that reads Q is done\n"
FIRST_MASK = "        b_s = ten.mask(b_s, row, (tiles - 1) * BLOCK_N, S, CAUSAL)\n        b_p"
STORE_WAIT = "        tma.store_wait(0)  # the O of the job before has left the buffer\n"
END_OF_PV = "        b_o = warpgroup_mma_wait(0, deps=(token,))  # [64, D]\n"
NEXT_V = "            ten.load_tile(v_desc, i_h, later, full.index(2 + slot), v_tiles.index(slot))\n"
LOAD_V = "        if i + 2 < tiles:\n" + NEXT_V
LANDED = "self.bytes -= count\n"
START_NEXT = "scores = twelve.start_scores(mem, i + 1, W, b_zero)  # in flight during the softmax of tile i\n"
STEP = (
    "        b_s = ten.mask(b_s, row, (tiles - 1 - i) * BLOCK_N, S, False)\n"
    "        b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)  # [64, BLOCK_N], [64]\n"
)
ONE_EARLY = f"        if i == 0:\n            {START_NEXT}{STEP}        if i > 0:\n            {START_NEXT}"
ROWS_32 = (
    "triton.cdiv(S * group, 32), B * H_kv)](\n"
    "        q, k, v, o, S, group, six.LOG2_E * D**-0.5, D, 32, 32, causal)"
)
NEVER_FILLED = "    if c >= plan.stages:  # what was never filled is not given back\n"

PLANTED = {
    "00_how_we_measure": (
        ("is_right", "out.shape == truth.shape and ", "", "three equal ones: expected False, got True"),
        ("is_right", "<= tol).all()", "<= tol).any()", "one element: expected False, got True"),
        ("is_right", "bool(((out - truth).abs() <= tol).all())", "bool((out - truth).abs().mean() <= tol)",
         "one element: expected False, got True"),
        ("visited_tiles", "min(start + BLOCK_M, S)", "start + BLOCK_M", "S=129, tiles 128x64"),
        ("row_sums", "b_l += tl.sum", "b_l = tl.sum", "33 rows of 100: 32 sums are wrong"),
        ("row_sums", 'other=float("-inf")', "other=0.0", "sums are wrong"),
    ),
    "01_naive": (
        ("softmax_once", "tl.max(b_s, 0))", "tl.max(tl.load(s_ptr + o_row + o_n, mask=o_n < columns), 0))",
         "each once"),
        ("softmax_once", LAUNCH_OF_SOFTMAX, "p.copy_(s.softmax(-1))", "no Triton kernel"),
    ),
    "02_tiling": (
        ("kv_bytes", "min(seqlen, -(-end // block_n) * block_n)", "end", "64x128, causal=True"),
        ("kv_bytes", "* itemsize", "* 2", "4 bytes an element"),
        ("row_sum", "<= o_m[:, None])", "< o_m[:, None])", "rows are wrong"),
        ("without_waits", 'row["time_us"]', "3000.0", "expected 1920.0"),
    ),
    "03_online_softmax": (
        ("causal_head", "mask=o_n[:, None] < S,", "mask=o_n[:, None] < S + 32,", "S=20: error of O nan"),
        ("causal_head", "tl.minimum(S, (tl.program_id(0) + 1) * BLOCK)", "S", "later keys: error of O nan"),
        ("causal_head", "<= o_m[:, None], b_s", "< o_m[:, None], b_s", "error of O"),
        ("causal_head", "b_m + tl.log(b_l)", "b_m + tl.log2(b_l)", "error of LSE"),
    ),
    "04_exp2": (
        ("signed", "tl.minimum(b_m, tl.min(b_s, 1))", "tl.maximum(b_m, tl.max(b_s, 1))", "not finite"),
        ("signed", "tl.where(keep, b_s, never)", 'tl.where(keep, b_s, float("-inf"))', "not finite"),
    ),
    "05_two_pass_causal": (
        ("windowed", "o_m, first, full, S, window", "o_m, 0, full, S, window", "reads others"),
        ("windowed", 'float("-inf"), 0.0, b_m_new)', 'float("-inf"), b_m_new, b_m_new)', "not finite"),
        ("windowed", "> o_m[:, None] - window", ">= o_m[:, None] - window", "max error"),
    ),
    "06_autotuning": (
        ("packed", "(i_m * BLOCK_M // group if", "((i_m + 1) * BLOCK_M // group if", "outside of its"),
        ("packed", ROWS_32, ROWS_32.replace("32)", "64)").replace("D, 32", "D, 64"), "expected the grid"),
        ("packed", "triton.cdiv(S * group, 32)", "triton.cdiv(S * group, 32) + 1", "outside of its tensors"),
        ("packed", "o_r // group, o_r % group", "o_r % S, o_r // S", "outside of its tensors"),
        ("stages", "// ctas - 1024", "// ctas", "expected 8, got 9"),
        ("stages", "228 * 1024 // ctas - 1024", "227 * 1024 // ctas", "expected 14, got 15"),
        ("stages", "(budget - q)", "(budget - q - 1)", "expected 3, got 2"),
    ),
    "07_descriptors_and_late_tile": (
        ("token_major", "i_h, 0]).reshape([BLOCK_N", "0, 0]).reshape([BLOCK_N", "max error"),
        ("token_major", "[B, S, H, D], [S", "[1, B * S, H, D], [S", "B=2.*(max error|not finite)"),
        ("token_major", "tiles(k, 32)", "tiles(k.clone(), 32)", "a copy was made"),
        ("kept_keys", "start - BLOCK_N, 0", "start, 0", "max error"),
        ("kept_keys", "k_desc.load([i_h, begin", "k_desc.load([i_h, 0 * begin", "max error"),
        ("kept_keys", "(S - 1) // BLOCK_N * BLOCK_N, 0", "S // BLOCK_N * BLOCK_N, 0", "max error"),
        ("kept_keys", "begin + BLOCK_N, S", "begin, S", "max error"),
        ("late_attention", "values(p, j - 1)", "values(p, j)", "off by"),
    ),
    "08_production": (
        ("cached_attention", "i_kv = i_h // group", "i_kv = i_h", "max error"),
        ("cached_attention", "S_k - S, H // H_kv", "S_k * 0, H // H_kv", "max error"),
    ),
    "10_tma_wgmma": (
        ("paired_attention", "(full.index(slot), (i // 2) & 1)", "(full.index(slot), i & 1)", "Deadlock"),
        ("paired_attention", "    mbarrier.wait(full.index(4), 0)\n", "", "a copy writes it"),
        ("paired_attention", FENCE, "pass\n", "without fence_async_shared"),
        ("MBarrier", LANDED, LANDED + "        self.missing *= self.bytes != 0\n", "one of two arrivals"),
        ("paired_attention", END_OF_PV + LOAD_V, LOAD_V + END_OF_PV, "overwrites"),
    ),
    "11_warp_specialization": (
        ("attention_of_three", "eleven.barriers(STAGES, 3)", "eleven.barriers(STAGES, 2)", "Race"),
        ("attention_of_three", "[160, 160, 24]", "[240, 240, 24]", "of 65536"),
        ("attention_of_three", "maxnreg=128", "maxnreg=168", "512 threads begin"),
        ("attention_of_three", "triton.cdiv(S, 192)", "triton.cdiv(S, 128)", "a CTA for each 192"),
    ),
    "12_overlap": (
        ("early_attention", "mem.k_free, i + 1, 1)", "mem.k_free, i + 1, 2)", "Race"),
        ("early_attention", "        " + START_NEXT + STEP, ONE_EARLY, "in the softmax of trip 1"),
        ("early_attention", "start_scores(mem, i + 1, W", "start_scores(mem, i, W", "Race|Deadlock"),
    ),
    "13_scheduling": (
        ("choose", "heads - first if first >= last else section", "section", "ends at"),
        ("choose", "max(together * mib - fits, 0)", "0", "ends at"),
        ("choose", "range(0, heads, section)]", "range(0, heads)]", "expected a multiple"),
        ("order", "first == LAST, HEADS - LAST", "first == LAST, SECTION", "expected .block, head."),
        ("order", "* SECTION, LAST)", "* SECTION, HEADS)", "expected .block, head."),
        ("order", "number - first * blocks", "number - first", "expected .block, head."),
        ("owned_attention", STORE_WAIT, "", "overwrites o"),
        ("owned_attention", "turn + 1\n    tma.store_wait(0)\n", "turn + 1\n", "has not waited"),
        ("owned_attention", Q_IS_READ, "", "Deadlock"),
        ("owned_attention", FIRST_MASK, Q_IS_READ + FIRST_MASK, "has not said that it read|arrivals"),
    ),
    "14_ring": (
        ("mended_ring", NEVER_FILLED, "    if c >= 0:\n", "Deadlock"),
        ("mended_ring", "i_h, blocks - i, plan)", "i_h, blocks - 1 - i, plan)", "max error"),
        ("whole_shifts", "gl.where(grown, gl.ceil(top), shift)", "gl.where(grown, top, shift)", "no whole"),
        ("whole_shifts", "grown = top - shift > LAZY", "grown = top > shift", "a shift moves by 1"),
    ),
    "15_teaching": (
        ("in_four_goes", "third, mem, i_h, row, 2 *", "third, mem, i_h, row, 1 *", "not finite"),
        ("fits", "d // 2 + block_n // 2", "d // 2", "expected"),
        ("fits", "min(240, consumers // 8 * 8)", "consumers // 8 * 8", "1 consumers"),
        ("fits", " * d) + 1024", " * d)", "233472 bytes"),
    ),
    "19_record": (
        ("lazy_attention", "b_top > b_c + 8.0", "b_top > b_c", "the moves of"),
        ("lazy_attention", "b_l * b_alpha, b_o", "b_l, b_o", "max error"),
        ("lazy_attention", "tl.exp2(b_c - b_new)", "tl.exp2(b_c - b_top)", "max error|not finite"),
    ),
    "20_backward": (
        ("grouped_dv", "i_h = i_kv * group + g", "i_h = i_kv * group + g * 0", "max error"),
        ("grouped_dv", "o_n[:, None] <= o_m[None, :]", "o_n[:, None] < o_m[None, :]", "max error"),
    ),
    "21_hopper_backward": (
        ("mended_exchange", "    fence_async_shared()  # before the other is told\n", "", "without|Race"),
        ("mended_exchange", "2 * (1 - W) + (j & 1)", "2 * W + (j & 1)", "Race|Dead"),
        ("mended_exchange", "index((j & 1) * 2 + w)", "index((j & 1) + 2 * w)", "Race|max"),
        ("in_turns", "    if W == 0:  # consumer 1", "    if W <= 1:  # consumer 1", "Deadlock"),
        ("in_turns", "+ ((j + W) & 1), 256)", "+ (j & 1), 256)", "Race|Deadlock|twice before"),
        ("in_turns", "        await_ds(j - 1, W)\n", "", "Race|Deadlock|twice before"),
        ("rows_of_sums", "permute(1, 4, 2, 0, 3, 5)", "permute(1, 2, 4, 0, 3, 5)", "in a wrong place"),
        ("shared_kib", "2 * buffers * 64", "buffers * 64", "expected"),
        ("turn", ", S_k - 1)", ", S_k + 127)", "programs before"),
        ("turn", "S_k - S_q, ", "0, ", "programs before"),
        ("pausing", '        lines.append("nanosleep.u32 16;")\n', "", "times an addition and then"),
        ("pausing", "a + {i * 512}", "a + {i * 256}", "dq"),
    ),
    "22_fp8": (
        ("lagging", "gl.constexpr = 2.8", "gl.constexpr = 8.0", "times what rounding P costs"),
        ("lagging", "b_m_new - 6.0", "b_m_new - OFFSET", "times what rounding P costs"),
        ("lagging", "(b_alpha < 1.0)", "(b_alpha < 0.0)", "times what rounding P costs"),
        ("lagging", "rescale(b_o, b_alpha)\n    b_o =", "b_o\n    b_o =", "times what rounding P costs"),
        ("fraction_bits", "(bits + 1) < stops", "bits < stops", "expected"),
        ("centered", "v - mean) + mean", "v) + 0 * mean", "have a mean"),
    ),
    "23_decoding": (
        ("decode_pages", "* H_KV + head)", "* H_KV + 0 * head)", "max error"),
        ("decode_pages", "table + b * pages_of", "table + 0 * pages_of", "max error|not finite"),
        ("decode_pages", "v_ptr + o_kd, mask=o_k", "v_ptr + o_kd, mask=0 * o_k", "not finite"),
        ("snapped", "<= slack", "< slack", "expected"),
        ("free_queries", "2 * group", "group", "expected"),
    ),
    "30_block_masks": (
        ("capped_attention", "* LOG2_E  # [BLOCK, BLOCK]", "# [BLOCK, BLOCK]", "max error"),
        ("capped_attention", "2 * b_s / cap", "b_s / cap", "max error"),
        ("capped_attention", "tl.load(sinks_ptr + i_h)", "tl.load(sinks_ptr)", "max error"),
        ("capped_attention", "tl.full([BLOCK], 1.0", "tl.full([BLOCK], 0.0", "max error|not finite"),
        ("gradient_of_values", "b_lse[None, :]", "b_lse[:, None]", "max error"),
        ("gradient_of_values", "tl.load(steps_ptr + j) * BLOCK", "i_n * BLOCK", "max error"),
        ("fewest_blocks", "math.ceil(", "math.floor(", "blocks reach"),
    ),
    "31_bsfa": (
        ("running_attention", "float(margin)", "16.0 * float(margin)", "max error"),
        ("running_attention", "tl.max(tl.where(o_m < S, a", "tl.min(tl.where(o_m < S, a", "max error"),
        ("running_attention", "(b_top - b_m) * qk_scale", "b_top * qk_scale", "max error"),
        ("running_attention", "S - 1) // BLOCK_N", "S) // BLOCK_N", "max error|not finite"),
        ("bytes_of", "2 * kept - both)", "2 * kept)", "expected"),
    ),
    "32_seer": (
        ("pool_keys", "tl.minimum(BLOCK, S - j * BLOCK)", "BLOCK", "the mean is off"),
        ("pool_keys", 'tl.where(there, b_k, float("-inf"))', "b_k", "the largest is off"),
        ("pool_keys", "out_ptr + D + o_d", "out_ptr + o_d", "the smallest is off|the largest is off"),
        ("mean_pooled_attention", "tl.log2(b_sum) + b_new", "tl.log2(b_sum) + b_m", "the map is off"),
        ("mean_pooled_attention", "tl.exp2(b_sum - b_lse), 0) / count", "tl.exp2(b_sum - b_lse), 0) / BLOCK",
         "the map is off"),
        ("pays_from", "saved = sparsity *", "saved = (1 - sparsity) *", "tokens"),
    ),
    "33_s2": (
        ("hybrid_attention", "tl.where(i_h >= H - DENSE, 1, STRIDE)", "STRIDE", "1 dense: max error"),
        ("hybrid_attention", "range(near, i)", "range(near + 1, i)", "max error"),
        ("pages_of", "dropped % stride != first", "dropped % stride == first", "share a page"),
        ("pages_of", "if free:", "if False:", "as many as are held at once"),
        ("longest", "return low *", "return high *", "take"),
    ),
    "34_entmax": (
        ("sparsemax_attention", "range(5)", "range(0)", "max error"),
        ("sparsemax_attention", "b_l += tl.sum(b_x, 1)", "b_l += tl.sum(b_x * b_x, 1)", "max error"),
        ("sparsemax_attention", "tl.minimum(o_m, S - 1) if", "tl.minimum(o_m + 1, S - 1) if", "max error"),
    ),
    "35_monarch": (
        ("centers", "tl.sum(b_w, 0)", "tl.sum(b_w, 1)", "max error"),
        ("centers", "b_s - b_top[None, :]", "b_s", "queries times 400: max error"),
        ("best_block", "max(16, ", "max(1, ", "expected"),
        ("best_block", "min(range(1, N + 1), key=scores)", "1 << (N - 1).bit_length() // 2", "N = 300"),
    ),
    "37_exponentials": (
        ("half_and_half", "gl.exp2(left)", "gl.exp2(right)", "left half is not exp2"),
        ("half_and_half", "<< 23", "<< 22", "overflow|right half is off"),
        ("half_and_half", "gl.maximum(right, -126.0)", "gl.maximum(right, -12.0)", "right half is off"),
        ("binding_rate", "128 * exps", "32 * exps", "the unit takes"),
        ("early", "lines[i + 1 :]", "lines[i:]", "expected .'x'., got"),
        ("early", "later & set(operands)", "later", "expected none, got .'y'"),
        ("early", "[i + 1 :] for name", "[i + 1 : i + 2] for name", "expected .'z'., got none"),
    ),
    "36_distr": (
        ("sum_columns", "tl.load(places_ptr + o_d) // GROUP", "o_d // GROUP", "sums are wrong"),
        ("sum_columns", "b_y, mask=(o_m < S)[:, None])", "b_y)", "beyond S are written"),
        ("summed_keys", "o_c * GROUP + i)", "o_c * GROUP)", "max error"),
        ("summed_keys", "b_k += tl.load", "b_k = tl.load", "max error"),
        ("length_that_pays", "(group - 1)", "group", "the products save"),
        ("length_that_pays", "4 * flops", "2 * flops", "the products save"),
    ),
    "41_finetuning": (
        ("selective_bytes", "2 * width + ", "", "bytes, not"),
        ("selective_bytes", "2 * keys", "keys", "bytes, not"),
        ("LeanMLP", "save_for_backward(x, gate, up, down)",
         "save_for_backward(x, gate, up, down, x @ gate.T)", "kept besides the four inputs|too many values"),
        ("LeanMLP", "(1 - sigma)", "sigma", "the gradient of x is off"),
        ("LeanMLP", "d_out.T @ (silu * b)", "d_out.T @ silu", "the gradient of down is off"),
        ("longest", "(middle, high) if", "(low, middle) if", "more than"),
        ("adam", "b_m / one", "b_m", "off by"),
        ("adam", "0.05 * b_g * b_g", "0.05 * b_g", "off by"),
        ("adam", "(1 - 0.01 * rate)", "1.0", "rate 0.1: .* off by"),
    ),
    "42_context_parallel": (
        ("merge_two", "(b_wb / b_sum)", "b_wb", "the output is off"),
        ("merge_two", "b_max + tl.log(b_sum)", "tl.log(b_sum)", "the LSE is off"),
    ),
    "40_fastattention": (
        ("window_tile", "row - key - window, -M)", "row - key - window + 1, -M)", "scores are wrong"),
        ("window_tile", "tl.maximum(-above, 0)", "0", "scores are wrong"),
        ("window_tile", "tl.minimum(tl.maximum(row - key, -M), M)", "row - key", "scores are wrong"),
        ("window_tile", "b_seen - b_gone", "tl.where(o_n + key > o_m + row - window, b_seen, 0)", "compared"),
        ("best_chunks", "max(computed, sent)", "computed", "chunks, not"),
        ("crossover", ") + 1)", "))", "is not faster"),
    ),
}


MISTAKES = [(name, planted) for name, all_ in PLANTED.items() for planted in all_]


def test_each_mistake_has_its_place():
    for notebook, (_, old, *_) in MISTAKES:
        assert old in (lesson.notebooks_dir() / "solutions" / f"{notebook}.py").read_text()


@pytest.mark.parametrize(
    ("notebook", "planted"), first_of_each(MISTAKES, lambda mistake: (mistake[0], mistake[1][0]))
)
def test_a_planted_mistake_is_refused(notebook, planted):
    exercise, old, new, message = planted
    source = (lesson.notebooks_dir() / "solutions" / f"{notebook}.py").read_text()
    assert old in source
    answer = getattr(load_source(f"planted_{notebook}", source.replace(old, new)), exercise)
    with pytest.raises(AssertionError, match=message):
        getattr(lesson.checks(notebook), f"check_{exercise}")(answer)
