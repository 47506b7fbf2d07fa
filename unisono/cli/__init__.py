"""The command line: `unisono run` and `unisono doctor`."""
