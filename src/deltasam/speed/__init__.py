"""Faster and smaller steps: CUDA graphs, ``torch.compile``, and splitting when memory runs out."""
