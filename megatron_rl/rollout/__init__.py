"""Engines that sample, and what is made of their samples."""
