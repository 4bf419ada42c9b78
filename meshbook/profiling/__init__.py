"""What a run really did, and when: traces, the files that they lie in, and TensorBoard."""

__all__ = ["estimated_runs", "hlo_protos", "tensorboard", "traces", "xplane"]
