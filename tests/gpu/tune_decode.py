"""Candidates for the decoding kernels' configurations on this GPU, beside those that are chosen now.

    python tests/gpu/tune_decode.py                 about 100 seconds; prints tables, writes no record
    python tests/gpu/tune_decode.py --only ragged   one of `ragged`, `sizes`, `whole`, `pages` and `fp8`

`ragged`: how a stream-K program begins its next pair, and how partial results are merged. The shares are of
equal tiles, but those of short sequences have more pairs to begin, so they should end last. idle: a pair
counts as so many tiles more. next: the first keys of the next pair are asked for ahead. whole rows: a
program that merges takes 128 columns, so there are fewer of them. no room: programs that read keys have the
registers that those of the merge would need to begin early. One sequence and the batch of equal lengths are
there to see what it costs where it can't help. `sizes`: of calls with lengths, tiles of other sizes, and
fewer programs with more stages. `whole`: 128 pairs whose lengths the host does not know, split wherever
shares end, and left whole where the kernels find them nearly equal; of equal, nearly equal and other lengths,
and beside that in pages. `pages`: pages of 16 and 64 keys beside a cache in one piece that has
lengths, too, and pages with three stages. `fp8`: tiles and programs for caches in FP8.
All of a call in the same shuffled rounds, cold L2, with a control row; every output is judged against fp64.
A ratio is the time of what is chosen over the candidate's: above 1 the candidate is faster. What is inside of
the control's is a tie. Status 0 when all outputs were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hopper_only import no_hopper

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 2)]

import time_decode as timed  # noqa: E402
from time_decode import CALLS, OURS, OURS_FP8, PAGES, Call, Function, Inputs  # noqa: E402

from attnlib.bench.setting import SWEEP  # noqa: E402
from attnlib.kernels import DECODERS  # noqa: E402
from attnlib.kernels.common import device  # noqa: E402
from attnlib.kernels.decode.configs import registers_for  # noqa: E402
from attnlib.kernels.decode.launch import call_of, configuration  # noqa: E402
from attnlib.params import DecodeParams, mask_window  # noqa: E402

NEXT = {
    "idle 1": {"idle_tiles": 1},
    "idle 2": {"idle_tiles": 2},
    "next": {"prefetch_next": True},
    "whole rows": {"merge_columns": 128},
    "no room": {"registers": 168},
    "3 stages": {"num_stages": 3},
    "idle 1, next, whole rows": {"idle_tiles": 1, "prefetch_next": True, "merge_columns": 128},
}
# Keys of a tile over what is chosen, stages, programs of a multiprocessor, warps.
TILES = {"4 warps": (1, 3, 3, 4), "keys / 2": (0.5, 3, 6, 2)}
TILES |= {"1 warp": (1, 3, 8, 1), "1 warp, keys / 2": (0.5, 3, 8, 1)}
LARGE = {"2 x keys, 1 per SM": (2, 3, 1, 4), "2 x keys, 1 per SM, 8 warps": (2, 3, 1, 8)}
LARGE |= {"2 x keys, 2 per SM": (2, 2, 2, 4), "2 x keys, 2 per SM, 8 warps": (2, 2, 2, 8)}
LARGE |= {"3 stages, 2 per SM": (1, 3, 2, 4), "3 stages, 1 per SM": (1, 3, 1, 4)}
LARGE |= {"4 stages, 1 per SM": (1, 4, 1, 4), "2 stages, 3 per SM": (1, 2, 3, 4)}
LARGE |= {"late sums": (1, 2, 3, 4), "2 warps, late sums": (1, 2, 4, 2), "1 warp, late sums": (0.5, 3, 6, 1)}
LARGE |= {"2 warps, 5 per SM, late sums": (1, 2, 5, 2), "2 warps, keys / 2, late sums": (0.5, 3, 6, 2)}
# What is chosen for 126 to 132 pairs, and changes of it.
WHOLE = {"whole": {}, "as whole, but split": {"whole": 0}, "whole, next": {"prefetch_next": True}}
OTHER_TILES = {"keys / 2, 5 stages": (0.5, 5, 1, 4), "keys / 2, 4 stages, 2 per SM": (0.5, 4, 2, 4)}
OTHER_TILES |= {"keys / 2, 3 stages, 3 per SM": (0.5, 3, 3, 4)}
NEAR, RISING = tuple(8192 - 11 * i for i in range(16)), tuple(1024 * i for i in range(1, 17))
TUNED = {
    "ragged": [CALLS[-1], CALLS[2], CALLS[4]],
    "sizes": [*CALLS[:6], CALLS[-1], *(Call((16384,) * pairs, 4, 1) for pairs in (1, 56, 200))],
    "whole": [CALLS[4], CALLS[6], *map(Call, (NEAR, RISING, (*CALLS[-1].lengths, *CALLS[-1].lengths)))],
    "pages": [CALLS[0], CALLS[1], CALLS[4], CALLS[-1]],
    # With 4, 32 and 64 query rows for a key head.
    "fp8": [replace(CALLS[2], dtype="bfloat16"), *CALLS, Call((65536,), head_dim=256),
            *(Call((65536,), heads, head_dim=dim) for heads in (256, 512) for dim in (64, 128, 256))],
}


def with_config(
    inputs: Inputs, changes: dict, fp8: bool = False, page: int | None = None, split: str | None = "stream_k"
) -> Function:
    """attnlib with changes of its configuration, a cache in one piece with its lengths too. per_sm: programs
    of a multiprocessor; keys: of a tile, over what is chosen."""
    q, k, v, table, lengths = inputs.q, inputs.k, inputs.v, None, timed.lengths_of(inputs)
    scales = (None, None)
    if page is not None:
        k, v, table, lengths = timed.paged_caches(inputs, page)
    if fp8:
        k, v = ((x / scale).to(timed.FP8) for x, scale in zip((k, v), timed.SCALES, strict=True))
        scales = tuple(torch.full(k.shape[:2], scale, device=k.device) for scale in timed.SCALES)
    params = DecodeParams(mask_window(True, None), q.shape[-1] ** -0.5, lengths, table, False, split)
    params = params._replace(k_scale=scales[0], v_scale=scales[1])
    config = configuration(call_of(q, k, v, table, params))
    changes = dict(changes)
    if "per_sm" in changes:
        per_sm = changes.pop("per_sm")
        changes["shares"] = per_sm * device.num_sms(q.get_device())
        changes["registers"] = registers_for(per_sm, changes["num_warps"]) if fp8 else None
        changes["block_n"] = int(config.block_n * changes.pop("keys"))
    params = params._replace(config=replace(config, **changes))
    return lambda: DECODERS["triton"].forward(q, k, v, params)[0]


def sized(keys: float, stages: int, per_sm: int, warps: int, late: bool) -> dict:
    made = {"keys": keys, "num_stages": stages, "per_sm": per_sm, "num_warps": warps}
    return made | {"late_sums": True} if late else made


def peers_of(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    every = timed.implementations(inputs)
    return {name: every[name] for name in ("fa3", "cudnn", "cudnn, lengths", "flashinfer") if name in every}


def next_pairs(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    made = {OURS: lambda: with_config(inputs, {})}
    for name, changes in NEXT.items():
        made[f"{OURS}, {name}"] = lambda changes=changes: with_config(inputs, changes)
    return made | peers_of(inputs)


def sizes(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    made = {OURS: lambda: with_config(inputs, {}), f"{OURS}, as it chooses": lambda: timed.ours(inputs)}
    for name, wanted in LARGE.items():
        changes = sized(*wanted, "late" in name)
        made[f"{OURS}, {name}"] = lambda changes=changes: with_config(inputs, changes)
    return made | peers_of(inputs)


def whole(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    made = {OURS: lambda: with_config(inputs, {})}
    changed = WHOLE | {f"whole, {name}": sized(*wanted, False) for name, wanted in OTHER_TILES.items()}
    for name, changes in changed.items():
        made[f"{OURS}, {name}"] = lambda changes=changes: with_config(inputs, changes, split=None)
    for page in PAGES:
        made[f"{OURS}, pages of {page}"] = lambda page=page: with_config(inputs, {}, page=page)
        for name, changes in changed.items():
            made[f"{OURS}, pages of {page}, {name}"] = lambda page=page, changes=changes: with_config(
                inputs, changes, page=page, split=None
            )
    return made | peers_of(inputs)


def pages(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    made = {OURS: lambda: with_config(inputs, {})}
    for page in PAGES:
        made[f"{OURS}, pages of {page}"] = lambda page=page: with_config(inputs, {}, page=page)
        made[f"{OURS}, pages of {page}, 3 stages"] = lambda page=page: with_config(
            inputs, {"num_stages": 3}, page=page
        )
    return made


def tiles(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    made = {OURS: lambda: timed.ours(inputs, "stream_k"), OURS_FP8: lambda: with_config(inputs, {}, True)}
    for name, wanted in TILES.items():
        changes = sized(*wanted, True)
        made[f"{OURS_FP8}, {name}"] = lambda changes=changes: with_config(inputs, changes, True)
        for page in PAGES:
            made[f"{OURS_FP8}, pages of {page}, {name}"] = lambda page=page, changes=changes: with_config(
                inputs, changes, True, page
            )
    for page in PAGES:
        made[f"{OURS_FP8}, pages of {page}"] = lambda page=page: with_config(inputs, {}, True, page)
    return made


PARTS = {"ragged": next_pairs, "sizes": sizes, "whole": whole, "pages": pages, "fp8": tiles}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time candidates for decoding's configurations.")
    parser.add_argument("--only", choices=PARTS, action="append", help="(default: all)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    wrong, lines = 0, []
    for title in args.only or PARTS:
        fp8 = title == "fp8"
        for call in TUNED[title]:
            found = list(timed.rows(call, PARTS[title], SWEEP, fp8))
            own = next(row for row in found if row["impl"] == (OURS_FP8 if fp8 else OURS))
            lines.append(f"\n{title}")
            for row in found:
                ratio = f"{own['ms'] / row['ms']:.3f}" if "ms" in row and "ms" in own else "    -"
                lines.append(f"{ratio}  {timed.show(row)}")
                wrong += row["impl"].startswith(OURS) and row["status"] != "ok"
            print(*lines[-len(found) - 1 :], sep="\n", flush=True)
            torch.cuda.empty_cache()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
