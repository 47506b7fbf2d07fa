"""Predicts step time, efficiency and memory of a model on a fleet that is not at hand, by `unisono-simulate`."""
