"""First-use verification: the engine is compared with autograd and with weights that are really moved."""
