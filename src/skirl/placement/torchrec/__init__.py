"""Tables over ranks for TorchRec: its models read, plans for it and of it. Only here is it imported, when it is used."""
