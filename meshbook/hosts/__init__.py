"""Machines of others that the book runs on: hosted notebooks."""

__all__ = ["notebooks"]
