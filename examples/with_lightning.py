"""The model of with_skirl.py in Lightning: a callback trains the rows and wraps the loader; backward updates rows."""

import logging
import warnings

import lightning
import torch
from clicks import ITEMS, USERS, Clicks
from torch import nn

import skirl
from skirl.lightning import Rows


class MyModel(lightning.LightningModule):
    def __init__(self, embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Sequential(nn.Linear(3 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        out = self.embeddings(batch.sparse)
        rows = [out["user"], out["clicked"], out["bought"]]
        logits = self.top(torch.cat(rows, 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        if (index + 1) % 50 == 0:
            print(f"step {index + 1}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)  # rows have their own


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
loader = Clicks(batches=200)
tables = [
    skirl.Table("user", rows=USERS, dim=16),
    skirl.Table("item", rows=ITEMS, dim=16, features=("clicked", "bought"), pooling="mean"),
]
model = MyModel(skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.02), cache=2000))
rows = Rows()
trainer = lightning.Trainer(
    callbacks=[rows], max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, rows.loader(loader, length=loader.batches))
