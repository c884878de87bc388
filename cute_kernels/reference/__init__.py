"""The plain-torch twin of every kernel: the same name, the same signature, obviously right, any device, fp32 or fp64."""
