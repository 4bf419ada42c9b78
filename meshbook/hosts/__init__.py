"""Machines that the book runs on: hosted notebooks, and runs of several processes."""

__all__ = ["clusters", "notebooks", "places", "replicas", "roll_call"]
