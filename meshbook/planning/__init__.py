"""What a step needs before it runs: formulas, data sheets, and the compilers of absent TPUs."""

__all__ = ["clocks", "costs", "estimates", "memory_model", "programs", "records", "topologies"]
