"""Calls in CUDA graphs, and on streams side by side."""

from __future__ import annotations

import torch


def captured(call):
    """A CUDA graph of `call`, warmed up first, and what it returned when it was captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def side_by_side(calls, times):
    """What the calls return, each on a stream of its own, `times` times."""
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(times):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
        torch.cuda.synchronize()
        yield found
