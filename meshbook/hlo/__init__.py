"""What a compiled program does, read from its text: traffic, work, memory, operations.

And the options of the compiler with which the book compiles what runs a few times.
"""

__all__ = ["clock", "collectives", "exchanges", "execution", "flops", "liveness", "memory",
           "module", "opcodes", "options", "replica_groups", "schedule", "wire"]
