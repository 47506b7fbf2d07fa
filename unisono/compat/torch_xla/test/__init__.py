"""The modules of `torch_xla.test` that scripts import."""
