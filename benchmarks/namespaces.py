"""Trainer processes with a link of limited rate between them: network namespaces and a token bucket, on Linux."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

ADDRESS = "10.211.37.{}"
"""Addresses of the trainers, which nobody else sees."""
BURST = 0.0005
"""Size of the bucket in seconds of the rate: about what a network card sends at once."""
LEAST_BURST = 128 << 10
"""Minimum size of the bucket in bytes: twice what the system hands over in one piece."""


def why_not() -> str | None:
    """Return why no network namespace can be made here, or None if it can.

    >>> why_not() is None or "namespace" in why_not()
    True
    """
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need the commands ip and tc"
    name = f"skirl-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def two_namespaces(rate: float) -> Iterator[list[str]]:
    """Make two network namespaces with a link between them and yield their names.

    **Arguments**

    - `rate`: bytes per second, in each direction.
    """
    names = [f"skirl-{os.getpid()}-{n}" for n in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        burst = max(LEAST_BURST, int(rate * BURST))
        for n, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"{ADDRESS.format(n + 1)}/24", "dev", "wire")
            _run("ip", "-n", name, "link", "set", "wire", "up")
            limit = ("rate", f"{int(8 * rate)}bit", "burst", str(burst), "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            with suppress(OSError):
                _run("ip", "netns", "del", name)


def trained(size: int, module: str, words: Sequence[str], namespaces: Sequence[str] = ()) -> list[Any]:
    """Run trainers as processes and return the last line that each prints, parsed as JSON.

    **Arguments**

    - `size`: the number of processes.
    - `module`: the module that each runs, as with `python -m`.
    - `words`: the module's arguments.
    - `namespaces`: one per process; if empty, all talk over loopback.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    local: Mapping[str, Any] = {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    if namespaces:
        local = {"LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": ADDRESS.format(1), "GLOO_SOCKET_IFNAME": "wire"}
    ranks = []
    for rank in range(size):
        names = {
            "WORLD_SIZE": size,
            "RANK": rank,
            "LOCAL_RANK": 0 if namespaces else rank,
            "MASTER_PORT": port,
            **local,
        }
        within = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
        ranks.append(
            subprocess.Popen(
                [*within, sys.executable, "-m", module, *words],
                env=os.environ | {name: str(value) for name, value in names.items()},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"one of {size} measuring processes failed; it said why above")
    return [json.loads(lines.splitlines()[-1]) for lines in said]
