"""Arms decoded side by side: speed, losslessness, replay, and the report of a run."""
