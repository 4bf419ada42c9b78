"""Check the types of the package's arguments, those of arrays with their shapes, at every call."""
import importlib.util
from pathlib import Path

import jaxtyping

PACKAGE = Path(__file__).parents[2] / "meshbook"


def with_shapes():
    """Names of the modules that state the shapes of arrays."""
    return [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in sorted(PACKAGE.glob("**/*.py"))
            if "from jaxtyping import" in path.read_text("utf8")]


def check():
    """Check them from now on, where beartype is installed; before the package is imported.

    jaxtyping's check compares the shapes of a call's arguments with each other. It binds them
    anew at every call, which is more than what a small function of a parser does: elsewhere
    beartype alone looks.
    """
    if importlib.util.find_spec("beartype") is None:
        return
    from beartype import BeartypeConf
    from beartype.claw import beartype_package

    beartype_package("meshbook", conf=BeartypeConf(
        claw_is_pep526=False, is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
    jaxtyping.install_import_hook(with_shapes(), "beartype.beartype")
