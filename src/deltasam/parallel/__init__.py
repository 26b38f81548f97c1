"""Training in several processes: ranks, shards, and what is refused there."""
