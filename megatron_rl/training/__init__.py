"""Megatron-core: set-up, model, log-probs, the optimizer step, phases and checkpoints."""
