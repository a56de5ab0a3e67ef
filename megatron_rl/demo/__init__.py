"""A verifiable task and a base model small enough to show reinforcement learning on a CPU in a minute."""
