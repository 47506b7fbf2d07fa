"""Unisono: multi-device data-parallel training for PyTorch. One script, any number of devices, the same result."""
