"""Profiles: Nsight Compute's table as rows, several kernels in one row, machines without counters.

No GPU is here: ncu and the processes are replaced, and the sample is written in ncu's own format, that of
`ncu --csv --page raw --print-units base` as a run on an H200 printed it: lines of progress, a row of names, a
row of units, a row for each launch, everything quoted, thousands with commas. The values are made up."""

from __future__ import annotations

import json

import pytest
import torch

from attnlib.bench import cli, counters, harness, names, profile_target, profiling, records, sources
from attnlib.bench.counters import METRICS, PERCENT, SUMS, WARP_CYCLES, NoCounters, stall_metric
from attnlib.bench.shapes import TASK, Shape

SHAPE = TASK["d64"]
BASE = {"gpu__time_duration.sum": 100_000, "smsp__inst_executed.sum": 2_000_000, WARP_CYCLES: 8.0}
BASE |= {"dram__bytes_read.sum": 2_000_000, "dram__bytes_write.sum": 500_000, "lts__t_bytes.sum": 40_000_000}
BASE |= {stall_metric("selected"): 1.0, stall_metric("barrier"): 4.0, stall_metric("wait"): 3.0}
PERMISSION = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4711
==WARNING== No kernels were profiled.
"""  # noqa: E501


def unit_of(metric):
    kinds = {"gpu__time": "ns", "dram__bytes": "byte", "lts__t_bytes": "byte", "sm__cycles": "cycle"}
    by_name = next((unit for start, unit in kinds.items() if metric.startswith(start)), "inst")
    return "%" if "pct" in metric else by_name


def ncu_text(*launches, units=None, metrics=METRICS):
    """ncu's output for these launches: (kernel name, metric -> value); other metrics are 10."""
    fixed = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    fixed += ["Block Size", "Grid Size", "Device", "CC"]
    of = unit_of if units is None else lambda metric: units.get(metric, unit_of(metric))
    table = [[*fixed, *metrics], [""] * len(fixed) + [of(metric) for metric in metrics]]
    for number, (name, values) in enumerate(launches):
        row = [number, 4711, "python3.12", "127.0.0.1", name, 1, 7, "(128, 1, 1)", "(132, 1, 1)", 0, "9.0"]
        found = BASE | values
        cells = [found.get(m, 0 if "stalled" in m else 10) for m in metrics]
        table.append(row + [cell if isinstance(cell, str) else f"{cell:,}" for cell in cells])
    lines = [",".join('"' + str(cell) + '"' for cell in row) for row in table]
    progress = [
        f'==PROF== Profiling "{n}" - {i}: 0%....50%....100% - 12 passes' for i, (n, _) in enumerate(launches)
    ]
    return (
        "\n".join(["==PROF== Connected to process 4711", *progress, *lines, "==PROF== Disconnected"]) + "\n"
    )


# ---------------------------------------------------------------- the table


def test_one_launch_gives_the_fields_of_a_row():
    text = ncu_text(("flash_forward", {"sm__cycles_elapsed.max": 170_000, PERCENT["tensor_pct"]: 61.5}))
    row = counters.fields_of(counters.read_table(text), SHAPE)
    assert row["time_us"] == pytest.approx(100) and row["clock_mhz"] == pytest.approx(1700)
    assert row["tensor_pct"] == 61.5 and row["instructions"] == 2e6
    scores = 4 * 32 * 4096 * 4097 // 2
    assert row["instructions_per_score"] == pytest.approx(32 * 2e6 / scores)
    flops = 4 * 4 * 32 * 4096**2 * 64 / 2
    assert row["flops_per_dram_byte"] == pytest.approx(flops / 2.5e6)
    assert row["flops_per_l2_byte"] == pytest.approx(flops / 4e7)
    assert row["stalls"] == pytest.approx({"barrier": 0.5, "wait": 0.375, "selected": 0.125})
    assert list(row["stalls"]) == ["barrier", "wait", "selected"]
    launch = {"registers": 10, "shared_bytes": 10, "grid": "(132, 1, 1)", "block": "(128, 1, 1)"}
    assert row["kernels"] == [{"name": "flash_forward", "launches": 1, "share": 1.0, **launch}]


def test_every_field_of_the_record_is_there():
    row = counters.fields_of(counters.read_table(ncu_text(("k", {}))), SHAPE)
    wanted = (
        "time_us sm_clocks clock_mhz tensor_pct issue_pct fma_pct alu_pct xu_pct shared_pct l2_pct dram_pct "
    )
    wanted += (
        "dram_read_bytes dram_write_bytes l2_bytes l2_hit_pct occupancy_pct instructions registers kernels "
    )
    wanted += "instructions_per_score xu_instructions_per_score flops_per_dram_byte flops_per_l2_byte stalls"
    assert not set(wanted.split()) - set(row)
    assert all(row[key] is not None for key in row)


def test_several_launches_are_one_row():
    """Sums; percentages weighted by time, the hit rate by bytes, stalls by warp-cycles."""
    short = {"gpu__time_duration.sum": 100_000, PERCENT["tensor_pct"]: 10.0, counters.L2_HIT: 90.0,
             "lts__t_bytes.sum": 1_000, "smsp__inst_executed.sum": 1_000_000,
             counters.REGISTERS: 40}  # fmt: skip
    long = {"gpu__time_duration.sum": 300_000, PERCENT["tensor_pct"]: 50.0, counters.L2_HIT: 50.0,
            "lts__t_bytes.sum": 3_000, "smsp__inst_executed.sum": 3_000_000, counters.REGISTERS: 168,
            stall_metric("barrier"): 0.0, stall_metric("wait"): 0.0, WARP_CYCLES: 1.0}  # fmt: skip
    kernels = counters.read_table(ncu_text(("void zeros<4>(float*)", short), ("gradient_kv", long)))
    row = counters.fields_of(kernels, SHAPE, flops_factor=2.5)
    assert row["time_us"] == pytest.approx(400) and row["instructions"] == 4e6
    assert row["tensor_pct"] == pytest.approx(40) and row["l2_hit_pct"] == pytest.approx(60)
    assert row["registers"] == 168
    # the first has 8 cycles of warps for each of 1 M instructions, the second 1 for each of 3 M
    assert row["stalls"] == pytest.approx({"barrier": 4 / 11, "selected": 4 / 11, "wait": 3 / 11})
    assert [(k["name"], k["share"]) for k in row["kernels"]] == [("zeros", 0.25), ("gradient_kv", 0.75)]
    assert [(k["l2_bytes"], k["tensor_pct"]) for k in row["kernels"]] == [(1e3, 10), (3e3, 50)]
    assert row["kernels"][1]["stalls"]["selected"] == 1 and row["kernels"][0]["stalls"]["selected"] == 1 / 8
    assert row["flops_per_l2_byte"] == pytest.approx(2.5 * 4 * 128 * 4096**2 * 64 / 2 / 4e3)


def test_cycles_without_a_reason_are_other():
    kernels = counters.read_table(ncu_text(("k", {WARP_CYCLES: 10.0})))
    stalls = counters.stall_shares(kernels)
    assert stalls["other"] == pytest.approx(0.2) and sum(stalls.values()) == pytest.approx(1)


def test_units_are_converted():
    units = {"gpu__time_duration.sum": "ms", "dram__bytes_read.sum": "Mbyte", "lts__t_bytes.sum": "Gbyte"}
    values = {"gpu__time_duration.sum": 1.5, "dram__bytes_read.sum": 201.5, "lts__t_bytes.sum": 4.67}
    row = counters.fields_of(counters.read_table(ncu_text(("k", values), units=units)), SHAPE)
    assert row["time_us"] == 1500 and row["dram_read_bytes"] == 201.5e6
    assert row["l2_bytes"] == pytest.approx(4.67e9)


def test_what_ncu_could_not_count_is_none():
    """Not zero, and no sum of the launches that have it."""
    text = ncu_text(("a", {PERCENT["xu_pct"]: "n/a", SUMS["dram_read_bytes"]: "n/a"}), ("b", {}))
    row = counters.fields_of(counters.read_table(text), SHAPE)
    assert row["xu_pct"] is row["dram_read_bytes"] is row["flops_per_dram_byte"] is None
    assert row["tensor_pct"] == 10 and row["dram_write_bytes"] == 1e6
    fewer = [metric for metric in METRICS if metric != PERCENT["l2_pct"]]
    assert (
        counters.fields_of(counters.read_table(ncu_text(("a", {}), metrics=fewer)), SHAPE)["l2_pct"] is None
    )


def test_only_metrics_that_ncu_lists_are_asked_for():
    listing = "\n".join(f"{m.partition('.')[0]:70s} # of something" for m in METRICS if "drain" not in m)
    found = counters.known(METRICS, "Device NVIDIA H200\n" + listing)
    assert set(METRICS) - set(found) == {stall_metric("drain")} and counters.REGISTERS in found
    assert counters.known(METRICS, "==ERROR== no list") == list(METRICS)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (PERMISSION, "ERR_NVGPUCTRPERM"),
        ("==ERROR== LibraryNotLoaded\n==WARNING== No kernels were profiled.\n", "LibraryNotLoaded"),
        ("", "it wrote nothing"),
        ("Traceback ...\nImportError: no torch\n", "ImportError: no torch"),
    ],
)
def test_no_table_is_one_sentence(text, word):
    with pytest.raises(NoCounters) as caught:
        counters.read_table(text)
    said = str(caught.value)
    assert said.startswith("No counters: ") and word in said and said.endswith(".") and "\n" not in said


def test_kept_scores_counts_the_mask():
    for sq, sk in ((5, 5), (3, 7), (7, 3), (1, 4)):
        kept = int(torch.ones(sq, sk).tril(sk - sq).sum())
        assert counters.kept_scores(Shape(2, 3, sq, 16, True, seqlen_k=sk)) == 6 * kept
        assert counters.kept_scores(Shape(2, 3, sq, 16, False, seqlen_k=sk)) == 6 * sq * sk


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, float)",
         "at::native::vectorized_elementwise_kernel"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::Fwd<(int)2, (bool)1>>>(T1::Params)",
         "flash::Fwd"),
        ("void cutlass::device_kernel<flash::BwdPreprocess<cute::C<64>, float>>(T1::Params)",
         "flash::BwdPreprocess"),
        ("void cutlass::device_kernel<Plain>(T1::Params)", "cutlass::device_kernel"),
        ("flash_forward", "flash_forward"),
    ],
)  # fmt: skip
def test_names_of_kernels_are_short(name, short):
    assert counters.short_name(name) == short


# ---------------------------------------------------------------- running it


def value(command, option):
    return command[command.index(option) + 1]


class Machine:
    """A machine with ncu: `launches[impl]` is what a job launches, or the reason for which it fails."""

    def __init__(self, monkeypatch, launches, allowed=True, upto=None):
        self.launches, self.allowed, self.upto, self.commands = launches, allowed, upto, []
        monkeypatch.setattr(profiling.timing, "need_gpu", lambda: None)
        monkeypatch.setattr(profiling, "find_ncu", lambda: "/opt/ncu")
        monkeypatch.setattr(profiling, "compile_ahead", lambda *args: None)
        monkeypatch.setattr(profiling, "_run", self.run)

    def run(self, command, seconds):
        self.commands.append(command)
        if "--version" in command:
            return "NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.4.0.0 (build 1)\n"
        if "--query-metrics" in command:
            return "\n".join(metric.partition(".")[0] for metric in METRICS)
        target = command[command.index("attnlib.bench.profile_target") :]
        jobs, tool = json.loads(open(target[1]).read()), value(target, "--tool")
        if tool == "ncu" and not self.allowed:
            return PERMISSION
        kernels, lines = [] if jobs else [("profile_marker", {})], []
        for index, job in enumerate(jobs[: self.upto]):
            made = self.launches[job["impl"]]
            if isinstance(made, str):
                lines.append({"index": index, "status": "failed", "reason": made})
                continue
            kernels += [("profile_marker", {}), *made]
            traced = [{"name": name, SUMS["time_us"]: 7.0} for name, _ in made]
            lines.append({"index": index, "began": True})
            lines.append({"index": index, "status": "ok", "kernels": [] if tool == "ncu" else traced})
        with open(target[2], "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return ncu_text(*kernels) if tool == "ncu" else ""


KERNELS = {"attnlib": [("attention_forward", {PERCENT["tensor_pct"]: 90.0})],
           "flash": "RuntimeError: too old",
           "cudnn": [(n, {PERCENT["tensor_pct"]: x}) for n, x in (("one", 20.0), ("two", 40.0))]}  # fmt: skip


def test_a_profile_has_a_row_for_each_job(monkeypatch, tmp_path):
    """One that fails says why, and what comes after it keeps its own launches."""
    machine = Machine(monkeypatch, KERNELS)
    rows = profiling.profile(profiling.jobs_of(KERNELS, [TASK["d64"], TASK["d128"]]), keep=tmp_path / "kept")
    assert profiling.rows_in(tmp_path / "kept", "Nsight Compute 2025.4.0.0") == rows
    assert [(r["impl"], r["head_dim"]) for r in rows] == [(i, d) for d in (64, 128) for i in KERNELS]
    ok = [row for row in rows if row["status"] == "ok"]
    assert [row["tensor_pct"] for row in ok] == [90, 30, 90, 30] and len(ok[1]["kernels"]) == 2
    assert {row["reason"] for row in rows if row["status"] != "ok"} == {"RuntimeError: too old"}
    assert {row["tool"] for row in rows} == {"Nsight Compute 2025.4.0.0"}
    profiled = [command for command in machine.commands if "--page" in command]
    assert len(profiled) == 2, "a probe, and one process for all jobs"
    assert (
        value(profiled[1], "--clock-control") == "none"
        and value(profiled[1], "--profile-from-start") == "off"
    )
    assert set(value(profiled[1], "--metrics").split(",")) == set(METRICS)
    text = profiling.format_rows(rows)
    assert (
        "RuntimeError: too old" in text and "| attnlib" in text and "barrier 50, wait 38, selected 12" in text
    )


def test_a_process_that_ends_early_keeps_the_rows_before(monkeypatch):
    Machine(monkeypatch, KERNELS, upto=1)
    first, second, third = profiling.profile(profiling.jobs_of(KERNELS, [SHAPE]))
    assert first["tensor_pct"] == 90
    assert {second["status"], third["status"]} == {"failed"} and "ended before" in third["reason"]


def test_a_table_that_does_not_fit_the_calls_gives_no_rows():
    jobs = profiling.jobs_of(["attnlib"], [SHAPE])
    lines = [{"index": 0, "began": True}, {"index": 0, "status": "ok"}]
    with pytest.raises(NoCounters, match="1 calls were made, Nsight Compute profiled 0"):
        profiling.rows_of(jobs, lines, [], {"tool": "ncu"})


@pytest.mark.parametrize("missing", [True, False])
def test_without_counters_times_remain_and_a_sentence(monkeypatch, missing):
    Machine(monkeypatch, KERNELS, allowed=False)
    if missing:
        monkeypatch.setattr(profiling, "find_ncu", lambda: None)
    jobs = profiling.jobs_of(["attnlib"], [SHAPE])
    (row,) = profiling.profile(jobs)
    assert row["status"] == "ok" and row["time_us"] == 7 and row["tensor_pct"] is None and row["stalls"] == {}
    assert row["note"].startswith("No counters: ") and "torch.profiler" in row["tool"]
    assert ("not found" if missing else "ERR_NVGPUCTRPERM") in row["note"]
    with pytest.raises(NoCounters):
        profiling.profile(jobs, need_counters=True)


# ---------------------------------------------------------------- the process under the profiler


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    said = []
    monkeypatch.setattr(profile_target, "mark", lambda: said.append("marker"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    return said


def test_a_job_is_profiled_once_and_warm(on_cpu, monkeypatch, tmp_path):
    def fine(q, k, v, causal, scale):
        on_cpu.append("call")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    def broken(*args):
        raise RuntimeError("no such kernel")

    made = {"attnlib": fine, "01_naive": broken}
    monkeypatch.setattr(profile_target, "function_of", lambda impl, head_dim: made[impl])
    small = Shape(1, 2, 32, 16)
    jobs = profiling.jobs_of(["01_naive", "attnlib"], [small])
    profile_target.work(jobs, tmp_path / "out.jsonl", "ncu", 60)
    assert on_cpu == ["marker", "call", "start", "marker", "call", "stop"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0]["status"] == "failed" and "no such kernel" in lines[0]["reason"]
    assert lines[1:] == [{"index": 1, "began": True}, {"index": 1, "status": "ok", "kernels": []}]
    rows = profiling.rows_of(jobs, lines, [counters.read_table(ncu_text(("k", {})))], {"tool": "ncu"})
    assert [row["status"] for row in rows] == ["failed", "ok"]

    on_cpu.clear()
    late = tmp_path / "late.jsonl"
    profile_target.work(jobs[1:], late, "ncu", -1)
    assert "not reached" in json.loads(late.read_text())["reason"] and "call" not in on_cpu


def test_a_backward_is_profiled_alone(on_cpu, monkeypatch, tmp_path):
    def fine(q, k, v, causal, scale):
        on_cpu.append("forward")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    monkeypatch.setattr(profile_target, "function_of", lambda impl, head_dim: fine)
    jobs = profiling.jobs_of(["attnlib"], [Shape(1, 2, 32, 16)], "backward")
    profile_target.work(jobs, tmp_path / "out.jsonl", "ncu", 60)
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["status"] == "ok"
    assert on_cpu.index("forward") < on_cpu.index("start") and on_cpu.count("forward") == 1


def test_without_a_job_the_marker_alone_is_profiled(on_cpu, tmp_path):
    profile_target.work([], tmp_path / "out.jsonl", "ncu", 60)
    assert on_cpu == ["marker", "start", "marker", "stop"]


def test_launches_of_a_trace():
    """The fields are those of a Chrome trace that torch.profiler writes on a CUDA machine."""
    args = {"grid": [132, 1, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 230000,
            "est. achieved occupancy %": 19}  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "attention_forward", "ts": 5.0, "dur": 753.2, "args": args}
    first = kernel | {"ts": 2.0, "name": "first", "dur": 246.8}
    found = profile_target.traced_kernels({"traceEvents": [kernel, {"cat": "cpu_op", "name": "x"}, first]})
    row = counters.fields_of(found, SHAPE)
    assert row["time_us"] == pytest.approx(1000) and row["registers"] == 168 and row["tensor_pct"] is None
    assert [k["name"] for k in row["kernels"]] == ["first", "attention_forward"]
    assert (
        row["kernels"][1]["theoretical_occupancy_pct"] == 19 and row["kernels"][1]["shared_bytes"] == 230000
    )


# ---------------------------------------------------------------- names, record, command line


def test_a_job_may_ask_for_a_variant_of_a_step(monkeypatch):
    monkeypatch.setattr(profile_target, "function_of", lambda impl, head_dim: lambda *x, **options: options)
    job = {"impl": "13_scheduling", "shape": SHAPE.to_dict(), "pass": "forward"}
    assert profile_target.variant_of(job)() == {}
    assert profile_target.variant_of(job | {"options": {"section": 4}})() == {"section": 4}


def test_names_are_steps_package_and_peers():
    found = profiling.implementations("forward")
    assert {"01_naive", "13_scheduling", "14_ring", "15_teaching", "attnlib", "fa3"} <= set(found)
    assert all(names.number(name) <= profiling.LAST_STEP for name in profiling.steps())
    for name in profiling.steps():
        assert profile_target.function_of(name, 64).__name__ == "attention"
    tiles = sources.load_step("20_backward")
    for name in profile_target.BACKWARD.values():
        assert {64, 128, 256} <= set(getattr(tiles, name))
    assert profile_target.function_of("fa3", 64) is None
    for name in profiling.implementations("backward"):
        profile_target.function_of(name, 64)
    assert callable(sources.load_step("22_fp8").forward)
    for job in profiling.beyond_jobs():
        assert job["pass"] in profile_target.BEYOND and Shape.from_dict(job["shape"]).dtype == "float16"
    with pytest.raises(ValueError, match="impl: unknown 20_backward; expected of 01_naive"):
        profiling.jobs_of(["20_backward"], [SHAPE])


def test_the_books_record(monkeypatch, tmp_path):
    jobs = profiling.book_jobs()
    assert len({json.dumps(job, sort_keys=True) for job in jobs}) == len(jobs)
    assert {Shape.from_dict(job["shape"]) for job in jobs} == set(TASK.values())
    impls = {job["impl"] for job in jobs}
    Machine(monkeypatch, {impl: [("k", {})] for impl in impls})
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    header = records.provenance(profiling.method()) | {"gpu": {"name": "NVIDIA H200"}}
    monkeypatch.setattr(records, "provenance", lambda method: header)
    profiling.record()
    path = tmp_path / "nvidia-h200" / "profile.json"
    stored = records.read(path)
    rows = stored["tables"]["counters"]["rows"]
    assert len(rows) == len(jobs) and {row["status"] for row in rows} == {"ok"}
    assert stored["method"] == profiling.method()

    before = path.read_bytes()
    Machine(monkeypatch, {}, allowed=False)
    with pytest.raises(NoCounters):
        profiling.record()
    assert path.read_bytes() == before


@pytest.mark.parametrize("direction", ["values", "decode"])
def test_a_call_beyond_forward_and_backward(monkeypatch, direction):
    """On a CPU, small: the kernels of Triton's interpreter."""
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shapes = {"values": Shape(1, 2, 70, 64), "decode": Shape(1, 4, 1, 64, False, heads_kv=2, seqlen_k=100)}
    shape = shapes[direction]
    run = profile_target.prepared({"impl": "attnlib", "shape": shape.to_dict(), "pass": direction})
    assert run.row["status"] == "ok", run.row
    found = run.call()
    assert found.shape == (1, 4, 1, 64) if direction == "decode" else found.role == "v"


@pytest.mark.parametrize(("name", "rows"), [("beyond", 12), ("package", 45)])
def test_some_have_a_table_of_their_own(monkeypatch, tmp_path, name, rows):
    jobs = profiling.JOBS[name]()
    assert len({json.dumps(job, sort_keys=True) for job in jobs}) == len(jobs) == rows
    Machine(monkeypatch, {impl: [("k", {})] for impl in {job["impl"] for job in jobs}})
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    header = records.provenance(profiling.method()) | {"gpu": {"name": "NVIDIA H200"}}
    monkeypatch.setattr(records, "provenance", lambda method: header)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["--profile", "--book", f"--{name}"]) == 0
    stored = records.read(tmp_path / "nvidia-h200" / "profile.json")["tables"]
    assert set(stored) == {name} and len(stored[name]["rows"]) == rows


def test_command_line(monkeypatch, tmp_path, capsys):
    assert cli.main(["--profile"]) == 2 and "needs a CUDA GPU" in capsys.readouterr().err
    for wrong in (
        ["--profile", "--impl", "99_none"],
        ["--book"],
        ["--beyond"],
        ["--package"],
        ["--profile", "--package", "--beyond"],
        ["--profile", "--beyond", "--impl", "attnlib"],
        ["--profile", "--book", "--impl", "attnlib"],
    ):
        with pytest.raises(SystemExit):
            cli.main(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        records, "provenance", lambda method: {"gpu": {"name": "NVIDIA H200"}, "date": "2026-11-22"}
    )
    Machine(monkeypatch, KERNELS)
    out = tmp_path / "out.json"
    capsys.readouterr()
    assert cli.main(["--profile", "--impl", "attnlib,flash", "--shapes", "d128", "--json", str(out)]) == 0
    assert "RuntimeError: too old" in capsys.readouterr().out
    assert [row["impl"] for row in records.read(out)["tables"]["counters"]["rows"]] == ["attnlib", "flash"]

    Machine(monkeypatch, KERNELS, allowed=False)
    assert cli.main(["--profile", "--impl", "attnlib", "--shapes", "d64"]) == 0
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().out
    Machine(monkeypatch, {"attnlib": "it broke"})
    assert cli.main(["--profile", "--impl", "attnlib", "--shapes", "d64"]) == 1
    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path / "data"))
    Machine(monkeypatch, KERNELS, allowed=False)
    assert cli.main(["--profile", "--book"]) == 0
    assert "The book's record stays as it is." in capsys.readouterr().out
