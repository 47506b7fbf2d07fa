"""The modules of `torch_xla.core`."""
