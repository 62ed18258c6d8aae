"""What `BlockMask` is made of, and a mask as an argument of `attention`, checked."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.arguments.common import check_dense, check_int, type_name

UNIT = 64  # every block size is a multiple of it


def check_block_size(block_size) -> tuple[int, int]:
    """Rows and columns of a block."""
    size = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if any(isinstance(x, bool) or not isinstance(x, int) for x in size):
        raise TypeError(f"block_size: expected an int or a pair of ints, got {type_name(block_size)}")
    if len(size) != 2 or any(x < UNIT or x % UNIT for x in size):
        raise ValueError(f"block_size: expected multiples of {UNIT}, such as 64 or 128, got {block_size}")
    return tuple(size)


def check_chosen_size(size, name: str = "block_size") -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}: expected 64 or 128, got {type_name(size)}")
    if size not in (UNIT, 2 * UNIT):
        raise ValueError(f"{name}: expected 64 or 128, got {size}")


def check_density(density) -> None:
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise TypeError(f"density: expected a number, got {type_name(density)}")
    if not 0 < density <= 1:
        raise ValueError(f"density: expected a number above 0, up to 1, got {density}")


def check_lengths(seqlen_q, seqlen_k) -> tuple[int, int]:
    check_int("seqlen_q", seqlen_q, 1)
    check_int("seqlen_k", seqlen_k, 1)
    return seqlen_q, seqlen_k


def check_shared(B, H) -> tuple[int, int]:
    for name, number in (("B", B), ("H", H)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{name}: expected an int or None, got {type_name(number)}")
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected 1 or more, or None for a mask that all share, got {number}")
    return B or 1, H or 1


def check_device(device) -> torch.device:
    """Without one PyTorch's default device; "cuda" is the current one."""
    device = torch.get_default_device() if device is None else torch.device(device)
    return torch.empty(0, device=device).device


def check_function(function) -> None:
    if not callable(function):
        raise TypeError(f"function: expected a function mask(b, h, q, k), got {type_name(function)}")


def check_mask(mask) -> torch.Tensor:
    """As (B, H, S_q, S_k)."""
    mask = _bool_tensor("mask", mask)
    if mask.dim() not in (2, 4) or not mask.numel():
        raise ValueError(f"mask: expected shape (B, H, S_q, S_k) or (S_q, S_k), got {tuple(mask.shape)}")
    return mask if mask.dim() == 4 else mask[None, None]


def check_blocks(blocks, seqlen_q, seqlen_k, size: tuple[int, int]) -> torch.Tensor:
    """As (B, H, blocks of queries, blocks of keys)."""
    blocks = _bool_tensor("blocks", blocks)
    grid = _blocks_of(seqlen_q, seqlen_k, size)
    if blocks.dim() not in (2, 4) or tuple(blocks.shape[-2:]) != grid or not blocks.numel():
        raise ValueError(
            f"blocks: expected shape (B, H, {grid[0]}, {grid[1]}) or {grid} for {seqlen_q} queries and "
            f"{seqlen_k} keys in blocks of {size[0]} x {size[1]}, got {tuple(blocks.shape)}"
        )
    return blocks if blocks.dim() == 4 else blocks[None, None]


def check_csr(starts, indices, seqlen_q, seqlen_k, size: tuple[int, int]) -> torch.Tensor:
    """The blocks that the lists name, bool (B, H, blocks of queries, blocks of keys)."""
    rows, columns = _blocks_of(seqlen_q, seqlen_k, size)
    for name, tensor in (("starts", starts), ("indices", indices)):
        _integer_tensor(name, tensor)
    if starts.dim() not in (1, 3) or starts.shape[-1] != rows + 1 or not starts.numel():
        raise ValueError(
            f"starts: expected shape (B, H, {rows + 1}) or ({rows + 1},) for {seqlen_q} queries in blocks of "
            f"{size[0]}, got {tuple(starts.shape)}"
        )
    if indices.dim() != 1:
        raise ValueError(f"indices: expected 1 dimension, got shape {tuple(indices.shape)}")
    if indices.device != starts.device:
        raise ValueError(f"indices: expected device {starts.device} as starts has, got {indices.device}")
    _check_memory("starts", starts)
    starts = (starts if starts.dim() == 3 else starts[None, None]).long()
    counts = starts.diff(dim=2)
    if bool((counts < 0).any()) or int(starts.min()) < 0 or int(starts.max()) > len(indices):
        raise ValueError(
            f"starts: expected values from 0 to {len(indices)}, the number of indices, that never go down"
        )
    numbers = torch.arange(counts.numel(), device=starts.device)
    row = numbers.repeat_interleave(counts.flatten())
    lengths, firsts = counts.flatten(), starts[..., :-1].flatten()
    within = torch.arange(len(row), device=starts.device) - (lengths.cumsum(0) - lengths)[row]
    column = indices.long()[firsts[row] + within]
    _check_columns("indices", column, columns)
    _check_order("indices", (row * columns + column), row)
    blocks = torch.zeros(counts.numel() * columns, dtype=torch.bool, device=starts.device)
    blocks[row * columns + column] = True
    return blocks.view(*counts.shape, columns)


def check_torch_mask(mask) -> tuple[torch.Tensor, tuple[int, int]]:
    """The kinds of the blocks of torch's own BlockMask, int8 (B, H, blocks of queries, blocks of keys), and
    the size of a block."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask: expected a torch.nn.attention.flex_attention.BlockMask, got {type_name(mask)}"
        )
    size = check_block_size(tuple(mask.BLOCK_SIZE))
    rows, columns = _blocks_of(*mask.seq_lengths, size)
    partial = _ordered("kv", mask.kv_num_blocks, mask.kv_indices, rows, columns)
    kinds = partial.to(torch.int8)
    if mask.full_kv_num_blocks is not None:
        full = _ordered("full_kv", mask.full_kv_num_blocks, mask.full_kv_indices, rows, columns)
        if full.shape != partial.shape or full.device != partial.device:
            raise ValueError(
                f"full_kv_indices: expected blocks {tuple(partial.shape)} on {partial.device} as kv_indices "
                f"has, got {tuple(full.shape)} on {full.device}"
            )
        if bool((full & partial).any()):
            raise ValueError("full_kv_indices: expected no block that kv_indices has too")
        kinds = torch.where(full, 2, kinds)
    return kinds.to(torch.int8), size


def check_s2(pattern) -> None:
    """The fields of an `S2Pattern`: whole numbers, and heads that together see every block."""
    for name in ("heads", "kv_heads", "block_size", "local_blocks", "stride", "dense_heads"):
        value, least = getattr(pattern, name), 0 if name == "dense_heads" else 1
        if name == "kv_heads" and value is None:
            continue
        check_int(name, value, least)
    if pattern.heads % pattern.key_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads, {pattern.heads}, got {pattern.kv_heads}")
    if pattern.block_size % UNIT:
        raise ValueError(f"block_size: expected a multiple of {UNIT}, got {pattern.block_size}")
    if pattern.dense_heads > pattern.key_heads:
        raise ValueError(
            f"dense_heads: expected at most {pattern.key_heads} key heads, got {pattern.dense_heads}"
        )
    if not pattern.dense_heads and pattern.stride > pattern.key_heads:
        raise ValueError(
            f"stride: expected at most {pattern.key_heads}, the number of key heads, or a dense head, so "
            f"that all heads together see every block, got {pattern.stride}"
        )


def check_s2_cache(pattern, k, v) -> None:
    """Keys and values of a cache (B, Hkv, S, D) for a pattern with so many key heads."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")
    if k.dim() != 4 or k.shape[1] != pattern.key_heads or not k.numel():
        raise ValueError(f"k: expected shape (B, {pattern.key_heads}, S, D), got {tuple(k.shape)}")
    if v.shape != k.shape or v.device != k.device:
        raise ValueError(
            f"v: expected shape {tuple(k.shape)} on {k.device} as k has, got {tuple(v.shape)} on {v.device}"
        )


def _ordered(name: str, counts, indices, rows: int, columns: int) -> torch.Tensor:
    """Bool (B, H, rows, columns) of torch's lists: the first counts[..., i] of indices[..., i, :]."""
    _integer_tensor(f"{name}_num_blocks", counts)
    _integer_tensor(f"{name}_indices", indices)
    if counts.device != indices.device:
        raise ValueError(
            f"{name}_num_blocks: expected device {indices.device} as {name}_indices has, got {counts.device}"
        )
    _check_memory(f"{name}_num_blocks", counts)
    if indices.shape[-2] != rows or counts.shape != indices.shape[:-1] or indices.dim() > 4:
        raise ValueError(
            f"{name}_indices: expected {rows} rows of lists, as many as {name}_num_blocks counts, got shapes "
            f"{tuple(indices.shape)} and {tuple(counts.shape)}"
        )
    indices = indices.reshape(*(1,) * (4 - indices.dim()), *indices.shape).long()
    counts = counts.reshape(indices.shape[:-1]).long()
    width = indices.shape[-1]
    if counts.numel() and (int(counts.min()) < 0 or int(counts.max()) > width):
        raise ValueError(f"{name}_num_blocks: expected values from 0 to {width}, the length of a list")
    valid = torch.arange(width, device=indices.device) < counts[..., None]
    _check_columns(f"{name}_indices", indices[valid], columns)
    found = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.int32, device=indices.device)
    found.scatter_add_(3, torch.where(valid, indices, columns), valid.int())
    if bool((found[..., :columns] > 1).any()):
        raise ValueError(f"{name}_indices: expected no block twice in a row")
    return found[..., :columns] > 0


def _check_columns(name: str, column: torch.Tensor, columns: int) -> None:
    if column.numel() and (int(column.min()) < 0 or int(column.max()) >= columns):
        wrong = column[(column < 0) | (column >= columns)][0].item()
        raise ValueError(f"{name}: expected blocks of keys from 0 to {columns - 1}, got {wrong}")


def _check_order(name: str, place: torch.Tensor, row: torch.Tensor) -> None:
    step, same = place.diff(), row.diff() == 0
    if bool((same & (step == 0)).any()):
        raise ValueError(f"{name}: expected no block twice in a row, got block number "
                         f"{int(row[1:][same & (step == 0)][0])} of rows with one")  # fmt: skip
    if bool((same & (step < 0)).any()):
        raise ValueError(f"{name}: expected ascending order in each row, got row number "
                         f"{int(row[1:][same & (step < 0)][0])} without")  # fmt: skip


def _blocks_of(seqlen_q, seqlen_k, size: tuple[int, int]) -> tuple[int, int]:
    check_lengths(seqlen_q, seqlen_k)
    return -(-seqlen_q // size[0]), -(-seqlen_k // size[1])


def _bool_tensor(name: str, tensor: Any) -> torch.Tensor:
    _check_form(name, tensor)
    _check_memory(name, tensor)
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name}: expected dtype bool, got {tensor.dtype}")
    return tensor


def _integer_tensor(name: str, tensor: Any) -> None:
    _check_form(name, tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {tensor.dtype}")


def _check_form(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(tensor)}")
    check_dense(name, tensor)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """A mask is made of its numbers."""
    if tensor.is_meta or type_name(tensor) == "torch._subclasses.fake_tensor.FakeTensor":
        raise ValueError(f"{name}: expected a tensor with memory, got one without (meta or fake)")
    if torch._C._functorch.is_batchedtensor(tensor):
        raise NotImplementedError(
            f"{name}: a block mask of what torch.vmap maps: not supported; make it outside"
        )


# ---------------------------------------------------------------- as an argument of attention


def is_torch_mask(mask) -> bool:
    """Whether it is FlexAttention's BlockMask, whose module takes long to import."""
    return type_name(mask) == "torch.nn.attention.flex_attention.BlockMask"


def check_block_mask(mask, q: torch.Tensor, k: torch.Tensor) -> None:
    """An `attnlib.BlockMask` that fits q and k."""
    if type_name(mask) != "attnlib.block_mask.mask.BlockMask":  # which imports this file
        hint = "; attnlib.BlockMask.from_torch makes one of it, outside of the graph" * is_torch_mask(mask)
        raise TypeError(f"block_mask: expected an attnlib.BlockMask or None, got {type_name(mask)}{hint}")
    B, H, S_q, S_k = mask.shape
    if mask.device != q.device:
        raise ValueError(f"block_mask: expected device {q.device} as q has, got {mask.device}")
    if (S_q, S_k) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"block_mask: expected {q.shape[2]} queries and {k.shape[2]} keys as q and k have, got {S_q} and "
            f"{S_k}"
        )
    for name, own, given, alone in (
        ("batch size", B, q.shape[0], mask.alone[0]), ("number of heads", H, q.shape[1], mask.alone[1])
    ):  # fmt: skip
        if own != 1 and own != given:  # under dynamo `in` does not find an int among symbols
            raise ValueError(f"block_mask: expected a {name} of 1 or {given} as q has, got {own}")
        if alone and given != 1:
            raise ValueError(
                f"block_mask: expected a {name} of {given} as q has, got a mask for 1 alone, whose function "
                "tells them apart; BlockMask.from_torch takes the batch size and the number of heads"
            )
