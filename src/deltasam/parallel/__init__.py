"""Training in several processes: ranks, shards, and the setups that are refused."""
