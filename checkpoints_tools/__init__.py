"""Checkpoints converted, looked into and compared: one process, no GPU, no model built."""
