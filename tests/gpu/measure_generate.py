"""Tokens per second of transformers' `generate()` on this GPU, with attention by attnlib and by SDPA.

    python tests/gpu/measure_generate.py                   about 150 seconds; figures/data/<gpu>/generate.json
    python tests/gpu/measure_generate.py --caches static,compiled  these tables, beside those in it
    python tests/gpu/measure_generate.py --prompts 512     less, no record

A Llama of 1.2 billion parameters (the shape of `book.training`'s "1B"), random weights, bfloat16 or, with
--dtype, float16; greedy search, so that every step is one token for each sequence. One table for each cache:
"dynamic" grows, "static" has a fixed size, "compiled" is static with the steps after the prompt compiled, as
generate() does unless it is told otherwise.
Compiling is most of the time, so each compiled call has a process of its own, all of them prepare side by
side, and what is not ready after two thirds of --seconds is ended. Then one process after the other measures,
while the others wait: compiled calls first, long prompts first. Tables are written as they come; what is not
begun after --seconds is a row that says so.
`ms` is that of a step, the median over all tokens but the first, and `prompt_ms` the time to the first token;
both are medians over rounds, in which attnlib, SDPA and SDPA again, the control, take turns in shuffled
order. Each is told by the host's clock when the GPU is done with a token, for which generate() waits anyway.
Before, the logits of one step from the cache are held against those of the same weights in float32: attnlib's
may err by 1.25 times what SDPA's do. Random weights leave many tokens nearly equally probable, so that tokens
need not agree; `same_tokens` says how many did.
Status 0 when all that ran was right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import transformers  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib.bench import records  # noqa: E402
from attnlib.bench.peers import brief  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.book.training import SHAPES, LlamaShape  # noqa: E402

OURS, THEIRS = "attnlib", "sdpa"
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
"""Options of generate()."""
BATCHES, PROMPTS = (1, 16), (8192, 512)
ROUNDS, TOKENS = 4, 33
READY = 2 / 3
"""Of the time: what has not compiled by then is ended."""
THREADS = "4"
"""Of each process's compiler."""
ALLOWED = 1.25
"""Of the error that SDPA's logits have."""
SUMS = 1e-6
"""Of the logits, what sums of float32 in another order may differ by."""


class Setting(NamedTuple):
    """Sequences of `prompt` tokens, which get `new` more each."""

    cache: str
    batch: int
    prompt: int
    new: int = TOKENS


def build(shape: LlamaShape, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Implementation -> a model; both have the same weights, in the same memory."""
    attnlib.hf.register()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
        max_position_embeddings=2 * max(PROMPTS), bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    models = {}
    for impl in (OURS, THEIRS):
        torch.manual_seed(0)
        settings = copy.deepcopy(config)
        settings._attn_implementation = impl
        with torch.device(device):
            models[impl] = transformers.LlamaForCausalLM(settings).to(dtype).eval()
        if impl != OURS:
            models[impl].load_state_dict(models[OURS].state_dict(), assign=True)
            models[impl].tie_weights()
        assert models[impl].config._attn_implementation == impl
    return models


def prompts(model, batch: int, length: int) -> torch.Tensor:
    """(batch, length) tokens, none of them special."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


# ---------------------------------------------------------------- right


@torch.no_grad()
def logits_of_a_step(model, ids: torch.Tensor, cache: str) -> torch.Tensor:
    """(batch, vocabulary) float32: the prompt but for its last token goes into the cache, then that."""
    past = None
    if cache != "dynamic":
        past = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + 8)
    past = model(ids[:, :-1], past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
    return model(ids[:, -1:], past_key_values=past, use_cache=True).logits[:, -1].float()


def errors(models: Mapping[str, Any], ids: torch.Tensor, cache: str) -> dict[str, float]:
    """RMS errors of the logits, by implementation, and the RMS of the logits (`size`)."""
    exact = copy.deepcopy(models[THEIRS]).float()
    with torch.no_grad():
        truth = exact(ids, logits_to_keep=1).logits[:, -1]
    del exact
    found = {impl: logits_of_a_step(model, ids, cache) - truth for impl, model in models.items()}
    found["size"] = truth
    return {name: x.square().mean().sqrt().item() for name, x in found.items()}


def wrong(found: Mapping[str, float]) -> str:
    """Why attnlib's logits are wrong; empty where they are not. NaN is wrong."""
    if found[OURS] <= ALLOWED * found[THEIRS] + SUMS * found["size"]:
        return ""
    return f"RMS error of the logits {found[OURS]:.3e}, SDPA's {found[THEIRS]:.3e}"


# ---------------------------------------------------------------- timed


class Clock(transformers.StoppingCriteria):
    """Notes when each token is there, and ends nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores, **options) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Run(NamedTuple):
    """Of one call of generate(): ms to the first token, median ms of the others, and the tokens."""

    prompt_ms: float
    step_ms: float
    tokens: torch.Tensor


def generate(model, ids: torch.Tensor, setting: Setting) -> Run:
    clock, new = Clock(), setting.new
    if ids.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
        stopping_criteria=transformers.StoppingCriteriaList([clock]), **CACHES[setting.cache],
    )  # fmt: skip
    times = clock.times
    if len(times) != new or out.shape[1] != ids.shape[1] + new:
        raise RuntimeError(f"expected {new} tokens, got {len(times)} steps and {tuple(out.shape)}")
    step = statistics.median(after - before for before, after in pairwise(times))
    return Run(1e3 * (times[0] - begin), 1e3 * step, out[:, ids.shape[1] :])


def prepare(models: Mapping[str, Any], setting: Setting) -> None:
    """What compiles does so now; a compiled step records its graph the second time."""
    ids = prompts(models[OURS], setting.batch, setting.prompt)
    for impl in (OURS, THEIRS):
        vars(models[impl]).pop("_previous_max_cache_length", None)  # or short prompts get a long one's cache
        for _ in range(2):
            generate(models[impl], ids, setting)


def measured(models: Mapping[str, Any], setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """A row for each implementation, and the control, after `prepare`."""
    shape = shape_of(models[OURS], setting)
    ids = prompts(models[OURS], setting.batch, setting.prompt)
    parts = {(OURS, False): OURS, (THEIRS, False): THEIRS, (THEIRS, True): THEIRS}
    runs: dict[tuple[str, bool], list[Run]] = {part: [] for part in parts}
    for number in range(rounds):
        for part in random.Random(number).sample(list(parts), len(parts)):
            runs[part].append(generate(models[parts[part]], ids, setting))
    theirs = runs[THEIRS, False][0].tokens
    rows = []
    for (impl, control), found in runs.items():
        row = about(impl, setting, shape) | summary([run.step_ms for run in found])
        prompt_ms = statistics.median(run.prompt_ms for run in found)
        row |= {
            "status": "ok", "prompt_ms": prompt_ms, "tokens_per_s": setting.batch * 1e3 / row["ms"],
            "prompt_tokens_per_s": setting.batch * setting.prompt * 1e3 / prompt_ms,
            "same_tokens": (found[0].tokens == theirs).float().mean().item(),
        }  # fmt: skip
        if control:
            row |= {"impl": f"{impl} (control)", "control_of": impl}
        rows.append(row)
    return rows


def about(impl: str, setting: Setting, shape: Shape) -> dict[str, Any]:
    call = f"batch {setting.batch}, {setting.prompt} tokens"
    return {"impl": impl, "call": call, "cache": setting.cache, "new_tokens": setting.new, **shape.to_dict()}


def shape_of(model, setting: Setting) -> Shape:
    """Of the attention of a layer in the first step."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    heads = config.num_attention_heads, config.num_key_value_heads
    return Shape(setting.batch, heads[0], 1, config.head_dim, False, dtype, heads[1], setting.prompt + 1)


def summary(times: Sequence[float]) -> dict[str, Any]:
    ends = {"ms_low": min(times), "ms_high": max(times)}
    return {"ms": statistics.median(times), **ends, "round_ms": list(times)}


def attempt(setting: Setting, missing: dict[str, Any], step: Callable[[], list | None]) -> list:
    """The rows that a step makes; what fails is a row that says why."""
    try:
        return step() or []
    except torch.OutOfMemoryError:
        return [missing | {"status": "out of memory"}]
    except Exception as error:  # of transformers or a compiler: the other settings go on
        return [missing | {"status": "failed", "reason": f"{type(error).__name__}: {brief(error)}"}]


def rows(
    models: Mapping[str, Any], settings: Sequence[Setting], rounds: int, until: float, prepared: bool = False
) -> Iterator[dict[str, Any]]:
    """All rows; what fails or has no time left is a row that says why."""
    checked: dict[tuple[str, int], str] = {}
    for setting in settings:
        missing = about(OURS, setting, shape_of(models[OURS], setting))
        if time.monotonic() > until:
            yield missing | {"status": "not run: no time was left"}
            continue

        def judged_and_measured(setting=setting, missing=missing) -> list[dict[str, Any]]:
            place = setting.cache, setting.batch
            if place not in checked:
                ids = prompts(models[OURS], setting.batch, min(setting.prompt, *PROMPTS))
                checked[place] = wrong(errors(models, ids, setting.cache))
            if checked[place]:
                return [missing | {"status": "wrong", "reason": checked[place]}]
            if not prepared:
                prepare(models, setting)
            return measured(models, setting, rounds)

        yield from attempt(setting, missing, judged_and_measured)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- processes


class Asked(NamedTuple):
    """What all processes do. until: by `time.monotonic`, which they share."""

    shape: LlamaShape
    dtype: torch.dtype
    device: str
    rounds: int
    until: float


def work(asked: Asked, settings: list[Setting], pipe: Connection) -> None:
    """One process: prepares what compiles, says so, and when it is told to measures and sends rows, and None
    at the end."""
    models = build(asked.shape, asked.dtype, asked.device)
    compiled = settings[0].cache == "compiled"
    failed = []
    if compiled:
        missing = about(OURS, settings[0], shape_of(models[OURS], settings[0]))
        failed = attempt(settings[0], missing, lambda: prepare(models, settings[0]))
    pipe.send("ready")
    pipe.recv()
    for row in failed or rows(models, settings, asked.rounds, asked.until, compiled):
        pipe.send(row)
    pipe.send(None)


def groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """The settings of each process: compiled ones alone, and first."""
    compiled = [[setting] for setting in settings if setting.cache == "compiled"]
    others = [setting for setting in settings if setting.cache != "compiled"]
    return [*compiled, *([others] if others else [])]


def side_by_side(
    asked: Asked, settings: Sequence[Setting], ready_by: float, start: Callable = None
) -> Iterator[dict[str, Any]]:
    """Rows of all processes, as they come. start: what makes a process of (target, args)."""
    start = start or multiprocessing.get_context("spawn").Process
    processes = []
    for group in groups(settings):
        here, there = multiprocessing.Pipe()
        process = start(target=work, args=(asked, group, there), daemon=True)
        process.start()
        processes.append((process, here, group))
    waiting = {here: process for process, here, _ in processes}
    while waiting and time.monotonic() < ready_by:
        ready = wait(list(waiting), timeout=min(1.0, max(0.0, ready_by - time.monotonic())))
        ended = [pipe for pipe, process in waiting.items() if not process.is_alive()]
        for pipe in {*ready, *ended}:
            del waiting[pipe]
    for process, pipe, group in processes:
        if pipe in waiting:
            process.terminate()
            yield from (lost(asked, setting, "not run: not compiled in time") for setting in group)
    for process, pipe, group in processes:
        if pipe in waiting:
            continue
        done = set()
        try:
            received(pipe, process)
            pipe.send("go")
            while (row := received(pipe, process)) is not None:
                done.add((row["cache"], row["call"]))
                yield row
        except (EOFError, OSError):
            pass
        told = (lost(asked, setting, "failed: its process ended") for setting in group)
        yield from (row for row in told if (row["cache"], row["call"]) not in done)
        process.join(10)


def received(pipe: Connection, process: Any) -> Any:
    """What a process sends next. EOFError if it has ended."""
    while not pipe.poll(1):
        if not process.is_alive() and not pipe.poll():
            raise EOFError
    return pipe.recv()


def lost(asked: Asked, setting: Setting, status: str) -> dict[str, Any]:
    """The row of a setting whose process is not there any more."""
    shape, dtype = asked.shape, str(asked.dtype).removeprefix("torch.")
    heads = Shape(
        setting.batch, shape.heads, 1, shape.head_dim, False, dtype, shape.kv_heads, setting.prompt + 1
    )
    return about(OURS, setting, heads) | {"status": status}


def show(row: Mapping[str, Any]) -> str:
    head = f"{row['cache']:8} {row['call']:24} {row['impl']:16}"
    if "ms" not in row:
        return f"{head} {row['status']} {row.get('reason', '')}"
    return (
        f"{head} {row['tokens_per_s']:8.1f} tokens/s  {row['ms']:7.3f} ms a step ({row['ms_low']:.3f} to "
        f"{row['ms_high']:.3f}), prompt {row['prompt_ms']:8.1f} ms, same tokens {row['same_tokens']:.0%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure generate() of transformers on this GPU.")
    parser.add_argument("--caches", default=",".join(CACHES), help="(default: %(default)s)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="(default: %(default)s)")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=150, help="begin nothing after them (%(default)s)")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/generate.json)")
    args = parser.parse_args(argv)
    caches, sides = args.caches.split(","), (args.batches, args.prompts)
    batches, lengths = ([int(n) for n in side.split(",")] for side in sides)
    if not set(caches) <= set(CACHES):
        parser.error(f"--caches: expected some of {', '.join(CACHES)}, got {args.caches}")
    if no_hopper():
        return 2
    begin = time.monotonic()
    settings = [Setting(*x) for x in product(caches, batches, lengths)]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = THREADS
    asked = Asked(SHAPES["1B"], getattr(torch, args.dtype), "cuda", ROUNDS, begin + args.seconds)
    whole = (set(batches), set(lengths)) == (set(BATCHES), set(PROMPTS))
    path = None
    if args.out or whole:
        header = records.provenance({
            "timed": "wall time between tokens of generate(); medians of rounds in shuffled order",
            "rounds": ROUNDS, "new_tokens": TOKENS, "parameters": SHAPES["1B"].parameters,
            "dtype": args.dtype, "transformers": transformers.__version__,
        })  # fmt: skip
        path = records.report_path("generate", header, args.out)
    tables: dict[str, list] = {name: [] for name in caches}
    for row in side_by_side(asked, settings, begin + READY * args.seconds):
        print(show(row), flush=True)
        tables[row["cache"]].append(row)
        if path:
            records.add_table(path, {"notebook": "generate", **header}, row["cache"], tables[row["cache"]])
    if path:
        print(path)
    found = [row for table in tables.values() for row in table]
    return int(any(row["status"] != "ok" and not row["status"].startswith("not run") for row in found))


if __name__ == "__main__":
    sys.exit(main())
