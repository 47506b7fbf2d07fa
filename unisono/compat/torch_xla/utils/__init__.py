"""The modules of `torch_xla.utils`."""
