"""Tests that need a GPU: `make test-gpu` runs them, `make test` does not."""

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.cli.sweep import SweepCommand
from skirl.cli.train import Train, Verify
from skirl.models import DIN
from tests import test_trainers as trainers
from tests.cases import cases
from tests.engine.device.test_gpu import BACK_AND_FORTH, losses_of
from tests.runs import Run
from tests.test_exact import cases_of
from tests.test_trainers import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.timeout(1800),
]


@given(cases_of(), st.sampled_from([0.0, 0.5]))
@cases(60)
def test_every_bit_is_that_of_the_reference(case, delayed):
    """The streams are delayed at random in half of the cases."""
    Run(replace(case, device="cuda", eager=delayed, shared=0.0)).go()  # samples share no bags here


@pytest.mark.parametrize("delayed", [0.2, 0.8, 1.0])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_rows_are_not_read_while_a_stream_still_writes_them(delayed, prefetch):
    """The bug in TorchRec's issue 4191."""
    forwarded = 0
    for seed in range(3):
        case = replace(BACK_AND_FORTH, seed=seed, prefetch=prefetch, eager=delayed, device="cuda")
        forwarded += Run(case).go().forwarded
    assert forwarded


@pytest.mark.parametrize("optimizer", ["rowwise-adagrad", "sgd", "adagrad", "adam"])
def test_verify(optimizer):
    result = Verify.of(
        data="synthetic:tiny", model="dlrm-tiny", optimizer=optimizer, dim=16, batch=512, steps=60, cache="touched:30%",
        device="cuda", quiet=True,
    ).run()  # fmt: skip
    assert not result["failed"], result["failed"]
    assert result["runs"][0]["moved"]["fetched"]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_the_sanitizer_finds_nothing(tool, monkeypatch):
    """Each tensor has its own memory here; in torch's large blocks, an access past the end would hit a neighbour."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    # Torch and Triton look for things that may be missing.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "skirl", "verify"]
    flags = "synthetic:tiny --device cuda --model dlrm-tiny --dim 16 --batch 64 --steps 6 --quiet"
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_memory_is_bounded_by_the_cache():
    tables = [skirl.Table("a", rows=1 << 24, dim=64)]
    before = torch.cuda.memory_allocated()
    embeddings = skirl.EmbeddingBagCollection(tables, optimizer=skirl.SGD(lr=0.1), cache="64MiB", device="cuda")
    loader = [skirl.KeyedJagged.one_hot(["a"], torch.randint(0, 1 << 24, (4096, 1))) for _ in range(100)]
    with skirl.lookahead(loader, embeddings, sparse=lambda ids: ids) as batches:
        for ids in batches:
            embeddings(ids)["a"].sum().backward()
            ids_bytes = 4096 * 40  # of one plan; some plans are in flight
            assert torch.cuda.memory_allocated() - before < (64 << 20) + 4096 * 64 * 4 * 2 + 16 * ids_bytes + (1 << 20)
    embeddings.close()


@pytest.mark.filterwarnings("ignore")  # the compiler warns about TF32 and about gradients that it inspects
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_dense_part_trains_the_same_rows(mode):
    """The dense part runs under torch.compile; reduce-overhead puts it into CUDA graphs."""
    both = (lambda model: model), partial(torch.compile, mode=mode)
    plain, compiled = (losses_of(each, "cuda", batch=256, steps=20, dim=8) for each in both)
    torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)


def test_a_model_that_attends_to_lists_trains_as_on_the_cpu():
    """Unpooled rows: their gradients, and what the model does with a batch's lengths, stay on the rows' device."""
    tables = [skirl.Table("item", 50, 8, features=("item", "clicked")), skirl.Table("user", 20, 8, pooling="mean")]
    rng = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(6):
        lengths = torch.cat([torch.ones(16, dtype=torch.int64), torch.randint(0, 4, (32,), generator=rng)])
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=rng)
        sparse = skirl.KeyedJagged(["item", "clicked", "user"], ids, lengths=lengths)
        labels = torch.randint(0, 2, (16,), generator=rng).float()
        batches.append(skirl.Batch(torch.randn(16, 4, generator=rng), sparse, labels))
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        rows = skirl.EmbeddingCollection(tables, optimizer=skirl.Adagrad(lr=0.1), cache=60, device=device)
        model = DIN.tiny(rows, dense_features=4, lists=["clicked", "user"]).to(device)
        dense = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses.append([])
        with skirl.lookahead(batches, model) as ahead:
            for batch in ahead:
                dense.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                dense.step()
                losses[-1].append(loss.item())
        rows.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_a_loop_on_a_stream_of_its_own_finds_its_rows():
    """The batch is taken on the default stream, but looked up and trained on another, which the GPU delays."""
    data = list(skirl.data.Synthetic("tiny", batch_size=256, batches=12))
    losses = []
    for other in (False, True):
        embeddings = skirl.EmbeddingBagCollection(
            skirl.data.Synthetic("tiny").tables(8), optimizer=skirl.Adagrad(lr=0.1), cache="20%", device="cuda"
        )
        stream = torch.cuda.Stream() if other else torch.cuda.current_stream()
        losses.append([])
        with skirl.lookahead(data, embeddings) as batches:
            for batch in batches:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
                    loss = (embeddings(batch.sparse).stacked() ** 2).sum()
                    loss.backward()
                    losses[-1].append(loss)
        torch.cuda.synchronize()
        losses[-1] = [loss.item() for loss in losses[-1]]
        embeddings.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model", ["dlrm-tiny", "wide-deep-tiny", "dcnv2-tiny", "deepfm-tiny"])
def test_variants_of_a_sweep_as_one_graph_have_the_bits_of_lone_runs(model):
    """deepfm draws random numbers, so its variants train in turns."""
    flags = {"data": "synthetic:tiny", "model": model, "dim": 16, "batch": 256, "steps": 30}
    flags |= {"cache": "60%", "device": "cuda"}
    sweep = SweepCommand.of(**flags, quiet=True, vary=("lr=0.01,0.05", "seed=0,1"), rungs="10", run="none").run()
    assert sweep["form"] == ("loop" if model == "deepfm-tiny" else "graph") and sweep["exact"]
    names = [place["variant"] for place in sweep["standing"] if place["state"] in ("leads", "races")]
    for name in names:
        lr, seed = (float(part.partition("=")[2]) for part in name.split(","))
        lone = Train.of(**flags, lr=lr, seed=int(seed), data_seed=0, threads=1, quiet=True, run="none").run()
        assert lone["loss"] == sweep["by_variant"][name]["loss"]


def test_several_trainers_on_one_gpu(monkeypatch):
    """Their vectors stay on the GPU and are exchanged within a process, because NCCL needs one GPU for each."""
    check(trainers.Case(trainers=3, shards=4, universe=50, cache=31, steps=8, depth=1, device="cuda"), monkeypatch)
