"""Whatever fails, hangs or is interrupted: there is one clear error or the bits are correct, and no thread is left."""

import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import skirl
from skirl import KeyedJagged
from skirl.core.ids import BadIds
from skirl.engine.capacity import DoesNotFit
from skirl.engine.engine import Damaged
from skirl.engine.kernels import cpu
from skirl.pipeline.stages import StageStuck
from tests.loops import (
    FEATURES,
    Broken,
    Hang,
    ProbedStore,
    Replay,
    collection,
    fail_at,
    hooked,
    loop,
    our_threads,
    stream,
    train,
    wait_for,
)

STEPS = 40
SHORT = 0.4
"""Seconds after which a stage counts as hanging, where one hangs."""


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_for(lambda: not our_threads())


@pytest.fixture(scope="module")
def data():
    """One stream for all tests, and the reference after any number of its steps."""
    batches, bags = stream(STEPS)
    # Compiling kernels alone takes longer than the timeout of some tests.
    for depth in ("auto", "epoch"):
        run(collection(), batches, depth=depth)
    return SimpleNamespace(batches=batches, bags=bags, replay=Replay(bags))


def run_until_it_fails(embeddings, loader, error, **options):
    """Train until `error` reaches the loop. Return the number of executed steps, and the error."""
    steps = 0
    with pytest.raises(error) as caught, skirl.lookahead(loader, embeddings, **options) as batches:
        for batch in batches:
            train(embeddings, batch)
            steps += 1
    return steps, caught.value


def goes_on(embeddings, data, steps, **options):
    """Assert that a new lookahead goes on from where training stopped after the failure, correct to the last bit."""
    batches, replay = data.batches, data.replay
    replay.check(embeddings, steps)
    with skirl.lookahead(batches[steps:], embeddings, **options) as ahead:
        assert loop(ahead, embeddings) == len(batches) - steps
    replay.check(embeddings, len(batches))


def trace_of(error):
    return "".join(traceback.format_exception(error))


# Loaders.


def test_a_failing_loader(data):
    def loader():
        yield from data.batches[:25]
        raise Broken("no more")

    embeddings = collection()
    steps, error = run_until_it_fails(embeddings, loader(), Broken, depth=3)
    assert 10 <= steps <= 25
    assert "in loader" in trace_of(error)
    goes_on(embeddings, data, steps)


def test_a_loader_that_comes_back_late_ends_training(data, caplog, capfd):
    def loader():
        yield from data.batches[:25]
        time.sleep(3 * SHORT)
        yield data.batches[25]

    embeddings = collection()
    steps, error = run_until_it_fails(embeddings, loader(), StageStuck, timeout=SHORT)
    assert re.search(r"the loader took \d\.\d s for batch 25, and timeout is 0.4 s", str(error))
    assert "the loader has been at batch 25 for 0." in caplog.text  # logged while it hung
    assert re.search(r"test_robust.py\", line \d+ in loader", capfd.readouterr().err)  # and where
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    goes_on(embeddings, data, steps)


# The store.


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failing_read(data, prefetch):
    store = ProbedStore()
    store.on_read = fail_at(20)
    embeddings = collection(store)
    steps, error = run_until_it_fails(embeddings, data.batches, Broken, prefetch=prefetch)
    assert "in on_read" in trace_of(error) or "in probe" in trace_of(error)
    assert embeddings.engine.damage is None
    assert steps > 3
    goes_on(embeddings, data, steps)


def test_a_read_fails_while_the_loop_is_moving_rows(data, monkeypatch):
    """The leaving rows must still be written, although all stages except the writer have ended."""
    store = ProbedStore()
    failed = threading.Event()

    def fail(number):
        if number == 20:
            failed.set()
            raise Broken("read")

    store.on_read = fail
    embeddings = collection(store)
    load = embeddings.engine.load

    def load_late(work):
        if failed.is_set() or (work.number >= 3 and failed.wait(0.2)):
            wait_for(lambda: "skirl-fetch" not in our_threads() and "skirl-plan" not in our_threads())
            time.sleep(0.05)
        return load(work)

    monkeypatch.setattr(embeddings.engine, "load", load_late)
    steps, _ = run_until_it_fails(embeddings, data.batches, Broken)
    monkeypatch.undo()
    goes_on(embeddings, data, steps)


def test_a_failing_write_damages_and_says_so_ever_after(data):
    store = ProbedStore()
    store.on_write = fail_at(12)
    embeddings = collection(store)
    _, error = run_until_it_fails(embeddings, data.batches, (Broken, Damaged))
    assert "in probe" in trace_of(error)
    sentence = "could not be written: .* Make new embeddings and resume from a checkpoint"
    for use in (
        lambda: embeddings(data.batches[0].sparse),
        lambda: embeddings.eval()(data.batches[0].sparse),
        lambda: embeddings.flush(),
        lambda: embeddings.close(),
        lambda: run(embeddings, data.batches),
    ):
        with pytest.raises(Damaged, match=sentence) as caught:
            use()
        assert isinstance(caught.value.__cause__, Broken)


def run(embeddings, batches, **options):
    with skirl.lookahead(batches, embeddings, **options) as ahead:
        return loop(ahead, embeddings)


@pytest.mark.parametrize("raises", [False, True], ids=["the loop breaks", "the loop raises"])
def test_a_write_that_fails_after_the_loop_is_not_silent(data, raises):
    """An error in the loop is the one that is raised, and what closing adds is a note."""
    store, hang = ProbedStore(), Hang(12)
    store.on_write = lambda number: (hang(number), fail_at(12)(number))
    embeddings = collection(store)

    def body():
        with skirl.lookahead(data.batches, embeddings) as batches:
            for batch in batches:
                train(embeddings, batch)
                if hang.reached.is_set():
                    threading.Timer(0.2, hang.go.set).start()
                    if raises:
                        raise ZeroDivisionError
                    break

    with pytest.raises(ZeroDivisionError if raises else Broken) as caught:
        body()
    assert not raises or "and while closing the lookahead: call 12" in caught.value.__notes__
    with pytest.raises(Damaged):
        embeddings(data.batches[0].sparse)


@pytest.mark.parametrize("stage", ["read", "write"])
def test_a_hanging_store(data, stage):
    store, hang = ProbedStore(), Hang(12)
    setattr(store, f"on_{stage}", hang)
    embeddings = collection(store)
    steps, error = run_until_it_fails(embeddings, data.batches, StageStuck, timeout=SHORT)
    name = {"read": "fetch", "write": "write"}[stage]
    assert f"the {name} stage is at step " in str(error)
    assert "no stage made progress for 0." in str(error)
    assert "raise lookahead(timeout=...)" in str(error)
    hang.go.set()
    wait_for(lambda: not our_threads())
    if stage == "read":  # nothing was lost
        goes_on(embeddings, data, steps)
    else:
        with pytest.raises(Damaged, match="the write stage did not stop"):
            embeddings(data.batches[0].sparse)


def test_a_hanging_write_without_lookahead_can_be_interrupted_twice(data):
    store, hang = ProbedStore(), Hang(3)
    store.on_write = hang
    embeddings = collection(store)

    def press():
        hang.reached.wait(240)
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        for batch in data.batches:
            train(embeddings, batch)
    presser.join()
    with pytest.raises(Damaged, match="could not be written"):
        train(embeddings, data.batches[0])


def test_a_row_that_vanished_from_the_store(data):
    store = ProbedStore()
    embeddings = collection(store)

    def lose(number):
        if number == 20:
            store._kinds = store._empty()

    store.on_read = lose
    _, error = run_until_it_fails(embeddings, data.batches, Damaged)
    assert "was trained before and is not in the store" in str(error)


# Kernels.


@pytest.mark.parametrize("name", ["take", "put", "update_kernel"])
def test_a_failing_kernel_that_changes_rows(data, monkeypatch, name):
    embeddings = collection()
    run(embeddings, data.batches[:5])
    monkeypatch.setattr(cpu, name, (lambda rule: fails) if name == "update_kernel" else fails)
    _, error = run_until_it_fails(embeddings, data.batches[5:], Broken)
    assert fails.__name__ in trace_of(error)
    monkeypatch.undo()
    with pytest.raises(Damaged, match="Make new embeddings and resume from a checkpoint"):
        embeddings(data.batches[0].sparse)


def fails(*args):
    raise Broken("kernel")


def test_a_failing_kernel_that_changes_nothing(data, monkeypatch):
    embeddings = collection()
    run(embeddings, data.batches[:5])
    monkeypatch.setattr(cpu, "pool", fails)
    run_until_it_fails(embeddings, data.batches[5:], Broken)
    monkeypatch.undo()
    goes_on(embeddings, data, 5)


def test_a_hanging_kernel_of_the_planner(data, monkeypatch):
    embeddings = collection()
    run(embeddings, data.batches[:5])
    hang = Hang(1)
    monkeypatch.setattr("skirl.core.ids._check", lambda *args: hang(1))
    _, error = run_until_it_fails(embeddings, data.batches[5:], StageStuck, timeout=SHORT)
    assert "the plan stage is at step 0 for 0." in str(error)
    hang.go.set()
    with pytest.raises(Damaged, match="the plan stage did not stop"):
        embeddings(data.batches[0].sparse)


def test_a_thread_that_cannot_start_takes_the_others_down(data, monkeypatch):
    begin = threading.Thread.start

    def all_but_one(thread):
        if thread.name == "skirl-write":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", all_but_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run(collection(), data.batches)


# Full queues: slow does not mean stuck.


@pytest.mark.parametrize("slow", ["read", "write", "loop", "plan", "load"])
@pytest.mark.parametrize("prefetch", [0, 5])
def test_slow_stages_slow_the_others(data, slow, prefetch):
    store = ProbedStore()
    # With two record widths and a cache in bytes, staging holds only a few rows.
    embeddings = collection(store, cache="2500B")

    def nap(number):
        time.sleep(0.004)

    if slow in ("read", "write"):
        setattr(store, f"on_{slow}", nap)

    def hook(stage, number):
        if stage == slow:
            nap(number)

    with hooked(hook, data.batches, embeddings, prefetch=prefetch) as batches:
        for batch in batches:
            train(embeddings, batch)
            if slow == "loop":
                nap(0)
    assert embeddings.engine.counters.fetched > 20
    data.replay.check(embeddings, STEPS)


# Ctrl-C.


class Alarm:
    """Sends SIGINT after a time, as if typed, and again a second later, because Python drops one that comes inside a
    `__del__`."""

    def __init__(self, seconds, again=1.0):
        self._seconds, self._again = seconds, again

    def __enter__(self):
        self._hook = sys.unraisablehook  # pytest's hook may be interrupted itself
        sys.unraisablehook = lambda raised: None if raised.exc_type is KeyboardInterrupt else self._hook(raised)
        self._before = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, self._seconds, self._again)
        return self

    def stop(self):
        signal.setitimer(signal.ITIMER_REAL, 0)

    def __exit__(self, *error):
        self.stop()
        signal.signal(signal.SIGALRM, self._before)
        sys.unraisablehook = self._hook


@pytest.mark.parametrize("moment", range(28))
def test_ctrl_c_at_a_random_moment(data, moment):
    """The last eight are without a lookahead."""
    batches, rng = data.batches, random.Random(moment)
    embeddings, begun = collection(), 2
    run(embeddings, batches[:2])
    options = {"prefetch": rng.randrange(4), "depth": rng.choice([1, 4, "auto", "epoch"])}
    ahead = skirl.lookahead(batches[2:], embeddings, **options) if moment < 20 else nullcontext(batches[2:])
    with Alarm(rng.uniform(0.0001, 0.03 if moment < 20 else 0.02)) as alarm:
        try:
            with ahead as loop:
                for batch in loop:
                    begun += 1
                    train(embeddings, batch)
            time.sleep(30)  # if it comes late, it arrives here
            pytest.fail("the Ctrl-C was lost")
        except KeyboardInterrupt:
            alarm.stop()
    assert embeddings.lookahead is None
    steps = data.replay.find(embeddings, range(begun - 1, begun + 1))
    goes_on(embeddings, data, steps)


@pytest.mark.parametrize("moment", range(5))
def test_many_ctrl_cs_in_a_row(data, moment):
    """Someone hammers Ctrl-C until the with-block ends, or until a sentence says how to leave it."""
    batches, embeddings = data.batches, collection()
    run(embeddings, batches[:2])
    begun, interrupts = 2, 0
    with Alarm(random.Random(moment).uniform(0.002, 0.02), again=0.0007) as alarm:
        ahead = skirl.lookahead(batches[2:], embeddings)
        try:
            with ahead:
                for batch in ahead:
                    begun += 1
                    train(embeddings, batch)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            while True:
                try:
                    alarm.stop()
                    break
                except KeyboardInterrupt:
                    interrupts += 1
    if embeddings.lookahead is not None:
        with pytest.raises(RuntimeError, match=r"embeddings\.lookahead\.close\(\)"):
            run(embeddings, batches)
        embeddings.lookahead.close()
    assert interrupts
    if embeddings.engine.damage is None:
        steps = data.replay.find(embeddings, range(begun - 1, begun + 1))
        goes_on(embeddings, data, steps)
    else:
        with pytest.raises(Damaged, match="did not stop"):
            run(embeddings, batches)


def test_ctrl_c_while_waiting_for_a_store(data):
    store, hang = ProbedStore(), Hang(12)
    store.on_read = hang
    embeddings = collection(store)
    threading.Thread(
        target=lambda: (hang.reached.wait(240), time.sleep(0.3), press(), time.sleep(0.3), hang.go.set())
    ).start()
    steps, _ = run_until_it_fails(embeddings, data.batches, KeyboardInterrupt)
    goes_on(embeddings, data, steps)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_closing_gives_the_store_a_moment(data, monkeypatch):
    monkeypatch.setattr("skirl.pipeline.stages.GRACE", 0.3)
    store, hang = ProbedStore(), Hang(12)
    store.on_write = hang
    embeddings = collection(store)
    with pytest.raises(KeyboardInterrupt), skirl.lookahead(data.batches, embeddings) as batches:
        for batch in batches:
            train(embeddings, batch)
            if hang.reached.is_set():
                threading.Timer(0.2, press).start()
                break
    assert not hang.go.is_set()
    with pytest.raises(Damaged, match="the write stage did not stop"):
        embeddings(data.batches[0].sparse)
    hang.go.set()


def test_a_pass_that_was_interrupted_refuses_to_go_on(data):
    def loader():
        yield from data.batches[:20]
        raise KeyboardInterrupt
        yield  # a generator that raised has ended: if this were allowed, the data would just seem to end

    embeddings, steps = collection(), 0
    with skirl.lookahead(loader(), embeddings) as batches:
        rest = iter(batches)
        with pytest.raises(KeyboardInterrupt):
            for batch in rest:
                train(embeddings, batch)
                steps += 1
        with pytest.raises(RuntimeError, match="cannot go on without losing it"):
            next(rest)
        with pytest.raises(RuntimeError, match="the loader is an iterator"):
            iter(batches)
    goes_on(embeddings, data, steps)


def test_the_users_own_handler_is_called_and_kept(data):
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        embeddings = collection()
        with Alarm(0.002, again=0.002) as alarm:
            assert run(embeddings, data.batches) == STEPS  # it only sets a flag: the loop goes on
            alarm.stop()
        assert calls
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    data.replay.check(embeddings, STEPS)


# Batches that do not fit, ids that are wrong.


def one_hot(ids, batch=2, features=FEATURES):
    ids = torch.as_tensor(ids)
    return skirl.Batch(
        torch.zeros(batch, 1), KeyedJagged(features, ids, lengths=torch.ones(len(ids), dtype=torch.int64)), None
    )  # type: ignore[arg-type]


def spoilt(spoil):
    bad = one_hot([1, 2, 3, 4, 5, 6, 7, 8])
    bad.sparse._values = spoil(bad.sparse._values)
    return bad


TOO_LARGE = r"^cache 26 is 26 rows, batch 25 needs 60.*set cache to 60 or more"


@pytest.mark.parametrize(
    ("bad", "error", "sentence"),
    [
        (one_hot(np.concatenate([np.arange(20)] * 4), batch=20), DoesNotFit, TOO_LARGE),
        (
            spoilt(lambda ids: ids.index_fill_(0, torch.tensor([2]), 10**12)),
            BadIds,
            "id 1000000000000 is outside table",
        ),
        (spoilt(lambda ids: ids.numpy()), TypeError, "ids are a ndarray"),
    ],
    ids=["too large", "an id outside", "no tensor"],
)
def test_a_batch_that_is_refused_in_the_middle_of_the_stream(data, bad, error, sentence):
    embeddings = collection()
    steps, caught = run_until_it_fails(embeddings, [*data.batches[:25], bad], error, depth=3)
    assert re.search(sentence, str(caught))
    assert steps > 5
    goes_on(embeddings, data, steps)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_give_the_bits_of_the_reference(data, value):
    embeddings = collection()
    with skirl.lookahead(data.batches[:10], embeddings) as batches:
        for batch in batches:
            train(embeddings, batch, factor=value if batches.step == 4 else 1.0)
    with np.errstate(all="ignore"):
        replay = Replay(data.bags)
        replay.after(3)
        replay._factor = value
        replay.after(4)
        replay._factor = 1.0
        replay.check(embeddings, 10)


# Wrong use.


def test_use_after_close(data):
    embeddings = collection()
    ahead = skirl.lookahead(data.batches, embeddings)
    with ahead:
        rest = iter(ahead)
        next(rest)
        with pytest.raises(RuntimeError, match="leave its with-block first"):
            embeddings.close()
    with pytest.raises(RuntimeError, match="this pass is over"):
        next(rest)
    with pytest.raises(RuntimeError, match="the lookahead is not open"):
        iter(ahead)
    embeddings.close()
    embeddings.close()
    for use in (embeddings.flush, lambda: run(embeddings, data.batches)):
        with pytest.raises(RuntimeError, match="these embeddings are closed"):
            use()


# Forks.


@contextmanager
def held_by_another_thread(lock):
    held, go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    pid = os.getpid()
    yield
    if os.getpid() == pid:
        go.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(data):
    embeddings = collection()
    read, write = os.pipe()
    with skirl.lookahead(data.batches, embeddings) as batches:
        for batch in batches:
            if batches.step == 10:
                with held_by_another_thread(batches._pipeline._lock):
                    pid = os.fork()
                if pid == 0:
                    signal.alarm(15)  # kills it if it hangs
                    told = 0
                    for use in (
                        lambda: embeddings(data.batches[0].sparse),
                        lambda: embeddings.flush(),
                        lambda: iter(batches),
                        lambda: next(batches._pass),
                    ):
                        try:
                            use()
                        except RuntimeError as error:
                            told += "this process is a fork" in str(error)
                    batches.close()
                    os.write(write, bytes([told]))
                    os._exit(0)
            train(embeddings, batch)
    os.close(write)
    end = time.monotonic() + 100
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert os.read(read, 1) == bytes([4])
    os.close(read)
    data.replay.check(embeddings, STEPS)


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_dataloader_beside_our_threads(method, workers):
    batches, bags = stream(20)
    count = 8 * len(batches)
    loader = torch.utils.data.DataLoader(
        batches * 8, batch_size=None, num_workers=workers, multiprocessing_context=method, persistent_workers=False
    )

    def started_late():
        """A loader whose workers start while our threads run, and which yields tensors in shared memory."""
        yield from loader

    embeddings, open_files = collection(), []
    with skirl.lookahead(started_late(), embeddings, depth=80) as ahead:
        for batch in ahead:
            assert not batch.sparse.values().is_shared()
            train(embeddings, batch)
            open_files.append(len(os.listdir("/proc/self/fd")))
    assert len(open_files) == count
    assert max(open_files[20:140]) <= max(open_files[:20]) + 8
    Replay(bags * 8).check(embeddings, count)


# The end of the process.

HERE = os.path.dirname(os.path.dirname(__file__))
SCRIPT = """
import time, skirl
from tests.loops import collection, stream, train, ProbedStore
batches, _ = stream(40)
store = ProbedStore()
store.on_{stage} = lambda number: time.sleep(1000) if number == 12 else None
embeddings = collection(store)
{body}
"""


@pytest.mark.parametrize(
    ("stage", "body"),
    [
        (
            "write",
            "with skirl.lookahead(batches, embeddings, timeout=0.4) as ahead:\n"
            "    for batch in ahead: train(embeddings, batch)",
        ),
        (
            "read",
            "ahead = skirl.lookahead(batches, embeddings, timeout=0.4).__enter__()\n"
            "for batch in ahead: train(embeddings, batch)",
        ),
    ],
    ids=["closed", "left open"],
)
def test_the_process_exits_when_a_stage_hangs(python, stage, body):
    script = SCRIPT.format(stage=stage, body=body)
    done = python.run(script, timeout=100, cwd=HERE)
    assert done.returncode == 1, done.stderr
    assert "StageStuck" in done.stderr  # may be followed by a note on the write-back that never ended
