"""What a run really did, and when: traces, the files that they lie in, and TensorBoard."""

__all__ = ["hlo_protos", "tensorboard", "traces", "xplane"]
