"""What makes training fast or lets it fit: CUDA graphs, ``torch.compile``, and splitting a batch that does not fit."""
