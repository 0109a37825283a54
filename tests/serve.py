"""The process from which tests/zygote.py forks others."""

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numba


def serve() -> Callable[[], None]:
    """Fork at each request from stdin, which is a socket, and end when it closes. In a fork, return what to run."""
    talk = socket.socket(fileno=0)
    gc.collect()
    gc.freeze()  # forks need not scan objects that exist now
    alone()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all its processes
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    tell: dict[int, int] = {}
    while True:
        ready = select.select([talk, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        while tell and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with contextlib.suppress(BrokenPipeError):  # nobody is waiting for it
                os.write(tell[ended[0]], str(ended[1]).encode())
            os.close(tell.pop(ended[0]))
        if talk in ready:
            try:
                head, files, *_ = socket.recv_fds(talk, 4, 4)
            except ConnectionResetError:  # the other end closed before reading an answer
                head, files = b"", []
            if not head:
                for pid in tell:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            wanted = json.loads(talk.recv(int.from_bytes(head), socket.MSG_WAITALL))
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                for file in (woken, wakes, *tell.values()):
                    os.close(file)
                talk.close()
                become(wanted, files)
                return lambda: exec(compile(wanted["code"], "<string>", "exec"), {"__name__": "__main__"})
            tell[pid] = files.pop()
            for file in files:
                os.close(file)
            talk.sendall(pid.to_bytes(4))


def alone() -> None:
    """Wait for joined threads to disappear, which takes the system a moment. A fork would lose any that still run."""
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, "threads are lost in a fork"
        time.sleep(0.01)


def become(wanted: dict[str, Any], files: list[int]) -> None:
    """Make this fork look like a fresh interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    *streams, tells = files
    os.close(tells)
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = wanted["args"]
    numba.config.reload_config()  # it has read the parent's environment
    if "skirl.peers.job" in sys.modules:
        sys.modules["skirl.peers.job"]._joined.clear()  # and so has this
    tempfile.tempdir = None
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115 as long as the process
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    raw = open(2, "wb", 0, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(raw, encoding, "backslashreplace", write_through=True)


def prepare() -> None:
    """Import slow packages, but nothing of skirl's."""
    import hypothesis  # noqa: F401
    import numpy.testing  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from numba.core import compiler, event  # noqa: F401

    torch.set_num_threads(1)
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.Adam([weight]).step()  # imports what each fork would otherwise import again


TRAIN = "--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 64 --steps 3 --threads 1 --cache 500 --quiet --json"


def warm() -> None:
    """Import skirl and load its kernels by training and saving briefly."""
    from skirl.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        saving = ["--save", f"{folder}/saves", "--optimizer", "adam", "--run", "none"]
        for more in (
            saving,
            [*saving, "--resume", "--steps", "5"],
            ["--run", "none", "--store", f"disk:{folder}/rows"],
        ):
            assert main(["train", *TRAIN.split(), *more]) == 0, said.getvalue()
