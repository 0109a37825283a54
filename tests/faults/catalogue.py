"""The faults: a line of the source, and what a tired author might have written instead.

tests/faults/plant.py explains the format. Code that is not found exactly once fails a test: when the source changes,
rewrite its fault so that it plants the same mistake.
"""

# ruff: noqa: E501 - what is replaced stays on one line where it can

from tests.faults.plant import Fault

ORACLE = [
    Fault("a position gets the slot of another row", "oracle.loops:group",
          "out[p] = mine[i]", "out[p] = mine[i - (p == 5)]"),
    Fault("positions of a row in falling order", "oracle.loops:group",
          "range(len(of) - 1, -1, -1)", "range(len(of))"),
    Fault("two rows of one mark are taken for one", "oracle.distinct:_find",
          "r != none and mine[r] != np.int64(row)", "False"),
    Fault("one slot is given to two rows", "oracle.loops:leave",
          "free[n_free + i] = s", "free[n_free + i] = victims[0]"),
    Fault("a batch larger than the cache enters", "oracle.bank:BankPlanner.enter",
          "total > self.capacity", "total > self.capacity + 1"),
    Fault("residents do not learn of every third batch", "oracle.bank:BankPlanner.enter",
          "next_uses is None", "next_uses is None and self.entered % 3"),
    Fault("a slot is not handed on", "oracle.loops:use",
          "slot[q] = s", "pass"),
    Fault("forwarding takes the wrong row of a step", "oracle.loops:arrive",
          "from_index[w] = index", "from_index[w] = 0"),
    Fault("evictions are forgotten before they are written", "oracle.bank:BankPlanner._forget",
          "number - self._hold", "number"),
    Fault("a fetch waits for no write-back", "oracle.loops:arrive",
          "after = max(after, held[k, 0])", "pass"),
    Fault("an old eviction is taken for written", "oracle.loops:arrive",
          "    f += 1\n    after = max(after, long_ago)\nelif", "    f += 1\nelif"),
    Fault("first uses after a break are not taken back", "oracle.bank:BankPlanner.rollback",
          "self._seen.discard(self._first_uses.pop()[1])", "self._first_uses.pop()"),
    Fault("residents are adopted in the order of their slots", "oracle.bank:BankPlanner._adopt",
          "resident.slots.astype(np.int32)", "np.sort(resident.slots.astype(np.int32))"),
    Fault("a known future leaves before an unknown one", "oracle.policies.minimum:Minimum.evict",
          "taken, self._begin = _oldest(out, self._queue, self._place, self._begin, self._end)",
          "taken = 0\n"
          "if self._farthest <= number:\n"
          "    taken, self._begin = _oldest(out, self._queue, self._place, self._begin, self._end)"),
    Fault("MIN takes the nearest", "oracle.policies.minimum:_farthest",
          "which = farthest & size - 1\n"
          "if lists[which, 0] < 0:\n"
          "    farthest -= 1\n"
          "    continue",
          "near = number + 1\n"
          "while lists[near & size - 1, 0] < 0:\n"
          "    near += 1\n"
          "which = near & size - 1"),
    Fault("ties leave by most recent use", "oracle.policies.minimum:_sort",
          "-place[members]", "place[members]"),
    Fault("LRU evicts rows of the current batch", "oracle.policies.lru:LRU.evict",
          "_touch(batch, self._after, self._before, self._ends)", "pass"),
    Fault("a first use leaves no mark: the row is made again", "oracle.loops:arrive",
          "known | bit", "known"),
    Fault("every row is taken for seen", "oracle.loops:arrive",
          "if had:", "if True:"),
    Fault("the window is smaller than promised", "oracle.options:is_full",
          "2 * planned", "planned"),
    Fault("next uses of an epoch are off by one", "pipeline.epoch:_scan",
          "dense[handle] = number + 1", "dense[handle] = number + 1 + number % 2"),
    Fault("a warm cache does not know the epoch's first uses", "pipeline.window:Window._first_uses",
          "residents is None or not self._epochs", "True"),
]  # fmt: skip

MOVES = [
    Fault("fetched rows never enter the cache", "engine.device.host:HostRows.load",
          "len(arrival), self.array", "len(arrival), self.array.copy()"),
    Fault("write-back from a slot that was overwritten", "engine.device.host:HostRows.load",
          "self._run(cpu.take, len(leaving), self.array, step.evict_slots, leaving)\n"
          "pending[step.number] = leaving",
          "pending[step.number] = leaving\n"
          "self._run(cpu.put, len(arrival), self.array, step.fetch_slots, arrival)\n"
          "self._run(cpu.take, len(leaving), self.array, step.evict_slots, leaving)"),
    Fault("a hold is released one step too early", "engine.device.host:HostRows.load",
          "n < step.hold_from", "n <= step.hold_from"),
    Fault("initial values depend on the slot", "engine.device.host:HostRows._make",
          "len(keys), keys", "len(keys), keys ^ slots & 1"),
    Fault("optimizer state stays with the slot", "engine.kernels.cpu:put",
          "cache.shape[1]", "cache.shape[1] - 1"),
    Fault("new rows start with a state of zero", "core.initial:fill",
          "number(state_value)", "number(0)"),
    Fault("no final flush", "engine.engine:Engine.flush",
          "cache.unwritten", "cache.unwritten[:0]"),
    Fault("the fetcher does not wait for the writer", "pipeline.pipeline:Pipeline._may_read",
          "self._written >= after and self._fits(self._fetched_rows, rows)", "self._fits(self._fetched_rows, rows)"),
    Fault("the fetcher waits for one bank of two", "pipeline.pipeline:Pipeline._fetch_all",
          "max((step.fetch_after for step in flight.steps))", "flight.steps[0].fetch_after"),
    Fault("the writer says so before it has written", "pipeline.pipeline:Pipeline._write_all",
          "self._writing.append(number)", "self._written = number\nself._writing.append(number)"),
    Fault("writes that wait are dropped at the end", "pipeline.pipeline:Pipeline._write_all",
          "self._write_failure is not None", "stages.closing"),
    Fault("an error of a stage is swallowed", "pipeline.stages:Stages._guard",
          "if self.failure is None:\n    self.failure = error", "pass"),
    Fault("a rollback forgets one step", "pipeline.pipeline:Pipeline.close",
          "self.done", "self.done + 1"),
    Fault("a rollback reaches one step too far", "pipeline.pipeline:Pipeline.next",
          "flight.number + 1", "flight.number"),
    Fault("a buffer is free while one owner is left", "engine.staging:Staging.release",
          "owners > 1", "owners > 2"),
    Fault("rows go under the keys of another bank's order", "engine.cache:Cache.record",
          "_fill(self.key_of, keys, slots)", "_fill(self.key_of, keys[::-1], slots)"),
    Fault("a slot that a row left is still found", "engine.cache:Cache.record",
          "self._sorted = None", "pass"),
]  # fmt: skip

TRAINING = [
    Fault("rows that occur once get no gradient", "engine.kernels.cpu:update",
          "count == 0", "count <= 1"),
    Fault("an empty bag repeats the bag before", "engine.kernels.cpu:pool",
          "    out[row, d] = zero\ncontinue", "    out[row, d] = out[row - 1, d]\ncontinue"),
    Fault("the sum of a bag starts from its first term", "engine.kernels.cpu:pool",
          "zero + times * cache[slot, d]", "times * cache[slot, d]"),
    Fault("no clipping", "engine.kernels.cpu:update",
          "clip < inf", "clip < 0"),
    Fault("Adam divides by the square", "engine.kernels.cpu:_adam",
          "np.sqrt(v)", "v"),
    Fault("Adagrad adds to the state after the step", "engine.kernels.cpu:_adagrad",
          "np.sqrt(s)", "np.sqrt(s - g[d] * g[d])"),
    Fault("momentum forgets what was before", "engine.kernels.cpu:_momentum",
          "cache[slot, dim + d] = b", "cache[slot, dim + d] = g[d]"),
    Fault("weight decay is left out", "engine.kernels.cpu:update",
          "decay != 0", "decay > 1"),
    Fault("Adam's correction is one step ahead", "core.optim:Adam._scalars_at",
          "lr * sqrt(1 - b2 ** step) / (1 - b1 ** step)", "lr * sqrt(1 - b2 ** (step + 1)) / (1 - b1 ** (step + 1))"),
    Fault("all tables take the numbers of the first group", "core.groups:Groups.scalars",
          "settings[at[0]]", "settings[0]"),
    Fault("a frozen table is trained", "nn.current_step:CurrentStep.returned",
          "ticket.live & ticket.trained", "ticket.live"),
    Fault("the mean counts one too many", "core.ids:_bags",
          "weights.dtype.type(end - begin)", "weights.dtype.type(end - begin + (b == 1))"),
    Fault("bags of one feature are those of another", "core.ids:_bags",
          "b * features + f", "b * features + (f if b else 0)"),
    Fault("tables without a gradient count updates", "engine.engine:Engine.update",
          "self.table_steps += raised", "self.table_steps += 1"),
    Fault("a feature without gradient gets one of zeros", "nn.lookup:Unbind.backward",
          "if grad is not None:\n    ctx.ticket.live[column] = True", "ctx.ticket.live[column] = True"),
    Fault("shards are added one after the other", "engine.kernels.tree:meets_below",
          "near < far and near < near ^ far", "True"),
    Fault("stretches run on over parts", "engine.kernels.tree:sums",
          "count = taken = 0", "count, taken = 0, (i - group_start[u]) % STRETCH"),
    Fault("dense gradients are a sum over shards", "nn.dense_sums:DenseSums._mean_here",
          "grad.mul_(self._times)", "grad"),
    Fault("random numbers go on from shard to shard", "pipeline.agree:ShardsInLoop.begin",
          "rng_state.swap_in(self._seed, step, self._first + micro)", "pass"),
    Fault("the step's gradient is a sum over its shards", "engine.device.host:HostRows.update",
          "1 / work.shards", "1"),
    Fault("micro-batches look up the first one's slots", "engine.work:Work.positions",
          "self.micros[:micro]", "self.micros[:0]"),
    Fault("every micro-batch updates", "nn.current_step:CurrentStep.backward_done",
          "work.returned == len(work.micros)", "work.returned"),
    Fault("part of an accumulation is lost", "nn.current_step:CurrentStep.finish",
          "work.returned", "work.returned == len(work.micros)"),
    Fault("the learning rate is fixed when the run begins", "core.handle:TorchHandle.settings",
          "self._checked[i] = now", "pass"),
    Fault("evaluation does not wait for write-backs", "nn.collection:Collection._peek",
          "self.current.drain()", "pass"),
    Fault("evaluation sees a row of the window as stored", "engine.access:peek_distinct",
          "found[known[held]]", "found[known]"),
    Fault("a loader's buffers are not copied", "pipeline.reader:Reader._take",
          "not getattr(self._loader, 'yields_fresh', False)", "False"),
]  # fmt: skip

DISK = [
    Fault("an opened store takes its last point for one that lasts", "store.disk.store:DiskStore._load",
          "self._files.sync_folder(self.path)", "pass"),
    Fault("strangers go before the point lasts", "store.disk.store:DiskStore._load",
          "self._files.sync_folder(self.path)\n"
          "for log in self._logs:\n"
          "    log.trim()\n"
          "self._remove_strangers()",
          "self._remove_strangers()\n"
          "self._files.sync_folder(self.path)\n"
          "for log in self._logs:\n"
          "    log.trim()"),
    Fault("a file that was cut counts as synced", "store.disk.log:Log.load",
          "Segment(entry.name, slot, rows, keys, paths[0], paths[1], synced=-1, named=True)",
          "Segment(entry.name, slot, rows, keys, paths[0], paths[1], synced=entry.count, named=True)"),
    Fault("records are not synced", "store.disk.log:Log.sync",
          "self._files.sync(segment.rows.number)", "pass"),
    Fault("names of new files are not synced", "store.disk.log:sync",
          "files.sync_folder(logs[0].folder)", "pass"),
    Fault("a header is renamed before it is synced", "store.disk.os_files:OsFiles.put",
          "self.sync(file.number)", "pass"),
    Fault("the rename of a header is not synced", "store.disk.links:replace",
          "files.sync_folder(folder)", "pass"),
    Fault("dead segments go before the point that does not name them", "store.disk.store:DiskStore._commit",
          "self._write_manifest(self.identity, generation, self._logs)",
          "for log in self._logs:\n"
          "    for dead in log.dead():\n"
          "        for path in (dead.rows_path, dead.keys_path):\n"
          "            (os.replace(path, self.path.parent / path.name), self._files.note('remove', path) if hasattr(self._files, 'note') else None)\n"
          "            os.replace(self.path.parent / path.name, path)\n"
          "self._write_manifest(self.identity, generation, self._logs)"),
    Fault("cleaning writes rows under other rows' keys", "store.disk.log:Log.rewrite",
          "self.append(keys, rows)", "self.append(keys, np.roll(rows, self._words))"),
    Fault("the log is read in another order than it was written", "store.disk.log:load",
          "for entry in manifest.segments:", "for entry in manifest.segments[::-1]:"),
]  # fmt: skip

FROZEN = [
    Fault("names of frozen files are not synced", "store.disk.frozen:FrozenSegments.write",
          "self._files.sync_folder(self._folder)", "pass"),
    Fault("a copy is not synced", "store.disk.os_files:OsFiles.copy_of",
          "self.sync(target.number)", "pass"),
    Fault("a frozen file is taken for whole whatever its size", "store.disk.links:take_over",
          "there and new.stat().st_size >= size", "there"),
    Fault("a frozen state shares a file that grows", "store.disk.store:DiskStore.freeze",
          "log.seal()", "pass"),
    Fault("a file that a frozen state shares is cut", "store.disk.log:_shared",
          "path.stat().st_nlink > 1", "False"),
    Fault("an older state's files go before the new header is there", "store.disk.frozen:FrozenSegments.write",
          "entries = [entry.sized(self._folder) for entry in self._manifest.segments]",
          "entries = [entry.sized(self._folder) for entry in self._manifest.segments]\n"
          "links.remove_but(self._files, self._folder, {name for entry in entries for name in entry.files()})"),
    Fault("thawed rows are not synced", "store.disk.store:DiskStore._replaced_by",
          "all_logs.sync(logs, self._files, anew=True)", "self._files.sync_folder(self.path)"),
    Fault("what a thawed state replaces goes before it", "store.disk.store:DiskStore._replaced_by",
          "self._write_manifest(identity, generation, logs)",
          "links.remove_but(self._files, self.path, {path.name for path in all_logs.paths(logs)})\n"
          "self._write_manifest(identity, generation, logs)"),
]  # fmt: skip

CHECKPOINTS = [
    Fault("an updated row does not count as changed", "engine.engine:Engine.update",
          "self.caches[bank].changing(work.steps[bank].rows)", "pass"),
    Fault("a row that leaves is not set aside", "engine.engine:Engine._load_bank",
          "cache.changing(step.evict_slots)", "pass"),
    Fault("a row that comes back counts as unchanged", "engine.cache:Cache.record",
          "self.changing(slots, stored)", "_set(self._unwritten, slots, not stored)"),
    Fault("a row written to memory does not count as changed", "store.memory.store:MemoryStore._write_pieces",
          "held.changing(positions)", "pass"),
    Fault("rows of the last cache do not count as changed after a resume", "store.memory.store:MemoryStore.thaw_parts",
          "if changed:", "if False:"),
    Fault("a checkpoint names the generation before", "store.memory.store:MemoryStore.freeze",
          "self.generation, 'files'", "self.generation - 1, 'files'"),
    Fault("only the last file of a chain is named", "store.memory.frozen:FrozenRows.write",
          "[*files, writer.entry]", "[writer.entry]"),
    Fault("rows that have left the cache are taken from an old file", "checkpoint.own_rows:overlay",
          "resident[place] == keys if len(resident) else np.zeros(len(keys), np.bool_)", "np.ones(len(keys), np.bool_)"),
    Fault("resident rows that did not change are forgotten", "checkpoint.own_rows:FrozenCaches.__init__",
          "cache.key_of[(cache.key_of >= 0) & (cache.flags == 0)]", "cache.key_of[:0]"),
    Fault("rows on their way to the store are not waited for", "nn.current_step:CurrentStep.settle",
          "self.loop.drain()", "pass"),
    Fault("row files are not synced", "tools.tensor_file:TensorWriter.__exit__",
          "to_disk(self._file)", "pass"),
    Fault("a header is not synced before its rename", "tools.sealed_json:put_whole",
          "to_disk(file)", "pass"),
    Fault("the rename of a checkpoint's header is not synced", "tools.sealed_json:put_whole",
          "os.replace(draft, path)\nsync_folder(path.parent)", "os.replace(draft, path)"),
    Fault("checksums of row files are not compared", "tools.tensor_file:TensorReader.check",
          "digest.hexdigest() != self._sha256[name]", "False"),
    Fault("a damaged checkpoint counts as one of those kept", "checkpoint.folder:retain",
          "[n for n in others if after is None or n <= after]", "[n for n in others]"),
    Fault("one checkpoint too few is kept", "checkpoint.folder:retain",
          "keep - 1", "keep - 2"),
    Fault("an older start may put its header in place", "checkpoint.saving:write",
          "write_sealed(saving.path, head, mark, partial(starts.check, path, saving.start))", "write_sealed(saving.path, head, mark)"),
    Fault("an older start removes what a newer one has not named yet", "checkpoint.folder:sweep",
          "if not starts.is_newest(folder, start):\n    return", "pass"),
]  # fmt: skip

TRAINERS = [
    Fault("sums of rows are added in the order of ranks", "engine.gradients:Gradients.apply",
          "np.array([leaves.start for tree in trees for leaves in tree])", "1 << np.arange(len(ends))"),
    Fault("an owner takes the sums of a row for those of its neighbours", "engine.gradients:_spread",
          "which * np.repeat(counts[rank], copies)", "which"),
    Fault("owners serve the values of the step before", "engine.exchange:Exchange._bring",
          "send = values_of(work, np.flatnonzero(which.requests))",
          "of = np.flatnonzero(which.requests)\n"
          "now, slots, name = values_of(work, of).clone(), work.steps[number].slots[of].tolist(), f'served {number}'\n"
          "before, self.__dict__[name] = self.__dict__.get(name, {}), dict(zip(slots, now.clone()))\n"
          "for i, slot in enumerate(slots):\n"
          "    now[i] = before.get(slot, now[i])\n"
          "send = now"),
    Fault("the last gradient that came is dropped", "engine.gradients:Gradients.apply",
          "~((first == 0) & torch.signbit(first))", "~((first == 0) & torch.signbit(first)) & (torch.arange(len(come)) + 1 < len(come))"),
    Fault("a request for one row of a table is dropped", "oracle.halves:_parts",
          "counts[i] > 0", "counts[i] > 1"),
    Fault("requests are taken for those of another rank", "oracle.halves:joined",
          "[part.rows for part in asked]", "[part.rows for part in asked[::-1]]"),
    Fault("one owner writes nothing back", "pipeline.window:Window._next",
          "entry, steps = planned",
          "entry, steps = planned\n"
          "for step in steps if self._together is not None and self._together.rank else []:\n"
          "    step.evict_keys, step.evict_slots = step.evict_keys[:0], step.evict_slots[:0]"),
    Fault("rows are trained with gradients of another trainer that are not finite", "engine.engine:Engine._update_together",
          "told[-1]", "not finite"),
    Fault("rows without gradient are told as rows with one of zero", "engine.gradients:marked",
          "-0.0", "0.0"),
    Fault("a dense gradient that is nowhere is zero", "peers.dense:_Kind.give",
          "found[n] is None and there", "found[n] is None"),
    Fault("rows get the mean over the shards of one trainer", "engine.gradients:Gradients.apply",
          "1 / update.work.shards", "1 / len(update.work.micros)"),
    Fault("two rows of an owner have one number", "oracle.share:number_of",
          "bit - np.uint64(1)", "bit - np.uint64(1) & ~np.uint64(1)"),
    Fault("what is left of a window at the end is not trained", "oracle.planner:Planner.next",
          "self._full() or self._ended or (self.stopped and self.due is None)", "self._full() or (self.stopped and self.due is None)"),
    Fault("a batch that one trainer cannot hold is told to nobody", "pipeline.window:Window._told",
          "self._together.failure = error", "pass"),
    Fault("rows and ids travel on one channel, in any order", "engine.exchange:Exchange.__init__",
          "peers.channel('moves')", "peers.channel('ids')"),
    Fault("a trainer reads its shards in another order", "data.share:Shards.cuts",
          "range(self.first * each, self.last * each, each)", "range(self.first * each, self.last * each, each)[::-1]"),
]  # fmt: skip

AREAS = {
    "oracle": ORACLE,
    "moves": MOVES,
    "training": TRAINING,
    "disk": DISK,
    "frozen": FROZEN,
    "checkpoints": CHECKPOINTS,
    "trainers": TRAINERS,
}
"""One test for each area, run side by side."""
