"""Programs that went wrong beside right ones, and the gallery that puts the proofs to them."""

from meshbook.faults.programs import FAULTS, Fault, one_of_each

__all__ = ["FAULTS", "Fault", "gallery", "networks", "one_of_each", "right_models",
           "right_programs", "wrong_models", "wrong_programs"]
