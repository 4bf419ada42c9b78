"""What a training step costs, by formula: a table for each model, and sums over what it says.

`tables` say what models are made of; `step.describe` puts one on a mesh, by the sharding rules of a
`plans.Plan`; `work`, `traffic`, `memory`, `timeline` and `seconds` add up; `ranking` goes through
all plans; `explorer` lists a plan's tensors and what each part of the model sends.
"""

__all__ = ["devices", "explorer", "machines", "memory", "page", "places", "plans", "presets",
           "ranking", "rows", "seconds", "step", "tables", "tiles", "timeline", "traffic",
           "transfers", "turns", "work"]
