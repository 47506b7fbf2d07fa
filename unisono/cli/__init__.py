"""The command line: `unisono run`, `unisono doctor` and `unisono checkpoint`."""
