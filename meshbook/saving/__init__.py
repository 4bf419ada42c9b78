"""Checkpoints that survive: the files, what they say of their run, and the folder of a run."""

__all__ = ["agreement", "checkpoint_files", "checkpoints", "contents", "identities", "manifests",
           "parts", "progress", "runs"]
