"""The fixtures of the engines' tests."""

from slurm_cluster import slurm_entry as slurm_entry
