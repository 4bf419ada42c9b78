"""Ways to run one step on many devices, or on one with less memory."""

__all__ = ["accumulation", "overlap", "sequence"]
