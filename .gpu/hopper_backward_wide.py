"""Check and time the wide Hopper backward kernel (D = 256): `python .gpu/hopper_backward_wide.py`, from the
repository's root, on an H200. Cases of one mask are checked in a process of their own; one that says nothing
for LIMIT_S is killed. Another process compiles meanwhile, and then times the kernel beside cuDNN's and the
portable one."""

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

sys.path.insert(0, os.getcwd())

# B, H, H_kv, S_q, S_k, D, causal, dtype, scale
CASES = [
    (1, 1, 1, 64, 64, 256, True, "float16", None),
    (1, 1, 1, 128, 128, 256, True, "float16", None),
    (2, 3, 3, 512, 512, 256, True, "float16", None),
    (1, 4, 2, 1000, 1000, 256, True, "bfloat16", None),
    (1, 2, 1, 129, 700, 256, True, "float16", -0.1),
    (1, 2, 2, 700, 129, 200, True, "float16", None),
    (1, 1, 1, 1, 1, 136, True, "float16", None),
    (1, 8, 4, 2048, 2048, 256, True, "float16", None),
    (1, 2, 2, 1024, 1024, 256, False, "float16", None),
    (1, 6, 2, 300, 300, 256, False, "float16", None),
    (2, 2, 2, 63, 65, 192, False, "bfloat16", None),
    (1, 8, 2, 2500, 2500, 224, False, "float16", None),
]
KINDS = ("causal", "dense")
LIMIT_S = 40
TASK = (1, 8, 16384, 256)


def check(kind):
    """In a child: one line of JSON for each case."""
    import torch

    from attnlib import attention, launch_hopper_backward
    from attnlib.band import band
    from attnlib.reference_gradients import GradientOracle

    for i, (B, H, H_kv, S_q, S_k, D, causal, dtype, scale) in enumerate(CASES):
        if causal != (kind == "causal"):
            continue
        torch.manual_seed(i)
        half = getattr(torch, dtype)
        q, d_out = (torch.randn(B, H, S_q, D, device="cuda", dtype=half) for _ in range(2))
        k, v = (torch.randn(B, H_kv, S_k, D, device="cuda", dtype=half) for _ in range(2))
        out, lse = attention(q, k, v, causal=causal, sm_scale=scale, return_lse=True, impl="triton")
        sm_scale = D**-0.5 if scale is None else scale
        arguments = d_out, q, k, v, out, lse, band(causal, None), sm_scale
        found = launch_hopper_backward.backward(*arguments)
        torch.cuda.synchronize()
        same = True
        for _ in range(20):
            again = launch_hopper_backward.backward(*arguments)
            same = same and all(torch.equal(a, b) for a, b in zip(found[1:], again[1:], strict=True))
        oracle = GradientOracle(d_out, q, k, v, causal=causal, sm_scale=sm_scale)
        verdicts = oracle.judge(*found)
        worst = {}
        for name, x in verdicts.items():
            shares = x.max_error / max(x.budget.max, 1e-30), x.rms_error / max(x.budget.rms, 1e-30)
            worst[name] = round(max(shares), 2)
        ok = same and all(x.ok for x in verdicts.values())
        print(json.dumps({"case": i, "ok": ok, "same": same, "of budget": worst}), flush=True)
        if not ok:
            where(found, oracle)
    print(json.dumps({"done": True}), flush=True)


def where(found, oracle):
    """Which blocks of 64 rows and 64 columns of a gradient are wrong, of the first head."""
    import torch

    for (name, exact), got in zip(oracle.truth.items(), found, strict=True):
        error = (got[0, 0].double() - exact[0, 0]).abs().nan_to_num(9e9)
        error = torch.nn.functional.pad(error, (0, -error.shape[1] % 64, 0, -error.shape[0] % 64))
        blocks = error.unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).amax((1, 3)).cpu()
        text = " | ".join(" ".join(f"{x:.1e}" for x in row) for row in blocks[:4].tolist())
        print(json.dumps({"note": f"{name} scale {exact.abs().max().item():.1e}: {text}"}), flush=True)


def watch(kind, verdicts):
    command = [sys.executable, __file__, "--check", kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines, heard = queue.Queue(), []

    def read():
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    end = ""
    while True:
        try:
            line = lines.get(timeout=LIMIT_S)
        except queue.Empty:
            child.kill()
            end = "HANG"
            break
        if line is None:
            break
        if line.startswith("{"):
            heard.append(json.loads(line))
    child.wait()
    if not end and not (heard and "done" in heard[-1]):
        end = "DIED: " + child.stderr.read()[-900:]
    cases = [x for x in heard if "case" in x]
    verdicts[kind] = not end and bool(cases) and all(x["ok"] for x in cases)
    for x in heard:
        if "note" in x:
            print("     ", x["note"])
        elif "case" in x:
            print(f"  {CASES[x['case']]}: {'ok' if x['ok'] else 'WRONG'}, {x['of budget']}, same {x['same']}")
    print(f"{kind}: {len(cases)} cases {'right' if verdicts[kind] else 'NOT RIGHT'} {end}", flush=True)


def times():
    """In a child: compile, wait for a line, time; TFLOP/s, medians of shuffled rounds."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    from attnlib import attention, launch_backward, launch_hopper_backward
    from attnlib.band import band
    from attnlib.configs_backward_hopper import hopper_backward_config

    B, H, S, D = TASK
    q, k, v, d_out = (torch.randn(B, H, S, D, device="cuda", dtype=torch.float16) for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl="triton")
    arguments = d_out, q, k, v, out, lse, band(True, None), D**-0.5
    two_heads = replace(hopper_backward_config(D), l2_bytes=80 << 20)
    calls = {"portable": lambda: launch_backward.backward(*arguments)}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        result = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    calls["cuDNN"] = lambda: torch.autograd.grad(result, leaves, d_out, retain_graph=True)
    calls["portable"]()
    reference = calls["cuDNN"]()
    calls["wide"] = lambda: launch_hopper_backward.backward(*arguments)
    calls["wide, two heads"] = lambda: launch_hopper_backward.backward(*arguments, config=two_heads)
    torch.cuda.synchronize()
    print("compiled", flush=True)
    sys.stdin.readline()
    flop = 2.5 * 4 * B * H * S * S * D / 2
    errors, rounds = {}, {name: [] for name in calls}
    for name in calls:
        found = zip(calls[name](), reference, strict=True)
        errors[name] = " ".join(f"{(a - b).abs().max().item():.1e}" for a, b in found)
    for r in range(5):
        for name in random.Random(r).sample(list(calls), len(calls)):
            rounds[name].append(do_bench(calls[name], warmup=20, rep=100, return_mode="median"))
    base = sorted(rounds["cuDNN"])[2]
    print(f"D = {D}, B{B} H{H} S{S} causal fp16")
    for name, ms in rounds.items():
        middle = sorted(ms)[2]
        tf = [flop / x / 1e9 for x in (max(ms), middle, min(ms))]
        print(f"  {name:16s} {middle:7.3f} ms  {tf[1]:6.1f} TFLOP/s ({tf[0]:.0f}..{tf[2]:.0f})  "
              f"{base / middle:.3f} x cuDNN, differs by {errors[name]}", flush=True)  # fmt: skip


def main():
    start, verdicts = time.time(), {}
    timer = subprocess.Popen([sys.executable, __file__, "--time"], stdin=subprocess.PIPE, text=True)
    threads = [threading.Thread(target=watch, args=(kind, verdicts)) for kind in KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"checked in {time.time() - start:.0f} s", flush=True)
    if not verdicts.get("causal"):
        print("not timed")
        timer.kill()
        sys.exit(1)
    try:
        timer.communicate("go\n", timeout=90)
    except subprocess.TimeoutExpired:
        timer.kill()
        print("timing: HANG")
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    elif sys.argv[1:2] == ["--time"]:
        times()
    else:
        main()
