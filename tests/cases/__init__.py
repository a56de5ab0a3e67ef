"""Worked cases that several tests share."""
