"""The model of with_skirl.py on a Hugging Face data set from local files; samples have lists of ids of any length."""

import tempfile
from dataclasses import dataclass

import torch
from clicks import ITEMS, USERS, Clicks
from datasets import Dataset
from torch import nn

import skirl


@dataclass
class Batch:
    sparse: skirl.KeyedJagged
    labels: torch.Tensor


def collate(samples) -> Batch:
    """Make a batch out of samples of the data set; the DataLoader calls it."""
    bags = [sample[name] for name in ("user", "clicked", "bought") for sample in samples]
    lengths = torch.tensor([len(bag) for bag in bags])
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    sparse = skirl.KeyedJagged(["user", "clicked", "bought"], ids, lengths=lengths)
    return Batch(sparse, torch.tensor([sample["label"] for sample in samples]))


def rows_of(batch):
    """Yield the samples of a batch in the form in which the file stores them."""
    bags = batch.sparse.values().split(batch.sparse.lengths().tolist())
    n = batch.sparse.stride()
    for i in range(n):
        yield {
            "user": bags[i].tolist(),
            "clicked": bags[n + i].tolist(),
            "bought": bags[2 * n + i].tolist(),
            "label": batch.labels[i].item(),
        }


class MyModel(nn.Module):
    def __init__(self, embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Sequential(nn.Linear(3 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, batch):
        out = self.embeddings(batch.sparse)
        rows = [out["user"], out["clicked"], out["bought"]]
        logits = self.top(torch.cat(rows, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


tables = [
    skirl.Table("user", rows=USERS, dim=16),
    skirl.Table("item", rows=ITEMS, dim=16, features=("clicked", "bought"), pooling="mean"),
]
model = MyModel(skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.02), cache=2000))
dense = torch.optim.Adam(model.parameters(), lr=1e-3)

with tempfile.TemporaryDirectory() as folder:
    samples = [sample for batch in Clicks(batches=200, size=64) for sample in rows_of(batch)]
    Dataset.from_list(samples).to_parquet(f"{folder}/clicks.parquet")
    data = Dataset.from_parquet(f"{folder}/clicks.parquet", cache_dir=folder)
    loader = torch.utils.data.DataLoader(data, batch_size=64, collate_fn=collate)
    with skirl.lookahead(loader, model) as batches:
        for batch in batches:
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            if batches.step % 50 == 0:
                print(f"step {batches.step}  loss {loss.item():.4f}")
