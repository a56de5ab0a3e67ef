"""Graders: how right an answer is."""
