"""What a run really did, and when: traces, the files that they lie in, and TensorBoard."""

__all__ = ["estimated_runs", "hlo_protos", "op_stats", "overlap", "tensorboard", "traces", "xplane"]
