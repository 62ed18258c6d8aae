"""Solutions of chapter 10."""


def byte_of(row, column, rows, D):
    """The byte of element (row, column) of a swizzled [rows, D] fp16 tile: panel, row, chunk, place."""
    panel, column = divmod(column, 64)
    chunk, place = divmod(column, 8)
    return panel * rows * 128 + row * 128 + (chunk ^ row % 8) * 16 + place * 2


class mbarrier:
    """A barrier of arrivals and bytes; its phases follow each other."""

    def __init__(self, count):
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, expect=0):
        self.missing -= 1
        self.bytes += expect
        self._advance()

    def land(self, count):
        self.bytes -= count
        self._advance()

    def passed(self, parity):
        return self.phase % 2 != parity

    def _advance(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


def clocks_per_trip(product, softmax, latency):
    """The longest of three circles: the work, K's buffer, V's buffer. Free up to product + softmax."""
    work = 2 * product + softmax
    copy_of_k = product + latency  # product ends, copy, next product
    copy_of_v = latency + product  # second product ends, copy, second product
    return max(work, copy_of_k, copy_of_v)
