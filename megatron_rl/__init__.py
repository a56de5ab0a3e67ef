"""Reinforcement learning with verifiable rewards: Megatron-core trains, engines sample, weights move every step."""
