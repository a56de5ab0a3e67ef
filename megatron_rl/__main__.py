"""`python -m megatron_rl`, for torchrun."""

from megatron_rl.cli import main

if __name__ == "__main__":
    main()
