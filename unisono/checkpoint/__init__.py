"""Checkpoints for any number of devices, where a kill at any moment leaves a good one; and objects as bytes."""

from unisono.checkpoint.checkpointer import Checkpointer as Checkpointer
from unisono.checkpoint.checkpointer import load as load
from unisono.checkpoint.checkpointer import save as save
from unisono.checkpoint.loading import Loaded as Loaded
from unisono.checkpoint.serialization import deserialize as deserialize
from unisono.checkpoint.serialization import serialize as serialize
