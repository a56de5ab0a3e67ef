"""Metrics, trackers, progress."""
