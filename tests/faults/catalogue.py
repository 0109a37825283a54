"""The faults: a few lines of the source, and what a tired author might have written in their place.

tests/faults/plant.py says how they are written. What is not found exactly once fails a test: when the source changes, its
fault is written anew so that it plants the same mistake.
"""

# ruff: noqa: E501 - what is replaced stays on one line where it can

from tests.faults.plant import Fault

ORACLE = [
    Fault("a position gets the slot of another row", "oracle.loops:group",
          "out[p] = mine[i]", "out[p] = mine[i - (p == 5)]"),
    Fault("positions of a row in falling order", "oracle.loops:group",
          "range(len(of) - 1, -1, -1)", "range(len(of))"),
    Fault("a row is found at its first position", "oracle.distinct:_find",
          "for p in range(len(part) - 1, -1, -1):\n"
          "    ...\n"
          "    r = mark[row]\n"
          "    ...",
          "for p in range(len(part)):\n"
          "    ...\n"
          "    r = mark[row]\n"
          "    ..."),
    Fault("two rows of one mark are taken for one", "oracle.distinct:_find",
          "r != none and mine[r] != np.int64(row)", "False"),
    Fault("capacity overrun by one", "oracle.bank:plan",
          "residents + n_missing - self.capacity", "residents + n_missing - self.capacity - 1"),
    Fault("one slot is given to two rows", "oracle.loops:leave",
          "free[n_free + i] = s", "free[n_free + i] = victims[0]"),
    Fault("a batch larger than the cache enters", "oracle.bank:enter",
          "total > self.capacity", "total > self.capacity + 1"),
    Fault("a window does not know every third batch", "oracle.loops:use",
          "batch_of[q >> bits]", "batch_of[q >> bits] if batch_of[q >> bits] % 3 else NEVER"),
    Fault("residents do not learn of every third batch", "oracle.bank:enter",
          "next_uses is None", "next_uses is None and self.entered % 3"),
    Fault("a slot is not handed on", "oracle.loops:use",
          "slot[q] = s", ""),
    Fault("forwarding takes the wrong row of a step", "oracle.loops:arrive",
          "from_index[w] = index", "from_index[w] = 0"),
    Fault("forwarding takes rows of the step before", "oracle.loops:arrive",
          "from_step[w] = held[k, 0]", "from_step[w] = max(0, held[k, 0] - 1)"),
    Fault("evictions are forgotten before they are written", "oracle.bank:_forget",
          "number - self._hold", "number"),
    Fault("a fetch waits for no write-back", "oracle.loops:arrive",
          "after = max(after, held[k, 0])", ""),
    Fault("a forgotten eviction is taken for written", "oracle.loops:arrive",
          "if had:\n"
          "    ...\n"
          "    after = max(after, long_ago)\n"
          "else:\n"
          "    ...",
          "if had:\n"
          "    ...\n"
          "else:\n"
          "    ..."),
    Fault("an old eviction is taken for written", "oracle.loops:arrive",
          "if k < 0 or held_keys[held[k, 2] + index] != key:\n"
          "    ...\n"
          "    after = max(after, long_ago)\n"
          "else:\n"
          "    ...",
          "if k < 0 or held_keys[held[k, 2] + index] != key:\n"
          "    ...\n"
          "else:\n"
          "    ..."),
    Fault("first uses after a break are not taken back", "oracle.bank:rollback",
          "self._seen.discard(self._first_uses.pop()[1])", "self._first_uses.pop()"),
    Fault("executed first uses are taken back", "oracle.bank:executed",
          "self._first_uses[0][0] < number", "self._first_uses[0][0] < number - 3"),
    Fault("residents are adopted in the order of their slots", "oracle.bank:_adopt",
          "resident.slots.astype(np.int32)", "np.sort(resident.slots.astype(np.int32))"),
    Fault("places are given to two batches", "oracle.uses:take",
          "(first + blocks, end)", "(first, end)"),
    Fault("a known future leaves before an unknown one", "oracle.policies.minimum:evict",
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
    Fault("a list is taken for sorted when a batch joins it", "oracle.policies.minimum:entered",
          "self._called[which] = len(slots)", "self._called[which] = 0"),
    Fault("LRU evicts rows of the current batch", "oracle.policies.lru:evict",
          "_touch(batch, self._after, self._before, self._ends)", ""),
    Fault("LFU evicts rows of the current batch", "oracle.policies.lfu:evict",
          "resident[batch[batch >= 0]] = False", ""),
    Fault("a clean-up interval of zero", "oracle.policies.ttl:__init__",
          "max(1, depth // 4)", "depth // 4"),
    Fault("a first use leaves no mark: the row is made again", "oracle.loops:arrive",
          "known | bit", "known"),
    Fault("every row is taken for seen", "oracle.loops:arrive",
          "if had:\n"
          "    ...\n"
          "else:\n"
          "    ...",
          "if True:\n"
          "    ...\n"
          "else:\n"
          "    ..."),
    Fault("one bit for two rows", "oracle.loops:arrive",
          "row & 63", "row & 62"),
    Fault("the window is smaller than promised", "oracle.reach:is_full",
          "2 * planned", "planned"),
    Fault("next uses of an epoch are off by one", "pipeline.epoch:_scan",
          "dense[handle] = number + 1", "dense[handle] = number + 1 + number % 2"),
    Fault("a warm cache does not know the epoch's first uses", "pipeline.window:_first_uses",
          "residents is None or not self._epochs", "True"),
]  # fmt: skip

MOVES = [
    Fault("fetched rows never enter the cache", "engine.device.host:load",
          "self._run(cpu.put, len(arrival), self.array, ...)", "self._run(cpu.put, len(arrival), self.array.copy(), ...)"),
    Fault("forwarded rows never enter the cache", "engine.device.host:load",
          "cpu.put(self.array, ...)", "cpu.put(self.array.copy(), ...)"),
    Fault("forwarded rows in the wrong order", "engine.device.host:_forwarded",
          "step.forward_index[which]", "step.forward_index[which][::-1]"),
    Fault("write-back from a slot that was overwritten", "engine.device.host:load",
          "self._run(cpu.take, len(leaving), self.array, step.evict_slots, leaving)\n"
          "pending[step.number] = leaving",
          "pending[step.number] = leaving\n"
          "self._run(cpu.put, len(arrival), self.array, step.fetch_slots, arrival)\n"
          "self._run(cpu.take, len(leaving), self.array, step.evict_slots, leaving)"),
    Fault("a hold is released one step too early", "engine.device.host:load",
          "n < step.hold_from", "n <= step.hold_from"),
    Fault("a hold does not own its buffer", "engine.device.host:load",
          "staging.retain(leaving)", "staging.take(0)"),
    Fault("initial values depend on the slot", "engine.device.host:_make",
          "self._run(..., keys, ...)", "self._run(..., keys ^ slots & 1, ...)"),
    Fault("optimizer state stays with the slot", "engine.kernels.cpu:put",
          "cache.shape[1]", "cache.shape[1] - 1"),
    Fault("optimizer state is not written back", "engine.kernels.cpu:take",
          "width = cache.shape[1]",
          "out[:] = 0\n"
          "width = cache.shape[1] - 1"),
    Fault("new rows start with a state of zero", "core.initial:fill",
          "number(state_value)", "number(0)"),
    Fault("no final flush", "engine.engine:flush",
          "np.flatnonzero(cache.key_of >= 0)", "np.flatnonzero(cache.key_of >= 0)[:0]"),
    Fault("rows that leave alone are not written back", "engine.engine:write",
          "if len(keys):\n"
          "    ...",
          "if len(keys) > 1:\n"
          "    ..."),
    Fault("the fetcher does not wait for the writer", "pipeline.pipeline:_may_read",
          "self._written >= after and self._fits(self._fetched_rows, rows)", "self._fits(self._fetched_rows, rows)"),
    Fault("the fetcher waits for one bank of two", "pipeline.pipeline:_fetch_all",
          "max((step.fetch_after for step in flight.steps))", "flight.steps[0].fetch_after"),
    Fault("the writer says so before it has written", "pipeline.pipeline:_write_all",
          "self._writing.append(number)",
          "self._written = number\n"
          "self._writing.append(number)"),
    Fault("writes that wait are dropped at the end", "pipeline.pipeline:_write_all",
          "self._write_failure is not None", "stages.closing"),
    Fault("an error of a stage is swallowed", "pipeline.stages:_guard",
          "if self.failure is None:\n"
          "    self.failure = error",
          ""),
    Fault("a rollback forgets one step", "pipeline.pipeline:close",
          "self.done", "self.done + 1"),
    Fault("a rollback reaches one step too far", "pipeline.pipeline:next",
          "flight.number + 1", "flight.number"),
    Fault("a buffer is free while one owner is left", "engine.staging:release",
          "owners > 1", "owners > 2"),
    Fault("a free buffer that is too small is handed out", "engine.staging:take",
          "need <= len(buffer) <= most", "need // 2 <= len(buffer) <= most"),
    Fault("rows go under the keys of another bank's order", "engine.cache:record",
          "_fill(..., keys, ...)", "_fill(..., keys[::-1], ...)"),
    Fault("recency is kept by key", "engine.cache:resident",
          "self.used", "self.key_of"),
    Fault("a slot that a row left is still found", "engine.cache:record",
          "self._sorted = None", ""),
    Fault("forwarded rows are not counted as fetched", "engine.engine:_load_bank",
          "found + len(step.forward_keys)", "found"),
]  # fmt: skip

TRAINING = [
    Fault("rows that occur once get no gradient", "engine.kernels.cpu:update",
          "count == 0", "count <= 1"),
    Fault("the last position of a row is left out", "engine.kernels.cpu:update",
          "min(begin + STRETCH, end)", "max(begin + 1, min(begin + STRETCH, end - 1))"),
    Fault("an empty bag repeats the bag before", "engine.kernels.cpu:pool",
          "out[row, d] = zero", "out[row, d] = out[row - 1, d]"),
    Fault("the sum of a bag starts from its first term", "engine.kernels.cpu:pool",
          "zero + times * cache[slot, d]", "times * cache[slot, d]"),
    Fault("no clipping", "engine.kernels.cpu:update",
          "clip < inf", "clip < 0"),
    Fault("a halving sum drops an odd element", "engine.kernels.cpu:tree_sum",
          "n - half", "n // 2"),
    Fault("Adam divides by the square", "engine.kernels.cpu:_adam",
          "np.sqrt(v)", "v"),
    Fault("Adagrad adds to the state after the step", "engine.kernels.cpu:_adagrad",
          "np.sqrt(s)", "np.sqrt(s - g[d] * g[d])"),
    Fault("weight decay is left out", "engine.kernels.cpu:update",
          "decay != 0", "decay > 1"),
    Fault("momentum forgets what was before", "engine.kernels.cpu:_momentum",
          "cache[slot, dim + d] = b", "cache[slot, dim + d] = g[d]"),
    Fault("FTRL takes the sum of squares after the step", "engine.kernels.cpu:_ftrl",
          "before = np.sqrt(n)\n"
          "n = n + g[d] * g[d]",
          "n = n + g[d] * g[d]\n"
          "before = np.sqrt(n)"),
    Fault("FTRL drops the weight that a row starts with", "engine.kernels.cpu:_ftrl",
          "not n > 0", "n > np.inf"),
    Fault("all tables take the numbers of the first group", "core.groups:scalars",
          "settings[at[0]]", "settings[0]"),
    Fault("a frozen table is trained", "nn.current_step:returned",
          "ticket.live & ticket.trained", "ticket.live"),
    Fault("Adam's correction is one step ahead", "core.optim:Adam._scalars_at",
          "lr * sqrt(1 - b2 ** step) / (1 - b1 ** step)", "lr * sqrt(1 - b2 ** (step + 1)) / (1 - b1 ** (step + 1))"),
    Fault("the decayed rate is one step ahead", "core.optim:Adagrad._scalars_at",
          "step - 1", "step"),
    Fault("the mean counts one too many", "core.ids:_bags",
          "weights.dtype.type(end - begin)", "weights.dtype.type(end - begin + (b == 1))"),
    Fault("the mean leaves weights out", "core.ids:_bags",
          "factor / count", "one / count"),
    Fault("the last id of a table is out of range", "oracle.distinct:_find",
          "np.uint64(rows[t])", "np.uint64(rows[t] - 1)"),
    Fault("bags of one feature are those of another", "core.ids:_bags",
          "b * features + f", "b * features + (f if b else 0)"),
    Fault("a table's updates are counted by feature", "engine.engine:update",
          "self.table_steps += raised",
          "for (bank, _), live in work.live.items():\n"
          "    np.add.at(self.table_steps, self.table_of[bank][live], 1)"),
    Fault("tables without a gradient count updates", "engine.engine:update",
          "self.table_steps += raised", "self.table_steps += 1"),
    Fault("a feature without gradient gets one of zeros", "nn.lookup:Unbind.backward",
          "if grad is not None:\n"
          "    ctx.ticket.live[column] = True",
          "ctx.ticket.live[column] = True"),
    Fault("a feature without gradient adds to that of the stacked output", "nn.lookup:Unbind.backward",
          "0 if grad is None else grad", "1 if grad is None else grad"),
    Fault("a feature without gradient has none in the stacked output either", "nn.lookup:Unbind.backward",
          "if grad is not None:\n"
          "    ctx.ticket.live[column] = True",
          "ctx.ticket.live[column] = grad is not None"),
    Fault("an unpooled feature without gradient gets one of zeros", "nn.lookup:Split.backward",
          "if grad is not None:\n"
          "    out[begin:begin + size] = grad\n"
          "    ctx.ticket.live[column] = True",
          "if grad is not None:\n"
          "    out[begin:begin + size] = grad\n"
          "ctx.ticket.live[column] = True"),
    Fault("stacked outputs train no row", "nn.lookup:Whole.backward",
          "ctx.ticket.live[:] = True", ""),
    Fault("a micro-batch's gradients are those of its other samples", "engine.work:keep",
          "self._beside(bank, micro, grad.shape[-1], empty).copy_(grad)",
          "self._beside(bank, micro, grad.shape[-1], empty).copy_(grad.flip(0))"),
    Fault("shards are added one after the other", "engine.kernels.tree:meets_below",
          "near < far and near < near ^ far", "True"),
    Fault("a part of a row without gradient counts", "engine.kernels.tree:sums",
          "count == 0", "False"),
    Fault("stretches run on over parts", "engine.kernels.tree:sums",
          "count = taken = 0", "count, taken = 0, (i - group_start[u]) % STRETCH"),
    Fault("dense gradients are a sum over shards", "nn.dense_sums:_mean_here",
          "grad.mul_(self._times)", "grad"),
    Fault("a shard takes the dense gradients of the one before along", "nn.dense_sums:_take",
          "weight.grad = None", ""),
    Fault("random numbers go on from shard to shard", "pipeline.shards:begin",
          "rng_state.swap_in(self._seed, step, self._first + micro)", ""),
    Fault("the step's gradient is a sum over its shards", "engine.device.host:update",
          "1 / work.shards", "1"),
    Fault("micro-batches share the first one's bags", "engine.device.base:joined_bags",
          "i.bag_of + start", "i.bag_of"),
    Fault("micro-batches look up the first one's slots", "engine.work:positions",
          "self.micros[:micro]", "self.micros[:0]"),
    Fault("every micro-batch updates", "nn.current_step:backward_done",
          "work.returned == len(work.micros)", "work.returned"),
    Fault("part of an accumulation is lost", "nn.current_step:finish",
          "work.returned", "work.returned == len(work.micros)"),
    Fault("the learning rate is fixed when the run begins", "core.handle:settings",
          "self._checked[i] = now", ""),
    Fault("evaluation marks rows as existing", "engine.access:peek_distinct",
          "found = slots >= 0",
          "found = slots >= 0\n"
          "engine.seen.add(distinct)"),
    Fault("evaluation counts as a use", "engine.access:peek_distinct",
          "found = slots >= 0",
          "found = slots >= 0\n"
          "if engine.caches:\n"
          "    engine.caches[bank].used[slots[found]] += 1"),
    Fault("evaluation does not wait for write-backs", "nn.collection:_peek",
          "self.current.drain()", ""),
    Fault("evaluation sees a row of the window as stored", "engine.access:peek_distinct",
          "found[known[held]]", "found[known]"),
    Fault("a first use takes the first values of another row", "engine.begun:first",
          "given.take(row_of(keys[places]))", "given.take(row_of(keys[places])[::-1])"),
    Fault("rows that begin from an array have no optimizer state", "engine.engine:_begin",
          "self.optimizers[table_of(keys[0])].initial_state", "0.0"),
    Fault("what begins from an array is made as all else", "engine.begun:begin",
          "seen.add_all(t)", ""),
    Fault("a loader's buffers are not copied", "pipeline.reader:_take",
          "not getattr(self._loader, 'yields_fresh', False)", "False"),
    Fault("the first pass of an epoch keeps a loader's buffers", "pipeline.reader:spool",
          "capture(self._ids_of(batch), self._features)", "capture(self._ids_of(batch), self._features, copy=False)"),
    Fault("a mean's weight gradient is not divided", "nn.lookup:_weight_grad",
          "part = part / np.repeat(np.diff(starts), np.diff(starts))", "pass"),
    Fault("trained weights are those of the reader", "nn.collection:_look_up",
          "ids.scale = again.scale", "pass"),
    Fault("an inverse is off by one", "core.shared:Shared.of",
          "inverse[f] + begins[i]", "np.maximum(inverse[f] - 1, 0) + begins[i]"),
    Fault("a sum over samples leaves the last one out", "engine.kernels.shares:fold",
          "range(bag.shape[0])", "range(bag.shape[0] - 1)"),
    Fault("shared bags take the rows of the samples before them", "engine.kernels.shares:fold",
          "sample * features + columns[i]", "max(0, sample - 1) * features + columns[i]"),
    Fault("a shared bag's gradient is that of its last sample", "engine.kernels.shares:fold",
          "out[b, d] = out[b, d] + grads[row, d]", "out[b, d] = grads[row, d]"),
    Fault("bags are copied to the first shared feature alone", "engine.kernels.shares:expand",
          "sample * features + columns[i]", "sample * features + columns[0]"),
    Fault("shared bags without a gradient get that of the first feature", "core.shared:Shared.by_bag",
          "mask[self.columns]", "mask[:1].repeat(len(self.columns))"),
    Fault("a mean over shared bags counts one too many", "core.shared:_bags",
          "weights.dtype.type(end - begin)", "weights.dtype.type(end - begin + (b == 1))"),
    Fault("rows of shared sequences are those of the sample", "nn.output:Unpooled._expanded",
          "np.diff(starts)[inverse], starts[:-1][inverse]",
          "np.diff(starts)[inverse], np.sort(starts[:-1][inverse])"),
    Fault("bags of one hash are taken for one", "core.find:_find",
          "if _same(values, weights, weighted, begin, end, low, high):\n"
          "    bag = other\n"
          "    break",
          "bag = other\n"
          "break"),
    Fault("bags are compared up to their last id", "core.find:_same",
          "for i in range(end - begin):\n"
          "    if values[begin + i] != values[low + i]:\n"
          "        return False",
          "for i in range(end - begin - 1):\n"
          "    if values[begin + i] != values[low + i]:\n"
          "        return False"),
    Fault("an epoch does not see the inverse", "pipeline.epoch:_digest",
          "int(_sum(bank.values, bank.parts)) ^ bank.inverse", "int(_sum(bank.values, bank.parts))"),
]  # fmt: skip

DISK = [
    Fault("an opened store takes its last point for one that lasts", "store.disk.store:_load",
          "self._files.sync_folder(self.path)", ""),
    Fault("strangers go before the point lasts", "store.disk.store:_load",
          "self._files.sync_folder(self.path)\n"
          "for log in self._logs:\n"
          "    log.trim()\n"
          "self._remove_strangers()",
          "self._remove_strangers()\n"
          "self._files.sync_folder(self.path)\n"
          "for log in self._logs:\n"
          "    log.trim()"),
    Fault("a file that was cut counts as synced", "store.disk.log:load",
          "Segment(entry.name, slot, rows, keys, paths[0], paths[1], synced=-1, named=True)",
          "Segment(entry.name, slot, rows, keys, paths[0], paths[1], synced=entry.count, named=True)"),
    Fault("records are not synced", "store.disk.log:sync",
          "self._files.sync(segment.rows.number)", ""),
    Fault("keys are not synced", "store.disk.log:sync",
          "self._files.sync(file)", "pass"),
    Fault("only the first records of a segment are synced", "store.disk.log:sync",
          "segment.synced < end", "segment.synced <= 0"),
    Fault("names of new files are not synced", "store.disk.logs:sync",
          "files.sync_folder(logs[0].folder)", ""),
    Fault("a header is renamed before it is synced", "store.disk.os_files:put",
          "self.sync(file.number)", ""),
    Fault("the rename of a header is not synced", "store.disk.links:replace",
          "files.sync_folder(folder)", ""),
    Fault("dead segments go before the point that does not name them", "store.disk.store:_commit",
          "self._write_manifest(self.identity, generation, self._logs)",
          "for log in self._logs:\n"
          "    for dead in log.dead():\n"
          "        for path in (dead.rows_path, dead.keys_path):\n"
          "            (os.replace(path, self.path.parent / path.name), self._files.note('remove', path) if hasattr(self._files, 'note') else None)\n"
          "            os.replace(self.path.parent / path.name, path)\n"
          "self._write_manifest(self.identity, generation, self._logs)"),
    Fault("cleaning writes rows under other rows' keys", "store.disk.log:rewrite",
          "self.append(..., rows)", "self.append(..., np.roll(rows, self._words))"),
    Fault("the log is read in another order than it was written", "store.disk.logs:load",
          "for entry in manifest.segments:\n"
          "    ...",
          "for entry in manifest.segments[::-1]:\n"
          "    ..."),
]  # fmt: skip

FROZEN = [
    Fault("names of frozen files are not synced", "store.disk.frozen",
          "        self._files.sync_folder(self._folder)\n", ""),
    Fault("a copy is not synced", "store.disk.os_files",
          "                self.sync(target.number)\n", ""),
    Fault("a frozen file is taken for whole whatever its size", "store.disk.links",
          " and new.stat().st_size >= size", ""),
    Fault("frozen rows are not synced, but for their keys", "store.disk.frozen",
          "dict.fromkeys(self._added + self._unsynced):", "[path for path in self._added if path.suffix == '.keys']:"),
    Fault("a frozen state shares a file that grows", "store.disk.store",
          "                    log.seal()\n                    self._renew(log, folder)\n",
          "                    self._renew(log, folder)\n"),
    Fault("a file that a frozen state shares is cut", "store.disk.log",
          "    return path.stat().st_nlink > 1\n", "    return False\n"),
    Fault("an older state's files go before the new header is there", "store.disk.frozen",
          "        entries = [entry.sized(self._folder) for entry in self._manifest.segments]\n",
          "        entries = [entry.sized(self._folder) for entry in self._manifest.segments]\n"
          "        links.remove_but(self._files, self._folder, {name for entry in entries for name in entry.files()})\n"),
    Fault("thawed rows are not synced", "store.disk.store",
          "            all_logs.sync(logs, self._files, anew=True)\n", "            self._files.sync_folder(self.path)\n"),
    Fault("names of thawed files are not synced", "store.disk.logs",
          "if anew or not s.named", "if not s.named"),
    Fault("what a thawed state replaces goes before it", "store.disk.store",
          "            self._write_manifest(identity, generation, logs)\n",
          "            links.remove_but(self._files, self.path, {path.name for path in all_logs.paths(logs)})\n"
          "            self._write_manifest(identity, generation, logs)\n"),
]  # fmt: skip

CHECKPOINTS = [
    Fault("an updated row does not count as changed", "engine.engine:Engine.update",
          "self.caches[bank].changing(work.steps[bank].rows)", ""),
    Fault("a row that leaves is not set aside", "engine.engine:_load_bank",
          "cache.changing(step.evict_slots)", ""),
    Fault("a row that comes back counts as unchanged", "engine.cache:record",
          "self.changing(slots)", "pass"),
    Fault("a row written to memory does not count as changed", "store.memory.store:_write_pieces",
          "held.changing(positions)", ""),
    Fault("rows of the last cache do not count as changed after a resume", "store.memory.store:thaw_parts",
          "if changed:\n"
          "    ...",
          "if False:\n"
          "    ..."),
    Fault("a checkpoint names the generation before", "store.memory.store",
          '"generation": self.generation, "files"', '"generation": self.generation - 1, "files"'),
    Fault("only the last file of a chain is named", "store.memory.frozen:",
          "[*files, writer.entry]", "[writer.entry]"),
    Fault("rows that have left the cache are taken from an old file", "checkpoint.cached_rows:overlay",
          "resident[place] == keys if len(resident) else np.zeros(len(keys), np.bool_)", "np.ones(len(keys), np.bool_)"),
    Fault("resident rows that did not change are forgotten", "checkpoint.cached_rows:__init__",
          "cache.key_of[(cache.key_of >= 0) & (cache.flags == 0)]", "cache.key_of[:0]"),
    Fault("files of the cache are read in the wrong order", "checkpoint.cached_rows:overlay",
          "for reader in readers:\n"
          "    ...",
          "for reader in readers[::-1]:\n"
          "    ..."),
    Fault("rows on their way to the store are not waited for", "nn.current_step:CurrentStep.settle",
          "self.loop.drain()", ""),
    Fault("row files are not synced", "tools.tensor_file:__exit__",
          "to_disk(self._file)", "pass"),
    Fault("names of row files are not synced", "tools.tensor_file:__exit__",
          "sync_folder(self._path.parent)", "pass"),
    Fault("the dense part is not synced", "checkpoint.dense:write",
          "to_disk(file)", ""),
    Fault("a header is not synced before its rename", "tools.sealed_json:write_sealed",
          "to_disk(file)", ""),
    Fault("the rename of a checkpoint's header is not synced", "tools.sealed_json:write_sealed",
          "os.replace(draft, path)\n"
          "sync_folder(path.parent)",
          "os.replace(draft, path)"),
    Fault("segments of a checkpoint are not synced", "store.disk.frozen:write",
          "self._files.sync(file.number)", "pass"),
    Fault("a checkpoint shares a segment that grows", "store.disk.store:freeze",
          "log.seal()", ""),
    Fault("checksums of row files are not compared", "tools.tensor_file:check",
          "digest.hexdigest() != self._sha256[name]", "False"),
    Fault("a damaged checkpoint counts as one of those kept", "checkpoint.folder:retain",
          "[n for n in others if after is None or n <= after]", "[n for n in others]"),
    Fault("one checkpoint too few is kept", "checkpoint.folder:retain",
          "keep - 1", "keep - 2"),
    Fault("any start of a run is the newest", "checkpoint.starts:is_newest",
          "newest(folder) <= start", "True"),
    Fault("a process that resumes takes the number of the start before", "checkpoint.saving:Saving.begin",
          "starts.claim(self.folder)", "starts.newest(self.folder) or starts.claim(self.folder)"),
    Fault("drafts of an older start stay", "checkpoint.starts:claim",
          "_DRAFT.fullmatch(name) or (older and int(older[1]) < number)", "older and int(older[1]) < number"),
    Fault("an older start may put its header in place", "checkpoint.saving:",
          "write_sealed(saving.path, head, mark, partial(starts.check, path, saving.start))",
          "write_sealed(saving.path, head, mark)"),
    Fault("an older start removes what a newer one has not named yet", "checkpoint.folder:sweep",
          "if not starts.is_newest(folder, start):\n"
          "    return", ""),
]  # fmt: skip

GPU = [
    Fault("rows are used before they have arrived", "engine.device.gpu:shipped",
          "arrival.came = arrival.rows.copied = arrival.plan.copied = inward.record()",
          "arrival.rows.copied = arrival.plan.copied = inward.record()\n"
          "arrival.came = self._streams.outward.record()\n"
          "arrival.plan.device[:sizes[1]].copy_(arrival.plan.host[:sizes[1]])"),
    Fault("the host's side is filled while it is copied", "engine.device.gpu:arriving",
          "block.copied.synchronize()", "pass"),
    Fault("a block is filled while its rows are in use", "engine.device.gpu:shipped",
          "inward.wait(block.used)", "pass"),
    Fault("rows are copied out before they are gathered", "engine.device.gpu:load",
          "streams.outward.wait(compute.record())", ""),
    Fault("the store gets rows that are not there yet", "engine.device.gpu:landed",
          "leaving.block.copied.synchronize()", ""),
    Fault("nobody knows when a block was last used", "engine.device.gpu:_release",
          "block.used = self._streams.compute.record()", ""),
    Fault("a plan is let go of before its rows are updated", "engine.device.gpu:load",
          "self._now = arrival",
          "self._release(arrival.plan, self.plans)\n"
          "self._now = arrival"),
    Fault("forwarding does not own its block", "engine.device.gpu:load",
          "self.blocks.retain(block)", "block.owners += 0"),
    Fault("rows are forwarded from the wrong place", "engine.device.gpu:move",
          "views['forward_index'][lo:hi]", "views['forward_index'][:hi - lo]"),
    Fault("weights set in the loop are not heard of", "engine.device.gpu:GpuRows.pool",
          "ids.scale is arrival.scales[micro]", "True"),
    Fault("weights set in the loop are not trained with", "engine.device.gpu_backward:_scales",
          "all((i.scale is sent for i, sent in zip(ids, arrival.scales, strict=True)))",
          "True or all((i.scale is sent for i, sent in zip(ids, arrival.scales, strict=True)))"),
    Fault("a feature without gradient counts on a GPU", "engine.device.gpu_backward:update",
          "bool(update.live.all())", "True"),
    Fault("what was small is never sent again", "engine.device.gpu_backward:_remembered",
          "self._small[name][0] != content", "False"),
    Fault("a cache on a GPU is flushed by halves", "engine.device.gpu:read",
          "range(0, len(slots), ...)", "range(0, len(slots) - 1, ...)"),
    Fault("a block has one owner, whoever else wants it", "engine.device.pinned:retain",
          "block.owners += 1", "pass"),
]  # fmt: skip

TRAINERS = [
    Fault("sums of rows are added in the order of ranks", "engine.gradients:Gradients.apply",
          "np.array([leaves.start for tree in trees for leaves in tree])", "1 << np.arange(len(ends))"),
    Fault("sums of dense gradients are added in the order of ranks", "peers.dense:share",
          "(leaves.start for tree in self._trees for leaves in tree)", "(1 << n for n in range(64))"),
    Fault("a trainer's subtrees of dense gradients change places", "peers.dense:OfAllTrainers.start",
          "subtrees(self.mine.start, self.mine.stop)", "subtrees(self.mine.start, self.mine.stop)[::-1]"),
    Fault("sums of several subtrees are sent one after the other", "engine.gradients:_by_owner",
          "torch.cat(...)", "torch.cat(sent)"),
    Fault("an owner takes the sums of a row for those of its neighbours", "engine.gradients:_spread",
          "which * np.repeat(counts[rank], copies)", "which"),
    Fault("owners serve the values of the step before", "engine.exchange:_bring",
          "send = values_of(work, np.flatnonzero(which.requests))",
          "of = np.flatnonzero(which.requests)\n"
          "now, slots, name = values_of(work, of).clone(), work.steps[number].slots[of].tolist(), f'served {number}'\n"
          "before, self.__dict__[name] = self.__dict__.get(name, {}), dict(zip(slots, now.clone()))\n"
          "for i, slot in enumerate(slots):\n"
          "    now[i] = before.get(slot, now[i])\n"
          "send = now"),
    Fault("the last gradient that came is dropped", "engine.gradients:Gradients.apply",
          "~((first == 0) & torch.signbit(first))",
          "~((first == 0) & torch.signbit(first)) & (torch.arange(len(come)) + 1 < len(come))"),
    Fault("a request for one row of a table is dropped", "oracle.halves:_parts",
          "counts[i] > 0", "counts[i] > 1"),
    Fault("requests are taken for those of another rank", "oracle.halves:joined",
          "[part.rows for part in asked]", "[part.rows for part in asked[::-1]]"),
    Fault("one owner writes nothing back", "pipeline.window:_next",
          "entry, steps = planned",
          "entry, steps = planned\n"
          "for step in steps if self._together is not None and self._together.rank else []:\n"
          "    step.evict_keys, step.evict_slots = step.evict_keys[:0], step.evict_slots[:0]"),
    Fault("a table's steps are those of one trainer", "engine.engine:_update_together",
          "self.table_steps += told[:-1]",
          "mine = np.zeros(len(self.schema.tables), np.bool_)\n"
          "for (bank, _), live in work.live.items():\n"
          "    mine[self.table_of[bank][live]] = True\n"
          "self.table_steps += mine"),
    Fault("rows are trained with gradients of another trainer that are not finite", "engine.engine:_update_together",
          "told[-1]", "not finite"),
    Fault("gradients of the step before are sent", "engine.gradients:Gradients.begin",
          "self._sent = ()",
          "before = self._rows.__dict__.get('sent before', send)\n"
          "self._rows.__dict__['sent before'] = send.clone()\n"
          "send = torch.cat([before, send])[:len(send)]\n"
          "self._sent = ()"),
    Fault("all gradients come late", "oracle.halves:critical_gradients",
          "wanted[after.rows] = True", "pass"),
    Fault("a row that leaves gets its gradient after", "oracle.halves:critical_gradients",
          "wanted[after.evict_slots] = True", "wanted[after.evict_slots] = False"),
    Fault("all values come early", "oracle.halves:critical_values",
          "changed[before.rows] = True", "pass"),
    Fault("early values of rows that come are those of the rows before them", "engine.device.host:values_ahead",
          "cpu.take_coming(...)", "pass"),
    Fault("values go early before late gradients came", "pipeline.pipeline:_move",
          "exchange.bring_late()", "pass"),
    Fault("rows are owned by two trainers", "engine.exchange:__init__",
          "Placement.even(peers.size)", "Placement.even(peers.size, 'store' if peers.rank else 'ranks')"),
    Fault("rows without gradient are told as rows with one of zero", "engine.gradients:marked",
          "-0.0", "0.0"),
    Fault("the mark of rows without gradient is not read", "engine.gradients:Gradients.apply",
          "~((first == 0) & torch.signbit(first))", "torch.ones(len(come), dtype=torch.bool)"),
    Fault("pieces of dense gradients come in another order", "peers.dense:send",
          "list(self._send)", "list(self._send)[::-1]"),
    Fault("a dense gradient that is nowhere is zero", "peers.dense:give",
          "found[n] is None and there", "found[n] is None"),
    Fault("rows get the mean over the shards of one trainer", "engine.gradients:Gradients.apply",
          "1 / update.work.shards", "1 / len(update.work.micros)"),
    Fault("random numbers depend on the rank", "pipeline.shards:begin",
          "self._first + micro", "micro"),
    Fault("trainers have equally many leaves, whatever their shards", "engine.gradients:_trees",
          "block_of(rank, size, shards)",
          "range(rank * (shards // size), (rank + 1) * (shards // size))"),
    Fault("two rows of an owner have one number", "oracle.share:number_of",
          "bit - np.uint64(1)", "bit - np.uint64(1) & ~np.uint64(1)"),
    Fault("the last row of a word has the number of the next one", "oracle.share:_mark",
          "end += ones(word)", "end += max(ones(word) - 1, 0)"),
]  # fmt: skip

PLACEMENT = [
    Fault("a range of rows ends one row late", "core.placement:_as_arrays",
          "(end << shift) - 1", "min((end << shift) - 1 + (shift > 0) * (1 << 15), (1 << 64) - 1)"),
    Fault("a part of the hash that two ranges share is the first one's", "core.placement:_as_arrays",
          "guess == of_last", "guess >= 0"),
    Fault("a plan with a hole is read", "core.placement_plan:_table",
          "begin != end", "begin < end"),
    Fault("a plan whose last rows are nobody's is read", "core.placement_plan:_table",
          "end != cut.end and not (by == 'rows' and end == table.rows)", "False"),
    Fault("a table is dropped from a plan", "placement.plan:_plan",
          "tuple(placed)", "tuple(placed)[:-1]"),
    Fault("a cap is ignored", "placement.plan:plan_for",
          "np.array([math.inf if site.memory is None else float(site.memory) for site in sites])",
          "np.array([math.inf if n == 1 or site.memory is None else float(site.memory) for n, site in enumerate(sites)])"),
    Fault("the rows of a site are not counted against its memory", "placement.plan:_over",
          "np.isinf(caps).all()", "True"),
    Fault("the densest rows are taken from the other end", "placement.shares:_densest",
          "np.argsort(-density, kind='stable')", "np.argsort(density, kind='stable')"),
    Fault("what one bank writes is counted as another's", "placement.loads:Loads.steps",
          "each[banks:2 * banks]", "each[banks:2 * banks][::-1]"),
    Fault("one site of several changes though another failed", "store.placed.store:thaw_parts",
          "self.stores[number].thaw_parts(folder, taken[number], identity, generation, meeting.wait)",
          "self.stores[number].thaw_parts(folder, taken[number], identity, generation)"),
    Fault("rows of another placement are looked for where they are not", "store.placed.store:_found_misplaced",
          "len(store) and store.about.get(MARK) != self._mark(number)", "False"),
    Fault("rows of a call come back in another order", "store.placed.store:_read_at",
          "cut.give(rows, at, out)", "cut.give(rows, at[::-1].copy(), out)"),
    Fault("rows laid over a checkpoint go to one site", "store.placed.taking:_split",
          "over[site].append((keys[sites == site], rows[sites == site]))",
          "over[0].append((keys[sites == site], rows[sites == site]))"),
]  # fmt: skip

AREAS = {
    "oracle": ORACLE,
    "moves": MOVES,
    "training": TRAINING,
    "disk": DISK,
    "frozen": FROZEN,
    "checkpoints": CHECKPOINTS,
    "trainers": TRAINERS,
    "placement": PLACEMENT,
    "gpu": GPU,
}
"""One test each: they run beside each other."""
