"""Where recorded measurements are: results/ of the repository, or its copy in a wheel."""
from pathlib import Path

_HERE = Path(__file__).resolve().parent
RESULTS = next(folder for folder in (_HERE.parent / "results", _HERE / "recorded")
               if (folder / "tpu.json").exists())
