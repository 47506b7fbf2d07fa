"""The modules of `torch_xla.debug`."""
