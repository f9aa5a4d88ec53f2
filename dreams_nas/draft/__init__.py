"""The small model that proposes tokens: layers, rows, caches, checkpoints, unrolling."""
