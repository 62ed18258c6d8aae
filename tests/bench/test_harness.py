"""The benchmark's judgment and bookkeeping, with the GPU replaced: what gets a speed, and what does not."""

import contextlib
import functools
import importlib
import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from timed_cpu import DENSE, SHAPE, TWO, all_nan, good, gpu  # noqa: F401  (gpu: a fixture)

from attnlib.bench import cli, harness, peers, records, timing
from attnlib.bench.oracle import judge, make_inputs
from attnlib.bench.setting import BOOK, Setting
from attnlib.bench.shapes import TASK, Shape

ONE = Setting("test", rounds=1, pause_ms=0)


def ignores_the_mask(q, k, v, causal, sm_scale):
    return good(q, k, v, False, sm_scale)


def runs_out_of_memory(q, k, v, causal, sm_scale):
    raise torch.OutOfMemoryError("tried to allocate 300 GiB")


def does_not_compile(q, k, v, causal, sm_scale):
    raise RuntimeError("out of resource: shared memory,\n Required: 300000, Hardware limit: 232448")


class WrongLater:
    """Right when it is first judged, wrong after it was timed, as with a race or a stale buffer."""

    calls = 0

    def __call__(self, q, k, v, causal, sm_scale):
        self.calls += 1
        out = good(q, k, v, causal, sm_scale)
        return out if self.calls == 1 else out * 1.5


def rows_of(implementations, shapes=(SHAPE,), **options):
    rows = harness.collect(implementations, shapes, setting=TWO, **options)
    return {row["impl"]: row for row in rows}


def test_a_good_kernel_gets_errors_and_speed(gpu):
    row = rows_of({"ours": good})["ours"]
    assert row["status"] == "ok"
    assert (row["ms"], row["ms_p20"], row["ms_p80"]) == (2.0, 1.0, 3.0)
    assert row["tflops"] == pytest.approx(2 * 1 * 2 * 32 * 32 * 16 / 2.0e-3 * 1e-12)
    assert 0 <= row["max_error"] <= row["budget_max"] and 0 <= row["rms_error"] <= row["budget_rms"]
    assert row["registers"] is None and row["num_warps"] is None  # no Triton kernel was launched
    assert row["sm_mhz"] is None  # no NVML
    assert row["round_ms"] == [2.0, 2.0] and "watts" not in row  # NVML's watts are of the last second
    assert row["peak_bytes"] == 1000
    assert Shape.of_row(row) == SHAPE


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (all_nan, "1024 of 1024 values are not finite"),
        (ignores_the_mask, "max error"),
        (lambda q, k, v, causal, sm_scale: (q, None), "expected a torch.Tensor, got tuple"),
    ],
)
def test_a_wrong_kernel_gets_no_speed(gpu, function, reason):
    rows = rows_of({"wrong": function, "good": good})
    assert rows["good"]["status"] == "ok"
    assert rows["wrong"]["status"] == "wrong" and reason in rows["wrong"]["reason"]
    assert not {"ms", "ms_p20", "ms_p80", "tflops"} & set(rows["wrong"])
    assert "max_error" in rows["wrong"]


def test_output_that_is_not_written_does_not_pass_on_what_memory_held(gpu, monkeypatch):
    """The allocator often returns the memory of the last output, and that one was right."""
    last = []

    def remembers(q, k, v, causal, sm_scale):
        last[:] = [good(q, k, v, causal, sm_scale)]
        return last[0]

    def writes_nothing(q, k, v, causal, sm_scale):
        return torch.empty_like(q)

    monkeypatch.setattr(torch, "empty_like", lambda x: last[0].clone())
    rows = rows_of({"remembers": remembers, "writes nothing": writes_nothing})
    assert rows["remembers"]["status"] == "ok"
    assert rows["writes nothing"]["reason"] == "1024 of 1024 values are not finite"


def test_a_kernel_that_is_wrong_after_the_timing_gets_no_speed(gpu):
    kernel = WrongLater()
    row = rows_of({"later": kernel})["later"]
    assert kernel.calls > 3  # it was timed
    assert row["status"] == "wrong" and "ms" not in row and "tflops" not in row


def test_without_the_gate_nothing_is_judged(gpu):
    row = rows_of({"wrong": all_nan}, gate=False)["wrong"]
    assert row["status"] == "ok" and "max_error" not in row


def test_memory_and_exceptions_are_reported_and_end_nothing(gpu):
    rows = rows_of({"big": runs_out_of_memory, "broken": does_not_compile, "good": good})
    assert rows["big"]["status"] == "out of memory" and "ms" not in rows["big"]
    assert rows["broken"]["status"] == "failed" and "ms" not in rows["broken"]
    assert rows["broken"]["reason"].startswith(
        "RuntimeError: out of resource: shared memory, Required: 300000"
    )
    assert rows["good"]["status"] == "ok"


def test_a_gpu_that_is_lost_ends_the_run(gpu, monkeypatch):
    """After an illegal memory access every later number would be worthless."""

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crash(q, k, v, causal, sm_scale):
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        lost()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        rows_of({"crash": crash, "good": good})


def test_a_peer_that_is_missing_is_shown(gpu, monkeypatch):
    monkeypatch.delenv("ATTNLIB_TUTORIAL", raising=False)
    row = rows_of({"tutorial": None, "good": good})["tutorial"]
    assert row["status"] == "not installed"
    assert "ATTNLIB_TUTORIAL is not set" in row["reason"]
    assert "ms" not in row and "max_error" not in row


def test_peers_are_measured_like_anything_else(gpu):
    rows = rows_of({"math": None, "good": good}, shapes=[DENSE])
    assert rows["math"]["status"] == rows["good"]["status"] == "ok"
    assert rows["math"]["ms"] == 2.0


def test_a_peer_refuses_what_it_would_compute_differently(gpu):
    row = rows_of({"math": None}, shapes=[Shape(1, 2, 16, 16, seqlen_k=32)])["math"]
    assert row["status"] == "failed" and "top-left" in row["reason"]


def test_rounds_are_interleaved_and_shuffled(gpu, monkeypatch):
    order = []
    names = [f"k{i}" for i in range(6)]

    def named(name, q, k, v, causal, sm_scale):
        order.append(name)
        return good(q, k, v, causal, sm_scale)

    monkeypatch.setattr(timing, "estimate_ms", lambda fn, cold: 1.0)
    implementations = {name: functools.partial(named, name) for name in names}
    monkeypatch.setattr(timing, "samples_ms", lambda fn, estimate, setting, cold: [1.0 for _ in [fn()]])
    harness.collect(implementations, [SHAPE], setting=Setting("test", rounds=3, pause_ms=0), control="k2")
    assert order[:7] == [*names, "k2"]  # judged in the order given, the control last
    rounds = [order[7 + 7 * i : 14 + 7 * i] for i in range(3)]
    assert all(sorted(one) == sorted([*names, "k2"]) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3


def test_names_are_checked_before_anything_runs(gpu):
    with pytest.raises(ValueError, match="'cudn' has no function and is no peer .*cudnn"):
        harness.measure("t", {"cudn": None}, [SHAPE], notebook="00_test")
    with pytest.raises(TypeError, match="implementations.'x'.: expected a callable or None, got str"):
        harness.measure("t", {"x": "attention"}, [SHAPE], notebook="00_test")


def test_measure_stores_and_replays(gpu, monkeypatch, capsys):
    implementations = {"ours": good, "wrong": all_nan}
    measured = harness.measure("speed", implementations, [SHAPE, DENSE], notebook="00_test", setting=ONE)
    assert [row["impl"] for row in measured.rows] == ["ours", "wrong"] * 2 and not measured.replayed
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")

    def never(*args):
        raise AssertionError("a replay must not run a kernel")

    replayed = harness.measure("speed", {"wrong": never, "ours": never}, [DENSE], notebook="00_test")
    assert replayed.replayed
    assert replayed.rows == [measured.rows[3], measured.rows[2]]  # only what was asked for, as asked for
    assert replayed.rows[0]["status"] == "wrong" and replayed.rows[0]["max_error"] is None  # NaN
    assert capsys.readouterr().out == ""


def test_replay_names_a_row_that_was_not_recorded(gpu, monkeypatch):
    harness.measure("speed", {"ours": good}, [SHAPE], notebook="00_test", setting=ONE)
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    with pytest.raises(records.RecordError, match="impl='new', B1 H2 S32 D16 causal fp16, found 0"):
        harness.measure("speed", {"ours": good, "new": good}, [SHAPE], notebook="00_test")
    with pytest.raises(records.RecordError, match="impl='ours', B1 H2 S32 D16 dense fp16, found 0"):
        harness.measure("speed", {"ours": good}, [DENSE], notebook="00_test")


def test_quantiles_interpolate():
    assert timing.summarize([5.0]) == (5.0, 5.0, 5.0)
    assert timing.summarize([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx((3.0, 1.8, 4.2))


@pytest.mark.parametrize(("cold", "clean"), [(True, False), (True, True), (False, False), (False, True)])
def test_what_comes_before_a_call_is_outside_of_the_timed_span(monkeypatch, cold, clean):
    log = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            self.name = ("start", "end")[Event.made % 2]
            Event.made += 1

        def record(self):
            log.append(self.name)

        def elapsed_time(self, end):
            assert (self.name, end.name) == ("start", "end")
            return 7.0

    buffer = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: buffer)
    whole = types.SimpleNamespace(amax=lambda: log.append("read"))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: whole)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: log.append("head start"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    with timing.clean_l2() if clean else contextlib.nullcontext():
        assert timing._record_ms(lambda: log.append("fn"), 2, cold) == [7.0, 7.0]
    before = ["head start", *(["flush", *["read"] * clean] if cold else [])]
    assert log == [*before, "start", "fn", "end"] * 2 + ["wait"]


@pytest.mark.parametrize(
    "call", [timing.time_ms, timing.sustained, timing.host_us, lambda fn: harness.collect({}, [])]
)
def test_timing_without_a_gpu_is_an_error(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        call(lambda: None)


def test_number_of_calls_is_bounded(gpu):
    calls = []
    endless = Setting("test", rounds=1, warmup_ms=1e6, rep_ms=1e6)
    timing.samples_ms(lambda: calls.append(1), 1e-3, endless, cold=True)
    assert len(calls) == timing._MAX_CALLS + 1 and gpu.timed == [timing._MAX_TIMED]
    calls.clear()
    timing.samples_ms(lambda: calls.append(1), 500.0, BOOK, cold=True)
    assert len(calls) == 2 and gpu.timed[1:] == [1]  # a slow kernel: one after the pause, and one timed


def test_slow_functions_are_estimated_from_one_call(gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "_record_ms", lambda fn, n, cold: [fn() or 200.0 for _ in range(n)])
    assert timing.estimate_ms(lambda: calls.append(1), cold=True) == 200.0
    assert len(calls) == 2


def test_host_time_is_per_call(gpu, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks) * 1e-3)
    calls = []
    assert timing.host_us(lambda: calls.append(1), n=60) == pytest.approx(1e3 / 20)
    assert len(calls) == 63


def fake_kernel(n_regs):
    metadata = types.SimpleNamespace(shared=1000 * n_regs, num_warps=4)
    return types.SimpleNamespace(n_regs=n_regs, n_spills=0, metadata=metadata)


def test_launched_kernels_are_collected_and_the_heaviest_is_described(monkeypatch):
    jit = pytest.importorskip("triton.runtime.jit")

    def run(self, *args, grid=None, warmup=False, **kwargs):
        return None if kwargs.get("fails") else fake_kernel(args[0])

    monkeypatch.setattr(jit.JITFunction, "run", run)
    function = object.__new__(jit.JITFunction)
    with pytest.raises(KeyError), timing.launched_kernels() as kernels:
        function[(1,)](32)
        function[(1,)](168)
        function[(1,)](64)
        function[(1,)](250, fails=True)
        function.run(255, grid=(1,), warmup=True)
        raise KeyError
    assert jit.JITFunction.run is run  # restored
    assert [kernel.n_regs for kernel in kernels] == [32, 168, 64]
    assert timing.resources(kernels) == {
        "registers": 168, "spills": 0, "shared_bytes": 168000, "num_warps": 4,
    }  # fmt: skip
    assert set(timing.resources([]).values()) == {None}


# --- peers ---


def test_peer_reasons_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("math", "flash", "cudnn", "flex"):
        assert peers.PEERS[name].available() == "needs a CUDA GPU"
    assert list(peers.PEERS) == ["math", "flash", "cudnn", "flex", "fa3", "tutorial"]
    assert all(peer.label for peer in peers.PEERS.values())


@pytest.fixture
def fa3(gpu, monkeypatch):
    """No FA3 anywhere, whatever is installed here."""
    monkeypatch.delenv("ATTNLIB_FA3", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    forward = peers._fa3_forward
    forward.cache_clear()
    yield peers.PEERS["fa3"]
    forward.cache_clear()


def test_fa3_missing(fa3, monkeypatch, tmp_path):
    assert "ATTNLIB_FA3 is not set" in fa3.available()
    monkeypatch.setenv("ATTNLIB_FA3", str(tmp_path))
    assert "expected a folder with _C.so" in fa3.available()
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert fa3.available() and "ATTNLIB_FA3 is not set" not in fa3.available()


def test_fa3_package_gets_its_own_layout(fa3, monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, softmax_scale, causal):
        seen.append((tuple(q.shape), q.is_contiguous(), causal))
        out = good(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
        return out.transpose(1, 2), None

    package = types.ModuleType("flash_attn_interface")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
    row = rows_of({"fa3": None})["fa3"]
    assert row["status"] == "ok", row.get("reason")
    assert set(seen) == {((1, 32, 2, 16), True, True)}


def test_fa3_operator_gets_its_34_arguments(fa3, monkeypatch, tmp_path):
    """The operator's argument list: 3 tensors, 20 empty options, then scale, mask and 9 more."""

    def forward(*args):
        assert len(args) == 34 and args[3:23] == (None,) * 20
        assert args[25:] == (-1, -1, 0, 0.0, True, None, 1, None, 0)
        q, k, v = (x.transpose(1, 2) for x in args[:3])
        return [good(q, k, v, args[24], args[23]).transpose(1, 2), None]

    (tmp_path / "_C.so").touch()
    monkeypatch.setenv("ATTNLIB_FA3", str(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(fwd=forward), raising=False)
    row = rows_of({"fa3": None})["fa3"]
    assert row["status"] == "ok", row.get("reason")


def test_fa3_needs_hopper(fa3, monkeypatch):
    monkeypatch.setattr(peers, "_fa3_forward", lambda: good)
    assert fa3.available() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (8, 0))
    assert fa3.available() == "needs a Hopper GPU"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "shape", [SHAPE, DENSE, Shape(1, 2, 16, 16, seqlen_k=32), Shape(1, 4, 32, 16, heads_kv=2)]
)
def test_flex_computes_our_attention(monkeypatch, shape):
    """Its mask is bottom-right and its heads are grouped as ours; compiling is left out, it takes long."""
    from torch.nn.attention import flex_attention

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: compiled.append("reset"))
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = make_inputs(shape, device="cpu")
    call = peers.PEERS["flex"].make(q, k, v, shape.causal, 0.25)
    assert compiled == ["reset", {"dynamic": False, "fullgraph": True}]
    judge(call(), q, k, v, causal=shape.causal, sm_scale=0.25).raise_if_bad("flex")


def test_tutorial_is_loaded_from_its_file(gpu, monkeypatch, tmp_path):
    path = tmp_path / "06-fused-attention.py"
    path.write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def attention(q, k, v, causal, sm_scale, warp_specialize):\n"
        "    assert warp_specialize is False\n"
        "    return sdpa(q, k, v, is_causal=causal, scale=sm_scale)\n"
    )
    monkeypatch.setenv("ATTNLIB_TUTORIAL", str(path))
    peers._tutorial_module.cache_clear()
    assert rows_of({"tutorial": None})["tutorial"]["status"] == "ok"
    peers._tutorial_module.cache_clear()
    path.write_text("import a_module_that_is_not_there")
    assert "a_module_that_is_not_there" in peers.PEERS["tutorial"].available()
    monkeypatch.setenv("ATTNLIB_TUTORIAL", str(tmp_path / "nothing.py"))
    assert "no such file" in peers.PEERS["tutorial"].available()
    peers._tutorial_module.cache_clear()


def test_long_messages_keep_their_end():
    assert peers.brief(ValueError("one\n  two")) == "one two"
    assert peers.brief(ValueError("no /some/where/x.h:12, 3 GB/s")) == "no x.h:12, 3 GB/s"
    assert peers.brief(ValueError()) == "ValueError"
    text = peers.brief(ValueError("at 10:15:\n" + "x " * 500 + "the point"))
    assert len(text) <= 240 and text.startswith("at 10:15:") and text.endswith("the point")


# --- the command line ---


def test_cli_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert cli.main(["--peers"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert cli.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "needs a CUDA GPU" in listed and len(listed.splitlines()) == len(peers.PEERS)


def test_cli_without_pandas(gpu, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main([]) == 2
    assert "need pandas" in capsys.readouterr().err
    assert cli.main(["--list"]) == 0


def test_the_table_has_a_line_for_each_row_and_a_dash_for_what_was_not_measured():
    rows = [
        {"impl": "ours", **SHAPE.to_dict(), "status": "ok", "ms": 1.23456, "ms_p20": 1.2, "ms_p80": 1.3}
        | {
            "tflops": 512.34,
            "max_error": 1e-3,
            "budget_max": 2e-3,
            "registers": 168,
            "spills": 0,
        },
        {"impl": "fa3", **SHAPE.to_dict(), "status": "not installed", "reason": "no ATTNLIB_FA3"},
    ]
    head, _, ours, peer = cli.format_rows(rows).splitlines()
    assert head.split() == ["ms", "p20-p80", "TFLOP/s", "max", "err", "budget", "regs", "spills", "MHz"]
    shape = SHAPE.label.split()
    numbers = ["1.2346", "1.2000-1.3000", "512.3", "1.0e-03", "2.0e-03", "168", "0", "-"]
    assert ours.split() == [*shape, "ours", *numbers]
    assert peer.split() == [*shape, "fa3", *["-"] * 8, "not", "installed:", "no", "ATTNLIB_FA3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "attnlib,fa9"], "unknown fa9"),
        (["--shapes", "d64,d512"], "unknown d512"),
        (["--batch", "1", "--heads", "2"], "together"),
        (
            ["--shapes", "d64", "--batch", "1", "--heads", "1", "--seqlen", "8", "--head-dim", "16"],
            "without --shapes",
        ),
        (["--batch", "0", "--heads", "1", "--seqlen", "8", "--head-dim", "16"], "batch: expected at least 1"),
        (["--rounds", "0"], "--rounds: expected at least 1"),
        (["--peers", "--impl", "flash"], "--peers takes every implementation"),
        (["--peers", "--dense"], "--peers takes every implementation"),
        (["--dtype", "fp16"], "invalid choice"),
    ],
)
def test_cli_rejects_bad_arguments(gpu, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_status:
        cli.main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def test_cli_defaults_to_the_task():
    parser = cli._parser()
    shapes = cli._shapes_of(parser.parse_args(["--dense", "--dtype", "bfloat16"]), parser)
    assert [s.label for s in shapes] == [
        s.label.replace("causal fp16", "dense bf16") for s in TASK.values()
    ]  # fmt: skip


def test_cli_prints_a_table_and_writes_json(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "_attnlib", good)
    size = ["--batch", "1", "--heads", "2", "--seqlen", "32", "--head-dim", "16", "--rounds", "1"]
    out = tmp_path / "out.json"
    assert cli.main([*size, "--dense", "--impl", "attnlib,math", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200" in text and text.count("B1 H2 S32 D16 dense fp16") == 3 and "2.5000" in text
    record = json.loads(out.read_text())
    impls = [row["impl"] for row in record["tables"]["bench"]["rows"]]
    assert impls == ["attnlib", "math", "attnlib (control)"]
    assert record["gpu"]["name"] == "NVIDIA H200" and record["method"]["rounds"] == 1


def test_cli_peers_prints_the_ladder(gpu, monkeypatch, capsys):
    """Attnlib and every peer, at the shapes of the task, causal and dense, in the book's setting."""
    asked = []

    def collect(implementations, shapes, **options):
        asked.append((list(implementations), [shape.label for shape in shapes], options["setting"]))
        return [
            {"impl": impl, **shape.to_dict(), "status": "ok", "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0}
            | {"tflops": 500.0 if impl == "fa3" else 400.0, "max_error": 1e-3}
            if impl != "flex"
            else {"impl": impl, **shape.to_dict(), "status": "failed", "reason": "no compiler"}
            for shape in shapes
            for impl in implementations
        ]

    monkeypatch.setattr(harness, "collect", collect)
    assert cli.main(["--peers"]) == 0
    [(names, labels, setting)] = asked
    assert names == ["attnlib", *peers.PEERS] and setting == BOOK
    assert labels == [s.label.replace("causal", mask) for mask in ("causal", "dense") for s in TASK.values()]
    rows, causal, dense = capsys.readouterr().out.replace("\nDense", "\nCausal").split("\nCausal\n")
    assert "failed: no compiler" in rows
    for table in (causal, dense):
        assert "% of FA3" in table and "TFLOP/s, D = 256" in table and "max error" in table
        [ours] = [line for line in table.splitlines() if line.startswith("| attnlib ")]
        assert ours.split("|")[2:7] == [" 400 ", " 400 ", " 400 ", " 80 / 80 / 80 ", " 1.0e-03 "]
    assert cli.main(["--peers", "--shapes", "d64", "--rounds", "2"]) == 0
    assert asked[1][1:] == (
        [TASK["d64"].label, TASK["d64"].label.replace("causal", "dense")],
        replace(BOOK, rounds=2),
    )


def test_cli_fails_when_attnlib_is_wrong(gpu, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_attnlib", all_nan)
    monkeypatch.setattr(cli, "_portable", good)
    size = ["--batch", "1", "--heads", "2", "--seqlen", "32", "--head-dim", "16", "--rounds", "1"]
    assert cli.main([*size, "--impl", "attnlib-triton"]) == 0
    assert cli.main([*size, "--impl", "attnlib-triton,attnlib"]) == 1
    assert "wrong: 1024 of 1024 values are not finite" in capsys.readouterr().out
