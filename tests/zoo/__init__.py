"""Many architectures, tiny and random; a pool swaps among checkpoints of each that are hard to tell apart."""
