"""One loop, for one process (`python trainers.py`) or two that share rows (`skirl launch -n 2 -- trainers.py`)."""

import os

import torch
from clicks import USERS
from torch import nn
from torch.utils.data import DataLoader

import skirl

SAMPLES, BATCH, SHARDS = 10_000, 256, 2  # a batch is divided into shards, which trainers share

users = (2000 ** torch.rand(SAMPLES, generator=torch.Generator().manual_seed(0))).long() * 7919 % USERS
clicked = ((users * 2654435761) % 1000 < 300).float()  # some users always click


def batch_of(samples: list[int]) -> skirl.Batch:
    ids = skirl.KeyedJagged.one_hot(["user"], users[samples].unsqueeze(1))
    return skirl.Batch(torch.empty(len(samples), 0), ids, clicked[samples])


class MyModel(nn.Module):
    def __init__(self, embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, batch):
        logits = self.top(self.embeddings(batch.sparse)["user"]).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


tables = [skirl.Table("user", rows=USERS, dim=16)]
embeddings = skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.05), cache=2000)
torch.manual_seed(0)  # the same dense weights on all trainers
model = MyModel(embeddings)
dense = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler = skirl.ShardSampler(range(SAMPLES), batch_size=BATCH, shards=SHARDS, shuffle=True, seed=1)
loader = DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=batch_of)
first = os.environ.get("RANK", "0") == "0"

for epoch in range(2):
    sampler.set_epoch(epoch)
    with skirl.lookahead(loader, model, shards=SHARDS) as batches:
        for batch in batches:
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            if first and batches.ends_step and batches.step % 19 == 0:
                print(f"epoch {epoch}  step {batches.step}  loss of a shard {loss.item():.4f}")
if first:
    total = sum(weight.double().sum().item() for weight in model.top.parameters())
    print(f"weights {total:.15f}, for one trainer as for two")
