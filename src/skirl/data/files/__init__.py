"""Click logs: their columns, readers, ids to rows, batches."""
