"""Held-out accuracy."""
