"""Real processes: data arrives as it was sent, and a rank that is killed, hangs or fails ends the others within seconds."""

import json

import pytest

from tests.peers.talk import expected
from tests.warm import Python

TALK = """
import json, os, sys, time
import numpy as np
from skirl.peers.job import join
from tests.peers.talk import talk
with join(timeout=float(sys.argv[2])) as peers:
    print(json.dumps(talk(peers, 7)), flush=True)
    for name in ("ids", "rows"):
        peers.channel(name).step = 9
    if peers.rank == int(sys.argv[3]):
        match sys.argv[1]:
            case "stops":
                os.kill(os.getpid(), 19)
            case "dies":
                os.kill(os.getpid(), 9)
            case "hangs":
                time.sleep(60)
            case "fails":
                raise ValueError("id 7 of table 'user' is out of range")
    if sys.argv[1] != "goes on":
        peers.channel("ids").exchange([np.zeros(3, np.uint8)] * peers.size, "batch 9")
    print(json.dumps(peers.counted()["rows"] | {"near": peers.near}))
"""


def test_two_processes_get_what_two_threads_get(python: Python):
    ranks = python.team(2, TALK, "goes on", "20", "1")
    for rank, process in enumerate(ranks):
        with process:
            out, err = process.communicate(60)
            assert process.returncode == 0 and not err, err
            said, counted = map(json.loads, out.splitlines())
            assert said == expected(rank, 2, 7)
            assert counted["near"] == 2
            assert counted["bytes_sent"][rank] == 0 < counted["bytes_sent"][1 - rank]


@pytest.mark.parametrize(
    ("how", "timeout", "said"),
    [
        (
            "dies",
            600,
            "rank 1 is gone: see the last lines printed there, if any (rank 0 was in channel ids, exchange 7 (batch 9)",
        ),
        (
            "hangs",
            1,
            "for rank 1 in channel ids, exchange 7 (batch 9) of step 9, ahead of the loop: it hangs, or takes longer than ",
        ),
        ("fails", 600, "rank 1 ended the job: id 7 of table 'user' is out of range"),
    ],
)
def test_a_lost_rank_ends_the_other_with_a_sentence(python: Python, how, timeout, said):
    first, second = python.team(2, TALK, how, str(timeout), "1")
    with first, second:
        err = first.communicate(60)[1]
        assert first.returncode == 1 and said in err.splitlines()[-1], err
        second.kill()


@pytest.mark.parametrize(("size", "which"), [(2, 1), (3, 0)])
def test_a_stopped_rank_is_named_even_if_it_serves_the_store_and_nobody_waits_longer(python: Python, size, which):
    ranks = python.team(size, TALK, "stops", "1", str(which))
    try:
        for rank, process in enumerate(ranks):
            if rank != which:
                err = process.communicate(60)[1]
                assert process.returncode == 1
                said = f"for rank {which} in channel ids, exchange 7 (batch 9) of step 9, ahead of the loop: it hangs"
                assert said in err.splitlines()[-1], err
    finally:
        ranks[which].kill()
        for process in ranks:
            with process:
                pass
