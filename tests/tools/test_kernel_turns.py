"""Processes that need the same kernel at the same time compile it once."""

import json
import os
import subprocess
import sys
import time

import pytest
from numba import config

from skirl.tools import kernel_cache

pytestmark = pytest.mark.skipif(
    config.DISABLE_JIT or kernel_cache.fcntl is None, reason="nothing is compiled, or locked"
)

RUN = """
import json, os, sys, time
from numba.core import event
import numpy as np
from skirl.tools.hash_index import mix

class Slow(event.Listener):  # so long that the others come meanwhile
    begun = 0
    def on_start(self, event):
        self.begun += 1
        time.sleep(0.5)
    def on_end(self, event):
        pass

slow = Slow()
event.register("numba:compile", slow)
folder, number = sys.argv[1:]
open(f"{folder}/ready-{number}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.005)
print(json.dumps([int(mix(np.int64(7))), slow.begun]))
"""


def test_one_of_several_processes_compiles(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    team = [
        subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), str(n)], stdout=subprocess.PIPE, env=env)
        for n in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = [json.loads(process.communicate()[0]) for process in team]
    assert len({value for value, _ in said}) == 1
    assert sum(begun for _, begun in said) == 1
    assert not list(tmp_path.rglob("*.turn"))
