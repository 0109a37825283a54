"""The files in examples/cluster: shells and parsers accept them, and every flag in them exists."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skirl.checkpoint.folder import numbers
from skirl.cli.train import Train
from skirl.tools.flags import flags_of, option

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
FLAGS = {option(name) for name in flags_of(Train)}
OF_TORCHRUN = {
    "--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
}  # fmt: skip


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sh"])
def test_a_shell_reads_it(name):
    done = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


def test_what_torchrun_is_given():
    text = (CLUSTER / "torchrun.sh").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("while ! ")]
    launcher, _, trainer = line.partition(" -m -- skirl train ")
    assert set(re.findall(r"--[a-z-]+", launcher)) == OF_TORCHRUN
    assert set(re.findall(r"--[a-z-]+", trainer)) <= FLAGS and "--resume" in trainer
    from torch.distributed.run import get_args_parser

    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert known >= OF_TORCHRUN


def test_kubernetes_gets_a_training_job():
    job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for a container of this name"
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert container["command"][:5] == ["torchrun", "-m", "--", "skirl", "train"]
    data, *flags = container["command"][5:]
    given = {"--data": data} | dict(word.partition("=")[::2] for word in flags)
    assert given.keys() <= FLAGS and "--resume" in given
    Train.of(**{n[2:].replace("-", "_"): _value(n, v) for n, v in given.items() if n != "--save"}, save=Path("/run"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    assert given["--save"].startswith(mounts["shared"])


def _value(name: str, text: str):
    kind = flags_of(Train)[name[2:].replace("-", "_")].type
    return True if kind is bool else int(text) if text.isdigit() else text


def test_ray_is_given_flags_that_there_are():
    source = (CLUSTER / "ray_train.py").read_text()
    compile(source, "ray_train.py", "exec")
    (flags,) = re.findall(r"^FLAGS[^=]*= (\{.*?^\})", source, re.MULTILINE | re.DOTALL)
    Train.of(**eval(flags), save=Path("/run"))


@pytest.mark.slow  # starts and restarts as users do: eight interpreters
def test_torchrun_with_two_nodes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "HOST": "127.0.0.1", "PORT": str(port), "SAVE": str(tmp_path / "saves"), "EVERY": "5", "NODES": "2:2",
        "TORCHRUN": f"{shlex.quote(sys.executable)} -m torch.distributed.run", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = "--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 64 --steps 12 --shards 4 --cache 2000 --json"
    nodes = [
        subprocess.Popen(["bash", CLUSTER / "torchrun.sh", *words.split(), "--run", str(tmp_path / "run")], env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    said = [node.communicate(timeout=280) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert '"trainers": 2' in "".join(out for out, _ in said)
    assert numbers(tmp_path / "saves")
