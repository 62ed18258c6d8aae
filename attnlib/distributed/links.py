"""What ranks send each other: their options, which have to agree, rows of keys and values, and sums.
torch.distributed does it, NCCL between GPUs and gloo between CPUs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from datetime import timedelta
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from attnlib.arguments.distributed import usable_timeout
from attnlib.distributed.groups import Ranks, device_of

CTAS = 16
"""Programs of NCCL's kernels at most: each takes a multiprocessor from attention while it runs."""
ROOM = 4096
"""Bytes of a rank's options, written as JSON."""
LONGEST = 2000
"""Characters of one of them, a list of chunks or an error; the others are short."""

Sent = list[tuple[int, torch.Tensor]]
"""(rank of the group, contiguous tensor)"""


class Transfer(NamedTuple):
    """Sends and receives that were started, and their tensors, which stay until they are done."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    links: Links

    def wait(self) -> None:
        """The current stream goes on when all has come and gone; on a CPU the caller does."""
        try:
            for work in self.works:
                work.wait(*self.links.patience)
        except RuntimeError as error:
            self.links.fail(error)


class Links:
    """The private groups of one group of ranks: a rank's requests meet no others of the program there, have a
    time limit of their own and, on GPUs, streams of high priority.

    timeout: seconds that this rank waits, which may differ between ranks and, by `of_call`, between calls.
    name: one that no other links of these ranks have. caller: the function that was called, for errors.
    calls: their numbers, the same on all ranks."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: float, name: str, caller: str
    ) -> None:
        self.rank, self.ranks, self.timeout = dist.get_rank(group), dist.get_world_size(group), timeout
        self.caller = caller
        self._broken: list[str] = []  # why, of all calls
        self.calls = count()
        try:
            self._control = _new_group(group, "gloo", timeout, f"{name}_control")
            self._data = self._control
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = timedelta(seconds=timeout)  # as the group is told, which warns of another
                options.config.max_ctas = CTAS
                options.config.cga_cluster_size = 0  # clusters wait for free neighbors
                self._data = _new_group(group, "nccl", timeout, name, options)
                dist.all_reduce(torch.zeros(1, device=device), group=self._data)  # connects all of them
        except RuntimeError as error:
            self.fail(error)

    def of_call(self, timeout: float, caller: str) -> Links:
        """The same groups for a call of a function, with its time limit."""
        links = copy(self)
        links.timeout, links.caller = timeout, caller
        return links

    @property
    def broken(self) -> str | None:
        """Why these groups can't be used any more."""
        return self._broken[0] if self._broken else None

    @property
    def patience(self) -> tuple[timedelta, ...]:
        """What a wait for a transfer is told. gloo takes the limit of the first call otherwise; NCCL's
        transfers have theirs from the start, and with one in the wait the host would block."""
        return (timedelta(seconds=self.timeout),) if self._data is self._control else ()

    def _limit(self) -> None:
        """The groups are shared by calls: what this one starts has its limit."""
        for group in {self._control, self._data}:
            c10d._set_pg_timeout(timedelta(seconds=self.timeout), group)

    def agree(self, options: Mapping[str, Any], error: Exception | None = None) -> None:
        """Compare the ranks' options. `error`: why this rank can't take part.

        Raises:
            ValueError: options differ; on all ranks, with the same words.
            RuntimeError: another rank can't take part, died, or did not come in time.
        """
        if self.broken:
            raise RuntimeError(f"{self.caller}: {self.broken}")
        mine = {"error": f"{type(error).__name__}: {error}"} if error else dict(options)
        text = json.dumps({name: _shortened(value) for name, value in mine.items()})
        mine_as_bytes = torch.frombuffer(bytearray(text.encode().ljust(ROOM)), dtype=torch.uint8)
        every = torch.empty(self.ranks, ROOM, dtype=torch.uint8, device="cpu")
        self._limit()
        try:
            dist.all_gather(list(every), mine_as_bytes, group=self._control)
        except RuntimeError as failure:
            self.fail(failure)
        if error:
            raise error
        given = [json.loads(bytes(row.tolist())) for row in every]
        for rank, other in enumerate(given):
            if "error" in other:
                raise RuntimeError(
                    f"{self.caller}: rank {rank} of the group can't take part: {other['error']}"
                )
        for rank, other in enumerate(given):
            for name in {**given[0], **other}:
                first, here = given[0].get(name), other.get(name)
                if first != here:
                    raise ValueError(
                        f"{name}: expected the same on all ranks of the group, got {first} on rank 0 and "
                        f"{here} on rank {rank}"
                    )

    def room(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory that others' keys come to."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def start(self, sent: Sent, received: Sent) -> Transfer:
        """Start to send and to receive; between two ranks, in the order of these lists."""
        ops = [
            dist.P2POp(op, tensor, group=self._data, group_peer=peer, tag=i)
            for op, pairs in ((dist.isend, sent), (dist.irecv, received))
            for i, (peer, tensor) in _numbered(pairs)
        ]
        tensors = [tensor for _, tensor in sent + received]
        self._limit()
        try:
            return Transfer(dist.batch_isend_irecv(ops) if ops else [], tensors, self)
        except RuntimeError as error:
            self.fail(error)

    def sum(self, x: torch.Tensor) -> Transfer:
        """Start to add up `x`, contiguous, over the ranks, in its place."""
        self._limit()
        try:
            return Transfer([dist.all_reduce(x, group=self._data, async_op=True)], [x], self)
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """A rank is missing: say so, now and at every later call."""
        self._broken.append(
            f"a rank of the group died, or did not come within {self.timeout:g} s; seen by rank "
            f"{self.rank} of {self.ranks}: {error}"
        )
        raise RuntimeError(f"{self.caller}: {self._broken[-1]}") from error


def agree_on_all(
    every: Iterable[Links], stated: Callable[[], Mapping[str, Any]], error: Exception | None = None
) -> None:
    """`agree` in one group of ranks, or in several, of which each rank is in one of each kind: what one rank
    has against the call, or two have against each other, reaches all. stated: checks the arguments and says
    what ranks compare; not called where `error` was found before."""
    options = {}
    if error is None:
        try:
            options = stated()
        except Exception as found:  # whatever it is, the other ranks wait
            error = found
    for links in every:
        try:
            links.agree(options, error)
        except (TypeError, ValueError, RuntimeError) as found:
            error = error or found
    if error:
        raise error


def _shortened(value: Any) -> Any:
    """An option, as it is compared and told, of at most LONGEST characters."""
    text = json.dumps(value, default=str)
    if len(text) <= LONGEST:
        return value
    return f"{str(value)[: LONGEST // 4]}... ({sha256(text.encode()).hexdigest()[:16]})"


def _new_group(group: dist.ProcessGroup, backend: str, timeout: float, name: str, options=None):
    """A group of the same ranks. `dist.new_group` either wants a call of all ranks of the program, or makes
    a name from the number of groups that a rank is in: ranks that are in others besides then never meet."""
    ranks = dist.get_process_group_ranks(group)
    _, store = c10d._world.pg_map[dist.group.WORLD]
    found, _ = c10d._new_process_group_helper(
        len(ranks), dist.get_rank(group), ranks, c10d.Backend(backend), store, name,
        backend_options=options, timeout=timedelta(seconds=timeout), group_desc=name,
        device_id=dist.group.WORLD.bound_device_id,
    )  # fmt: skip
    c10d._world.pg_group_ranks[found] = {rank: i for i, rank in enumerate(ranks)}
    return found


def _numbered(pairs: Sent) -> list[tuple[int, tuple[int, torch.Tensor]]]:
    """The number of each among those of the same rank."""
    seen: dict[int, int] = {}
    found = []
    for peer, tensor in pairs:
        number = seen.get(peer, 0)
        seen[peer] = number + 1
        found.append((number, (peer, tensor)))
    return found


_links: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def links_of(group: dist.ProcessGroup, device: torch.device, timeout: float, caller: str) -> Links:
    """For a call of the function `caller`. The groups are made at the first call, which all ranks of the
    group have to make; without the time limit in the key, which may differ between ranks."""
    of_group = _links.setdefault(group, {})
    key = device.type, CTAS
    if key not in of_group:
        name = f"attnlib_{group.group_name}_{len(of_group)}"
        of_group[key] = Links(group, device, timeout, name, caller)
    return of_group[key].of_call(timeout, caller)


def linked(x, ranks: Ranks, timeout, caller: str) -> tuple[Links, Links | None, Exception | None]:
    """(outer, inner, what is wrong with `timeout`) for a call with x."""
    timeout, error = usable_timeout(timeout)
    device = device_of(x, ranks.outer)
    outer = links_of(ranks.outer, device, timeout, caller)
    inner = None if ranks.inner is None else links_of(ranks.inner, device, timeout, caller)
    return outer, inner, error
