"""What a compiled program does, read from its text: traffic, work, memory, operations."""

__all__ = ["collectives", "execution", "flops", "liveness", "memory", "module", "opcodes",
           "replica_groups", "wire"]
