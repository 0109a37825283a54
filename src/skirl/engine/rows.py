"""The rows of one engine behind one face: they are all this trainer's, or several trainers share them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch

from skirl.core.groups import Setting
from skirl.core.keys import table_of
from skirl.core.optim import RowOptimizer
from skirl.core.placement import Owner, Placement, cuts_of, sites_of
from skirl.core.tables import Schema, Table
from skirl.core.tree import block_of, leaves_of, subtrees
from skirl.engine.device import BankRows
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Work
from skirl.oracle.route import Route, SharedRoute
from skirl.oracle.step import Step
from skirl.peers.base import Peers, Swapping
from skirl.peers.job import trainers

if TYPE_CHECKING:
    from skirl.engine.engine import Engine


class Rows:
    """The rows of a lone trainer: they are where the Steps say."""

    local = True
    """True if no other trainer needs to know of a step."""
    whole: Mapping[int, Owner] = {}
    """By number of a table: the trainer that looks it up for all, and has its rows, or those that have cut it by columns."""

    cut = ""
    """A mark of this trainer's columns of tables that are cut."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def owns(self, keys: np.ndarray) -> np.ndarray:
        return np.ones(len(keys), np.bool_)

    def counts(self, table: int) -> bool:
        """Return whether rows of a table count here: of one that is cut by columns, they do at its first owner."""
        return True

    def route(self, schemas: Sequence[tuple[Schema, Mapping[int, Owner]]], first: int) -> Route:
        """Return the way of a pass's ids to the planner of their rows. `schemas`: with `whole` of each. `first`: the number
        of its first step in the run."""
        return Route()

    def gather(self, engine: "Engine", work: Work) -> None: ...

    def apply(
        self, engine: "Engine", work: Work, raised: np.ndarray, settings: Sequence[Setting], finite: bool
    ) -> bool:
        """Apply the gradients of a step, if all are finite. `raised`: the tables that have some. Return whether it did."""
        pack = engine.packs[work.pack]
        if finite:
            pack.steps += raised
            for bank in pack.banks_of(raised):
                engine.caches[bank].changing(work.steps[bank].rows)
                engine.banks[bank].update(work, pack.scalars(bank, settings), engine.counters.steps)
        return finite

    def look_up(self, keys: np.ndarray, table: int, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return some rows as their owners have them now. `table`: one of their bank. `read` returns records of rows that
        this trainer owns."""
        return read(keys)


class SharedRows(Rows):
    """Rows that trainers own by a hash of their key, or table by table. All exchanges are in the thread of the training
    loop, except those of ids, which are in the planner's.

    A trainer gets the values of the rows that it reads from their owners and sends their gradients back; as an owner, it
    serves values and applies gradients for all. Of a table in `whole`, bags go to the owner, or to each that has some of its
    columns, which computes on the whole step as a lone trainer does: pooled vectors come back, and their gradients go there.
    """

    local = False

    def __init__(self, peers: Peers, whole: Mapping[int, Owner] | None = None) -> None:
        super().__init__(peers)
        self.whole = whole or {}
        self.placement = Placement.even(peers.size, whole=self.whole.items())
        cut = [pair for pair in self.placement.whole if len(pair[1]) > 1]
        here = [(t, at) for t, owner in cut for site, at in cuts_of(owner) if site == peers.rank]
        self.cut = f"-{blake2b(repr(here).encode(), digest_size=4).hexdigest()}" if here else ""
        self._rows, self._host = peers.channel("rows"), peers.channel("lookups")

    def owns(self, keys: np.ndarray) -> np.ndarray:
        owned, tables = self.placement.site_of(keys) == self.peers.rank, table_of(keys)
        for table, owner in self.whole.items():
            if self.peers.rank in sites_of(owner):
                owned |= tables == table
        return owned

    def counts(self, table: int) -> bool:
        return table not in self.whole or self.peers.rank not in sites_of(self.whole[table])[1:]

    def route(self, schemas: Sequence[tuple[Schema, Mapping[int, Owner]]], first: int) -> Route:
        channel = self.peers.channel("ids")

        def exchanged(arrays: list[np.ndarray]) -> list[np.ndarray]:
            channel.step = first + together.number
            return channel.exchange(arrays, "ids")

        together = SharedRoute(schemas, self.peers.rank, self.placement, exchanged)
        return together

    def gather(self, engine: "Engine", work: Work) -> None:
        coming, bags = {}, {}
        for number, (bank, reads) in enumerate(zip(engine.banks, work.reads, strict=True)):
            if reads is None:
                bags[number] = self._send_pooled(engine, work, number)
            else:
                ask, serve = np.diff(reads.ask).tolist(), np.diff(work.serve[number]).tolist()
                coming[number] = self._rows.begin_swap(bank.values(work), serve, ask, tag="values of rows")
        mine = self._micros(work)[self.peers.rank]
        here = {
            bank: [engine.banks[bank].pool(work.whole[bank], m) for m in mine] for bank in bags if bank in work.whole
        }
        work.values = {number: swap.wait() for number, swap in coming.items()}
        for bank, swap in bags.items():
            cuts, came, sizes = self._cuts(engine, bank), swap.wait(), [ids.banks[bank].bags for ids in work.micros]
            given = [here[bank] if site == self.peers.rank else came[site].split(sizes) for site, _ in cuts]
            if len(cuts) > 1 or (bank not in here and len(sizes) > 1):
                # Copied, since the bits of some products depend on where their memory begins.
                work.pooled[bank] = [engine.device.empty(n, engine.schema.banks[bank].dim) for n in sizes]
                for (_, columns), parts in zip(cuts, given):
                    for out, part in zip(work.pooled[bank], parts):
                        out[:, columns] = part
            else:
                work.pooled[bank] = list(given[0])

    def apply(
        self, engine: "Engine", work: Work, raised: np.ndarray, settings: Sequence[Setting], finite: bool
    ) -> bool:
        (pack,) = engine.packs
        whole = [bank for bank, reads in enumerate(work.reads) if reads is None]
        # Sums are made while trainers tell each other which tables have gradients, and sent once all have told.
        live = [self._live(engine, work, bank) for bank in whole]
        said = np.concatenate([raised, [not finite], *(of.reshape(-1) for of in live)]).astype(np.uint8)
        flags = torch.from_numpy(np.tile(said, (self.peers.size, 1)))
        telling = self._host.begin_swap_parts(list(flags), list(flags.clone()), tag="tables with gradients")
        trees = self._trees(work)
        own = trees[self.peers.rank]
        sums = {bank: self._sums(engine, work, bank, own) for bank in pack.banks_of(raised) if bank not in whole}
        heard = np.any([part.numpy() for part in telling.wait()], axis=0)
        told, bad, *each = np.split(heard, np.cumsum([len(raised), 1, *(of.size for of in live)])[:-1])
        if bad.any():
            return False
        pack.steps += told
        banks, coming = pack.banks_of(told), []
        bags = {bank: self._send_gradients(engine, work, bank) for bank in banks if bank in whole}
        for bank in banks:  # other trainers may have gradients where this one has none
            if bank in whole:
                continue
            parts = sums.get(bank) or self._sums(engine, work, bank, own)
            engine.caches[bank].changing(work.steps[bank].rows)
            ask, serve = work.reads[bank].ask, work.serve[bank]
            counts = [n * len(tree) for n, tree in zip(np.diff(serve).tolist(), trees)]
            sent = (np.diff(ask) * len(parts)).tolist()
            swap = self._rows.begin_swap(by_owner(parts, ask), sent, counts, tag="gradients of rows")
            coming.append((bank, swap))
        for bank, swap in coming:
            apply(engine.banks[bank], work, trees, swap.wait(), pack.scalars(bank, settings), engine.counters.steps)
        masks = {bank: part.reshape(of.shape) for bank, part, of in zip(whole, each, live)}
        for bank, swap in bags.items():
            swap.wait()
            if bank in work.whole:
                of = work.whole[bank]
                of.live.update(((bank, micro), mask) for micro, mask in enumerate(masks[bank]))
                engine.caches[bank].changing(work.steps[bank].rows)
                engine.banks[bank].update(of, pack.scalars(bank, settings), engine.counters.steps)
        return True

    def _live(self, engine: "Engine", work: Work, bank: int) -> np.ndarray:
        """Return [micro-batches of the step, features of a bank]: which got a gradient on this trainer."""
        micros = self._micros(work)
        live = np.zeros((micros[-1].stop, len(engine.schema.banks[bank].features)), np.bool_)
        for micro, row in enumerate(live[micros[self.peers.rank].start : micros[self.peers.rank].stop]):
            row[:] = work.live.get((bank, micro), False)
        return live

    def _micros(self, work: Work) -> list[range]:
        """Return which of a step's micro-batches each trainer has."""
        each, size = len(work.micros) // len(work.mine), self.peers.size
        blocks = [block_of(rank, size, work.shards) for rank in range(size)]
        return [range(block.start * each, block.stop * each) for block in blocks]

    def _cuts(self, engine: "Engine", bank: int) -> list[tuple[int, slice]]:
        return cuts_of(self.whole[engine.schema.banks[bank].tables[0]])

    def _send_pooled(self, engine: "Engine", work: Work, bank: int) -> Swapping[Sequence[torch.Tensor]]:
        """Begin to send the pooled bags of a bank from its owners to all others: by owner, [bags, columns]."""
        parts, outs = ([engine.device.empty(0, 1)] * self.peers.size for _ in range(2))
        for site, columns in self._cuts(engine, bank):
            if site != self.peers.rank:
                bags = sum(ids.banks[bank].bags for ids in work.micros)
                outs[site] = engine.device.empty(bags, columns.stop - columns.start)
                continue
            for rank, micros in enumerate(self._micros(work)):
                if rank != site:
                    parts[rank] = joined([engine.banks[bank].pool(work.whole[bank], micro) for micro in micros])
        return self._rows.begin_swap_parts(parts, outs, tag="pooled bags")

    def _send_gradients(self, engine: "Engine", work: Work, bank: int) -> Swapping[Sequence[torch.Tensor]]:
        """Begin to send the gradients of a bank's bags from all to its owners, which get them as those of `work.whole`."""
        parts, outs = ([engine.device.empty(0, 1)] * self.peers.size for _ in range(2))
        dim, sizes = engine.schema.banks[bank].dim, [ids.banks[bank].bags for ids in work.micros]
        given = [work.grads.get((bank, micro)) for micro in range(len(sizes))]
        grads = joined([engine.device.empty(n, dim).zero_() if of is None else of for n, of in zip(sizes, given)])
        for site, columns in self._cuts(engine, bank):
            if site != self.peers.rank:
                parts[site] = grads[:, columns].contiguous()
                continue
            of = work.whole[bank]
            rooms = [of.room(bank, m, columns.stop - columns.start, engine.device.empty) for m in range(len(of.micros))]
            by_rank = [sum(map(len, rooms[micros.start : micros.stop])) for micros in self._micros(work)]
            for rank, out in enumerate(of.joint[bank].split(by_rank)):
                if rank == site:
                    out.copy_(grads[:, columns])
                else:
                    outs[rank] = out
        return self._rows.begin_swap_parts(parts, outs, tag="gradients of bags")

    def _sums(self, engine: "Engine", work: Work, bank: int, blocks: list[range]) -> list[torch.Tensor]:
        if not any(of == bank for of, _ in work.grads):  # others have gradients for it
            none = engine.device.empty(len(work.groups(bank)[0]) - 1, engine.schema.banks[bank].dim).fill_(-0.0)
            return [none for _ in blocks]
        return [marked(*engine.banks[bank].sums(work, block)) for block in blocks]

    def _trees(self, work: Work) -> list[list[range]]:
        size, micros = self.peers.size, len(work.micros) // len(work.mine)
        blocks = [leaves_of(block_of(rank, size, work.shards), micros) for rank in range(size)]
        return [subtrees(block.start, block.stop) for block in blocks]

    def look_up(self, keys: np.ndarray, table: int, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the weights of some rows as their owners have them now. All trainers call this together."""
        owner, every = self.placement.site_of(keys), range(self.peers.size)
        cut = dict(cuts_of(self.whole.get(table, ())))
        columns = [cut.get(rank, slice(0, dim)) for rank in every]
        places = [(owner == rank) | (owner < 0) & (rank in cut) for rank in every]
        asked = self._host.exchange([keys[at].view(np.uint8) for at in places], "rows to look up")
        here = columns[self.peers.rank]
        mine = [np.ascontiguousarray(read(part.view(np.int64))[:, : here.stop - here.start]) for part in asked]
        come = self._host.exchange([part.reshape(-1).view(np.uint8) for part in mine], "rows that were looked up")
        out = np.empty((len(keys), dim), mine[0].dtype)
        for at, of, part in zip(places, columns, come):
            out[at, of] = part.view(out.dtype).reshape(-1, of.stop - of.start)
        return out


def marked(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return values in which -0 marks sums that do not count. Sums begin at +0, so no sum that counts is -0."""
    if counted.device.type == "cpu" and bool(counted.all()):
        return values  # nearly always; asking a GPU would mean waiting for it
    return values.masked_fill_(~counted[:, None], -0.0)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def by_owner(sums: Sequence[torch.Tensor], ask: np.ndarray) -> torch.Tensor:
    if len(sums) == 1:
        return sums[0]
    return torch.cat([part[lo:hi] for lo, hi in zip(ask[:-1].tolist(), ask[1:].tolist()) for part in sums])


def apply(
    rows: BankRows, work: Work, trees: list[list[range]], come: torch.Tensor, scalars: np.ndarray, number: int
) -> None:
    """Apply what all trainers sent to this one, for each subtree of theirs, to the rows of a bank that it owns."""
    bank = rows.facts.number
    step, serve = work.steps[bank], work.serve[bank]
    first = come[:, 0].clone()  # contiguous: one pass over the vectors instead of three
    counted = ~((first == 0) & torch.signbit(first))
    ends = np.cumsum([n for n, tree in zip(np.diff(serve), trees) for _ in tree])
    parts = Parts(ends, np.array([leaves.start for tree in trees for leaves in tree]))
    plan = _spread(step, serve, trees) if len(ends) > len(trees) else step
    rows.apply(work, plan, parts, come, counted, scalars, number)


def _spread(step: Step, serve: np.ndarray, trees: list[list[range]]) -> Step:
    """Return an owner's step whose positions are the sums that came: one per request and subtree of its trainer."""
    rank = np.searchsorted(serve[1:], step.group_pos, side="right")
    times = np.array([len(tree) for tree in trees])
    counts = np.diff(serve).astype(np.int64)
    first_of = np.concatenate([[0], np.cumsum(counts * times)])[rank]
    copies = times[rank]
    first = np.repeat(first_of + step.group_pos - serve[rank], copies)
    which = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    pos = first + which * np.repeat(counts[rank], copies)
    ends = np.concatenate([[0], np.cumsum(copies)])[step.group_start]
    return replace(step, group_start=ends.astype(np.int32), group_pos=pos.astype(np.int32))


def open_rows(
    at: torch.device,
    tables: Sequence[Table] = (),
    optimizers: Sequence[RowOptimizer] = (),
    placement: Mapping[str, int | Mapping[int, int]] | None = None,
    half: bool = False,
) -> Rows:
    """Return the rows of this trainer, or those that it shares with the others of its job. `at` is where rows are.
    `placement`: the trainer that looks a table up for all, by its name, or how many of its columns each has."""
    peers = trainers(str(at))
    if peers.size == 1:
        return Rows(peers)
    numbers, whole = {table.name: t for t, table in enumerate(tables)}, {}
    for name, given in (placement or {}).items():
        if name not in numbers:
            raise ValueError(
                f"placement has table {name!r}, and the tables are {', '.join(numbers)}: make a plan for these"
            )
        number = numbers[name]
        try:
            cuts = given if isinstance(given, Mapping) else {given: tables[number].dim}
            owner = tuple((index(site), index(count)) for site, count in cuts.items())
        except TypeError:
            raise TypeError(
                f"placement of table {name!r} is {given!r}: set it to a trainer's number, or to trainers and how many "
                "columns each has, such as {0: 32, 1: 32}"
            ) from None
        if not all(0 <= site < peers.size for site in sites_of(owner)):
            raise ValueError(
                f"placement has table {name!r} at trainer {given} of {peers.size}: make a plan for that many"
            )
        if isinstance(given, Mapping):
            check_cut(tables[number], optimizers[number], owner, at, half)
        whole[number] = owner
    return SharedRows(peers, whole)


def check_cut(
    table: Table, optimizer: RowOptimizer, owner: tuple[tuple[int, int], ...], at: torch.device, half: bool
) -> None:
    """Raise if trainers cannot cut a table by columns and keep the bits of one process."""
    what, columns = f"placement cuts table {table.name!r} by columns", [count for _, count in owner]
    if not optimizer.by_number:
        why = "its clip bounds" if optimizer.clip else f"{optimizer.name} trains"
        then = "leave clip out" if optimizer.clip else "train it with adagrad, adam, ftrl or sgd"
        raise ValueError(f"{what}, and {why} a row as one, so bits would differ: place it whole or by rows, or {then}")
    if sum(columns) != table.dim or min(columns) < 1 or any(count % 2 for count in columns[:-1]):
        raise ValueError(
            f"{what} of {columns}, and its dim is {table.dim}: give each but the last an even number of them"
        )
    if at.type != "cpu" or half:
        raise ValueError(f"{what}, which is not done on GPUs and in half precision: place it whole or by rows")
