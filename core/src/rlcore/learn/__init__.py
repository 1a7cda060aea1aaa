"""The consumer: from finished groups to packed batches and checkpoints."""
