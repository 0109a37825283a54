"""Faults of a published implementation of many trainers that resemble none of our others: see tests/test_known_faults.py."""

from tests.faults.plant import Fault

KNOWN = [
    Fault("what is left of a window at the end is not trained", "oracle.planner:Planner.next",
          "self._full() or self._ended or (self.stopped and self.due is None)",
          "self._full() or (self.stopped and self.due is None)", "three trainers"),
    Fault("a batch that one trainer cannot hold is told to nobody", "pipeline.window:_told",
          "self._together.failure = error", "", "a cache that is too small"),
    Fault("rows and ids travel on one channel, in any order", "engine.exchange:__init__",
          "peers.channel('moves')", "peers.channel('ids')", "naps"),
    Fault("a trainer reads its shards in another order", "data.share:Shards.cuts",
          "range(self.first * each, self.last * each, each)", "range(self.first * each, self.last * each, each)[::-1]",
          "shards of data"),
]  # fmt: skip
