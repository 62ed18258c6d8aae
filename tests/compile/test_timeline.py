"""Copies with stamps compile for sm_90 as the kernels do: no spill, no serialized product in a loop."""

from __future__ import annotations

import pytest
import torch
from chosen import with_more
from launches import jobs_of

from attnlib.bench import inspect_sm90, sources, timeline
from attnlib.bench.timeline import Span, after, before

SPANS = {
    "11_warp_specialization": [  # the chapter's own, which compiles this copy
        Span("wait for K", before("mbarrier.wait(mem.k_full"), after("mbarrier.wait(mem.k_full")),
        Span("QK", after("mbarrier.wait(mem.k_full"), after("mbarrier.arrive(mem.k_free")),
        Span("softmax", after("mbarrier.arrive(mem.k_free"), after("mbarrier.wait(mem.v_full")),
        Span("PV", after("mbarrier.wait(mem.v_full"), after("mbarrier.arrive(mem.v_free")),
    ],
    "12_overlap": [
        Span("QK", after("mbarrier.wait(mem.k_full", "start_scores"), after("b_s = finish(scores")),
        Span(
            "PV",
            after("mbarrier.wait(mem.v_full", "start_values"),
            after("b_o = finish(values", tile="i - 1"),
        ),
    ],
}


@pytest.mark.parametrize("step", SPANS)
def test_stamps_of_a_chapter(step):
    one = timeline.of_step(step, SPANS[step], range(4, 28))
    plain = sources.load_step(step)
    jobs = []
    for d in with_more([64, 256] if step == "11_warp_specialization" else [256], (64, 128, 256)):
        x = torch.empty(1, 2, 512, d, dtype=torch.float16)
        jobs += jobs_of(plain, lambda x=x: plain.attention(x, x, x))
        jobs += jobs_of(one.module, lambda x=x: one.attention(x, x, x))
    found = inspect_sm90.compile_all(jobs)
    for kernel, copy in zip(found[::2], found[1::2], strict=True):
        assert copy.warnings == kernel.warnings and copy.ctas_per_sm == kernel.ctas_per_sm
        assert [kernel.order(i) for i in (0, 1)] == [copy.order(i) for i in (0, 1)]
        for plain_loop, loop in zip(kernel.loops, copy.loops, strict=True):
            assert loop.get("CS2R", 0) - plain_loop.get("CS2R", 0) == one.copy.places
            assert "STL" not in loop and "LDL" not in loop
