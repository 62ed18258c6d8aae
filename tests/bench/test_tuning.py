"""Tuning: the fastest correct candidate wins, is remembered, and a damaged cache is harmless."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnlib.bench import sources, tuning
from attnlib.bench.paths import NOTEBOOKS


@dataclasses.dataclass(frozen=True)
class Tile:
    block_m: int
    num_warps: int


TILES = [Tile(64, 4), Tile(128, 4), Tile(128, 8)]
MS = {TILES[0]: 3.0, TILES[1]: 9.0, TILES[2]: 2.0}
KEY = {"gpu": "NVIDIA Test 9000", "head_dim": 64}


class Stopwatch:
    """A fake stopwatch: known times, counted calls."""

    def __init__(self, ms: dict[Tile, float | Exception]) -> None:
        self.ms, self.calls = ms, []

    def __call__(self, tile: Tile) -> float:
        self.calls.append(tile)
        if isinstance(self.ms[tile], Exception):
            raise self.ms[tile]
        return self.ms[tile]


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_fastest_wins_and_is_not_timed_twice(tmp_path):
    first, second = Stopwatch(MS), Stopwatch(MS)
    assert tuning.tune(TILES, first, KEY, tmp_path) == TILES[2]
    assert tuning.tune(TILES, second, KEY, tmp_path) == TILES[2]
    assert first.calls and not second.calls


def test_environment_variable_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CACHE", str(tmp_path / "here"))
    tuning.tune(TILES, Stopwatch(MS), KEY)
    assert only_file(tmp_path / "here").name.startswith("nvidia-test-9000-")
    monkeypatch.delenv("ATTNLIB_CACHE")
    assert tuning.cache_folder().parts[-2:] == (".cache", "attnlib")


DAMAGE = [
    "",
    "{",
    "[]",
    "null",
    '{"schema": 1}',
    '{"schema": 0, "best": "Tile(block_m=128, num_warps=4)"}',
    '{"schema": 1, "best": "Tile(block_m=7, num_warps=1)"}',
    '{"schema": 1, "best": []}',
    pytest.param("[" * 200_000, id="deep"),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_replaced(tmp_path, damage):
    tuning.tune(TILES, Stopwatch(MS), KEY, tmp_path)
    path = only_file(tmp_path)
    path.write_text(damage)
    again = Stopwatch(MS)
    assert tuning.tune(TILES, again, KEY, tmp_path) == TILES[2]
    assert again.calls
    assert json.loads(only_file(tmp_path).read_text())["best"] == repr(TILES[2])


def test_binary_garbage_is_tolerated(tmp_path):
    tuning.tune(TILES, Stopwatch(MS), KEY, tmp_path)
    only_file(tmp_path).write_bytes(b"\xff\xfe\x00garbage")
    assert tuning.tune(TILES, Stopwatch(MS), KEY, tmp_path) == TILES[2]


def test_unwritable_cache_still_tunes(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file, not a folder")
    assert tuning.tune(TILES, Stopwatch(MS), KEY, blocked / "cache") == TILES[2]
    assert list(tmp_path.iterdir()) == [blocked]


def test_failing_candidates_are_left_out(tmp_path):
    wrong = {**MS, TILES[2]: AssertionError("wrong answer"), TILES[1]: float("nan")}
    assert tuning.tune(TILES, Stopwatch(wrong), KEY, tmp_path) == TILES[0]
    stored = json.loads(only_file(tmp_path).read_text())
    assert "wrong answer" in stored["failed"][repr(TILES[2])]
    assert "above 0" in stored["failed"][repr(TILES[1])]


def test_all_failing_says_why_and_stores_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="out of shared memory"):
        tuning.tune(TILES, Stopwatch(dict.fromkeys(TILES, ValueError("out of shared memory"))), KEY, tmp_path)
    assert not list(tmp_path.iterdir())


def test_interrupt_stops_the_search(tmp_path):
    def interrupted(tile):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune(TILES, interrupted, KEY, tmp_path)


@pytest.mark.parametrize("candidates", [[], [TILES[0], TILES[0]]])
def test_candidates_must_be_distinct(tmp_path, candidates):
    with pytest.raises(ValueError, match="candidates"):
        tuning.tune(candidates, Stopwatch(MS), KEY, tmp_path)


def test_key_and_search_space_are_part_of_the_entry(tmp_path):
    tuning.tune(TILES, Stopwatch(MS), KEY, tmp_path)
    others = [({**KEY, "gpu": "another"}, TILES), ({**KEY, "head_dim": 128}, TILES), (KEY, TILES[:2])]
    for key, tiles in others:
        watch = Stopwatch(MS)
        tuning.tune(tiles, watch, key, tmp_path)
        assert watch.calls, f"{key} {tiles} should have been tuned anew"


def test_a_lucky_first_time_does_not_win(tmp_path):
    """Candidate 0 is timed once at 1 ms, later always at 3 ms: the finalists' new times decide."""
    calls = []

    def lucky_once(tile):
        calls.append(tile)
        return 1.0 if tile == TILES[0] and calls.count(tile) == 1 else MS[tile]

    assert tuning.tune(TILES, lucky_once, KEY, tmp_path) == TILES[2]


def test_a_finalist_that_breaks_later_is_out(tmp_path):
    """A candidate may fail only when timed again, for example because its output is checked after timing."""
    calls = []

    def breaks(tile):
        calls.append(tile)
        if tile == TILES[2] and calls.count(tile) > 1:
            raise AssertionError("wrong answer")
        return MS[tile]

    assert tuning.tune(TILES, breaks, KEY, tmp_path) == TILES[0]
    stored = json.loads(only_file(tmp_path).read_text())
    assert repr(TILES[2]) not in stored["ms"] and repr(TILES[2]) in stored["failed"]


def test_rounds_visit_only_the_finalists(tmp_path):
    watch = Stopwatch(MS)
    tuning.tune(TILES, watch, KEY, tmp_path, finalists=2, rounds=3)
    assert [watch.calls.count(tile) for tile in TILES] == [4, 1, 4]
    single = Stopwatch(MS)
    assert tuning.tune(TILES, single, {**KEY, "again": 1}, tmp_path, finalists=1) == TILES[2]
    assert len(single.calls) == len(TILES)


BUCKETS = [(0, 16), (1, 16), (16, 16), (17, 32), (4000, 4096), (4096, 4096), (4097, 8192)]


@pytest.mark.parametrize("seqlen, bucket", BUCKETS)
def test_seqlen_bucket(seqlen, bucket):
    assert tuning.seqlen_bucket(seqlen) == bucket


def test_key_names_everything_a_choice_depends_on():
    base = tuning.tuning_key(64, "float16", True, 4096, "kernel text")
    assert set(base) == {"gpu", "triton", "kernel", "head_dim", "dtype", "causal", "seqlen"}
    others = [
        tuning.tuning_key(128, "float16", True, 4096, "kernel text"),
        tuning.tuning_key(64, "bfloat16", True, 4096, "kernel text"),
        tuning.tuning_key(64, "float16", False, 4096, "kernel text"),
        tuning.tuning_key(64, "float16", True, 8192, "kernel text"),
        tuning.tuning_key(64, "float16", True, 4096, "edited text"),
    ]
    assert all(other != base for other in others)
    assert tuning.tuning_key(64, "float16", True, 4000, "kernel text") == base


def test_concurrent_writers_leave_one_whole_file(tmp_path):
    path, choices = tmp_path / "choice.json", [letter * 100_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(choices)) as pool:
        list(pool.map(lambda best: tuning._write(path, {"schema": tuning.SCHEMA, "best": best}), choices))
    assert [found.name for found in tmp_path.iterdir()] == ["choice.json"]
    assert tuning._read(path)["best"] in choices


def test_chapter_06_changes_only_the_launcher():
    """The chapter says that its kernel is chapter 05's, letter by letter."""
    notebooks = NOTEBOOKS
    bodies = []
    for step in ("05_two_pass_causal", "06_autotuning"):
        source = sources.kernel_source(notebooks / f"{step}.ipynb")
        first, launcher = source.index("@triton.jit"), source.index("\n\n\n", source.rindex("@triton.jit"))
        bodies.append(source[first:launcher])
    assert bodies[0] == bodies[1]
