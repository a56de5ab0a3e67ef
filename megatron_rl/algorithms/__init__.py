"""The objectives as pure tensor functions: no Megatron, no engine, no process groups."""
