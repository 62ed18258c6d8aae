"""Solutions of the exercises of chapter 05."""


def tile_counts(S, BLOCK_M, BLOCK_N):
    full = masked = 0
    for i_m in range(-(-S // BLOCK_M)):
        before = i_m * BLOCK_M // BLOCK_N
        end = -(-min(S, (i_m + 1) * BLOCK_M) // BLOCK_N)  # a partial tile is visited whole
        full += before
        masked += end - before
    return full, masked


def sectioned(launched, rows, heads, section):
    # With K and V of 1 MiB a head, 32 heads fill half of the 60 MiB of L2 of an H200.
    group, inside = divmod(launched, rows * section)
    size = min(section, heads - group * section)
    row, head = divmod(inside, size)
    return rows - 1 - row, group * section + head


def window_bounds(i_m, S, BLOCK_M, BLOCK_N, window):
    first_row, last_row = i_m * BLOCK_M, min(S, (i_m + 1) * BLOCK_M) - 1
    first = max(0, first_row - window + 1) // BLOCK_N * BLOCK_N
    end = -(-(last_row + 1) // BLOCK_N) * BLOCK_N
    # A full tile starts inside the window of the last row and ends no later than the first row.
    full_from = -(-max(0, last_row - window + 1) // BLOCK_N) * BLOCK_N
    full_to = (first_row + 1) // BLOCK_N * BLOCK_N
    full_from = min(max(full_from, first), end)
    return first, full_from, max(full_from, full_to), end
