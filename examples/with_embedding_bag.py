"""The model in plain PyTorch: every row is in memory, as part of a Parameter. It prints the losses of with_skirl.py."""

import torch
from clicks import ITEMS, USERS, Clicks, start_as_skirl
from torch import nn


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(USERS, 16, mode="sum", sparse=True)
        self.item = nn.EmbeddingBag(ITEMS, 16, mode="mean", sparse=True)
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(3 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, batch):
        ids = batch.sparse
        bags = ids.lengths().split(ids.stride())
        user, clicked, bought = ids.values().split([int(part.sum()) for part in bags])
        start = [part.cumsum(0) - part for part in bags]
        rows = [self.user(user, start[0]), self.item(clicked, start[1]), self.item(bought, start[2])]
        logits = self.top(torch.cat(rows, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


loader = Clicks(batches=200)
model = MyModel()
start_as_skirl(model.user, model.item)
sparse = torch.optim.Adagrad([*model.user.parameters(), *model.item.parameters()], lr=0.02)
dense = torch.optim.Adam(model.top.parameters(), lr=1e-3)

for step, batch in enumerate(loader, 1):
    loss = model.loss(batch)
    loss.backward()
    sparse.step()
    sparse.zero_grad()
    dense.step()
    dense.zero_grad()
    if step % 50 == 0:
        print(f"step {step}  loss {loss.item():.4f}")
