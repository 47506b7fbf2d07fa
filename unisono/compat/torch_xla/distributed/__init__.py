"""The modules of `torch_xla.distributed`."""
