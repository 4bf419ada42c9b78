"""What a step needs before it runs: formulas, data sheets, and the compilers of absent TPUs."""

__all__ = ["clocks", "memory_model", "programs", "records", "topologies"]
