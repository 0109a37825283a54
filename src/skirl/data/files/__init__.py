"""Click logs in files: schemas, readers, the mapping of ids to rows, and batches."""
