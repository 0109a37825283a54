"""One trainer's part in a step of several: it gets the values of the rows that it reads from their owners and sends
their gradients back; as an owner, it serves values and applies gradients for all. The loop waits only for critical
vectors: values that the step before changes, and gradients of rows that the next step uses or evicts."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from skirl.core.placement import Placement
from skirl.engine.device.base import BankRows, Update
from skirl.engine.gradients import Gradients, marked, trees_of
from skirl.engine.work import Waiting, Work, begins
from skirl.oracle.halves import critical_gradients, critical_values
from skirl.peers.base import Channel, Peers, Swapping
from skirl.peers.job import trainers

log = logging.getLogger("skirl")


class Exchange:
    """The exchanges of one engine's steps.

    Methods above the comment "While a step computes" are for the training loop's thread, those below it for the thread
    that moves rows meanwhile.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.placement = Placement.even(peers.size)
        """Which trainer owns which rows."""
        self.all_critical = False
        """True if nothing moves early or late, for comparison."""
        self.issues = False
        """True if the loop gives these moves to the device, where all ranks have to issue everything in one order."""
        self._early: Work | None = None
        """The next step, if its early values are still to be issued."""
        self._channel = peers.channel("rows")
        self._moves, self._links = peers.channel("moves"), peers.channel("links")
        self._coming: list[tuple[Gradients, Swapping]] = []
        """Critical gradients on their way."""
        self._late: list[Gradients] = []
        """Gradients of the last step that are to go while the next one computes."""
        self._going: list[Gradients] = []
        """Gradients of the step before it, which go now."""
        self._failure: BaseException | None = None
        self._linked, self._moved = threading.Event(), threading.Event()
        self.end_move()

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Return for each key whether this trainer owns its row."""
        return self.placement.site_of(keys) == self.peers.rank

    def values(self, banks: Sequence[BankRows], work: Work) -> None:
        """Get the values that this trainer reads and that did not come early. The step's rows must be resident."""
        for number, bank in enumerate(banks):
            which = work.values_wait[number] if work.values_wait else None
            self._bring(self._channel, work, bank, bank.values, which, "values of rows")
            bank.branch()

    def look_up(self, keys: np.ndarray, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the weights of some rows as their owners have them now. All trainers call this together.

        `read` returns records of rows that this trainer owns.
        """
        channel, owner = self.peers.channel("lookups"), self.placement.site_of(keys)
        asked = channel.exchange([keys[owner == rank] for rank in range(self.peers.size)], "rows to look up")
        mine = [np.ascontiguousarray(read(part)[:, :dim]) for part in asked]
        come = channel.exchange([part.reshape(-1) for part in mine], "rows that were looked up")
        out = np.empty((len(keys), dim), mine[0].dtype)
        for rank, part in enumerate(come):
            out[owner == rank] = part.reshape(-1, dim)
        return out

    def begin_anywhere(self, raised: np.ndarray) -> Swapping[Sequence[torch.Tensor]]:
        """Begin to tell the other trainers which tables got a gradient here."""
        flags = torch.from_numpy(np.tile(raised.astype(np.uint8), (self.peers.size, 1)))
        channel = self.peers.channel("lookups") if self.issues else self._channel  # flags are on the host
        return channel.begin_swap_parts(list(flags), list(flags.clone()), tag="tables with gradients")

    def anywhere(self, flags: Swapping[Sequence[torch.Tensor]]) -> np.ndarray:
        """Return which tables got a gradient from any trainer. `flags` is what `begin_anywhere` returned."""
        return np.any([part.numpy() for part in flags.wait()], axis=0)

    def sums(self, rows: BankRows, update: Update) -> list[torch.Tensor]:
        """Return the sums of the rows that this trainer reads, for each of its subtrees."""
        mine = trees_of(update.work, self.peers.size)[self.peers.rank]
        return [marked(rows.sums(update, block)) for block in mine]

    def update(self, rows: BankRows, update: Update, sent: Sequence[torch.Tensor]) -> None:
        """Begin to send the critical part of these sums to the owners. The rest waits for `bring_late`."""
        work, bank = update.work, rows.facts.number
        self._wait(self._linked)
        trees = trees_of(work, self.peers.size)
        which = work.gradients_wait[bank] if work.gradients_wait else None
        if which is not None:
            self._late.append(Gradients(rows, update, sent, trees, which.others()))
        critical = Gradients(rows, update, sent, trees, which)
        self._coming.append((critical, critical.begin(self._channel, "gradients of rows")))

    def complete(self) -> None:
        """Apply the critical gradients of the step to the rows of this trainer."""
        self._wait(self._moved)  # a step without gradients had no update, but its rows still move
        while self._coming:
            gradients, swapping = self._coming[0]
            gradients.apply(swapping.wait())
            del self._coming[0]

    def settle(self) -> None:
        """Bring all rows to the state after the last step that was updated. Nothing is on its way afterwards."""
        self._wait(self._moved)
        self.complete()
        self._going, self._late = self._late, []
        for late in self._going:
            late.rows.branch()
        self.bring_late()

    @property
    def settled(self) -> bool:
        """True if no gradient is on its way."""
        return self._moved.is_set() and not (self._coming or self._late or self._going)

    @property
    def moved(self) -> bool:
        """True if the other thread has moved all that there is to move while the step in the loop computes."""
        return self._moved.is_set()

    def open(self) -> None:
        """Begin a pass."""
        self._failure = None
        self.end_move()

    def begin_move(self) -> None:
        """Announce that another thread begins to move rows. Until that calls `end_link`, `update` waits; until it calls
        `end_move`, `complete` and `settle` wait.
        """
        if self._failure is not None:
            raise self._failure
        self._going, self._late, self._early = self._late, [], None
        self._linked.clear()
        self._moved.clear()
        if self.issues:
            self.bring_late()

    def issue_early(self, banks: Sequence[BankRows]) -> None:
        """Issue the early values of the next step to the device, which has this step's forward and backward already."""
        if self.issues:
            self._wait(self._linked)
            after, self._early = self._early, None
            if after is not None:
                self.bring_early(banks, after)

    def _wait(self, until: threading.Event) -> None:
        """Wait for the thread that moves rows, and raise if it failed."""
        until.wait()
        if self._failure is not None:
            raise self._failure

    # While a step computes.

    def end_move(self, failure: BaseException | None = None) -> None:
        """Announce that the other thread has moved all that there was, or that it failed."""
        self._failure = self._failure or failure
        self._linked.set()
        self._moved.set()

    def end_link(self) -> None:
        """Announce that it is known what is critical between the step in the loop and the next."""
        self._linked.set()

    def bring_late(self) -> None:
        """Send and apply the gradients that the step in the loop does not need."""
        while self._going:
            late = self._going[0]
            late.rows.aside(late.bring, self._moves, "late gradients of rows")
            del self._going[0]

    def link(self, banks: Sequence[BankRows], work: Work, after: Work | None, slots: Sequence[int]) -> bool:
        """Agree on what is critical between a step and the next. Return True if all trainers have planned the next one.

        In that case, set `gradients_wait` of the first and `values_wait` of the second. Owners send one bit a request.
        """
        size = self.peers.size
        if after is None or self.all_critical or not all(bank.moves_ahead for bank in banks):
            self._links.exchange([np.zeros(1, np.uint8)] * size, "critical rows")
            return False
        values = [critical_values(a, b, n) for a, b, n in zip(work.steps, after.steps, slots, strict=True)]
        gradients = [critical_gradients(a, b, n) for a, b, n in zip(work.steps, after.steps, slots, strict=True)]
        told = [
            np.concatenate([[1], *(np.packbits(bits[serve[rank] : serve[rank + 1]]) for bits, serve in
                                   [*zip(values, after.serve), *zip(gradients, work.serve)])]).astype(np.uint8)
            for rank in range(size)
        ]  # fmt: skip
        heard = self._links.exchange(told, "critical rows")
        if not all(len(words) and words[0] for words in heard):
            return False
        asks = [reads.ask for reads in (*after.reads, *work.reads)]
        rows = _read(heard, asks)
        after.values_wait = [Waiting(*pair) for pair in zip(rows[: len(banks)], values, strict=True)]
        work.gradients_wait = [Waiting(*pair) for pair in zip(rows[len(banks) :], gradients, strict=True)]
        self._early = after
        return True

    def bring_early(self, banks: Sequence[BankRows], after: Work) -> None:
        """Get the values of the next step's rows that the step in the loop does not change."""
        for number, bank in enumerate(banks):
            which = after.values_wait[number].others()
            bank.aside(self._bring, self._moves, after, bank, bank.values_ahead, which, "early values of rows")

    def _bring(
        self,
        channel: Channel,
        work: Work,
        bank: BankRows,
        values_of: Callable[[Work, np.ndarray | None], torch.Tensor],
        which: Waiting | None,
        tag: str,
    ) -> None:
        """Send values to the trainers that read them, and receive those that this one reads: all, or only `which`."""
        number = bank.facts.number
        ask, serve = work.reads[number].ask, work.serve[number]
        if which is None:
            work.values[number] = channel.swap(
                values_of(work, None), np.diff(serve).tolist(), np.diff(ask).tolist(), tag=tag
            )
            return
        send = values_of(work, np.flatnonzero(which.requests))
        to, of = np.diff(begins(which.requests)[serve]), np.diff(begins(which.rows)[ask])
        come = channel.swap(send, to.tolist(), of.tolist(), tag=tag)
        if number not in work.values:
            work.values[number] = come.new_empty((len(which.rows), *come.shape[1:]))
        bank.place(work.values[number], np.flatnonzero(which.rows).astype(np.int32), come)


def exchange_with(at: torch.device) -> Exchange | None:
    """Return the exchange with the other trainers of this job; None if there are none. `at` is where rows are."""
    peers = trainers(str(at))
    if peers.size == 1:
        return None
    if at.type != "cpu":
        log.warning(
            "%d trainers on GPUs: this has not been run yet, check that `skirl launch -n 2 -- train` and one process give "
            "the same bits on your machine",
            peers.size,
        )
    return Exchange(peers)


def _read(heard: Sequence[np.ndarray], asks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the bits for what this trainer reads, in the order of `asks`. Each owner told those of its part."""
    out: list[list[np.ndarray]] = [[] for _ in asks]
    for owner, words in enumerate(heard):
        at = 1
        for bits, ask in zip(out, asks, strict=True):
            count = int(ask[owner + 1] - ask[owner])
            size = -(-count // 8)
            bits.append(np.unpackbits(words[at : at + size], count=count).view(np.bool_))
            at += size
    return [np.concatenate(bits) for bits in out]
