"""The model of with_embedding_bag.py with skirl: 2,000 rows are in the cache, all others in the store."""

import torch
from clicks import ITEMS, USERS, Clicks
from torch import nn

import skirl


class MyModel(nn.Module):
    def __init__(self, embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(3 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, batch):
        out = self.embeddings(batch.sparse)
        rows = [out["user"], out["clicked"], out["bought"]]
        logits = self.top(torch.cat(rows, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


loader = Clicks(batches=200)
tables = [
    skirl.Table("user", rows=USERS, dim=16),
    skirl.Table("item", rows=ITEMS, dim=16, features=("clicked", "bought"), pooling="mean"),
]
model = MyModel(skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.02), cache=2000))
dense = torch.optim.Adam(model.parameters(), lr=1e-3)

with skirl.lookahead(loader, model) as batches:
    for batch in batches:
        loss = model.loss(batch)
        loss.backward()
        dense.step()
        dense.zero_grad()
        if batches.step % 50 == 0:
            print(f"step {batches.step}  loss {loss.item():.4f}")
