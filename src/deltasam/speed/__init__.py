"""What makes a step fast: CUDA graphs, ``torch.compile``, the fused move, parallel branches, splitting."""
