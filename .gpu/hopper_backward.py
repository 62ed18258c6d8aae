"""Check and time the Hopper backward kernel: `python .gpu/hopper_backward.py [names of variants]`, from the
repository's root, on an H200. Every variant is checked in a process of its own, with a time limit for each
case; a process that hangs is killed and the others go on. Then one process times the variants that are right.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.getcwd())

from attnlib.configs_backward_hopper import _CHOSEN  # noqa: E402
from attnlib.configs_backward_hopper import HopperBackwardConfig as C  # noqa: E402

VARIANTS = {
    "d64": (64, _CHOSEN[64]),
    "d64 bm64": (64, C(64)),
    "d128": (128, _CHOSEN[128]),
}
WITHOUT = "all", "no add", "no add, no dS barriers"  # see hopper_backward_without.py
MAIN = {"d64", "d128"}  # checked on all cases, others on every fourth
LIMIT_S = 100  # for a case, most of it compiling

# B, H, H_kv, S_q, S_k, D (of 64: the variant's), causal, dtype, scale
CASES = [
    (1, 1, 1, 128, 128, 64, True, "float16", None),
    (2, 3, 3, 512, 512, 64, True, "float16", None),
    (1, 2, 2, 1024, 1024, 64, False, "float16", None),
    (1, 4, 2, 1000, 1000, 64, True, "bfloat16", None),
    (1, 6, 2, 300, 300, 64, False, "float16", None),
    (1, 2, 1, 129, 700, 64, True, "float16", None),
    (1, 2, 2, 700, 129, 64, True, "float16", None),
    (2, 2, 2, 63, 65, 64, False, "bfloat16", None),
    (1, 1, 1, 1, 1, 64, True, "float16", None),
    (1, 1, 1, 17, 1, 64, False, "float16", None),
    (1, 2, 2, 257, 511, 64, True, "float16", -0.1),
    (1, 2, 2, 200, 333, 64, False, "float16", 0.0),
    (1, 2, 2, 400, 400, 40, True, "float16", None),
    (3, 5, 1, 333, 333, 64, True, "float16", 0.5),
    (2, 8, 8, 2048, 2048, 64, True, "float16", None),
    (1, 8, 2, 2500, 2500, 56, False, "float16", None),
]
TASK = {64: (4, 32, 4096, 64), 128: (2, 16, 8192, 128)}


def check(name):
    """In a child: one line of JSON for each case."""
    import torch

    from attnlib import attention, launch_hopper_backward
    from attnlib.band import band
    from attnlib.reference_gradients import GradientOracle

    d, config = VARIANTS[name]
    first = int(sys.argv[3])
    for i, (B, H, H_kv, S_q, S_k, D, causal, dtype, scale) in enumerate(CASES):
        if i < first or (name not in MAIN and i % 4 != 1):
            continue
        D = D * d // 64
        torch.manual_seed(i)
        kind = getattr(torch, dtype)
        q, d_out = (torch.randn(B, H, S_q, D, device="cuda", dtype=kind) for _ in range(2))
        k, v = (torch.randn(B, H_kv, S_k, D, device="cuda", dtype=kind) for _ in range(2))
        out, lse = attention(q, k, v, causal=causal, sm_scale=scale, return_lse=True, impl="triton")
        sm_scale = D**-0.5 if scale is None else scale
        arguments = d_out, q, k, v, out, lse, band(causal, None), sm_scale
        found = launch_hopper_backward.backward(*arguments, config=config)
        torch.cuda.synchronize()
        again = launch_hopper_backward.backward(*arguments, config=config)
        same = all(torch.equal(a, b) for a, b in zip(found[1:], again[1:], strict=True))
        oracle = GradientOracle(d_out, q, k, v, causal=causal, sm_scale=scale)
        verdicts = oracle.judge(*found)
        ratios = {n: round(x.max_error / max(x.budget.max, 1e-30), 2) for n, x in verdicts.items()}
        rms = {n: round(x.rms_error / max(x.budget.rms, 1e-30), 2) for n, x in verdicts.items()}
        ok = same and all(x.ok for x in verdicts.values())
        print(json.dumps({"case": i, "ok": ok, "same": same, "max": ratios, "rms": rms}), flush=True)
        if not ok:
            where(found, oracle, config)
    print(json.dumps({"done": True}), flush=True)


def where(found, oracle, config):
    """Which blocks of a wrong gradient are wrong, of the first head."""
    import torch

    for (name, exact), got in zip(oracle.truth.items(), found, strict=True):
        error = (got[0, 0].double() - exact[0, 0]).abs().nan_to_num(9e9)
        error = torch.nn.functional.pad(error, (0, -error.shape[1] % 32, 0, -error.shape[0] % 64))
        blocks = error.unflatten(0, (-1, 64)).unflatten(2, (-1, 32)).amax((1, 3)).cpu()
        text = " | ".join(" ".join(f"{x:.1e}" for x in row) for row in blocks[:4].tolist())
        print(json.dumps({"note": f"{name} scale {exact.abs().max().item():.1e}: {text}"}), flush=True)


def run_checks(names):
    """All variants side by side; the names that are right in all their cases."""
    good, lock = [], threading.Lock()

    def one(name):
        first, bad, worst, count = 0, [], 0.0, 0
        while True:
            command = [sys.executable, __file__, "--check", name, str(first)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            lines = queue.Queue()

            def read(child=child, lines=lines):
                for line in child.stdout:
                    lines.put(line)
                lines.put(None)

            threading.Thread(target=read, daemon=True).start()
            done = False
            while True:
                try:
                    line = lines.get(timeout=LIMIT_S)
                except queue.Empty:
                    child.kill()
                    bad.append(f"HANG after case {first - 1}")
                    break
                if line is None:
                    break
                if not line.startswith("{"):
                    continue
                found = json.loads(line)
                if "done" in found:
                    done = True
                elif "note" in found:
                    bad.append("\n      " + found["note"])
                else:
                    first, count = found["case"] + 1, count + 1
                    worst = max(worst, *found["max"].values(), *found["rms"].values())
                    if not found["ok"]:
                        bad.append(f"\n    case {found['case']} {CASES[found['case']]}: {found}")
            child.wait()
            if done:
                break
            if not bad or not bad[-1].startswith("HANG"):
                bad.append("DIED: " + child.stderr.read()[-600:])
            first += 1
            if len([b for b in bad if b.startswith(("HANG", "DIED"))]) >= 2:
                break
        with lock:
            verdict = " ".join(bad[:12]) or "ok"
            print(f"{name:14s} {count} cases, worst {worst:.2f} of budget: {verdict}", flush=True)
            if not bad:
                good.append(name)

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name in names if name in good]


def ablate(label, warm):
    """In a child: time the chosen configurations without something; `warm`: only compile."""
    import torch
    from hopper_backward_without import leave_out
    from triton.testing import do_bench

    from attnlib import attention, launch_hopper_backward
    from attnlib.band import band

    leave_out(label)
    for d in (64, 128):
        B, H, S, D = TASK[d]
        q, k, v, d_out = (torch.randn(B, H, S, D, device="cuda", dtype=torch.float16) for _ in range(4))
        # Real numbers: what the tensor cores draw depends on them, and with it the clock.
        out, lse = attention(q, k, v, causal=True, return_lse=True, impl="triton")
        arguments = d_out, q, k, v, out, lse, band(True, None), D**-0.5

        def call(arguments=arguments):
            launch_hopper_backward.backward(*arguments)

        call()
        torch.cuda.synchronize()
        if not warm:
            ms = do_bench(call, warmup=10, rep=100, return_mode="median")
            tf = 2.5 * 4 * B * H * S * S * D / 2 / ms / 1e9
            print(f"  d{d} {label}: {ms:.3f} ms, {tf:.0f} TFLOP/s", flush=True)


def times(names):
    """In a child."""
    for d in TASK:
        mine = {name: VARIANTS[name][1] for name in names if VARIANTS[name][0] == d}
        if mine:
            times_of(*TASK[d], mine)


def times_of(B, H, S, D, mine):
    """TFLOP/s of each variant beside PyTorch's, medians of shuffled rounds."""
    import random

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    from attnlib import attention, launch_backward, launch_hopper_backward
    from attnlib.band import band

    q, k, v, d_out = (torch.randn(B, H, S, D, device="cuda", dtype=torch.float16) for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl="triton")
    arguments = d_out, q, k, v, out, lse, band(True, None), D**-0.5
    calls = {}
    for name, config in mine.items():
        calls[name] = lambda config=config: launch_hopper_backward.backward(*arguments, config=config)
    for peer, backend in {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.items():
        with sdpa_kernel(backend):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            result = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        calls[peer] = lambda result=result, leaves=leaves: torch.autograd.grad(
            result, leaves, d_out, retain_graph=True
        )
    reference = calls["cuDNN"]()
    flop = 2.5 * 4 * B * H * S * S * D / 2
    rounds = {name: [] for name in calls}
    for name in calls:  # compile
        found = calls[name]()
        error = [(a - b).abs().max().item() for a, b in zip(found, reference, strict=True)]
        rounds[name].append(" ".join(f"{x:.1e}" for x in error))
    for r in range(5):
        for name in random.Random(r).sample(list(calls), len(calls)):
            rounds[name].append(do_bench(calls[name], warmup=10, rep=60, return_mode="median"))
    base = sorted(rounds["cuDNN"][1:])[2]
    print(f"\nD = {D}, B{B} H{H} S{S} causal fp16")
    for name, (error, *ms) in rounds.items():
        middle = sorted(ms)[2]
        tf = [flop / x / 1e9 for x in (max(ms), middle, min(ms))]
        print(f"  {name:14s} {middle:7.3f} ms  {tf[1]:6.1f} TFLOP/s ({tf[0]:.0f}..{tf[2]:.0f})  "
              f"{base / middle:.3f} x cuDNN, differs by {error}", flush=True)  # fmt: skip
    # What goes around the kernel.
    config = next(iter(mine.values()))
    call = launch_hopper_backward._prepare(
        q.shape, k.shape, q.dtype, q.get_device(), band(True, None), D**-0.5, config
    )
    rows = torch.empty(call.rows_shape, device="cuda")
    sums, dq = torch.zeros(call.sums, device="cuda"), torch.empty_like(q)
    parts = {
        "rows": lambda: launch_backward._launch(
            call.rows_launch, q.get_device(), (out, d_out), (lse, rows, None)
        ),
        "zeros": lambda: torch.zeros(call.sums, device="cuda"),
        "convert": lambda: launch_hopper_backward._convert(sums, dq, 1.0, call),
    }
    text = ", ".join(f"{n} {do_bench(f, warmup=10, rep=40):.3f}" for n, f in parts.items())
    print(f"  around the kernel, ms: {text}", flush=True)


def main():
    names = sys.argv[1:] or list(VARIANTS)
    start = time.time()
    children = [subprocess.Popen([sys.executable, __file__, "--ablate", x, "warm"]) for x in WITHOUT]
    good = run_checks(names)
    for child in children:
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            print("ablation: HANG")
    print(f"checked in {time.time() - start:.0f} s; timing {', '.join(good) or 'nothing'}", flush=True)
    if good:
        try:
            subprocess.run([sys.executable, __file__, "--time", *good], timeout=180, check=False)
        except subprocess.TimeoutExpired:
            print("timing: HANG")
    for label in WITHOUT:
        try:
            subprocess.run([sys.executable, __file__, "--ablate", label], timeout=60, check=False)
        except subprocess.TimeoutExpired:
            print("ablation: HANG")
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    elif sys.argv[1:2] == ["--ablate"]:
        ablate(sys.argv[2], sys.argv[3:] == ["warm"])
    elif sys.argv[1:2] == ["--time"]:
        times(sys.argv[2:])
    else:
        main()
