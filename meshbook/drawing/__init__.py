"""Pictures of meshes, arrays, programs and measurements: inline SVG, light and dark."""

__all__ = ["arrays", "charts", "diagrams", "documents", "figures", "lowering", "profiles", "svg",
           "tiles"]
